"""A benchmark that a signal ends leaves no arena and no process behind, wherever it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import write_tiny

from splitpoint.config import SHARED_MEMORY
from splitpoint_cli.stack.child import child_environment

ROOT = Path(__file__).resolve().parents[3]
BENCH = ("-m", "splitpoint_cli", "bench")
SMALL = ("--threads", "1", "--repeats", "100000", "--link-rate", "2GB")
RESTORE = (*BENCH, "restore", "--layers", "2", "--prompt", "200", *SMALL)
OFFLOAD = (*BENCH, "offload", "--batch", "1", "--prompt", "70", "--new", "4", *SMALL)
STORE = (*BENCH, "store", "--memory", "12MiB", "--run-slots", "4", "--calls", "10000000")
WARM_PREFIX = ("-m", "benchmarks.warm_prefix")


def heed_signals() -> None:
    """Undo what a shell does to background jobs: they would ignore SIGINT, with nohup SIGHUP."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def session_of(process: int) -> set[int]:
    """The living processes of a session, whose leader `process` is or was."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # The command may contain anything; the fields after its last `)` do not.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == process and fields[0] != "Z":
            found.add(int(entry.name))
    return found


def arenas_of(process: int) -> set[Path]:
    return set(SHARED_MEMORY.glob(f"splitpoint-{os.getuid()}-*-{process}"))


def wait_until(condition: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, "the benchmark ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("command", "said", "signals", "code"),
    [
        (RESTORE, b"random weights", [signal.SIGTERM], 143),
        (RESTORE, b"timed runs", [signal.SIGINT, signal.SIGINT, signal.SIGTERM], 130),
        (OFFLOAD, b"timed runs", [signal.SIGHUP], 129),
        (STORE, b"control calls", [signal.SIGTERM, signal.SIGINT], 143),
        (WARM_PREFIX, b"", [signal.SIGTERM], 143),
    ],
    ids=["restore that begins", "restore, twice", "offload", "store, twice", "warm prefix"],
)
def test_a_signal_leaves_nothing_behind(
    command: tuple[str, ...], said: bytes, signals: list[signal.Signals], code: int, tmp_path: Path
) -> None:
    """The arena is there when the signal comes, and gone when the process is."""
    log = tmp_path / "stderr"
    if command is OFFLOAD:
        command = (*OFFLOAD, "--shape", str(write_tiny("opt", tmp_path / "model")))
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            cwd=ROOT,
            env=child_environment({}),
            start_new_session=True,
            preexec_fn=heed_signals,
        )
    try:
        wait_until(lambda: said in log.read_bytes() and arenas_of(process.pid), process)
        for number in signals:
            process.send_signal(number)
            time.sleep(0.02)  # two that are pending at once would be one
        assert process.wait(60) == code, log.read_text()
        assert not arenas_of(process.pid)
        assert not session_of(process.pid)
    finally:
        process.kill()
        process.wait()
