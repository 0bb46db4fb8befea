"""The folder of the disk tier: its rights, its file system, its room."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from splitpoint.config import format_size, parse_size
from splitpoint.errors import InvalidArgument
from splitpoint.options import store
from splitpoint.shapes import ArenaLayout
from splitpoint_cli.checks.finding import Finding, Places, Verdict, read_text

NAME = "disk tier"
_IN_MEMORY = {"tmpfs", "ramfs", "hugetlbfs"}
_OF_NETWORK = {
    *("9p", "afs", "beegfs", "ceph", "cifs", "fuse.glusterfs", "fuse.sshfs", "gfs2", "gpfs"),
    *("lustre", "nfs", "nfs4", "ocfs2", "orangefs", "smb3"),
}
_OF_CONTAINER = {"overlay", "aufs"}


def check_tier_disk(
    folder: Path | None, size: str, places: Places, layout: ArenaLayout | None = None
) -> Finding:
    """Check the folder that `--tier-disk` names, None if it is missing, for `--tier-disk-size`.

    With a layout, the size is compared with that of the fewest chunks that a tier can hold.
    A file system that is slow, full or volatile is a warning: a tier costs reuse, not requests.
    Raises InvalidArgument for a size that is none.
    """
    wanted = parse_size(size, field="tier-disk-size")
    if folder is None:
        return _refused(
            "--tier-disk-size needs --tier-disk", "Name a folder on NVMe: --tier-disk DIR"
        )
    if wanted == 0:
        return Finding(
            NAME,
            Verdict.PROBLEM,
            "--tier-disk needs --tier-disk-size",
            "Give the bytes that its files may have: --tier-disk-size 100GiB",
        )
    too_small = None if layout is None else _too_small(layout, wanted)
    if too_small is not None:
        return too_small
    try:
        return _refusal(folder) or _place(folder, wanted, places)
    except OSError as error:
        return Finding(
            NAME,
            Verdict.PROBLEM,
            f"{error.filename or folder}: {error.strerror}",
            "Name a folder on a local disk, or one that can be made: --tier-disk DIR",
        )


def _too_small(layout: ArenaLayout, size_bytes: int) -> Finding | None:
    from kvstore_service.tiers.disk.format import Division

    try:
        Division.of(layout, size_bytes)
    except InvalidArgument as error:
        return _refused(error.message, "Ask for more: --tier-disk-size 100GiB, for one")
    return None


def _refusal(folder: Path) -> Finding | None:
    """Return why the store could not use the folder; None if it can. Raises OSError."""
    if not folder.exists():
        parent = folder.absolute().parent
        if not parent.exists():
            return _refused(
                f"{folder} cannot be made: {parent} does not exist",
                f"Make it first: mkdir -p {parent}",
            )
        if os.access(parent, os.W_OK | os.X_OK):
            return None
        return _refused(f"{folder} does not exist, and {parent} is not writable", f"mkdir {folder}")
    found = folder.stat()
    if not stat.S_ISDIR(found.st_mode):
        return _refused(f"{folder} is no folder", "Name another one: --tier-disk DIR")
    if found.st_uid != os.getuid():
        return _refused(
            f"{folder} belongs to user {found.st_uid}, not to this one",
            f"Give it to this user: sudo chown {os.getuid()} {folder}",
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        return _refused(
            f"other users can open {folder}, which would hold their prompts' caches",
            f"Keep it private: chmod 0700 {folder}",
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        return _refused(f"{folder} is not writable", f"chmod 0700 {folder}")
    return None


def _refused(found: str, advice: str) -> Finding:
    return Finding(NAME, Verdict.PROBLEM, found, advice)


def _place(folder: Path, wanted: int, places: Places) -> Finding:
    there = folder if folder.exists() else folder.absolute().parent
    room = os.statvfs(there)
    free = room.f_bavail * room.f_frsize
    kind, device = file_system_of(there, places)
    text = f"{format_size(wanted)} in {folder} on {kind or 'an unknown file system'}"
    text += f", {format_size(free)} free"
    used = _used_bytes(folder)
    if kind in _IN_MEMORY:
        return Finding(
            NAME,
            Verdict.WARNING,
            f"{text}: that is memory, which the arena uses better, and a restart loses it"
            + ("; and it is too little for the bound" if wanted > free + used else ""),
            "Name a folder on NVMe: --tier-disk DIR",
        )
    if kind in _OF_NETWORK:
        return Finding(
            NAME,
            Verdict.WARNING,
            f"{text}: a network's file system is slow, and can hang",
            "Name a folder on a disk of this host: --tier-disk DIR; a pool of several hosts' "
            f"memory is {store.TIER_POOL.flag} (docs/tiers.md)",
        )
    if wanted > free + used:
        return Finding(
            NAME,
            Verdict.WARNING,
            f"{text}, where a tier's files have {format_size(used)} so far: it will be full before "
            "its bound is reached, and keeps fewer chunks then",
            f"Ask for less: --tier-disk-size {_fitting(free + used)}",
        )
    if _rotates(device, places):
        return Finding(
            NAME,
            Verdict.WARNING,
            f"{text}: the disk rotates, so loading chunks may take longer than computing them",
            "Name a folder on NVMe: --tier-disk DIR",
        )
    if kind in _OF_CONTAINER:
        return Finding(
            NAME,
            Verdict.NOTE,
            f"{text}: the container's own layer, which goes with the container",
            "Mount a volume there to keep chunks",
        )
    return Finding(NAME, Verdict.OK, text)


def file_system_of(folder: Path, places: Places) -> tuple[str, str]:
    """Return the type of a folder's file system, and its device as "MAJOR:MINOR".

    Both are empty if the kernel does not tell. Raises OSError if the folder is gone.
    """
    number = folder.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    # "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw": see proc_pid_mountinfo(5).
    for line in (read_text(places.proc / "self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == device:
            return after.split()[0], device
    return "", device


def _rotates(device: str, places: Places) -> bool:
    """Return True if the kernel says so of the device, or of the disk that it is a part of.

    It says so of every disk of a virtual machine, whatever is behind it.
    """
    block = places.sys / "dev/block" / device
    if "/virtio" in os.path.realpath(block):
        return False
    texts = (read_text(block / "queue/rotational"), read_text(block / "../queue/rotational"))
    return "1" in texts


def _used_bytes(folder: Path) -> int:
    """Return the bytes that files below a folder occupy."""
    return sum(
        os.lstat(os.path.join(parent, name)).st_blocks * 512
        for parent, _, names in os.walk(folder)
        for name in names
    )


def _fitting(free_bytes: int) -> str:
    """Return a size a tenth below the room, for the option."""
    return f"{max(1, free_bytes * 9 // 10 >> 20)}MiB"
