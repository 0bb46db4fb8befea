"""A process's private memory by the kernel: heaps of malloc, and other mappings.

Reads /proc only; knows nothing of the services.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

# glibc maps a thread's malloc arena at a multiple of this (HEAP_MAX_SIZE on 64 bits).
_ARENA_ALIGNMENT = 64 << 20


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident bytes of a process that belong to no file and no shared memory.

    Attributes:
        anonymous: all of them.
        heap: of the main arena of malloc.
        arenas: of malloc's arenas of other threads.
        mapped: of other anonymous mappings: large arrays, the device's cache, stacks.
        files: of pages of files that were written to (relocated code, copy on write).
        rss: resident bytes with everything shared, for comparison.
    """

    anonymous: int
    heap: int
    arenas: int
    arena_count: int
    mapped: int
    files: int
    rss: int

    @property
    def malloc(self) -> int:
        return self.heap + self.arenas


def memory_of(pid: int | str) -> Memory:
    """Read the memory of a process. Raises FileNotFoundError, ProcessLookupError if it is gone."""
    parts = dict.fromkeys(("heap", "arenas", "mapped", "files"), 0)
    rss = arena_count = 0
    kind = "mapped"
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            kind = _kind(first, rest.split())
            arena_count += kind == "arenas"
        elif first == "Rss:":
            rss += int(rest.split()[0]) * 1024
        elif first == "Anonymous:":
            parts[kind] += int(rest.split()[0]) * 1024
    return Memory(anonymous=sum(parts.values()), arena_count=arena_count, rss=rss, **parts)


def _kind(addresses: str, fields: list[str]) -> str:
    if len(fields) > 4:
        return "heap" if fields[4] == "[heap]" else "files" if fields[4][0] == "/" else "mapped"
    low, high = (int(part, 16) for part in addresses.split("-"))
    is_arena = low % _ARENA_ALIGNMENT == 0 and high - low <= _ARENA_ALIGNMENT
    return "arenas" if is_arena and "w" in fields[0] else "mapped"


def children_of(parent: int) -> dict[int, str]:
    """Return each child's name by process id: the service, or "worker" and its id."""
    found: dict[int, str] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            words = (folder / "cmdline").read_bytes().decode().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) != parent:
            continue
        name = next((word for word in words if word.endswith("_service")), words[0])
        if "--worker-id" in words:
            name = f"worker {words[words.index('--worker-id') + 1]}"
        found[int(folder.name)] = name.removesuffix("_service")
    return found


def processor_seconds(pid: int) -> float:
    """Return user and system time of all threads of a process until now."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
