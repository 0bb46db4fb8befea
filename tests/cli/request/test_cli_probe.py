"""`splitpoint probe` asks real processes: serving, not yet serving, absent, behind TLS."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from own_names import shared_memory_folder

from splitpoint.config import remove_tree
from splitpoint.service import READY_PREFIX
from splitpoint.transport.access import Caller, Role
from splitpoint_cli.security.authority import make_certificates
from splitpoint_cli.security.token import add_token

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "models" / "stdlib-llama"
SCHEDULER = "splitpoint.v1.InferenceService"
ADMIN = "splitpoint.v1.AdminService"
STORE = "splitpoint.v1.KvStoreService"


@dataclass(frozen=True)
class Served:
    """A store at a socket, and a scheduler with TLS and tokens whose worker is not there."""

    store: str
    scheduler: str
    certificates: Path


def started(*arguments: object) -> tuple[subprocess.Popen[str], str]:
    """A service, and where it says it listens."""
    process = subprocess.Popen(
        [sys.executable, "-m", *map(str, arguments)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith(READY_PREFIX), line
    return process, line.removeprefix(READY_PREFIX).strip()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("probe")
    certificates = folder / "certificates"
    make_certificates(certificates, ["scheduler"])
    tokens = folder / "tokens.toml"
    add_token(tokens, Caller("alice", Role.CLIENT))
    arena = shared_memory_folder()
    processes = []
    try:
        store, at_socket = started(
            *("kvstore_service", "--listen", f"unix:{folder}/store.sock", "--model", MODEL),
            *("--host-memory", "64MiB", "--arena", arena / "arena"),
        )
        processes.append(store)
        scheduler, at_port = started(
            *("scheduler_service", "--listen", "127.0.0.1:0", "--model", MODEL),
            *("--worker", f"unix:{folder}/absent.sock", "--tokens", tokens),
            *("--tls-cert", certificates / "server.pem"),
            *("--tls-key", certificates / "server-key.pem"),
        )
        processes.append(scheduler)
        yield Served(at_socket, at_port, certificates)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            assert process.wait(30) == 0
            assert process.stdout is not None
            process.stdout.close()
        remove_tree(arena)


def probe(
    *arguments: object, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "splitpoint_cli.request.probe", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
    )


def test_a_service_that_serves(served: Served) -> None:
    for service in ([], ["--service", STORE]):
        done = probe(served.store, *service)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_service_that_is_not_ready_says_so(served: Served) -> None:
    """The scheduler lives, but has no worker."""
    ca = ("--ca", served.certificates / "ca.pem")
    assert probe(served.scheduler, "--service", ADMIN, *ca).returncode == 0
    done = probe(served.scheduler, "--service", SCHEDULER, *ca)
    assert done.returncode == 1
    assert f"{SCHEDULER} is not serving" in done.stderr


def test_tls_without_a_token(served: Served) -> None:
    """By the authority with the right name, or by the certificate itself, whatever its name."""
    own = ("--server-cert", served.certificates / "server.pem")
    assert probe(served.scheduler, *own).returncode == 0
    plain = probe(served.scheduler, "--timeout", "2")
    assert plain.returncode == 1
    assert "speaks TLS" in plain.stderr


def test_a_server_that_demands_a_certificate(served: Served, tmp_path: Path) -> None:
    """What a pod has in its environment is enough."""
    files = served.certificates
    server, address = started(
        *("scheduler_service", "--listen", "127.0.0.1:0", "--model", MODEL),
        *("--worker", f"unix:{tmp_path}/absent.sock", "--tls-ca", files / "ca.pem"),
        *("--tls-cert", files / "server.pem", "--tls-key", files / "server-key.pem"),
    )
    known = {"SPLITPOINT_CA": str(files / "ca.pem"), "SPLITPOINT_SERVER_NAME": "scheduler"}
    pair = {
        "SPLITPOINT_CERT": str(files / "client.pem"),
        "SPLITPOINT_KEY": str(files / "client-key.pem"),
    }
    try:
        assert probe(address, environment={**known, **pair}).returncode == 0
        assert probe(address, "--timeout", "2", environment=known).returncode == 1
    finally:
        server.terminate()
        assert server.wait(30) == 0
        assert server.stdout is not None
        server.stdout.close()


def test_a_server_of_another_authority_is_not_believed(served: Served, tmp_path: Path) -> None:
    make_certificates(tmp_path / "others", ())
    done = probe(served.scheduler, "--ca", tmp_path / "others" / "ca.pem", "--timeout", "2")
    assert done.returncode == 1
    assert "is not of the authority" in done.stderr


def test_a_service_that_does_not_exist(served: Served) -> None:
    done = probe(served.store, "--service", "splitpoint.v1.Nothing")
    assert done.returncode == 1
    assert "there is no service splitpoint.v1.Nothing" in done.stderr


def test_no_service(tmp_path: Path) -> None:
    done = probe(f"unix:{tmp_path}/absent.sock", "--timeout", "2")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["somewhere"], "is not an address"),
        (["127.0.0.1:1", "--timeout", "0"], "--timeout"),
        (["127.0.0.1:1", "--ca", "/nowhere.pem"], "/nowhere.pem cannot be read"),
        (["127.0.0.1:1", "--ca", "a.pem", "--server-cert", "b.pem"], "not both"),
    ],
)
def test_wrong_input_is_no_answer(arguments: list[str], words: str) -> None:
    done = probe(*arguments)
    assert done.returncode == 2
    assert words in done.stderr


def test_it_is_a_command_and_loads_no_torch() -> None:
    code = (
        "import sys, splitpoint_cli.request.probe as p; print('torch' in sys.modules, p.__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.split() == ["False", "splitpoint_cli.request.probe"]
    command = [sys.executable, "-m", "splitpoint_cli.main", "probe", "somewhere"]
    assert subprocess.run(command, capture_output=True, cwd=ROOT).returncode == 2
