"""Limits of this user's processes: locked memory and open files."""

from __future__ import annotations

import resource

from splitpoint.config import format_size
from splitpoint_cli.checks.finding import Finding, Verdict

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
