"""The files around an arena: its folder, lock and room in memory, a damaged copy, and its loss.

Another process may remove, replace or shorten an arena file while a store serves it. A mapping
outlives its file's name, but no worker can attach any more. Access to a mapping of a shortened
file ends the process by SIGBUS. Either way the store starts again on a fresh arena, and reports
the loss of the one before.
"""

from __future__ import annotations

import enum
import errno
import fcntl
import logging
import os
import uuid
from contextlib import suppress
from pathlib import Path

from splitpoint.arena.format import ArenaFormatError
from splitpoint.arena.mapping import Arena, open_arena
from splitpoint.config import format_size
from splitpoint.errors import DataLoss, FailedPrecondition, NotFound, ResourceExhausted
from splitpoint.host.files import private_folder
from splitpoint.host.memory import memory_facts

_log = logging.getLogger(__name__)

# Superblocks, records and tokens of an arena of some 100,000 slots.
_KEPT_OF_DAMAGED_BYTES = 64 << 20
# Files that took an arena's place and were renamed. They may fill the memory, so they are few.
_MOST_FOREIGN = 3


class NotOurArena(FailedPrecondition):
    """The file at the arena's path is not an arena of this user; it is left alone."""


def boot_id() -> bytes:
    """Return 16 bytes that change when the machine reboots."""
    return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes


def lock_path_of(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def is_locked(path: Path) -> bool:
    """Return True if a store runs on the arena.

    Takes the lock in shared mode for a moment; a store that starts in that moment takes
    it for the lock of another store.
    """
    try:
        lock = os.open(
            lock_path_of(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        )
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def unfinished_path(path: Path) -> Path:
    return path.with_name(path.name + ".new")


def damaged_path(path: Path) -> Path:
    return path.with_name(path.name + ".damaged")


def set_aside(fd: int, path: Path) -> None:
    """Copy the front of a damaged arena for diagnosis, and unlink the arena.

    The file is never shortened: workers that still map it would be killed by their next
    access. At most one copy is kept, so that a crash loop cannot fill the memory.
    """
    front = os.pread(fd, _KEPT_OF_DAMAGED_BYTES, 0)
    damaged = damaged_path(path)
    damaged.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(damaged, flags, 0o600), "wb") as copy:
            copy.write(front)
    except OSError as error:  # a full file system must not keep the store from starting
        _log.warning("%s is not kept: %s", path, error.strerror)
        damaged.unlink(missing_ok=True)
    os.unlink(path)


def rename_foreign(path: Path) -> Path:
    """Rename what took the place of an arena to `ARENA.foreign-N`, and return its new path.

    It is neither followed nor read, and no store removes it. Raises OSError; FileExistsError if
    three such files are there already.
    """
    for number in range(1, _MOST_FOREIGN + 1):
        aside = path.with_name(f"{path.name}.foreign-{number}")
        if not os.path.lexists(aside):
            return path.rename(aside)
    raise FileExistsError(errno.EEXIST, f"{_MOST_FOREIGN} files were renamed before")


def remove_unfinished(path: Path) -> None:
    """Remove the file of a store that was killed while it created its arena."""
    try:
        os.close(open_arena(path))
    except NotFound:
        return
    except ArenaFormatError as error:
        raise NotOurArena(f"{error.message}; it was left alone", path=path) from error
    os.unlink(path)


def is_at(fd: int, path: Path) -> bool:
    """Return True if the open file is still the one at `path`."""
    ours = os.fstat(fd)
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)


def _limits(folder: Path) -> tuple[int, int, int | None, str]:
    """Return the bytes free on the file system, available, left in the cgroup, and a text."""
    file_system = os.statvfs(folder)
    free = file_system.f_bavail * file_system.f_frsize
    facts = memory_facts()
    cgroup = facts.cgroup_available_bytes
    text = (
        f"{format_size(free)} free on the file system of {folder}, "
        f"{format_size(facts.available_bytes)} MemAvailable, "
        + ("no cgroup memory limit" if cgroup is None else f"{format_size(cgroup)} in the cgroup")
    )
    return free, facts.available_bytes, cgroup, text


def check_room(folder: Path, size_bytes: int) -> None:
    """Raise ResourceExhausted unless this much memory is free.

    Allocating more than that brings the OOM killer, not ENOSPC.
    """
    free, available, cgroup, text = _limits(folder)
    room = min(free, available) if cgroup is None else min(free, available, cgroup)
    if size_bytes > room:
        raise ResourceExhausted(
            f"an arena of {format_size(size_bytes)} does not fit: {text}",
            reason="ARENA_DOES_NOT_FIT",
            size_bytes=size_bytes,
            file_system_bytes=free,
            memory_available_bytes=available,
            cgroup_bytes="unlimited" if cgroup is None else cgroup,
        )


def allocate(fd: int, path: Path, size_bytes: int) -> None:
    """Allocate every byte of the file. Raises ResourceExhausted."""
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT):
            raise
        _, _, _, text = _limits(path.parent)
        raise ResourceExhausted(
            f"an arena of {format_size(size_bytes)} cannot be allocated ({error.strerror}): {text}",
            reason="ARENA_DOES_NOT_FIT",
            size_bytes=size_bytes,
        ) from error


class Loss(enum.StrEnum):
    """Why an arena cannot be served any longer."""

    REMOVED = "removed"  # or another file took its place
    TRUNCATED = "truncated"
    DAMAGED = "damaged"  # found at a start only


class ArenaLost(DataLoss):
    """The arena that this process serves is lost, for the reason `loss`."""

    def __init__(self, message: str, loss: Loss) -> None:
        super().__init__(f"{message}; a fresh arena is needed", reason="ARENA_LOST")
        self.loss = loss


def check_there(arena: Arena, lock_fd: int) -> None:
    """Raise ArenaLost unless arena and lock are whole and at their paths.

    Reads no mapping.
    """
    size = os.fstat(arena.fd).st_size
    if size != arena.size_bytes:
        raise ArenaLost(
            f"the arena {arena.path} was truncated from outside: it has {format_size(size)} of "
            f"{format_size(arena.size_bytes)}",
            Loss.TRUNCATED,
        )
    for fd, path in ((arena.fd, arena.path), (lock_fd, lock_path_of(arena.path))):
        if not is_at(fd, path):
            raise ArenaLost(f"{path} was removed from outside while in use", Loss.REMOVED)


def note_loss(path: Path, loss: Loss) -> None:
    """Leave a note for the next store at `path`, which finds no arena."""
    private_folder(path.parent)
    note = _note_path(path)
    note.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(note, flags, 0o600), "w") as file:
        file.write(loss.value)


def pop_note(path: Path) -> Loss | None:
    """Read and remove the note of an earlier store. None if there is none.

    A link or a folder at its path is not a note.
    """
    note = _note_path(path)
    told = ""
    with suppress(OSError):
        file = os.open(note, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            told = os.read(file, 32).decode(errors="replace")
        finally:
            os.close(file)
    with suppress(OSError):
        note.unlink()
    return Loss(told) if told in tuple(Loss) else None


def _note_path(path: Path) -> Path:
    return path.with_name(path.name + ".lost")
