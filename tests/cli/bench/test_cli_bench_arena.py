"""A benchmark that was killed leaves its arena until the next one comes, and no longer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from splitpoint.config import SHARED_MEMORY
from splitpoint_cli.bench.ending import bench_arena_path

HOLD = """
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


def start() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_killed_benchmarks_leave_nothing_behind_the_next_one() -> None:
    living, held = start()
    killed, left = start()
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
