"""Room for the arena: shared memory, memory, cgroup, huge pages, limits of processes."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from splitpoint.arena.format import Geometry
from splitpoint.config import format_size
from splitpoint.errors import InvalidArgument
from splitpoint.host.huge_pages import probe
from splitpoint.host.memory import MemoryFacts
from splitpoint.shapes import ArenaLayout
from splitpoint_cli.checks.finding import Finding, Places, Verdict

# Far above the need of connections, checkpoint files and the arena.
_OPEN_FILES = 1024


def check_locked_memory(limit: int, pinned_bytes: int, *, has_gpu: bool) -> Finding:
    """Compare RLIMIT_MEMLOCK with the part of the arena that a worker would page-lock.

    Args:
        limit: the soft limit in bytes, or resource.RLIM_INFINITY.
        has_gpu: without one nothing is page-locked.
    """
    name = "locked memory"
    if limit == resource.RLIM_INFINITY:
        return Finding(name, Verdict.OK, "unlimited")
    text = f"limit {format_size(limit)}"
    if limit >= pinned_bytes:
        return Finding(name, Verdict.OK, text)
    if not has_gpu:
        return Finding(name, Verdict.OK, f"{text}; without a GPU nothing is locked")
    return Finding(
        name,
        Verdict.WARNING,
        f"{text}, but {format_size(pinned_bytes)} of the arena are to be page-locked: if the "
        "driver is refused, copies are slower and do not overlap",
        "Raise it: ulimit -l unlimited (a systemd unit: LimitMEMLOCK=infinity; a container: "
        "docker run --ulimit memlock=-1), or lock less: --pin-limit SIZE",
    )


def check_open_files(soft: int, hard: int) -> Finding:
    name = "open files"
    if hard == resource.RLIM_INFINITY:
        return Finding(name, Verdict.OK, "unlimited")
    if hard >= _OPEN_FILES:
        raised = "" if soft == hard else f", which services raise to {hard:,}"
        return Finding(name, Verdict.OK, f"limit {soft:,}{raised}")
    return Finding(
        name,
        Verdict.WARNING,
        f"limit {hard:,}: each client, worker and checkpoint file takes one",
        f"Raise it: ulimit -Hn {_OPEN_FILES}, as root or by /etc/security/limits.conf",
    )


# Less than this holds a few prompts of a small model at best.
_LITTLE_ARENA_BYTES = 128 << 20
_MIB = 1 << 20


def check_shared_memory(
    folder: Path, wish_bytes: int, *, is_chosen: bool, there_bytes: int = 0
) -> Finding:
    """Check that an arena of `wish_bytes` fits into the file system of `folder`.

    Args:
        is_chosen: True for the default size.
        there_bytes: size of an arena there that would be adopted or replaced.
    """
    name = "shared memory"
    try:
        found = os.statvfs(folder)
    except OSError as error:
        return Finding(
            name,
            Verdict.PROBLEM,
            f"{folder}: {error.strerror}",
            f"Mount one: mount -t tmpfs -o size={_mount_size(wish_bytes)} tmpfs {folder}",
        )
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    room = f"{format_size(free)} of {format_size(total)} free in {folder}"
    if wish_bytes > free + there_bytes:
        needed = total - free - there_bytes + wish_bytes
        return Finding(
            name,
            Verdict.PROBLEM,
            f"an arena of {format_size(wish_bytes)} does not fit: {room}",
            _larger(folder, needed) + f", or ask for less: --host-memory {_fitting(free)}",
        )
    if is_chosen and not there_bytes and wish_bytes < _LITTLE_ARENA_BYTES:
        return Finding(
            name,
            Verdict.WARNING,
            f"{room}: the arena would have {format_size(wish_bytes)} only",
            _larger(folder, 8 << 30),
        )
    which = "chosen size" if is_chosen else "arena"
    return Finding(name, Verdict.OK, f"{room}, {which} {format_size(wish_bytes)}")


def _larger(folder: Path, size_bytes: int) -> str:
    size = _mount_size(size_bytes)
    return (
        f"Make it larger: sudo mount -o remount,size={size} {folder} "
        f"(a container: docker run --shm-size={size})"
    )


def _mount_size(size_bytes: int) -> str:
    """Return a size for mount and docker, rounded up."""
    return f"{-(-size_bytes // _MIB)}m"


def _fitting(free_bytes: int) -> str:
    return f"{max(1, free_bytes * 9 // 10 // _MIB)}MiB"


def check_memory(facts: MemoryFacts, arena_bytes: int, weight_bytes: int) -> Finding:
    """Check that the arena, and the weights in host memory, fit into the available memory.

    Args:
        arena_bytes: size to be allocated; 0 for an existing arena.
        weight_bytes: weights of all CPU workers together.
    """
    name = "memory"
    room = f"{format_size(facts.usable_bytes)} available"
    if facts.cgroup_limit_bytes is not None:
        room += f", cgroup limit {format_size(facts.cgroup_limit_bytes)}"
    less = (
        "raise the container's limit (docker run --memory=...)"
        if facts.cgroup_available_bytes is not None
        and facts.cgroup_available_bytes < facts.available_bytes
        else "end what takes memory"
    )
    if arena_bytes > facts.usable_bytes:
        return Finding(
            name,
            Verdict.PROBLEM,
            f"an arena of {format_size(arena_bytes)} does not fit: {room}",
            f"Ask for less: --host-memory {_fitting(facts.usable_bytes)}, or {less}",
        )
    if arena_bytes + weight_bytes > facts.usable_bytes:
        return Finding(
            name,
            Verdict.WARNING,
            f"arena {format_size(arena_bytes)} and weights {format_size(weight_bytes)} are more "
            f"than there is: {room}",
            "Ask for less: --host-memory, --device-memory, --workers or a smaller --dtype; or "
            + less,
        )
    return Finding(name, Verdict.OK, room)


def check_chunks(arena_bytes: int, layout: ArenaLayout) -> Finding | None:
    """Return a finding if the arena has no room for one chunk, else None."""
    try:
        Geometry.fitting(layout, arena_bytes)
    except InvalidArgument as error:
        return Finding(
            "arena",
            Verdict.PROBLEM,
            error.message,
            "Ask for more: --host-memory 1GiB, for one (splitpoint size says what requests need)",
        )
    return None


def check_huge_pages(wish: str, places: Places) -> Finding:
    """Check huge pages; `wish`: the value of --huge-pages."""
    name = "huge pages"
    if wish == "never":
        return Finding(name, Verdict.OK, "not asked for (--huge-pages never)")
    try:
        found = probe(
            places.shm,
            mounts=places.proc / "self/mountinfo",
            shmem_enabled=places.sys / "kernel/mm/transparent_hugepage/shmem_enabled",
        )
    except InvalidArgument as error:
        return Finding(name, Verdict.PROBLEM, error.message)
    if found.is_possible:
        return Finding(name, Verdict.OK, found.reason)
    advice = f"For large arenas: sudo mount -o remount,huge=advise {places.shm} (docs/memory.md)"
    if wish == "always":
        return Finding(
            name,
            Verdict.PROBLEM,
            f"--huge-pages always cannot be had: {found.reason}",
            f"{advice}, or --huge-pages auto",
        )
    return Finding(name, Verdict.NOTE, f"small pages: {found.reason}", advice)
