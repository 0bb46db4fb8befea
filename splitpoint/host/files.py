"""Files that appear whole or not at all, and files and folders of one user alone."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Collection
from pathlib import Path

from splitpoint.errors import FailedPrecondition, NotFound


class FolderNotPrivate(FailedPrecondition):
    """The folder belongs to, or is open to, another user."""


def replace_file(path: Path, content: bytes, mode: int) -> None:
    """Write or replace a file in one step; until then only this user can read it."""
    # mkstemp makes it with mode 0600, under a new name.
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    fresh = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), mode)
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def private_folder(folder: Path) -> None:
    """Make the folder with mode 700. Raises FolderNotPrivate, or NotFound without its parent."""
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


def is_private(
    found: os.stat_result, *, user: int | None = None, groups: Collection[int] | None = None
) -> bool:
    """Return True if only this user, or root, can read or write a file.

    A secret of root may belong to the service's group: Kubernetes mounts secrets so. `user` and
    `groups`: in place of this process's own.
    """
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid == (os.getuid() if user is None else user):
        return not mode & 0o177
    own_groups = {os.getegid(), *os.getgroups()} if groups is None else groups
    return found.st_uid == 0 and found.st_gid in own_groups and not mode & 0o137
