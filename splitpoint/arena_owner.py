"""Creates an arena file, owns it under a lock, and removes it again.

Only the store (and tools that take its place while it is down) use this. Knows
files and limits; what is inside the file is `splitpoint.arena`'s business.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
import secrets
import stat
import uuid
from pathlib import Path

from splitpoint.arena import Arena, open_arena, read_superblock
from splitpoint.arena_format import (
    ID_BYTES,
    SUPERBLOCK_BYTES,
    ArenaFormatError,
    BadMagic,
    Condition,
    Geometry,
    Superblock,
    Truncated,
)
from splitpoint.config import format_size, memory_facts
from splitpoint.errors import FailedPrecondition, NotFound, ResourceExhausted
from splitpoint.shapes import ArenaLayout


class ArenaInUse(FailedPrecondition):
    """Another store holds the lock of this arena."""


class FolderNotPrivate(FailedPrecondition):
    """The arena's folder belongs to, or is open to, somebody else."""


class NotOurArena(FailedPrecondition):
    """Something that is no arena lies at the arena's path; it is left alone."""


class ArenaOwner:
    """The lock on an arena's path: whoever holds it may create and remove the file.

    Use `lock`, then `create`; `remove` or `leave` at the end.
    """

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd

    @classmethod
    def lock(cls, path: Path) -> ArenaOwner:
        """Take the path's exclusive lock, making its private folder when missing.

        Raises ArenaInUse, FolderNotPrivate, or NotFound when the folder's own
        parent is missing.
        """
        _private_folder(path.parent)
        lock_path = _lock_path(path)
        while True:
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
            if _is_at(fd, lock_path):
                return cls(path, fd)
            # The former owner unlinked the file between our open and our lock.
            os.close(fd)

    def create(self, layout: ArenaLayout, slot_count: int) -> Arena:
        """A new, empty, fully allocated arena of epoch 1, mapped for the store.

        Raises ResourceExhausted naming every limit, and NotOurArena when
        something lies at the path.
        """
        geometry = Geometry(layout, slot_count)
        _check_room(self.path.parent, geometry.size_bytes)
        # Under another name until it is whole: what lies at the path is always
        # a complete arena, whenever we are killed.
        unfinished = _unfinished_path(self.path)
        _remove_unfinished(unfinished)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(unfinished, flags, 0o600)
        try:
            os.fchmod(fd, 0o600)  # whatever the umask is
            _allocate(fd, self.path, geometry.size_bytes)
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
            arena = Arena(self.path, fd, superblock, write_metadata=True)
            try:
                os.link(unfinished, self.path)  # unlike rename, never replaces anything
            except FileExistsError:
                arena.close()
                raise NotOurArena(f"{self.path} exists already") from None
            return arena
        finally:
            os.unlink(unfinished)
            os.close(fd)

    def remove_existing(self) -> bool:
        """Remove the arena that an earlier store left here; False when there is none.

        Raises NotOurArena for anything that is not an arena of this user.
        """
        try:
            fd = open_arena(self.path)
        except NotFound:
            return False
        except ArenaFormatError as error:
            raise NotOurArena(f"{error.message}; it was left alone", path=self.path) from error
        try:
            read_superblock(fd)
        except (BadMagic, Truncated) as error:
            raise NotOurArena(
                f"{self.path} is not an arena ({error.message}); it was left alone",
                path=self.path,
            ) from error
        except ArenaFormatError:
            # One of ours by its magic, but damaged or of another version: the
            # lock says that nobody uses it.
            pass
        finally:
            os.close(fd)
        os.unlink(self.path)
        return True

    def remove(self) -> None:
        """Remove arena, lock file and the then empty folder, and let go of the lock."""
        self.path.unlink(missing_ok=True)
        _unfinished_path(self.path).unlink(missing_ok=True)
        # Last, and while locked: nobody can take over a path that is being cleared.
        _lock_path(self.path).unlink(missing_ok=True)
        self.leave()
        try:
            self.path.parent.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.EBUSY):
                raise

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


def create_arena(path: Path, layout: ArenaLayout, slot_count: int) -> tuple[ArenaOwner, Arena]:
    """Lock `path`, replace an unlocked arena of ours there, create a new one.

    Raises what `ArenaOwner.lock`, `remove_existing` and `create` raise, and then
    leaves nothing of its own behind.
    """
    owner = ArenaOwner.lock(path)
    try:
        owner.remove_existing()
        return owner, owner.create(layout, slot_count)
    except NotOurArena:
        _lock_path(path).unlink(missing_ok=True)
        owner.leave()
        raise
    except BaseException:
        owner.remove()
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


def boot_id() -> bytes:
    """16 bytes that change when the machine starts anew."""
    return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _unfinished_path(path: Path) -> Path:
    return path.with_name(path.name + ".new")


def _remove_unfinished(path: Path) -> None:
    """What a store left that was killed while it made its arena."""
    try:
        os.close(open_arena(path))
    except NotFound:
        return
    except ArenaFormatError as error:
        raise NotOurArena(f"{error.message}; it was left alone", path=path) from error
    os.unlink(path)


def _private_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except FileNotFoundError as error:
        raise NotFound(f"{folder.parent} does not exist") from error
    except OSError as error:
        raise FolderNotPrivate(f"{folder} cannot be made: {error.strerror}") from error
    found = folder.lstat()
    if (
        not stat.S_ISDIR(found.st_mode)
        or found.st_uid != os.geteuid()
        or stat.S_IMODE(found.st_mode) & 0o077
    ):
        raise FolderNotPrivate(
            f"{folder} must be a folder of this user alone (mode 700), not a link",
            folder=folder,
        )


def _is_at(fd: int, path: Path) -> bool:
    """Whether the open file is still the one at `path`."""
    ours = os.fstat(fd)
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)


def _limits(folder: Path) -> tuple[int, int, int | None, str]:
    """(free on the file system, MemAvailable, left in the cgroup, all three in words)."""
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


def _check_room(folder: Path, size_bytes: int) -> None:
    # Memory is checked before allocating: beyond it comes the OOM killer, not ENOSPC.
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


def _allocate(fd: int, path: Path, size_bytes: int) -> None:
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
