"""A stack that cannot start: refused before anything starts, or ended with the service's reason."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from own_names import instance_name

from splitpoint.config import arena_path, runtime_path
from splitpoint_cli.stack.child import child_environment

COMMAND = [sys.executable, "-m", "splitpoint_cli"]
FAKE_STACK = str(Path(__file__).parents[1] / "fake_stack.py")
SECONDS = 120


def run(*command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=child_environment({}),
        cwd=cwd,
        check=False,
    )


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


@pytest.fixture
def cut_off(bundled_model: Path, tmp_path: Path) -> Path:
    """A checkpoint whose weights were not copied to their end."""
    folder = tmp_path / "cut-off"
    shutil.copytree(bundled_model, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return folder


def refused(code: int, *arguments: str) -> str:
    """The one line that `up` with these arguments ends with, nothing having been started."""
    instance = instance_name("refused")
    done = run(*COMMAND, "up", "--device", "cpu", "--instance", instance, *arguments)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert not arena_path(instance).exists()
    assert not runtime_path(instance).exists()
    return line


def test_ports_are_checked_before_anything_starts(taken_port: int) -> None:
    line = refused(3, "--listen", f"127.0.0.1:{taken_port}", "--host-memory", "64MiB")
    assert line.startswith(
        f"splitpoint: UNAVAILABLE: something listens at 127.0.0.1:{taken_port} already"
    )
    assert "or choose another: --listen 127.0.0.1:" in line


def test_memory_and_weights_are_checked_before_anything_starts(cut_off: Path) -> None:
    any_port = ("--listen", "127.0.0.1:0")
    line = refused(5, *any_port, "--host-memory", "900TiB")
    assert line.startswith("splitpoint: RESOURCE_EXHAUSTED: an arena of 900 TiB does not fit: ")
    line = refused(2, *any_port, "--host-memory", "64MiB", "--model", str(cut_off))
    assert line.startswith("splitpoint: INVALID_ARGUMENT: model.safetensors: it is cut off")


def test_a_chat_template_is_compiled_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "broken.jinja"
    options = ("--listen", "127.0.0.1:0", "--host-memory", "64MiB", "--chat-template", str(path))
    assert "broken.jinja: no such file" in refused(2, *options)
    path.write_text("{% for %}")
    line = refused(2, *options)
    assert line.startswith("splitpoint: INVALID_ARGUMENT: the chat template cannot be used: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--evict-to", "0.5"), "--evict-to needs --evict-above"),
        (("--numa-node", "4095"), "there is no NUMA node 4095 with memory here"),
        (("--host-memory", "1KiB"), "hold no chunk"),
        (("--model", "nosuchdir"), "nosuchdir: no such folder"),
    ],
)
def test_options_are_checked_before_anything_starts(
    arguments: tuple[str, ...], message: str
) -> None:
    line = refused(2, "--listen", "127.0.0.1:0", *arguments)
    assert line.startswith("splitpoint: INVALID_ARGUMENT: ")
    assert message in line


@pytest.mark.parametrize(
    ("store", "worker", "code", "last"),
    [
        (
            "wrong-input",
            "serve",
            2,
            "INVALID_ARGUMENT: store ended with status 2: --evict-to is above --evict-above",
        ),
        (
            "serve",
            "no-memory",
            5,
            "RESOURCE_EXHAUSTED: worker 0 ended with status 5: an arena of 9 TiB does not fit",
        ),
        ("crash", "serve", 1, "UNAVAILABLE: store ended with status 7"),
    ],
)
def test_a_service_passes_its_reason_and_code_on(
    tmp_path: Path, store: str, worker: str, code: int, last: str
) -> None:
    arguments = (instance_name("reason"), str(tmp_path / "log"), store, worker, "serve", "never")
    done = run(sys.executable, FAKE_STACK, *arguments)
    assert done.returncode == code, done.stderr
    # Two workers fail alike, and either may be first.
    assert done.stderr.splitlines()[-1].replace("worker 1", "worker 0") == f"splitpoint: {last}"
    assert "FAILED" not in done.stderr


def test_a_real_worker_without_room_ends_up_with_5() -> None:
    arguments = ("--listen", "127.0.0.1:0", "--host-memory", "64MiB", "--device-memory", "1MiB")
    instance = instance_name("room")
    done = run(*COMMAND, "up", "--device", "cpu", "--instance", instance, *arguments)
    assert done.returncode == 5, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("splitpoint: RESOURCE_EXHAUSTED: worker 0 ended with status 5: ")
    assert "device memory 1 MiB is too small" in last


def test_a_service_whose_port_is_taken_says_so_in_one_line(
    taken_port: int, bundled_model: Path
) -> None:
    """gRPC would write a line of its own beside it."""
    done = run(
        *(sys.executable, "-m", "scheduler_service", "--listen", f"127.0.0.1:{taken_port}"),
        *("--worker", "unix:/nowhere", "--model", str(bundled_model)),
    )
    assert (done.returncode, done.stdout) == (3, "")
    (line,) = [line for line in done.stderr.splitlines() if "INFO" not in line]
    assert f"ERROR scheduler: cannot listen on 127.0.0.1:{taken_port}: it is in use" in line
