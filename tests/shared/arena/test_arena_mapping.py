"""Arena files: made, attached, owned, refused and removed."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash
from kvstore_helpers import LAYOUT, read_payload, write_payload

from splitpoint.arena import mapping as arenas
from splitpoint.arena import presence
from splitpoint.arena.files import NotOurArena
from splitpoint.arena.format import (
    BadMagic,
    BadSlotCount,
    Condition,
    LayoutHashMismatch,
    SizeMismatch,
    Superblock,
)
from splitpoint.arena.mapping import Arena
from splitpoint.arena.owner import (
    ArenaDiffers,
    ArenaInUse,
    ArenaOwner,
    open_or_create_arena,
    write_superblocks,
)
from splitpoint.arena.records import PayloadMismatch, RowsNotZero
from splitpoint.errors import NotFound, ResourceExhausted
from splitpoint.host.files import FolderNotPrivate
from splitpoint.shapes import ArenaLayout, DataType, Encoding

SLOTS = 6


@pytest.fixture
def path(shm_folder: Path) -> Path:
    return shm_folder / "store" / "arena"


def open_pair(path: Path) -> tuple[ArenaOwner, Arena]:
    opened = open_or_create_arena(path, LAYOUT, SLOTS)
    return opened.owner, opened.arena


@pytest.fixture
def made(path: Path) -> Iterator[Arena]:
    owner, arena = open_pair(path)
    yield arena
    arena.close()
    owner.remove()
    assert not path.parent.exists()


def attach(arena: Arena, **changes: object) -> Arena:
    arguments: dict[str, object] = {
        "layout": LAYOUT,
        "slot_count": SLOTS,
        "instance_id": arena.superblock.instance_id,
        "epoch": 1,
    }
    return Arena.attach(arena.path, **{**arguments, **changes})  # type: ignore[arg-type]


def test_what_is_made(made: Arena) -> None:
    found = made.path.stat()
    assert found.st_mode & 0o777 == 0o600
    assert made.path.parent.stat().st_mode & 0o777 == 0o700
    assert found.st_size == made.size_bytes
    # Allocated, not sparse: a full file system cannot kill us later.
    assert found.st_blocks * 512 >= made.size_bytes
    assert {entry.name for entry in made.path.parent.iterdir()} == {"arena", "arena.lock"}
    assert made.superblock.epoch == 1
    assert made.superblock.process_id == os.getpid()


def test_a_worker_sees_what_another_wrote(made: Arena) -> None:
    first, second = attach(made), attach(made)
    checksum = write_payload(first, 3, seed=1, token_count=2)
    assert read_payload(second, 3) == read_payload(first, 3)
    assert second.checksum(3) == checksum
    assert not any(any(rows) for rows in read_payload(second, 2).values())
    by_hand = xxhash.xxh3_64()
    for layer in range(LAYOUT.layer_count):
        for tensor in ("K", "V", "X"):
            by_hand.update(second.plane(layer, tensor)[3].tobytes())
    assert by_hand.intdigest() == checksum
    first.close()
    second.close()


def test_planes_lie_where_the_format_says(made: Arena) -> None:
    worker = attach(made)
    raw = np.fromfile(made.path, dtype=np.uint8)
    for number, plane in enumerate(made.geometry.planes):
        assert not raw[plane.offset : plane.offset + 2 * plane.slot_bytes].any()
        view = worker.plane(plane.layer, plane.tensor)
        assert view.shape == (SLOTS, plane.slot_bytes)
        view[1] = number + 1
    raw = np.fromfile(made.path, dtype=np.uint8)
    for number, plane in enumerate(made.geometry.planes):
        start = plane.offset + plane.slot_bytes
        assert (raw[start : start + plane.slot_bytes] == number + 1).all()
    worker.close()


def test_payloads_are_read_back(made: Arena) -> None:
    checksum = write_payload(made, 0, seed=3, token_count=2)
    made.check_payload(0, 2, checksum)
    made.check_payload(0, 4, checksum)
    with pytest.raises(PayloadMismatch):
        made.check_payload(0, 2, checksum ^ 1)
    for tensor in ("K", "V", "X"):
        rows = made.plane(1, tensor)[0]
        rows[-1] = 1  # the last byte of the last head's last row
        with pytest.raises(PayloadMismatch):
            made.check_payload(0, 2, checksum)
        with pytest.raises(RowsNotZero, match=f"{tensor}1"):
            made.check_payload(0, 3, made.checksum(0))
        made.check_payload(0, 4, made.checksum(0))
        rows[-1] = 0


def test_commit_words_decide(made: Arena) -> None:
    worker = attach(made)
    words = made.metadata.cast("Q")
    words[(8192 + 256 * 2) // 8] = 9 << 8 | 2
    words[(8192 + 256 * 4) // 8] = 5 << 8 | 1
    words.release()
    assert worker.is_current([2], [9])
    assert not worker.is_current([2], [8])
    assert not worker.is_current([2, 4], [9, 5])
    assert not worker.is_current([-1], [9])
    assert not worker.is_current([SLOTS], [9])
    assert worker.is_current([], [])
    with pytest.raises(IndexError):
        worker.commit_word(SLOTS)
    worker.close()


def test_workers_cannot_write_metadata(made: Arena) -> None:
    worker = attach(made)
    with pytest.raises(TypeError, match="read-only"):
        worker.metadata[0] = 1
    worker.close()


def test_checksums_run_beside_other_threads(made: Arena) -> None:
    expected = [write_payload(made, slot, seed=slot, token_count=4) for slot in range(SLOTS)]
    found: dict[int, int] = {}
    threads = [
        threading.Thread(target=lambda slot=slot: found.update({slot: made.checksum(slot)}))
        for slot in range(SLOTS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[slot] for slot in range(SLOTS)] == expected


def test_views_outlive_close(made: Arena) -> None:
    worker = attach(made)
    view = worker.plane(0, "K")
    view[0] = 7
    worker.close()
    assert (view[0] == 7).all()


# -- refusals --------------------------------------------------------------------------


def test_attach_refuses_what_was_not_announced(made: Arena) -> None:
    other = ArenaLayout(4, 2, 2, 4, 8, DataType.FLOAT16, True, b"test model")
    with pytest.raises(LayoutHashMismatch):
        attach(made, layout=other)
    with pytest.raises(LayoutHashMismatch):
        attach(made, layout=dataclasses.replace(LAYOUT, encoding=Encoding.INT4))
    with pytest.raises(BadSlotCount):
        attach(made, slot_count=SLOTS + 1)
    with pytest.raises(arenas.InstanceMismatch):
        attach(made, instance_id=bytes(16))
    with pytest.raises(arenas.EpochMismatch):
        attach(made, epoch=2)


def test_attach_refuses_files_that_cannot_be_ours(made: Arena, shm_folder: Path) -> None:
    def refuse(path: Path, error: type[Exception]) -> None:
        with pytest.raises(error):
            Arena.attach(
                path,
                layout=LAYOUT,
                slot_count=SLOTS,
                instance_id=made.superblock.instance_id,
                epoch=1,
            )

    link = shm_folder / "link"
    link.symlink_to(made.path)
    refuse(link, arenas.NotARegularFile)
    refuse(shm_folder, arenas.NotARegularFile)
    pipe = shm_folder / "pipe"
    os.mkfifo(pipe, 0o600)
    refuse(pipe, arenas.NotARegularFile)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(shm_folder / "socket"))
        refuse(shm_folder / "socket", arenas.NotARegularFile)
    refuse(shm_folder / "nothing", NotFound)
    made.path.chmod(0o640)
    refuse(made.path, arenas.PermissionsTooOpen)
    made.path.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(made.path, 65534, -1)
        refuse(made.path, arenas.ForeignOwner)
        os.chown(made.path, 0, -1)
    text = shm_folder / "text"
    text.write_bytes(b"hello" * 2000)
    text.chmod(0o600)
    refuse(text, BadMagic)
    longer = shm_folder / "longer"
    longer.write_bytes(made.path.read_bytes() + b"\0")
    longer.chmod(0o600)
    refuse(longer, SizeMismatch)


def test_one_damaged_superblock_is_survived(made: Arena) -> None:
    with made.path.open("r+b") as file:
        file.write(b"\xff" * 4096)
    worker = attach(made)
    worker.close()


def test_two_owners_are_one_too_many(made: Arena) -> None:
    with pytest.raises(ArenaInUse, match="another store"):
        open_pair(made.path)
    assert made.path.exists()


@pytest.mark.parametrize("kind", ["text", "folder", "link", "empty", "open to others"])
def test_what_is_not_ours_stays(path: Path, kind: str) -> None:
    path.parent.mkdir(mode=0o700)
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("/etc/passwd")
    else:
        path.write_bytes(b"" if kind == "empty" else b"precious " * 2000)
        path.chmod(0o644 if kind == "open to others" else 0o600)
    with pytest.raises(NotOurArena):
        open_pair(path)
    assert path.is_symlink() or path.exists()
    assert [entry.name for entry in path.parent.iterdir()] == ["arena"]


def test_the_lock_may_not_be_a_link(path: Path, tmp_path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    (path.parent / "arena.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(NotOurArena, match="cannot be a lock"):
        open_pair(path)
    assert not (tmp_path / "victim").exists()


def test_the_folder_must_be_private(shm_folder: Path) -> None:
    shared = shm_folder / "shared"
    shared.mkdir(mode=0o755)
    with pytest.raises(FolderNotPrivate, match="mode 700"):
        open_pair(shared / "arena")
    assert shared.stat().st_mode & 0o777 == 0o755
    (shm_folder / "link").symlink_to(shared)
    with pytest.raises(FolderNotPrivate):
        open_pair(shm_folder / "link" / "arena")
    with pytest.raises(NotFound):
        open_pair(shm_folder / "no" / "such" / "arena")


# -- left behind -----------------------------------------------------------------------


def test_an_arena_left_behind_is_adopted_in_a_new_epoch(path: Path) -> None:
    owner, arena = open_pair(path)
    before = arena.superblock
    arena.close()
    owner.leave()  # as a killed process does
    opened = open_or_create_arena(path, LAYOUT, SLOTS)
    assert opened.is_adopted
    found = opened.arena.superblock
    assert (found.instance_id, found.epoch) == (before.instance_id, 2)
    # Either copy may be lost now: both name the new epoch.
    for offset in (0, 4096):
        assert Superblock.decode(bytes(opened.arena.metadata[offset : offset + 4096])).epoch == 2
    opened.arena.close()
    opened.owner.remove()


def test_one_lost_superblock_costs_nothing(path: Path) -> None:
    for offset in (0, 4096):
        owner, arena = open_pair(path)
        epoch = arena.superblock.epoch
        arena.metadata[offset + 300] ^= 1
        arena.close()
        owner.leave()
        owner, arena = open_pair(path)
        assert arena.superblock.epoch == epoch + 1
        arena.close()
        owner.leave()
    ArenaOwner.lock(path).remove()


def test_a_damaged_arena_of_ours_is_set_aside(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    owner, arena = open_pair(path)
    before = arena.superblock.instance_id
    worker = attach(arena)
    arena.metadata[200] = 1
    arena.metadata[4096 + 300] = 1
    arena.close()
    owner.leave()
    opened = open_or_create_arena(path, LAYOUT, SLOTS)
    assert not opened.is_adopted
    assert opened.arena.superblock.instance_id != before
    assert path.with_name("arena.damaged").exists()
    assert "damaged" in caplog.text
    worker.plane(1, "V")[SLOTS - 1] = 1  # a process that still maps it is not killed by that
    worker.close()
    opened.arena.close()
    opened.owner.remove()
    assert not path.parent.exists()


def test_an_arena_of_another_size_or_layout_is_refused(path: Path) -> None:
    owner, arena = open_pair(path)
    arena.close()
    owner.leave()
    other = dataclasses.replace(LAYOUT, chunk_tokens=8)
    encoded = dataclasses.replace(LAYOUT, encoding=Encoding.INT8)
    for layout, slot_count, what in (
        (other, SLOTS, "chunk_tokens"),
        (encoded, SLOTS, "encoding"),
        (LAYOUT, SLOTS + 1, "slots"),
    ):
        with pytest.raises(ArenaDiffers, match=what) as caught:
            open_or_create_arena(path, layout, slot_count)
        assert "splitpoint arena rm" in caught.value.message
        assert [entry.name for entry in path.parent.iterdir()] == ["arena"]
    opened = open_or_create_arena(path, other, SLOTS, replace_other=True)
    assert not opened.is_adopted
    assert opened.arena.layout == other
    opened.arena.close()
    opened.owner.remove()


def test_an_arena_of_another_version_is_refused(path: Path) -> None:
    owner, arena = open_pair(path)
    for offset in (0, 4096):
        arena.metadata[offset + 8] = 9
    arena.close()
    owner.leave()
    with pytest.raises(ArenaDiffers, match="arena format 9"):
        open_pair(path)
    assert path.exists()
    ArenaOwner.lock(path).remove()


def test_a_truncated_arena_is_never_served(path: Path) -> None:
    owner, arena = open_pair(path)
    arena.close()
    owner.leave()
    os.truncate(path, path.stat().st_size - 4096)
    opened = open_or_create_arena(path, LAYOUT, SLOTS)
    assert not opened.is_adopted
    opened.arena.close()
    opened.owner.remove()


def test_presence_ends_with_its_holder(made: Arena) -> None:
    session = b"0123456789abcdef"
    assert not presence.is_held(made.fd, session)
    worker = attach(made, session_id=session)
    assert presence.is_held(made.fd, session)
    assert not presence.is_held(made.fd, b"fedcba9876543210")
    with pytest.raises(presence.SessionHeld):
        attach(made, session_id=session)
    worker.close()
    assert not presence.is_held(made.fd, session)


def test_an_arena_half_made_is_removed(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    unfinished = path.with_name("arena.new")
    unfinished.write_bytes(bytes(10_000))
    unfinished.chmod(0o600)
    owner, arena = open_pair(path)
    assert not unfinished.exists()
    arena.close()
    owner.remove()
    assert not path.parent.exists()


def test_a_kept_arena_says_so(path: Path) -> None:
    owner, arena = open_pair(path)
    superblock = arena.superblock
    arena.close()
    owner.keep(superblock)
    fd = arenas.open_arena(path)
    kept = arenas.read_superblock(fd)
    os.close(fd)
    assert kept.condition is Condition.CLOSED
    assert kept.sequence == superblock.sequence + 2
    assert kept.instance_id == superblock.instance_id
    ArenaOwner.lock(path).remove()


REMOVED = """
import os
from pathlib import Path
from splitpoint.arena.owner import ArenaOwner
for _ in range(2):
    path = Path(os.environ["FOLDER"]) / "arena"
    ArenaOwner.lock(path).remove()
print(os.listdir(path.parent))
"""


@pytest.mark.parametrize("root", ["rw", "ro"])
def test_a_folder_that_is_a_mount_stays(root: str) -> None:
    """As in a container, where the folder is a volume and the root may be read-only."""
    if subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode:
        pytest.skip("the kernel forbids user and mount namespaces here")
    command = (
        'd=$(mktemp -d) && mount -t tmpfs none "$d" && install -d -m 0700 "$d/volume" && '
        'mount -t tmpfs -o mode=0700 none "$d/volume" && mount -o "remount,$ROOT" "$d" && '
        'FOLDER="$d/volume" "$PYTHON" -c "$SCRIPT"; code=$?; '
        'umount "$d/volume" "$d"; rmdir "$d"; exit $code'
    )
    project = str(Path(__file__).resolve().parents[3])
    done = subprocess.run(
        ["unshare", "-Urm", "bash", "-c", command],
        env={
            **os.environ,
            "PYTHON": sys.executable,
            "SCRIPT": REMOVED,
            "PYTHONPATH": project,
            "ROOT": root,
        },
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_superblocks_alternate(path: Path) -> None:
    owner, arena = open_pair(path)
    fd = arenas.open_arena(path)
    assert arena.superblock.sequence == 2
    later = write_superblocks(fd, arena.superblock)
    assert later.sequence == 4
    blocks = [os.pread(fd, 4096, offset) for offset in (0, 4096)]
    assert blocks[0] == later.encode()
    assert blocks[1] != blocks[0]
    os.close(fd)
    arena.close()
    owner.remove()


# -- room --------------------------------------------------------------------------------


def test_an_arena_that_cannot_fit_names_every_limit(path: Path) -> None:
    huge = ArenaLayout(4096, 80, 64, 256, 8192, DataType.FLOAT32, True)
    with pytest.raises(ResourceExhausted, match="does not fit") as caught:
        open_or_create_arena(path, huge, 10_000)
    text = caught.value.message
    assert "free on the file system" in text
    assert "MemAvailable" in text
    assert "cgroup" in text
    assert caught.value.retry_after_seconds is None
    assert not path.parent.exists()
