"""Backs an arena's file with huge pages where its file system has them.

On tmpfs the mount's `huge=` option decides (docs/memory.md); shmem_enabled only if it is
`deny` or `force`. With `huge=advise` the order matters: posix_fallocate knows no mapping, so
it makes small pages that stay small. The file must get its size first, be mapped and advised,
and be populated through that mapping.

`populate` has the kernel find and clear memory before its first use.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from splitpoint.config import format_size
from splitpoint.errors import FailedPrecondition, InvalidArgument

Wish = Literal["auto", "never", "always"]
WISHES: tuple[Wish, ...] = ("auto", "never", "always")

_SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
HUGE_PAGE_BYTES = 2 << 20
# Linux 5.14; the mmap module has no names for them.
MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23
# Not by the mmap module, whose madvise keeps other Python threads waiting.
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def populate(address: int, size_bytes: int, *, writes: bool) -> None:
    """Have the kernel map the memory pages that hold these bytes; other threads run meanwhile.

    `writes`: for a first use that writes, as private memory needs it; else for one that reads.
    Contents do not change. Raises OSError: EINVAL from a kernel before Linux 5.14.
    """
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    size = -(-(address + size_bytes - first) // mmap.PAGESIZE) * mmap.PAGESIZE
    if _madvise(first, size, MADV_POPULATE_WRITE if writes else MADV_POPULATE_READ):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class NoHugePages(FailedPrecondition):
    """Huge pages were demanded, and the file system cannot give them."""


@dataclass(frozen=True, slots=True)
class Probe:
    """True if a folder's file system can back a file with huge pages, and the reason."""

    is_possible: bool
    reason: str


def probe(
    folder: Path,
    *,
    mounts: Path = Path("/proc/self/mountinfo"),
    shmem_enabled: Path = _SHMEM_ENABLED,
) -> Probe:
    """Inspect the mount that holds `folder`. Raises InvalidArgument for hugetlbfs."""
    kind, options = _mount_of(folder.resolve(), mounts.read_text())
    if kind == "hugetlbfs":
        raise InvalidArgument(
            f"{folder} is on hugetlbfs, which takes no ordinary writes: "
            "put the arena on a tmpfs mounted with huge=advise instead",
            field="arena",
        )
    if kind != "tmpfs":
        return Probe(False, f"{folder} is on {kind}, not tmpfs")
    try:
        word = re.search(r"\[(\w+)\]", shmem_enabled.read_text())
    except OSError:
        return Probe(False, "this kernel has no transparent huge pages")
    # For mounts that users see, only these two values count.
    if word is not None and word[1] == "deny":
        return Probe(False, f"{shmem_enabled} is deny")
    if word is not None and word[1] == "force":
        return Probe(True, f"{shmem_enabled} is force")
    huge = next((o.removeprefix("huge=") for o in options if o.startswith("huge=")), "never")
    if huge in ("advise", "within_size", "always"):
        return Probe(True, f"tmpfs with huge={huge}")
    return Probe(False, f"the tmpfs of {folder} is mounted with huge={huge}")


def _mount_of(folder: Path, mountinfo: str) -> tuple[str, list[str]]:
    """Return type and options of the innermost mount that holds the folder."""
    best = (-1, "", [""])
    for line in mountinfo.splitlines():
        fields, _, tail = line.partition(" - ")
        # Spaces in paths are written as octal escapes.
        point = Path(fields.split()[4].replace("\\040", " "))
        kind, _, options = tail.split(" ", 2)
        # The last of several mounts at one point hides the others.
        if folder.is_relative_to(point) and len(point.parts) >= best[0]:
            best = (len(point.parts), kind, options.split(","))
    return best[1], best[2]


class Backing:
    """The pages of one arena's file.

    Call `populate` on the empty file, before posix_fallocate, which allocates the rest and
    fails if there is no room.

    Attributes:
        description: the pages that the file has, in words.
    """

    def __init__(self, wish: Wish, folder: Path, *, probe: Callable[[Path], Probe] = probe) -> None:
        self._wish: Wish = wish
        self._folder = folder
        self._probe = probe
        self.description = f"{_small()} pages (an arena that was there already)"

    def populate(self, fd: int, size_bytes: int) -> None:
        """Populate the file. Raises NoHugePages if huge pages are demanded and missing."""
        if self._wish == "never":
            self.description = f"{_small()} pages (--huge-pages never)"
            return
        found = self._probe(self._folder)
        if not found.is_possible:
            self._settle(0, size_bytes, found.reason)
            return
        # Truncating reserves nothing: without room, populating fails.
        os.ftruncate(fd, size_bytes)
        with mmap.mmap(fd, size_bytes) as mapping:
            try:
                mapping.madvise(mmap.MADV_HUGEPAGE)
                mapping.madvise(MADV_POPULATE_WRITE)
            except OSError as error:
                # No room, or a kernel older than 5.14; posix_fallocate finds out which.
                self._settle(0, size_bytes, f"populating failed: {error.strerror}")
                return
            self._settle(_huge_bytes(fd), size_bytes, found.reason)

    def _settle(self, huge_bytes: int, size_bytes: int, reason: str) -> None:
        if huge_bytes >= size_bytes:
            self.description = f"huge pages ({reason})"
        elif self._wish == "always":
            raise NoHugePages(
                f"--huge-pages always: {format_size(huge_bytes)} of {format_size(size_bytes)} "
                f"could be had ({reason})",
                reason="NO_HUGE_PAGES",
            )
        elif huge_bytes:
            self.description = (
                f"{format_size(huge_bytes)} of {format_size(size_bytes)} in huge pages, "
                f"the rest in {_small()} pages ({reason})"
            )
        else:
            self.description = f"{_small()} pages (no huge pages: {reason})"


def _small() -> str:
    return format_size(mmap.PAGESIZE)


def _huge_bytes(fd: int) -> int:
    """Return the bytes of this file that the process maps by huge pages, from smaps."""
    inode = str(os.fstat(fd).st_ino)
    total, is_ours = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            fields = line.split()
            if not fields[0].endswith(":"):
                is_ours = len(fields) > 5 and fields[4] == inode
            elif is_ours and fields[0] in ("ShmemPmdMapped:", "FilePmdMapped:"):
                total += int(fields[1]) * 1024
    return total
