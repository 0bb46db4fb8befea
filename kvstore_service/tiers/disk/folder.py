"""The folder of a disk tier: its lock, a folder for each layout, and all segments in it."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from splitpoint.arena.files import is_at
from splitpoint.errors import FailedPrecondition
from splitpoint.host.files import private_folder
from splitpoint.shapes import ArenaLayout, align

LOCK_NAME = "lock"
_LAYOUT_NAME = re.compile(r"[0-9a-f]{32}")
_SEGMENT_NAME = re.compile(r"([0-9]{12})\.segment")
# What opening a link, a socket or a FIFO without a reader, and a folder ends with.
_NOT_REGULAR = (errno.ELOOP, errno.ENXIO, errno.EISDIR)


class DiskTierInUse(FailedPrecondition):
    """Another store holds the lock of this folder."""


class FolderLost(FailedPrecondition):
    """The folder was removed or replaced, or its file system is no longer mounted."""


@dataclass(frozen=True, slots=True)
class FoundSegment:
    """A segment file by its name, of any layout, not read yet.

    Attributes:
        layout_name: hexadecimal hash of its layout.
        disk_bytes: its size in whole pages.
        changed_at: time of its last write, in nanoseconds.
    """

    path: Path
    layout_name: str
    number: int
    disk_bytes: int
    changed_at: int


class TierFolder:
    """A locked folder."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self.device = os.fstat(lock_fd).st_dev
        self._lock_fd = lock_fd

    @classmethod
    def lock(cls, path: Path) -> TierFolder:
        """Lock the folder; make it with mode 700 if it is missing.

        Raises DiskTierInUse, FolderNotPrivate, NotFound without its parent, FailedPrecondition if
        the lock cannot be made.
        """
        private_folder(path)
        lock_path = path / LOCK_NAME
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(lock_path, flags, 0o600)
        except OSError as error:
            raise FailedPrecondition(f"{lock_path} cannot be a lock: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _name_holder(fd)
            return cls(path, fd)
        except BlockingIOError:
            holder = os.pread(fd, 256, 0).decode(errors="replace").strip() or "another process"
            os.close(fd)
            raise DiskTierInUse(
                f"{path} is the disk tier of another store: {holder}", path=path
            ) from None
        except OSError as error:
            os.close(fd)
            raise FailedPrecondition(f"{lock_path} cannot be locked: {error.strerror}") from error

    def check_there(self) -> None:
        """Raise FolderLost unless the locked folder is still at its path."""
        try:
            is_there = is_at(self._lock_fd, self.path / LOCK_NAME)
        except OSError:
            is_there = False
        if not is_there:
            raise FolderLost(f"{self.path} was removed, replaced or unmounted")

    def layout_folder(self, layout: ArenaLayout) -> Path:
        """Make and return the folder of this layout's segments. Raises OSError."""
        folder = self.path / layout.layout_hash.hex()
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        return folder

    def close(self) -> None:
        """Release the lock. Its file stays, since another store may wait for it."""
        os.close(self._lock_fd)


def segment_path(folder: Path, number: int) -> Path:
    return folder / f"{number:012d}.segment"


def open_segment(path: Path, flags: int) -> int:
    """Open the file of a segment. A file that the flags create has mode 600.

    Follows no link, and does not wait for the other end of a FIFO. Raises OSError; if something
    other than a regular file has the name, FileNotFoundError.
    """
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno in _NOT_REGULAR:
            raise _not_a_file(path) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _not_a_file(path)
    return fd


def _not_a_file(path: Path) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "it is not a regular file", str(path))


def remove_segment(path: Path) -> None:
    """Remove the file of a segment, if it is still there. Raises OSError."""
    with suppress(FileNotFoundError, IsADirectoryError):
        path.unlink()


def find_segments(path: Path) -> Iterator[FoundSegment]:
    """Yield all segments below a tier's folder, in no order. Raises OSError.

    Those that are removed meanwhile are left out.
    """
    for folder in os.scandir(path):
        if _LAYOUT_NAME.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False):
            with suppress(FileNotFoundError):
                yield from _segments_in(folder)


def _segments_in(folder: os.DirEntry[str]) -> Iterator[FoundSegment]:
    for file in os.scandir(folder):
        name = _SEGMENT_NAME.fullmatch(file.name)
        if name is not None and file.is_file(follow_symlinks=False):
            try:
                facts = file.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            yield FoundSegment(
                path=Path(file.path),
                layout_name=folder.name,
                number=int(name[1]),
                disk_bytes=align(facts.st_size),
                changed_at=facts.st_mtime_ns,
            )


def _name_holder(fd: int) -> None:
    """Write for the next process that finds the lock taken. A full disk is no reason to fail."""
    with suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
