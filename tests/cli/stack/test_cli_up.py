"""`splitpoint up` around fake services: signals, deaths, locks, and nothing left behind."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from own_names import free_ports, instance_name
from up_process import up_process, wait_until_up

from splitpoint.config import arena_path, remove_tree, runtime_path
from splitpoint_cli.stack.keeper import RestartLimits
from splitpoint_cli.stack.options import StackOptions
from splitpoint_cli.stack.plan import plan_stack
from splitpoint_cli.stack.runner import run_stack

FAKE_STACK = str(Path(__file__).parents[1] / "fake_stack.py")
SECONDS = 60


@contextmanager
def stack(
    log: Path,
    instance: str,
    store: str = "serve",
    worker: str = "serve",
    scheduler: str = "serve",
    pause: str = "never",
    metrics: str = "",
    log_format: str = "text",
    retry: str = "300",
) -> Iterator[subprocess.Popen[str]]:
    with up_process(
        [
            *(sys.executable, FAKE_STACK, instance, str(log), store, worker, scheduler),
            *(pause, metrics, log_format, retry),
        ]
    ) as process:
        yield process


def assert_nothing_left(log: Path, instance: str) -> None:
    starts = [line.split()[-1] for line in log.read_text().splitlines() if "start" in line]
    assert starts
    assert not [pid for pid in starts if Path(f"/proc/{pid}").exists()]
    assert not arena_path(instance).parent.exists()
    assert not runtime_path(instance).exists()


def test_ctrl_c_stops_in_order_and_exits_0(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with stack(log, instance_name("ctrl-c")) as process:
        printed = wait_until_up(process)
        assert "worker 1" in printed
        assert "splitpoint generate" in printed
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    stops = [line.split()[1] for line in log.read_text().splitlines() if line.startswith("stop")]
    assert stops[0] == "scheduler"
    assert stops[-1] == "store"
    assert len(stops) == 4
    assert_nothing_left(log, instance_name("ctrl-c"))


def test_ctrl_c_twice_kills_what_hangs(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with stack(log, instance_name("twice"), worker="stubborn") as process:
        wait_until_up(process)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        for line in process.stderr:
            if "stopping" in line:
                break
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert "stopped at once: killed" in errors
    assert "still ran after" not in errors
    told = errors.splitlines()[-1]
    assert told.startswith("killed: requests that still ran are lost; removed ")
    assert str(arena_path(instance_name("twice")).parent) in told
    assert_nothing_left(log, instance_name("twice"))


def test_ctrl_c_while_starting(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with stack(log, instance_name("early"), worker="never-ready") as process:
        assert process.stderr is not None
        for line in process.stderr:
            # The last line of a service that takes long, which is no warning.
            if "worker 1" in line and "starting ..." in line:
                break
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert_nothing_left(log, instance_name("early"))


def test_a_dead_worker_ends_everything_with_1(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with stack(log, instance_name("death"), worker="die-later") as process:
        _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert "UNAVAILABLE: worker" in errors
    assert "SIGKILL" in errors
    assert "last lines of worker" in errors
    assert_nothing_left(log, instance_name("death"))


def test_a_service_that_cannot_start_says_why(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with stack(log, instance_name("crash"), store="crash") as process:
        _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert "no luck today" in errors
    assert "store ended with status 7" in errors
    assert_nothing_left(log, instance_name("crash"))


def test_where_metrics_are_is_printed(tmp_path: Path) -> None:
    log, port = tmp_path / "log", free_ports(4)
    with stack(log, instance_name("metrics"), metrics=str(port)) as process:
        printed = wait_until_up(process)
        assert f"http://127.0.0.1:{port}/metrics (scheduler)" in printed
        assert f"http://127.0.0.1:{port + 1}/metrics (store)" in printed
        assert f"{port + 2} to {port + 3} (workers)" in printed
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    assert_nothing_left(log, instance_name("metrics"))


def test_a_taken_port_for_metrics_is_said_before_anything_starts(tmp_path: Path) -> None:
    instance, port = instance_name("taken"), free_ports(4)
    with socket.socket() as other:
        other.bind(("127.0.0.1", port + 3))  # worker 1's
        other.listen()
        # A store that made no arena: none is started.
        with stack(tmp_path / "log", instance, store="crash", metrics=str(port)) as process:
            _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode != 0
    assert f"127.0.0.1:{port + 3} cannot be used: Address already in use" in errors
    assert "4 ports in a row are needed: --metrics" in errors
    assert not (tmp_path / "log").exists()  # no service was started
    assert not runtime_path(instance).exists()


async def test_a_first_start_without_a_process_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    instance = instance_name("no-process")
    options = StackOptions(
        instance=instance, device="cpu", host_memory="1MiB", listen="127.0.0.1:0"
    )
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert await run_stack(plan_stack(options), verbose=False, limits=RestartLimits()) == 5
    errors = capsys.readouterr().err
    assert "store cannot be started: No such file or directory" in errors.splitlines()[-1]
    assert not arena_path(instance).parent.exists()
    assert not runtime_path(instance).exists()


def test_an_arena_that_was_kept_survives_a_start_that_failed(tmp_path: Path) -> None:
    arena = arena_path(instance_name("crash-kept"))
    arena.parent.mkdir(mode=0o700)
    arena.touch(0o600)
    try:
        with stack(tmp_path / "log", instance_name("crash-kept"), store="crash") as process:
            process.communicate(timeout=SECONDS)
        assert process.returncode == 1
        assert arena.exists()
    finally:
        remove_tree(arena.parent)


def test_two_stacks_cannot_share_a_name(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with stack(log, instance_name("shared")) as first:
        wait_until_up(first)
        with stack(tmp_path / "other", instance_name("shared")) as second:
            _, errors = second.communicate(timeout=SECONDS)
        assert second.returncode != 0
        assert "already running" in errors
        assert first.poll() is None
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=SECONDS)
    assert first.returncode == 0
    assert_nothing_left(log, instance_name("shared"))
