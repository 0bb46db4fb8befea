"""`splitpoint doctor` as a user runs it: real files, ports, servers and limits."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from own_names import free_ports
from redis_server import RedisServer
from typer.testing import CliRunner

from splitpoint import config
from splitpoint.checkpoint.resolve import resolve_model
from splitpoint.errors import ResourceExhausted
from splitpoint.planning.weight_placement import LINK_ONLY, NOTHING_ON_HOST
from splitpoint.shapes import ArenaLayout, Encoding, WeightFormat
from splitpoint_cli.main import app
from splitpoint_cli.models import NamedModel, model_shape
from splitpoint_cli.security.authority import make_certificates
from splitpoint_cli.stack.child import child_environment
from worker_service.device.memory import divide_device
from worker_service.kernels.choice import by_flags, use
from worker_service.startup.model_source import source_of

COMMAND = [sys.executable, "-m", "splitpoint_cli", "doctor"]
SMALL = ("--host-memory", "64MiB")
# GPUs that there may be are hidden: these tests are of a host without.
HERE = {"CUDA_VISIBLE_DEVICES": ""}


# Runs the rest of its arguments with a low limit of locked memory. A `preexec_fn` would run Python
# in a fork of this process, which has threads.
WITH_LOW_LIMIT = [
    sys.executable,
    "-c",
    "import os, resource, sys; resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536)); "
    "os.execv(sys.argv[1], sys.argv[1:])",
]


def doctor(
    *arguments: str,
    environment: dict[str, str] | None = None,
    under: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    settings = {"NO_COLOR": "1", **HERE}
    return subprocess.run(
        [*under, *COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=child_environment({**settings, **(environment or {})}),
        check=False,
    )


Findings = dict[str, dict[str, str]]


def examine(
    *arguments: str,
    environment: dict[str, str] | None = None,
    under: Sequence[str] = (),
) -> tuple[int, Findings]:
    """Exit code and the findings by name, of a process of its own."""
    done = doctor(*arguments, "--json", environment=environment, under=under)
    assert done.stderr == ""
    return done.returncode, findings_in(done.stdout, done.returncode)


def examine_here(*arguments: str) -> tuple[int, Findings]:
    """As `examine`, in this process: a start takes longer than most checks."""
    done = CliRunner().invoke(app, ["doctor", *arguments, "--json"], env=HERE)
    return done.exit_code, findings_in(done.stdout, done.exit_code)


def findings_in(told: str, code: int) -> Findings:
    """By name; of several the last one."""
    report = json.loads(told)
    assert report["ok"] == (code == 0)
    return {finding["name"]: finding for finding in report["findings"]}


def problem(name: str, *arguments: str, advice: bool = True) -> dict[str, str]:
    """The one problem there is, of this name."""
    code, findings = examine_here(*arguments, *free_listen(arguments), *SMALL)
    problems = [found["name"] for found in findings.values() if found["verdict"] == "problem"]
    assert (code, problems) == (1, [name]), findings
    assert bool(findings[name]["advice"]) == advice
    return findings[name]


def free_listen(arguments: tuple[str, ...] = ()) -> tuple[str, ...]:
    return () if "--listen" in arguments else ("--listen", f"127.0.0.1:{free_ports(1)}")


@contextmanager
def listener() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        yield int(server.getsockname()[1])


def test_a_clean_bill() -> None:
    done = doctor(*free_listen(), *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "✗" not in done.stdout
    for name in ("kernel", "model", "shared memory", "listen", "locked memory"):
        assert f"✓ {name}" in done.stdout
    assert " checks: " in done.stdout.splitlines()[-1]


def test_a_terminal_that_knows_no_more_than_ascii() -> None:
    done = doctor(
        *SMALL,
        *free_listen(),
        environment={"PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "LC_ALL": "C"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


def test_an_arena_too_small_for_a_chunk() -> None:
    code, findings = examine(*free_listen(), "--host-memory", "5")
    assert code == 1
    assert findings["arena"]["verdict"] == "problem"
    assert "5 B of host memory hold no chunk" in findings["arena"]["found"]
    assert "--host-memory 1GiB" in findings["arena"]["advice"]


def test_an_arena_that_does_not_fit() -> None:
    code, findings = examine(*free_listen(), "--host-memory", "900TiB")
    assert code == 1
    found = findings["shared memory"]
    assert found["verdict"] == "problem"
    assert "900 TiB does not fit" in found["found"]
    assert "mount -o remount,size=" in found["advice"]
    assert "docker run --shm-size=" in found["advice"]
    assert findings["memory"]["verdict"] == "problem"


def test_a_low_limit_of_locked_memory_matters_on_a_gpu_only() -> None:
    _, findings = examine(*free_listen(), *SMALL, "--device", "cpu", under=WITH_LOW_LIMIT)
    assert findings["locked memory"]["verdict"] == "ok"
    # As on a host with a GPU whose driver does not answer.
    code, findings = examine(
        *free_listen(),
        *SMALL,
        environment={"CUDA_VISIBLE_DEVICES": "0"},
        under=WITH_LOW_LIMIT,
    )
    assert findings["locked memory"]["verdict"] == "warning"
    assert "ulimit -l unlimited" in findings["locked memory"]["advice"]
    assert "64 KiB" in findings["locked memory"]["found"]
    if not Path("/dev/nvidiactl").exists():
        assert code == 1
        assert findings["driver"]["verdict"] == "warning"
        assert findings["torch"]["verdict"] == "problem"  # built for the CPU, or finds no device


def test_a_busy_port() -> None:
    with listener() as port:
        found = problem("listen", "--listen", f"127.0.0.1:{port}")
        assert f"something listens at 127.0.0.1:{port}" in found["found"]
        assert "splitpoint down" in found["advice"]
        free = found["advice"].rpartition(":")[2]
        assert examine_here("--listen", f"127.0.0.1:{free}", *SMALL)[0] == 0
        found = problem("metrics", "--metrics", str(port))
        assert f"127.0.0.1:{port} cannot be used" in found["found"]


def test_metrics_of_a_stack_take_ports_in_a_row() -> None:
    """As `up --metrics`: the scheduler's, the store's, a worker's; the last one is taken."""
    listen = free_listen()  # before those in a row: the advice is about the ports after them
    port = free_ports(3)
    with socket.socket() as server:
        server.bind(("127.0.0.1", port + 2))
        server.listen(1)
        found = problem("metrics", "--metrics", str(port))
        assert f"127.0.0.1:{port + 2} cannot be used: Address already in use" in found["found"]
        advice, _, free = found["advice"].rpartition(" ")
        assert advice == "3 ports in a row are needed: --metrics"
        code, findings = examine_here(*listen, *SMALL, "--metrics", free)
        assert (code, findings["metrics"]["verdict"]) == (0, "ok")


def test_a_gateway_needs_a_port_of_its_own() -> None:
    port = free_ports(1)
    at = f"127.0.0.1:{port}"
    found = problem("http", "--http", at, "--listen", at)
    assert "is the scheduler's" in found["found"]
    with listener() as busy:
        found = problem("http", "--http", f"127.0.0.1:{busy}")
        assert f"something listens at 127.0.0.1:{busy}" in found["found"]
        assert "--http 127.0.0.1:" in found["advice"]
    assert "--tls-cert" in problem("http", "--http", f"0.0.0.0:{port}")["found"]
    first = free_ports(4)
    # The gateway's metrics are at the last of four ports.
    more = ("--metrics", str(first), "--http", f"127.0.0.1:{first + 3}")
    _, findings = examine_here(*free_listen(), *SMALL, *more)
    assert "(--http)" in findings["metrics"]["found"]
    code, findings = examine_here(*free_listen(), *SMALL, "--http", at)
    assert (code, findings["http"]["verdict"]) == (0, "ok")


def test_an_open_port_needs_tls_and_tokens() -> None:
    found = problem("listen", "--listen", f"0.0.0.0:{free_ports(1)}")
    assert "--tls-cert" in found["found"]
    assert "docs/security.md" in found["advice"]


def test_a_redis_that_is_absent() -> None:
    found = problem("Redis", "--redis", f"redis://127.0.0.1:{free_ports(1)}")
    assert "is away: no connection" in found["found"]
    assert "redis-cli" in found["advice"]


def test_an_authority_of_redis_that_is_no_file(tmp_path: Path) -> None:
    url = f"rediss://127.0.0.1:{free_ports(1)}"
    found = problem("Redis", "--redis", url, "--redis-ca", str(tmp_path / "none.pem"))
    assert "none.pem cannot be read" in found["found"]


def test_redis_with_and_without_its_password(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    server.start()
    try:
        with server.client() as client:
            client.config_set("requirepass", "right")
        url = f"unix://{server.socket}"
        found = problem("Redis", "--redis", url)
        assert "--redis-password-file" in found["advice"]
        password = tmp_path / "password"
        password.write_text("wrong\n")
        password.chmod(0o600)
        options = ("--redis", url, "--redis-password-file", str(password))
        found = problem("Redis", *options)
        assert "wrong" not in json.dumps(found).replace("password is wrong", "")
        password.write_text("right\n")
        code, findings = examine_here(*options, *free_listen(), *SMALL)
        assert code == 0
        assert "may be written to, version" in findings["Redis"]["found"]
        assert "right" not in json.dumps(findings)
        password.chmod(0o644)
        assert "chmod 600" in problem("Redis", *options)["advice"]
    finally:
        server.stop()


# -- the model -----------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the bundled model, to be broken."""
    return Path(shutil.copytree(resolve_model(None), tmp_path / "copy"))


def test_weights_that_are_cut_off(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size // 2)
    found = problem("weights", "--model", str(checkpoint))
    assert "cut off" in found["found"]
    with weights.open("r+b") as file:
        file.truncate(100)
    assert "within its header" in problem("weights", "--model", str(checkpoint))["found"]
    weights.write_bytes(b"<html>not found</html>")
    assert "no safetensors file" in problem("weights", "--model", str(checkpoint))["found"]
    weights.unlink()
    assert "no safetensors file" in problem("weights", "--model", str(checkpoint))["found"]


def test_a_draft_model(checkpoint: Path) -> None:
    """Whole, cut off, without its tokenizer, in this memory; and options that contradict."""
    draft, roomy = ("--draft-model", str(checkpoint)), ("--device-memory", "1GiB")
    on_cpu = ("--device", "cpu", *free_listen(), *SMALL)
    code, findings = examine_here(*draft, *roomy, *on_cpu)
    assert code == 0
    assert findings["draft model"]["verdict"] == "ok"
    _, plain = examine_here(*roomy, *on_cpu)
    assert "draft model" not in plain
    # Its weights, workspace and cache are taken from the device's memory first.
    alone, beside = (
        float(found["device memory"]["found"].rpartition("cache ")[2].removesuffix(" MiB"))
        for found in (plain, findings)
    )
    named = NamedModel(model_shape(checkpoint, "auto"), checkpoint)
    assert alone - beside > named.weight_sizes(is_gpu=False).total / (1 << 20)
    wanted = ("--speculative-config", '{"method": "model"}')
    assert "needs a draft model" in problem("speculation", *wanted)["found"]
    weights = checkpoint / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size // 2)
    assert "cut off" in problem("draft model", *draft)["found"]
    (checkpoint / "tokenizer.json").unlink()
    assert "no tokenizer to compare" in problem("draft model", *draft)["found"]


@pytest.mark.parametrize("more", [(), ("--max-batch", "8"), ("--kv-encoding", "int8")])
def test_device_memory_is_divided_as_a_worker_does(more: tuple[str, ...]) -> None:
    """Also the weights, which a CPU worker mostly holds in panels."""
    use(by_flags(torch.bfloat16, []).parsed("linear=panels"))
    folder = resolve_model(None)
    source = source_of(folder)
    held: Any = {"max_batch_size": 32, "max_batched_tokens": 512}
    layout = ArenaLayout.of(
        source.config.shape,
        chunk_tokens=64,
        has_activations=source.config.shape.activations_can_pay,
        encoding=Encoding.INT8 if "int8" in more else Encoding.NATIVE,
    )
    if "--max-batch" in more:
        held["max_batch_size"] = 8
    sizes = source.weight_sizes(torch.device("cpu"), WeightFormat.NATIVE)
    verdicts = []
    for mebibytes in (20, 30, 50, 60, 80, 100, 4096):
        arguments = ("--device-memory", f"{mebibytes}MiB", "--device", "cpu", *free_listen())
        _, findings = examine_here(*arguments, *SMALL, *more)
        found = findings["device memory"]
        verdicts.append(found["verdict"])
        divide = partial(
            divide_device,
            source.config.shape,
            layout,
            sizes,
            budget_bytes=mebibytes << 20,
            is_gpu=False,
            rates=lambda: LINK_ONLY,
            **held,
        )
        if found["verdict"] == "problem":
            with pytest.raises(ResourceExhausted) as refused:
                divide()
            assert found["found"] == refused.value.message
            continue
        worker = divide()
        size = config.format_size(sizes.total)
        if worker.placement.on_host == NOTHING_ON_HOST:
            assert found["verdict"] == "ok"
            cache = config.format_size(worker.memory.cache_capacity_bytes)
            assert f"weights {size}, " in found["found"]
            assert found["found"].endswith(f"cache {cache}")
        else:
            assert found["verdict"] == "warning"
            assert found["found"].startswith(f"{size} of weights do not fit")
            assert "--profile" in found["advice"]
    assert sorted(set(verdicts)) == ["ok", "problem", "warning"]


def test_options_that_up_refuses_are_a_problem() -> None:
    """Whatever they are: `up` takes no others than doctor."""
    found = problem("options", "--kv-encoding", "int8", "--numerics", "invariant", advice=False)
    assert "--numerics invariant needs --kv-encoding native" in found["found"]
    code, findings = examine_here("--weight-objective", "latency", *free_listen(), *SMALL)
    assert (code, findings["options"]["verdict"]) == (0, "ok")


def test_a_model_without_tokenizer_serves_ids_only(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    code, findings = examine_here("--model", str(checkpoint), *free_listen(), *SMALL)
    assert code == 0
    assert findings["tokenizer"]["verdict"] == "warning"
    (checkpoint / "tokenizer.json").write_text("{")
    problem("tokenizer", "--model", str(checkpoint))


def test_a_chat_template_that_is_missing_or_broken_leaves_prompts(checkpoint: Path) -> None:
    def chats() -> dict[str, str]:
        code, findings = examine_here("--model", str(checkpoint), *free_listen(), *SMALL)
        assert code == 0
        return findings["chat template"]

    assert chats()["found"] == "of the model: it teaches no calls of tools"
    path = checkpoint / "chat_template.jinja"
    path.write_text("<tool_call>")
    assert chats()["found"] == "of the model: it teaches calls of tools (hermes)"
    path.write_text("{% for %}")
    assert (chats()["verdict"], "cannot be used" in chats()["found"]) == ("warning", True)
    path.unlink()
    assert chats()["verdict"] == "note"


def test_a_config_that_is_no_json_or_of_another_family(checkpoint: Path) -> None:
    path = checkpoint / "config.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps({**told, "model_type": "mamba"}))
    found = problem("model", "--model", str(checkpoint))
    assert "'mamba': MambaModel takes no position ids" in found["found"]
    assert "docs/models.md" in found["advice"]
    path.write_text("{")
    assert "cannot be read" in problem("model", "--model", str(checkpoint))["found"]
    problem("model", "--model", str(checkpoint / "nowhere"))


# -- TLS and tokens ---------------------------------------------------------------------------


def tls(folder: Path) -> tuple[str, ...]:
    return ("--tls-cert", str(folder / "server.pem"), "--tls-key", str(folder / "server-key.pem"))


def test_certificates(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["gateway.example"])
    code, findings = examine_here(*tls(tmp_path), *free_listen(), *SMALL)
    assert code == 0
    assert findings["certificate names"]["verdict"] == "ok"
    (tmp_path / "server-key.pem").chmod(0o644)
    found = problem("TLS files", *tls(tmp_path))
    assert found["advice"] == f"Close it to others: chmod 600 {tmp_path}/server-key.pem"
    (tmp_path / "server-key.pem").chmod(0o600)
    shutil.copy(tmp_path / "client.pem", tmp_path / "server.pem")
    assert "are not a certificate" in problem("TLS files", *tls(tmp_path))["found"]


def test_a_certificate_that_expired(tmp_path: Path) -> None:
    make_certificates(tmp_path, days=3, now=datetime.now(UTC) - timedelta(days=10))
    assert "expired on" in problem("certificate ends", *tls(tmp_path))["found"]
    make_certificates(tmp_path, days=3, force=True)
    code, findings = examine_here(*tls(tmp_path), *free_listen(), *SMALL)
    assert (code, findings["certificate ends"]["verdict"]) == (0, "warning")


def test_a_tokens_file(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    assert "splitpoint token --file" in problem("tokens", "--tokens", str(tokens))["advice"]
    make = [sys.executable, "-m", "splitpoint_cli", "token", "--file", str(tokens)]
    subprocess.run([*make, "--name", "a"], check=True, capture_output=True, timeout=60)
    _, findings = examine_here("--tokens", str(tokens), *free_listen(), *SMALL)
    assert findings["tokens"]["verdict"] == "note"
    tokens.chmod(0o640)
    assert problem("tokens", "--tokens", str(tokens))["advice"] == f"Close it: chmod 600 {tokens}"
