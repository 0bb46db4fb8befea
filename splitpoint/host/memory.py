"""The memory and the cores that this process may use, from /proc and its cgroups."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from splitpoint.config import SHARED_MEMORY

_MOST_DEFAULT_HOST_MEMORY = 8 << 30


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Memory that this process may use, in bytes. None: no such limit."""

    total_bytes: int
    available_bytes: int
    cgroup_limit_bytes: int | None
    cgroup_available_bytes: int | None

    @property
    def usable_bytes(self) -> int:
        """The smaller of MemAvailable and the rest of the cgroup's limit."""
        if self.cgroup_available_bytes is None:
            return self.available_bytes
        return min(self.available_bytes, self.cgroup_available_bytes)


def memory_facts(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> MemoryFacts:
    """Read /proc/meminfo and the memory limits of this process's cgroups (v2 and v1)."""
    meminfo = {}
    for line in (proc / "meminfo").read_text().splitlines():
        key, _, rest = line.partition(":")
        meminfo[key] = int(rest.split()[0]) * 1024
    limits = _cgroup_memory(proc, cgroup)
    return MemoryFacts(
        total_bytes=meminfo["MemTotal"],
        available_bytes=meminfo["MemAvailable"],
        cgroup_limit_bytes=min((limit for limit, _ in limits), default=None),
        cgroup_available_bytes=min((max(0, limit - used) for limit, used in limits), default=None),
    )


def _cgroup_memory(proc: Path, cgroup: Path) -> list[tuple[int, int]]:
    """Return (limit, used) of every memory cgroup above this process that has a limit."""
    limits = []
    for line in _read_text(proc / "self" / "cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            root, names = cgroup, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = cgroup / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = root / group.lstrip("/")
        # In a container its own group is the root, although /proc names it in full.
        for candidate in (folder, *folder.parents):
            if not candidate.is_relative_to(root):
                break
            limit, used = (_read_text(candidate / name).strip() for name in names)
            # In v1 "no limit" is a number near 2^63.
            if limit.isdigit() and used.isdigit() and int(limit) < 1 << 60:
                limits.append((int(limit), int(used)))
    return limits


def _read_text(path: Path) -> str:
    """Return the file's text; empty if the kernel has no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""


def default_host_memory(shm: Path = SHARED_MEMORY) -> int:
    """Return the default size of an arena in bytes.

    It is a quarter of the usable memory, at most 8 GiB and half of the free space of /dev/shm.
    """
    free = os.statvfs(shm)
    shm_free = free.f_bavail * free.f_frsize
    return min(memory_facts().usable_bytes // 4, shm_free // 2, _MOST_DEFAULT_HOST_MEMORY)


def available_cores() -> int:
    """Return the cores that this process may use, by affinity and the cgroup's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _read_text(Path("/sys/fs/cgroup/cpu.max")).partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores
