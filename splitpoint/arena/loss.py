"""Arena files that another process removed, replaced or shortened while a store served them.

A mapping outlives its file's name, but no worker can attach any more. Access to a mapping of
a shortened file ends the process by SIGBUS. Either way the store starts again on a fresh
arena, and reports the loss of the one before.
"""

from __future__ import annotations

import enum
import os
from contextlib import suppress
from pathlib import Path

from splitpoint.arena.files import is_at, lock_path_of
from splitpoint.arena.mapping import Arena
from splitpoint.config import format_size
from splitpoint.errors import DataLoss
from splitpoint.host.files import private_folder


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
