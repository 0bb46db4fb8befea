"""Creates an arena file or adopts the one that is there, owns it under a lock, removes it.

Only the store (and tools that take its place while it is down) use this. Knows
files and limits; what is inside the file is `splitpoint.arena.mapping`'s business.
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
    NotOurArena,
    allocate,
    boot_id,
    check_room,
    damaged_path,
    is_at,
    lock_path_of,
    private_folder,
    remove_unfinished,
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
from splitpoint.arena.loss import Loss, check_there, note_loss, take_note
from splitpoint.arena.mapping import Arena, open_arena, read_superblock
from splitpoint.config import format_size
from splitpoint.errors import FailedPrecondition, NotFound, ResourceExhausted
from splitpoint.host.huge_pages import Backing
from splitpoint.shapes import ArenaLayout

_log = logging.getLogger(__name__)

_ADVICE = "remove it with `splitpoint arena rm`, or start the store as it was started before"


class ArenaInUse(FailedPrecondition):
    """Another store holds the lock of this arena."""


class ArenaDiffers(FailedPrecondition):
    """The arena at the path is whole, but of another version, layout or size."""


@dataclasses.dataclass(frozen=True, slots=True)
class OpenedArena:
    """An arena mapped for the store.

    Attributes:
        is_adopted: an earlier store filled it.
        former_loss: what became of the arena before this one; None if nothing did.
    """

    owner: ArenaOwner
    arena: Arena
    is_adopted: bool
    former_loss: Loss | None = None


class ArenaOwner:
    """The lock on an arena's path: whoever holds it may create and remove the file.

    Use `lock`, then `adopt` or `create`; `remove`, `keep` or `leave` at the end.
    """

    def __init__(self, path: Path, lock_fd: int, *, had_owner: bool = False) -> None:
        self.path = path
        self._lock_fd = lock_fd
        # A store was here before, and did not stop as it should.
        self._had_owner = had_owner
        # What `adopt` found to be wrong with the arena that it set aside.
        self.found_loss: Loss | None = None

    @classmethod
    def lock(cls, path: Path) -> ArenaOwner:
        """Take the path's exclusive lock, making its private folder when missing.

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
        """A new, empty, fully allocated arena of epoch 1, mapped for the store.

        `backing` may give it other pages than posix_fallocate would.

        Raises ResourceExhausted naming every limit, NotOurArena when something
        lies at the path, and what `Backing.populate` raises.
        """
        geometry = Geometry(layout, slot_count)
        # Under another name until it is whole: what lies at the path is always
        # a complete arena, whenever we are killed.
        unfinished = unfinished_path(self.path)
        # Before the room is measured: a store killed while it allocated left much of it.
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
        """The arena that an earlier store left here, in a new epoch; None: there is none.

        Both superblocks name the new epoch before this returns, so no handle of
        an earlier epoch is ever taken for one of this. What the slots hold is the
        caller's to check. A damaged arena is set aside (see `set_aside`), and
        None returned.

        Raises ArenaDiffers, and NotOurArena for anything that is not an arena of
        this user.
        """
        fd = self._open_existing()
        if fd is None:
            return None
        try:
            try:
                superblock = read_superblock(fd)
            except (UnsupportedVersion, ForeignByteOrder) as error:
                raise ArenaDiffers(f"{self.path}: {error.message}; {_ADVICE}") from error
            except ArenaFormatError as error:
                self._check_ours(fd, error)
                _log.error("%s is damaged and is not served: %s", self.path, error.message)
                is_short = isinstance(error, SizeMismatch) or not os.fstat(fd).st_size
                self.found_loss = Loss.TRUNCATED if is_short else Loss.DAMAGED
                set_aside(fd, self.path)
                os.close(fd)
                return None
            _check_same(self.path, superblock, layout, slot_count)
            # Whole, whatever somebody did to the file: a hole would be a SIGBUS.
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

    def _check_ours(self, fd: int, error: ArenaFormatError) -> None:
        """Raises NotOurArena unless one of the superblocks at least begins like one.

        An empty file is what truncation left of an arena if a store died here.
        """
        if self._had_owner and not os.fstat(fd).st_size:
            return
        for offset in (0, SUPERBLOCK_BYTES):
            if os.pread(fd, len(MAGIC), offset) == MAGIC:
                return
        raise NotOurArena(
            f"{self.path} is not an arena ({error.message}); it was left alone", path=self.path
        ) from error

    def remove_existing(self) -> bool:
        """Remove the arena that an earlier store left here; False when there is none.

        Raises NotOurArena for anything that is not an arena of this user.
        """
        fd = self._open_existing()
        if fd is None:
            return False
        try:
            read_superblock(fd)
        except ArenaFormatError as error:
            # Damaged or of another version: the lock says that nobody uses it.
            self._check_ours(fd, error)
        finally:
            os.close(fd)
        os.unlink(self.path)
        return True

    def remove(self) -> None:
        """Remove arena, lock file and the then empty folder, and let go of the lock."""
        self.path.unlink(missing_ok=True)
        damaged_path(self.path).unlink(missing_ok=True)
        self.give_up()

    def give_up(self) -> None:
        """Let go of the lock and leave nothing behind but the arena, if there is one."""
        unfinished_path(self.path).unlink(missing_ok=True)
        take_note(self.path)
        # Last, and while locked: nobody can take over a path that is being cleared.
        lock_path_of(self.path).unlink(missing_ok=True)
        self.leave()
        try:
            self.path.parent.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.EBUSY):
                raise

    def check_there(self, arena: Arena) -> None:
        """Raise ArenaLost if something else removed, replaced or shortened the files."""
        check_there(arena, self._lock_fd)

    def abandon(self, loss: Loss) -> None:
        """Let go of the lock of a lost arena, and tell the next store of it."""
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
        """Let go of the lock; the files stay."""
        os.close(self._lock_fd)


def open_or_create_arena(
    path: Path,
    layout: ArenaLayout,
    slot_count: int,
    *,
    replace_other: bool = False,
    backing: Backing | None = None,
) -> OpenedArena:
    """Lock `path`, adopt the arena there, or create a new one where there is none.

    `replace_other`: an arena of another version, layout or size gives way instead
    of raising ArenaDiffers.

    Raises what `ArenaOwner.lock`, `adopt` and `create` raise, and then leaves
    nothing of its own behind.
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
            take_note(path)  # of a lock that was removed: the arena itself was not
            return OpenedArena(owner, arena, is_adopted=True)
        arena = owner.create(layout, slot_count, backing)
        note = take_note(path)
        return OpenedArena(owner, arena, False, former_loss=owner.found_loss or note)
    except BaseException:
        owner.give_up()
        raise


def write_superblocks(fd: int, superblock: Superblock) -> Superblock:
    """Write the next two superblocks, one after the other; returns the later one.

    Both carry the change afterwards, so that losing either cannot undo it.
    """
    for _ in range(2):
        superblock = dataclasses.replace(superblock, sequence=superblock.sequence + 1)
        written = os.pwrite(fd, superblock.encode(), superblock.offset)
        if written != SUPERBLOCK_BYTES:
            raise ResourceExhausted("a superblock could not be written in full")
    return superblock


def _check_same(path: Path, found: Superblock, layout: ArenaLayout, slot_count: int) -> None:
    """Raises ArenaDiffers unless the arena is the one that would be created."""
    if found.layout.layout_hash != layout.layout_hash:
        differing = ", ".join(
            field.name
            for field in dataclasses.fields(layout)
            if getattr(layout, field.name) != getattr(found.layout, field.name)
        )
        raise ArenaDiffers(
            f"{path} was made for another model or layout ({differing} differ); {_ADVICE}",
            path=path,
        )
    if found.slot_count != slot_count:
        raise ArenaDiffers(
            f"{path} has {format_size(found.geometry.size_bytes)} and {found.slot_count} slots; "
            f"{slot_count} slots were asked for; {_ADVICE}",
            path=path,
        )
