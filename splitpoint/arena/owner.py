"""Creates or adopts an arena file, owns it under a lock, and removes it.

Used by the store, and by tools that take its place while it is down.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import logging
import os
import secrets
from pathlib import Path

from splitpoint.arena.files import (
    Loss,
    NotOurArena,
    allocate,
    boot_id,
    check_room,
    check_there,
    damaged_path,
    is_at,
    lock_path_of,
    note_loss,
    pop_note,
    remove_unfinished,
    rename_foreign,
    set_aside,
    unfinished_path,
)
from splitpoint.arena.format import (
    ID_BYTES,
    MAGIC,
    SUPERBLOCK_BYTES,
    ArenaFormatError,
    Condition,
    ForeignByteOrder,
    Geometry,
    SizeMismatch,
    Superblock,
    UnsupportedVersion,
)
from splitpoint.arena.mapping import Arena, open_arena, read_superblock
from splitpoint.config import format_size
from splitpoint.errors import FailedPrecondition, NotFound, ResourceExhausted
from splitpoint.host.files import private_folder
from splitpoint.host.huge_pages import Backing
from splitpoint.shapes import ArenaLayout

_log = logging.getLogger(__name__)

ADVICE = "remove it with `splitpoint arena rm`, or start the store as it was started before"
# Why an empty folder may stay: it is a mount point, as in containers, whose root may be read-only
# besides; or the folder above it belongs to another user.
_FOLDER_STAYS = (
    *(errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT),
    *(errno.EBUSY, errno.EROFS, errno.EACCES, errno.EPERM),
)


class ArenaInUse(FailedPrecondition):
    """Another store holds the lock of this arena."""


class ArenaDiffers(FailedPrecondition):
    """The arena at the path is whole, but of another version, layout or size."""


@dataclasses.dataclass(frozen=True, slots=True)
class OpenedArena:
    """An arena mapped for the store.

    Attributes:
        is_adopted: an earlier store filled it.
        former_loss: why the arena before this one was lost; None if it was not.
    """

    owner: ArenaOwner
    arena: Arena
    is_adopted: bool
    former_loss: Loss | None = None


class ArenaOwner:
    """The lock on an arena's path, whose holder may create and remove the file.

    Use `lock`, then `adopt` or `create`; `remove`, `keep` or `leave` at the end.
    """

    def __init__(self, path: Path, lock_fd: int, *, had_owner: bool = False) -> None:
        self.path = path
        self._lock_fd = lock_fd
        # A former store left its lock: it was killed, or kept its arena.
        self._had_owner = had_owner
        # What was wrong with an arena that `adopt` set aside, or whose place it found taken.
        self.found_loss: Loss | None = None

    @classmethod
    def lock(cls, path: Path) -> ArenaOwner:
        """Lock the path exclusively; make its private folder if it is missing.

        Raises ArenaInUse, FolderNotPrivate, or NotFound when the folder's own
        parent is missing.
        """
        private_folder(path.parent)
        lock_path = lock_path_of(path)
        while True:
            had_owner = os.path.lexists(lock_path)
            try:
                fd = os.open(
                    lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
                )
            except OSError as error:
                raise NotOurArena(f"{lock_path} cannot be a lock: {error.strerror}") from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                raise ArenaInUse(f"another store is running on {path}", path=path) from None
            if is_at(fd, lock_path):
                return cls(path, fd, had_owner=had_owner)
            # The former owner unlinked the file between our open and our lock.
            os.close(fd)

    def create(self, layout: ArenaLayout, slot_count: int, backing: Backing | None = None) -> Arena:
        """Return a new, empty, fully allocated arena of epoch 1, mapped for the store.

        `backing` may give it other pages than posix_fallocate would.

        Raises ResourceExhausted naming every limit, NotOurArena if the path exists, and
        what `Backing.populate` raises.
        """
        geometry = Geometry(layout, slot_count)
        # Under another name until it is whole: the file at the path is always a complete
        # arena, even if this process is killed.
        unfinished = unfinished_path(self.path)
        # Before the room is measured: the file of a killed store may be large.
        remove_unfinished(unfinished)
        check_room(self.path.parent, geometry.size_bytes)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(unfinished, flags, 0o600)
        try:
            os.fchmod(fd, 0o600)  # whatever the umask is
            if backing is not None:
                backing.populate(fd, geometry.size_bytes)
            allocate(fd, self.path, geometry.size_bytes)
            superblock = Superblock(
                layout=layout,
                slot_count=slot_count,
                instance_id=secrets.token_bytes(ID_BYTES),
                boot_id=boot_id(),
                epoch=1,
                sequence=0,
                condition=Condition.OPEN,
                process_id=os.getpid(),
            )
            superblock = write_superblocks(fd, superblock)
            try:
                os.link(unfinished, self.path)  # unlike rename, never replaces anything
            except FileExistsError:
                raise NotOurArena(f"{self.path} exists already") from None
        except BaseException:
            os.close(fd)
            raise
        finally:
            os.unlink(unfinished)
        return Arena(self.path, fd, superblock, write_metadata=True)

    def adopt(self, layout: ArenaLayout, slot_count: int) -> Arena | None:
        """Return the arena that an earlier store left here, in a new epoch.

        None if there is none, or if it is damaged and so was set aside (see `set_aside`).
        Both superblocks name the new epoch before this returns, so no handle of an earlier
        epoch is accepted as one of this. The caller checks the contents of slots.

        Anything but an arena of this user is renamed if a former store left its lock beside it
        (see `rename_foreign`), and the result is None. Without that lock it raises NotOurArena.

        Raises ArenaDiffers.
        """
        try:
            return self._adopt(layout, slot_count)
        except NotOurArena as error:
            if not self._had_owner:
                raise
            try:
                aside = rename_foreign(self.path)
            except OSError as failure:
                raise NotOurArena(
                    f"{error.message}: it cannot be renamed ({failure.strerror})", path=self.path
                ) from error
        _log.error("%s was not the arena that a store left there: it is %s now", self.path, aside)
        self.found_loss = Loss.REMOVED
        return None

    def _adopt(self, layout: ArenaLayout, slot_count: int) -> Arena | None:
        """Do what `adopt` does. Raises NotOurArena whether or not there was a lock."""
        fd = self._open_existing()
        if fd is None:
            return None
        try:
            try:
                superblock = read_superblock(fd)
            except (UnsupportedVersion, ForeignByteOrder) as error:
                raise ArenaDiffers(f"{self.path}: {error.message}; {ADVICE}") from error
            except ArenaFormatError as error:
                self._check_ours(fd, error, Geometry(layout, slot_count).size_bytes)
                _log.error("%s is damaged and is not served: %s", self.path, error.message)
                is_short = isinstance(error, SizeMismatch) or not os.fstat(fd).st_size
                self.found_loss = Loss.TRUNCATED if is_short else Loss.DAMAGED
                set_aside(fd, self.path)
                os.close(fd)
                return None
            _check_same(self.path, superblock, layout, slot_count)
            # A hole in the file would be a SIGBUS.
            allocate(fd, self.path, superblock.geometry.size_bytes)
            superblock = dataclasses.replace(
                superblock,
                epoch=superblock.epoch + 1,
                condition=Condition.OPEN,
                process_id=os.getpid(),
            )
            superblock = write_superblocks(fd, superblock)
        except BaseException:
            os.close(fd)
            raise
        return Arena(self.path, fd, superblock, write_metadata=True)

    def _open_existing(self) -> int | None:
        try:
            return open_arena(self.path)
        except NotFound:
            return None
        except ArenaFormatError as error:
            raise NotOurArena(f"{error.message}; it was left alone", path=self.path) from error

    def _check_ours(self, fd: int, error: ArenaFormatError, size_bytes: int = 0) -> None:
        """Raise NotOurArena unless one of the superblocks begins with the magic.

        If a former store left its lock, a file of `size_bytes` was its arena, and so was an
        empty file.
        """
        if self._had_owner and os.fstat(fd).st_size in (0, size_bytes):
            return
        for offset in (0, SUPERBLOCK_BYTES):
            if os.pread(fd, len(MAGIC), offset) == MAGIC:
                return
        raise NotOurArena(
            f"{self.path} is not an arena ({error.message}); it was left alone", path=self.path
        ) from error

    def remove_existing(self) -> bool:
        """Remove the arena that an earlier store left here; False if there is none.

        Raises NotOurArena for anything but an arena of this user.
        """
        fd = self._open_existing()
        if fd is None:
            return False
        try:
            read_superblock(fd)
        except ArenaFormatError as error:
            # Damaged or of another version: the lock proves that it is not in use.
            self._check_ours(fd, error)
        finally:
            os.close(fd)
        os.unlink(self.path)
        return True

    def remove(self) -> None:
        """Remove arena, lock file and the then empty folder, and release the lock."""
        self.path.unlink(missing_ok=True)
        damaged_path(self.path).unlink(missing_ok=True)
        self.give_up()

    def give_up(self) -> None:
        """Release the lock and remove every file but the arena."""
        unfinished_path(self.path).unlink(missing_ok=True)
        pop_note(self.path)
        # Last, and while locked: no other store can lock a path that is being cleared.
        lock_path_of(self.path).unlink(missing_ok=True)
        self.leave()
        try:
            self.path.parent.rmdir()
        except OSError as error:
            if error.errno not in _FOLDER_STAYS:
                raise

    def check_there(self, arena: Arena) -> None:
        """Raise ArenaLost if another process removed, replaced or shortened the files."""
        check_there(arena, self._lock_fd)

    def abandon(self, loss: Loss) -> None:
        """Release the lock of a lost arena, and leave a note for the next store."""
        note_loss(self.path, loss)
        self.leave()

    def keep(self, superblock: Superblock) -> None:
        """Leave the file in place, marked as closed by a clean stop."""
        fd = open_arena(self.path)
        try:
            write_superblocks(fd, dataclasses.replace(superblock, condition=Condition.CLOSED))
        finally:
            os.close(fd)
        self.leave()

    def leave(self) -> None:
        """Release the lock; the files stay."""
        os.close(self._lock_fd)


def open_or_create_arena(
    path: Path,
    layout: ArenaLayout,
    slot_count: int,
    *,
    replace_other: bool = False,
    backing: Backing | None = None,
) -> OpenedArena:
    """Lock `path`, and adopt the arena there or create a new one.

    `replace_other`: replace an arena of another version, layout or size instead of raising
    ArenaDiffers.

    Raises what `ArenaOwner.lock`, `adopt` and `create` raise, and then leaves no file of its
    own behind.
    """
    owner = ArenaOwner.lock(path)
    try:
        try:
            arena = owner.adopt(layout, slot_count)
        except ArenaDiffers as error:
            if not replace_other:
                raise
            _log.warning("replaced: %s", error.message)
            owner.remove_existing()
            arena = None
        if arena is not None:
            pop_note(path)  # of a removed lock: the arena itself was not lost
            return OpenedArena(owner, arena, is_adopted=True)
        arena = owner.create(layout, slot_count, backing)
        note = pop_note(path)
        return OpenedArena(owner, arena, False, former_loss=owner.found_loss or note)
    except BaseException:
        owner.give_up()
        raise


def write_superblocks(fd: int, superblock: Superblock) -> Superblock:
    """Write the next two superblocks in turn, and return the later one.

    Both carry the change then, so that losing either cannot undo it.
    """
    for _ in range(2):
        superblock = dataclasses.replace(superblock, sequence=superblock.sequence + 1)
        written = os.pwrite(fd, superblock.encode(), superblock.offset)
        if written != SUPERBLOCK_BYTES:
            raise ResourceExhausted("a superblock could not be written in full")
    return superblock


def _check_same(path: Path, found: Superblock, layout: ArenaLayout, slot_count: int) -> None:
    """Raise ArenaDiffers unless the arena is the one that would be created."""
    if found.layout.layout_hash != layout.layout_hash:
        differing = ", ".join(
            field.name
            for field in dataclasses.fields(layout)
            if getattr(layout, field.name) != getattr(found.layout, field.name)
        )
        raise ArenaDiffers(
            f"{path} was made for another model or layout ({differing} differ); {ADVICE}",
            path=path,
        )
    if found.slot_count != slot_count:
        raise ArenaDiffers(
            f"{path} has {format_size(found.geometry.size_bytes)} and {found.slot_count} slots; "
            f"{slot_count} slots were asked for; {ADVICE}",
            path=path,
        )
