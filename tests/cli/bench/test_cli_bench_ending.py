"""A benchmark that a signal ends leaves no arena and no process behind, wherever it was.

One that was killed leaves its arena until the next one comes.
"""

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
from splitpoint_cli.bench.ending import bench_arena_path
from splitpoint_cli.stack.child import child_environment

ROOT = Path(__file__).resolve().parents[3]
BENCH = ("-m", "splitpoint_cli", "bench")
SMALL = ("--threads", "1", "--repeats", "100000", "--link-rate", "2GB")
RESTORE = (*BENCH, "restore", "--layers", "2", "--prompt", "200", *SMALL)
OFFLOAD = (*BENCH, "offload", "--batch", "1", "--prompt", "70", "--new", "4", *SMALL)
STORE = ("-m", "benchmarks.store", "--memory", "12MiB", "--run-slots", "4", "--calls", "10000000")
WARM_PREFIX = ("-m", "benchmarks.prefix", "warm")


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


# Programs that get a signal at a chosen instruction.
LOST = """
class Noted:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGHUP)  # an exception would be reported and dropped

with ended_by_signals():
    file = tempfile.NamedTemporaryFile(delete=False)
    print(os.path.dirname(file.name), flush=True)
    Noted()
    while True:
        pass
"""
# The signal comes when work was noted, and not yet given to the lane's thread, for which `close`
# would wait forever.
LANES = """
class Interrupted(collections.deque):
    def append(self, item):
        super().append(item)
        os.kill(os.getpid(), signal.SIGHUP)

lanes = ThreadLanes(torch.device("cpu"))
lanes._queued = Interrupted()
with ended_by_signals():
    print(tempfile.gettempdir(), flush=True)
    try:
        lanes.run(Lane.LINK_IN, Work("piece", lambda: print("too far")))
    finally:
        lanes.close()
"""
# A second signal comes when the loop has taken its handlers away.
CLOSING = """
import asyncio
from splitpoint_cli.bench.ending import run_until_signal

close = asyncio.SelectorEventLoop.close

def close_and_interrupt(loop):
    close(loop)
    os.kill(os.getpid(), signal.SIGINT)

asyncio.SelectorEventLoop.close = close_and_interrupt

async def work():
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(60)
    finally:
        print("cleaned up")

run_until_signal(work())
"""
HEADER = """
import collections, os, signal, tempfile
from splitpoint_cli.bench.ending import ended_by_signals
"""
LANE_HEADER = """
import torch
from splitpoint.planning.schedule import Lane
from worker_service.lanes.cpu import ThreadLanes
from worker_service.lanes.work import Work
"""


def ended_by_a_signal(program: str) -> str:
    """Run a program that gets SIGHUP; return the line that it printed."""
    done = subprocess.run(
        [sys.executable, "-c", HEADER + program],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env=child_environment({}),
        preexec_fn=heed_signals,
        check=False,
    )
    assert done.returncode == 129, done.stderr
    (line,) = done.stdout.splitlines()
    return line


@pytest.mark.parametrize("program", [LOST, LANE_HEADER + LANES], ids=["lost", "lanes"])
def test_a_signal_ends_the_process_wherever_it_comes(program: str) -> None:
    """In a finalizer or in the lanes, with the temporary files."""
    folder = Path(ended_by_a_signal(program))
    assert folder.name.startswith("splitpoint-bench-")
    assert not folder.exists()


def test_services_are_stopped_before_the_end() -> None:
    assert ended_by_a_signal(CLOSING) == "cleaned up"


HOLDER = """
import sys, time
from splitpoint.arena.owner import open_or_create_arena
from splitpoint.shapes import ArenaLayout, BUILT_IN_SHAPES
from splitpoint_cli.bench.ending import bench_arena_path
shape = BUILT_IN_SHAPES["opt-125m"]
layout = ArenaLayout.of(shape, chunk_tokens=16, has_activations=False)
path = bench_arena_path()
opened = open_or_create_arena(path, layout, 2)
print(path, flush=True)
time.sleep(600)
"""


def holding() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_killed_benchmarks_leave_nothing_behind_the_next_one() -> None:
    living, held = holding()
    killed, left = holding()
    try:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert left.exists()
        mine = bench_arena_path()
        assert not left.parent.exists()
        # One that runs keeps what it has.
        assert held.exists()
        assert mine.parent.name == f"splitpoint-{os.getuid()}-bench-{os.getpid()}"
        assert mine.parent.parent == SHARED_MEMORY
    finally:
        for process in (killed, living):
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        bench_arena_path()
    assert not held.parent.exists()
