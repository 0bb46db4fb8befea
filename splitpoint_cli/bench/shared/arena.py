"""The arena of a benchmark, and removal of those that killed benchmarks left.

The lock beside an arena tells whether a process uses it, in any container; the process id in its
path only keeps two benchmarks apart.
"""

from __future__ import annotations

import os
from pathlib import Path

from splitpoint.config import SHARED_MEMORY
from splitpoint.errors import SplitpointError
from splitpoint_cli.bench.shared.ending import ARENA_PREFIX, MOST_ARENAS, own_arena_path


def bench_arena_path() -> Path:
    """Remove what killed benchmarks left in memory; return a free `own_arena_path`."""
    for folder in SHARED_MEMORY.glob(f"splitpoint-{os.getuid()}-{ARENA_PREFIX}*"):
        _remove_abandoned(folder / "arena")
    paths = (own_arena_path(number) for number in range(MOST_ARENAS))
    return next(path for path in paths if not path.exists())


def _remove_abandoned(path: Path) -> None:
    from splitpoint.arena.owner import ArenaInUse, ArenaOwner  # needs an extra

    try:
        owner = ArenaOwner.lock(path)
    except ArenaInUse:
        return
    except SplitpointError:
        return  # not an arena of ours
    try:
        owner.remove_existing()
    finally:
        owner.give_up()
