"""Arenas in shared memory: that of this instance, and what dead ones left."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from splitpoint.arena.files import lock_path_of
from splitpoint.config import format_size, runtime_path
from splitpoint.errors import InvalidArgument
from splitpoint_cli.checks.finding import Finding, Verdict
from splitpoint_cli.stack.instance import running_process

_NAME = "arenas"


@dataclass(frozen=True, slots=True)
class FoundArena:
    """An arena of this user's `splitpoint up`.

    `is_used`: a store runs on it, or will again. `is_kept`: the secret of its keys lies
    beside it, as --keep-arena leaves it.
    """

    instance: str
    path: Path
    size_bytes: int
    is_used: bool
    is_kept: bool


def find_arenas(shm: Path, user: int) -> list[FoundArena]:
    """In order of their names."""
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
                is_used=is_locked(lock_path_of(arena)) or _is_supervised(instance),
                is_kept=(folder / "key").exists(),
            )
        )
    return found


def _is_supervised(instance: str) -> bool:
    """Whether its `splitpoint up` lives: it starts a store that died again, after a pause."""
    try:
        return running_process(runtime_path(instance), seconds=0) is not None
    except InvalidArgument:  # somebody else's way of naming
        return False


def is_locked(lock: Path) -> bool:
    """Whether a store holds it. Asks for a shared lock, which it gives back at once."""
    try:
        file = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def check_arenas(arenas: list[FoundArena], instance: str | None) -> Iterator[Finding]:
    """What lies there, seen by a stack of this name that is to be started; None: none is."""
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
                f"If nobody wants it any more: splitpoint arena rm {arena.instance}",
            )
        else:
            yield Finding(
                _NAME,
                Verdict.WARNING,
                f"a dead stack left {size} of memory: {arena.instance}",
                f"Give it back: splitpoint arena rm {arena.instance}",
            )
    if not arenas:
        yield Finding(_NAME, Verdict.OK, "nothing was left in shared memory")
