"""What `pip install splitpoint` brings, and that each extra is enough for its service.

Every environment here holds the closure of one extra and nothing else: an import of what
the extra lacks fails as it does for a user.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from installation import Installation, closure, requirements_of
from packaging.utils import canonicalize_name
from redis_server import RedisServer
from secured_stack import SecuredStack, secured_stack

from splitpoint.extras import MODULES, SERVICES
from splitpoint.service import READY_PREFIX

HEAVY = {"torch", "redis", "tokenizers", "numpy", "safetensors", "cryptography", "huggingface-hub"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    return Installation(tmp_path_factory.mktemp("base"), "")


@functools.cache
def brought() -> dict[str, set[str]]:
    """Return the distributions that bring each module; reads the files of all of them."""
    return {
        module: {canonicalize_name(name) for name in found}
        for module, found in metadata.packages_distributions().items()
    }


@pytest.mark.parametrize("extra", MODULES)
def test_the_modules_of_an_extra_are_those_of_its_requirements(extra: str) -> None:
    brought_by = brought()
    for module in MODULES[extra]:
        assert brought_by[module] & closure(extra)
        assert not brought_by[module] & closure("")
    for requirement in requirements_of(extra):
        name = canonicalize_name(requirement.name)
        assert any(name in brought_by[module] for module in MODULES[extra]), requirement


def test_a_client_gets_neither_torch_nor_redis(base: Installation) -> None:
    assert not HEAVY & closure("")
    assert closure("all") >= HEAVY
    for name in ("torch", "redis", "numpy"):
        assert base.run("-c", f"import {name}").returncode == 1


COMMANDS = (
    "import sys\n"
    "from typer.testing import CliRunner\n"
    "from splitpoint_cli.main import COMMANDS, app\n"
    "for command in COMMANDS:\n"
    "    done = CliRunner().invoke(app, [command, '--help'])\n"
    "    assert done.exit_code == 0, (command, done.output)\n"
    "    print(command)\n"
    "import splitpoint.client\n"
)


def test_every_command_of_a_client_explains_itself(base: Installation) -> None:
    done = base.run("-c", COMMANDS)
    assert done.returncode == 0, done.stderr
    assert {"generate", "status", "top", "up"} <= set(done.stdout.split())
    sized = base.run("-m", "splitpoint_cli", "size")
    assert sized.returncode == 0, sized.stderr


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (("kvstore_service", "--help"), "store"),
        (("scheduler_service", "--help"), "scheduler"),
        (("worker_service", "--help"), "worker"),
        (("gateway_service", "--help"), "gateway"),
        (("splitpoint_cli", "up"), "all"),
        (("splitpoint_cli.demo",), "all"),
        (("splitpoint_cli", "bench", "restore"), "all"),
        (("splitpoint_cli", "certs", "certificates"), "scheduler"),
        (("splitpoint_cli", "arena", "inspect", "port-50050"), "store"),
    ],
)
def test_a_missing_extra_is_one_line(
    base: Installation, words: tuple[str, ...], extra: str
) -> None:
    done = base.run("-m", *words)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("splitpoint: ")
    assert f"pip install 'splitpoint[{extra}]'" in line
    assert done.stdout == ""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SecuredStack]:
    """Each service in an environment with its own extra alone; TLS, tokens, Redis and metrics."""
    folder = tmp_path_factory.mktemp("stack")
    redis = RedisServer(folder)
    redis.start()
    try:
        more = ("--metrics", "127.0.0.1:0", "--redis", redis.url)
        pythons = {extra: Installation(folder / extra, extra).python for extra in SERVICES}
        async with secured_stack(folder, *more, pythons=pythons) as running:
            yield running
    finally:
        redis.stop()


@pytest.mark.asyncio(loop_scope="module")
async def test_services_with_their_own_extras_serve_a_client_with_none(
    base: Installation, stack: SecuredStack
) -> None:
    good = stack.certificates
    identity = {
        "SPLITPOINT_CA": str(good / "ca.pem"),
        "SPLITPOINT_CERT": str(good / "client.pem"),
        "SPLITPOINT_KEY": str(good / "client-key.pem"),
    }
    at = ("--address", stack.scheduler)

    def command(*words: str, caller: str) -> dict[str, Any]:
        done = base.run(
            *("-m", "splitpoint_cli", *words, *at, "--json"),
            **identity,
            SPLITPOINT_TOKEN=stack.tokens[caller],
        )
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    answer = command("generate", "import os", "--max-tokens", "4", caller="alice")
    assert len(answer["token_ids"]) == 4
    assert len(command("status", caller="root")["workers"]) == 1
    assert "rates" in command("top", "--once", "--interval", "0.2", caller="root")
    asked = base.run("-m", "splitpoint_cli.request.probe", stack.store, **identity)
    assert asked.returncode == 0, asked.stderr


@contextmanager
def gateway(python: Path, stack: SecuredStack) -> Iterator[str]:
    """A gateway of this interpreter in front of the stack, once it says where it listens."""
    good = stack.certificates
    words = [
        *("-m", "gateway_service", "--listen", "127.0.0.1:0", "--scheduler", stack.scheduler),
        *("--ca", str(good / "ca.pem"), "--tls-cert", str(good / "server.pem")),
        *("--tls-key", str(good / "server-key.pem"), "--tokens", str(stack.tokens_file)),
    ]
    inherited = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        [str(python), *words], stdout=subprocess.PIPE, text=True, env=inherited, cwd=python.parent
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith(READY_PREFIX), line
        yield line.removeprefix(READY_PREFIX).strip()
    finally:
        process.terminate()
        process.communicate(timeout=30)
    assert process.returncode == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_a_gateway_with_its_own_extra_serves(
    base: Installation, stack: SecuredStack, tmp_path: Path
) -> None:
    own = Installation(tmp_path / "gateway", "gateway")
    with gateway(own.python, stack) as address:
        asked = await asyncio.to_thread(
            base.run,
            *("-m", "splitpoint_cli.request.probe", f"https://{address}/health"),
            *("--ca", str(stack.certificates / "ca.pem")),
        )
        assert asked.returncode == 0, asked.stderr
