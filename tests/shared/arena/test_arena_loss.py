"""Arena files removed, replaced or truncated under a running store: noticed, then made anew."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from kvstore_helpers import LAYOUT
from test_kvstore_process import StoreProcess, finish, start_worker, stats_of

from splitpoint.arena.files import Loss, NotOurArena, lock_path_of, note_loss, pop_note
from splitpoint.arena.format import SUPERBLOCK_BYTES
from splitpoint.arena.mapping import Arena
from splitpoint.arena.owner import open_or_create_arena

PRECIOUS = b"precious " * 2000


@pytest.fixture
def path(shm_folder: Path) -> Path:
    return shm_folder / "store" / "arena"


def remove(arena: Path) -> None:
    arena.unlink()


def remove_folder(arena: Path) -> None:
    shutil.rmtree(arena.parent)


def replace(arena: Path) -> None:
    """By a file that is no arena of this format."""
    fresh = arena.with_suffix(".other")
    fresh.touch(mode=0o600)
    fresh.rename(arena)


def halve(arena: Path) -> None:
    os.truncate(arena, arena.stat().st_size // 2)


def empty(arena: Path) -> None:
    os.truncate(arena, 0)


@pytest.mark.parametrize(
    ("harm", "loss", "words"),
    [
        (remove, "removed", "was removed from outside while in use"),
        (remove_folder, "removed", "was removed from outside while in use"),
        # What lies there by now is shorter than any arena: a truncated one for the next store.
        (replace, "truncated", "was removed from outside while in use"),
        (halve, "truncated", "was truncated from outside"),
        (empty, "truncated", "was truncated from outside"),
    ],
)
def test_a_store_whose_arena_was_harmed_ends_and_the_next_one_begins_anew(
    shm_folder: Path,
    socket_address: str,
    harm: Callable[[Path], None],
    loss: str,
    words: str,
) -> None:
    arena = shm_folder / "store" / "arena"
    first = StoreProcess(arena, socket_address)
    worker = start_worker(first.address or "", [1] * 10, seals=True)
    try:
        harm(arena)
        first.wait()  # by itself
        status, errors = first.end()
        # Whatever touches a page that is gone is ended by the kernel at once.
        assert status == 1 or (loss == "truncated" and status == -signal.SIGBUS), errors
        assert status < 0 or errors.count(words) == 1
        assert "incident" not in errors, errors
    finally:
        finish(worker)
        first.end(signal.SIGKILL)
    for expected in (loss, ""):
        again = StoreProcess(arena, socket_address)
        try:
            with again.stub() as stub:
                stats = stats_of(stub)
            assert stats.former_arena_loss == expected
            assert stats.free_slot_count == stats.slot_count
            assert arena.stat().st_size == stats.arena_size_bytes
        finally:
            status, errors = again.end()
        assert status == 0, errors
        assert not arena.parent.exists()


def destroy_magics(arena: Path) -> None:
    with arena.open("r+b") as file:
        for offset in (0, SUPERBLOCK_BYTES):
            file.seek(offset)
            file.write(bytes(8))


def link(arena: Path) -> None:
    victim = arena.parent.parent / "victim"
    victim.write_bytes(PRECIOUS)
    victim.chmod(0o600)
    arena.unlink()
    arena.symlink_to(victim)


def write_another(arena: Path) -> None:
    other = arena.with_suffix(".other")
    other.write_bytes(PRECIOUS)
    other.chmod(0o600)
    other.rename(arena)


def fold(arena: Path) -> None:
    arena.unlink()
    arena.mkdir()
    (arena / "file").write_bytes(PRECIOUS)


@pytest.mark.parametrize(
    ("harm", "loss", "aside", "precious"),
    [
        (destroy_magics, "damaged", "arena.damaged", ""),
        (link, "removed", "arena.foreign-1", "../victim"),
        (write_another, "removed", "arena.foreign-1", "arena.foreign-1"),
        (fold, "removed", "arena.foreign-1", "arena.foreign-1/file"),
    ],
)
def test_a_killed_stores_arena_that_is_none_any_more_is_put_aside(
    shm_folder: Path,
    socket_address: str,
    harm: Callable[[Path], None],
    loss: str,
    aside: str,
    precious: str,
) -> None:
    arena = shm_folder / "store" / "arena"
    first = StoreProcess(arena, socket_address)
    first.end(signal.SIGKILL)
    harm(arena)
    for expected, end in ((loss, signal.SIGKILL), ("", signal.SIGTERM)):
        again = StoreProcess(arena, socket_address)
        try:
            assert again.address == socket_address, again.end()
            with again.stub() as stub:
                stats = stats_of(stub)
            assert stats.former_arena_loss == expected
            assert stats.free_slot_count == stats.slot_count
            assert arena.stat(follow_symlinks=False).st_size == stats.arena_size_bytes
            assert os.path.lexists(arena.with_name(aside))
        finally:
            status, errors = again.end(end)
    assert status == 0, errors
    if precious:  # a clean stop removes what the store made, and nothing else
        assert [entry.name for entry in arena.parent.iterdir()] == [aside]
        assert (arena.parent / precious).read_bytes() == PRECIOUS
    else:
        assert not arena.parent.exists()


def test_a_fourth_file_in_an_arenas_place_is_refused(path: Path) -> None:
    for number in range(1, 5):
        opened = open_or_create_arena(path, LAYOUT, 6)
        opened.arena.close()
        opened.owner.leave()  # as a killed process does
        path.unlink()
        path.write_bytes(PRECIOUS)
        path.chmod(0o600)
        if number < 4:
            assert not path.with_name(f"arena.foreign-{number}").exists()
    with pytest.raises(NotOurArena, match="renamed before"):
        open_or_create_arena(path, LAYOUT, 6)
    kept = [path, *(path.with_name(f"arena.foreign-{number}") for number in (1, 2, 3))]
    assert [each.read_bytes() for each in kept] == [PRECIOUS] * 4


def test_an_arena_whose_lock_was_removed_is_adopted(shm_folder: Path, socket_address: str) -> None:
    arena = shm_folder / "store" / "arena"
    first = StoreProcess(arena, socket_address)
    worker = start_worker(first.address or "", [1] * 10, seals=True)
    try:
        lock_path_of(arena).unlink()
        assert first.wait() == 1
    finally:
        finish(worker)
        first.end(signal.SIGKILL)
    again = StoreProcess(arena, socket_address)
    try:
        with again.stub() as stub:
            stats = stats_of(stub)
        assert (stats.former_arena_loss, stats.adopted_chunk_count) == ("", 3)
    finally:
        again.end()


def test_nothing_is_current_in_a_truncated_arena(shm_folder: Path, socket_address: str) -> None:
    """The rest of the last page reads as zeros, without a signal."""
    store = StoreProcess(shm_folder / "store" / "arena", socket_address)
    worker = start_worker(store.address or "", [1] * 4, seals=True)
    arena = Arena.attach_read_only(store.arena)
    try:
        word = arena.commit_word(0)
        assert arena.layout == LAYOUT
        assert arena.is_current([0], [word >> 8])
        os.truncate(store.arena, store.arena.stat().st_size - 1)
        assert arena.commit_word(0) == word
        assert not arena.is_current([0], [word >> 8])
    finally:
        arena.close()
        finish(worker)
        store.end(signal.SIGKILL)


def test_a_note_is_taken_once_and_what_is_none_is_removed(tmp_path: Path) -> None:
    arena, note = tmp_path / "arena", tmp_path / "arena.lost"
    assert pop_note(arena) is None
    note_loss(arena, Loss.REMOVED)
    assert pop_note(arena) is Loss.REMOVED
    assert not note.exists()
    note.write_bytes(b"\xff\xfe removed")
    assert pop_note(arena) is None
    assert not note.exists()
    other = tmp_path / "other"
    other.write_text("removed")
    note.symlink_to(other)
    assert pop_note(arena) is None
    assert not note.is_symlink()
    assert other.read_text() == "removed"
    note.mkdir()
    assert pop_note(arena) is None
