"""Arenas in shared memory: that of this instance, and those of dead stacks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from splitpoint.arena.files import is_locked
from splitpoint.config import format_size, runtime_path
from splitpoint.errors import InvalidArgument
from splitpoint_cli.checks.finding import Finding, Verdict
from splitpoint_cli.stack.instance import running_process

_NAME = "arenas"


@dataclass(frozen=True, slots=True)
class FoundArena:
    """An arena of this user's `splitpoint up`.

    `is_used`: a store runs on it, or will again. `is_kept`: --keep-arena left it, with the
    secret of its keys.
    """

    instance: str
    path: Path
    size_bytes: int
    is_used: bool
    is_kept: bool


def find_arenas(shm: Path, user: int) -> list[FoundArena]:
    """Return the arenas in order of their names."""
    found = []
    for folder in sorted(shm.glob(f"splitpoint-{user}-*")):
        arena = folder / "arena"
        if not arena.is_file() or not arena.stat().st_blocks:
            continue
        instance = folder.name.removeprefix(f"splitpoint-{user}-")
        found.append(
            FoundArena(
                instance=instance,
                path=arena,
                size_bytes=arena.stat().st_blocks * 512,
                is_used=is_locked(arena) or _is_supervised(instance),
                is_kept=(folder / "key").exists(),
            )
        )
    return found


def _is_supervised(instance: str) -> bool:
    """Return True if its `splitpoint up` runs, which restarts a dead store after a pause."""
    try:
        return running_process(runtime_path(instance), seconds=0) is not None
    except InvalidArgument:  # not a name of `up`
        return False


def check_arenas(arenas: list[FoundArena], instance: str | None) -> Iterator[Finding]:
    """Check the arenas for the start of a stack named `instance`; None: it runs already."""
    for arena in arenas:
        size = format_size(arena.size_bytes)
        if arena.is_used and arena.instance == instance:
            yield Finding(
                "instance",
                Verdict.PROBLEM,
                f"a stack named {instance} is running",
                f"Stop it: splitpoint down --instance {instance}; or start another one beside it: "
                "splitpoint up with another --listen port or --instance",
            )
        elif arena.is_used:
            yield Finding(_NAME, Verdict.OK, f"{arena.instance} is running, {size}")
        elif arena.is_kept:
            yield Finding(
                _NAME,
                Verdict.NOTE,
                f"{arena.instance} keeps {size} of memory (--keep-arena)",
                f"If it is no longer needed: splitpoint arena rm {arena.instance}",
            )
        else:
            yield Finding(
                _NAME,
                Verdict.WARNING,
                f"a dead stack left {size} of memory: {arena.instance}",
                f"Free it: splitpoint arena rm {arena.instance}",
            )
    if not arenas:
        yield Finding(_NAME, Verdict.OK, "nothing was left in shared memory")
