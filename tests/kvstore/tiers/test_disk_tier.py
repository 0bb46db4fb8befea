"""The disk tier keeps chunks within its bound, over restarts, and through a disk's errors."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import logging
import os
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from disk_tier_helpers import TierBench, bound_of
from kvstore_helpers import LAYOUT
from waiting import until

from kvstore_service.tiers.disk.folder import DiskTierInUse
from kvstore_service.tiers.disk.format import Division
from splitpoint.arena.mapping import Arena
from splitpoint.errors import FailedPrecondition, InvalidArgument, Unavailable
from splitpoint.host.files import FolderNotPrivate

SIZE = 1 << 20
RECORDS = Division.of(LAYOUT, SIZE).record_count
# A disk of a busy machine answers sooner.
STALL_SECONDS = 1.0


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[TierBench]:
    bench = TierBench(tmp_path, SIZE)
    yield bench
    await bench.close()
    bench.remove()


async def run(*command: str) -> int:
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    return await process.wait()


async def unavailable(call: Awaitable[object]) -> None:
    with pytest.raises(Unavailable):
        await call


async def test_chunks_come_back_as_they_were_stored(bench: TierBench) -> None:
    tier = await bench.start()
    told: list[bytes] = []
    tier.on_change = told.extend
    assert await bench.write(1, 2, 3) == 3
    assert told == bench.keys(1, 2, 3) == list(tier.keys())
    assert await tier.has(bench.keys(1, 3, 4, 2)) == [True, True, False, True]
    assert [tier.holds(key) for key in bench.keys(2, 4)] == [True, False]
    assert await bench.check_read(3, 4, 1, 2) == [True, False, True, True]
    assert (
        tier.stats.written_chunk_count == tier.stats.read_chunk_count == tier.stats.chunk_count == 3
    )
    assert tier.stats.read_bytes == 3 * LAYOUT.chunk_bytes
    assert tier.stats.missed_chunk_count == 1
    assert tier.stats.damaged_chunk_count == 0


async def test_many_chunks_are_read_in_one_call(bench: TierBench) -> None:
    tier = await bench.start()
    numbers = [*range(6)]
    await bench.write(*numbers)
    for slot in numbers:
        bench.arena.zero(slot)
    checksums = await tier.read(bench.keys(*numbers), numbers)
    assert checksums == [bench.arena.checksum(slot) for slot in numbers]


async def test_a_chunk_is_stored_once(bench: TierBench) -> None:
    tier = await bench.start()
    assert await bench.write(1, 2) == 2
    assert await bench.write(2, 1, 3) == 3
    assert tier.stats.written_chunk_count == 3


async def test_a_restart_finds_finished_and_unfinished_segments(bench: TierBench) -> None:
    await bench.start()
    numbers = [*range(2 * RECORDS + 3)]
    await bench.write(*numbers)
    await bench.close()
    assert len(bench.segments()) == 3
    tier = await bench.start()
    assert await tier.has(bench.keys(*numbers)) == [True] * len(numbers)
    assert all(await bench.check_read(*numbers))
    # The last segment is continued.
    await bench.write(1000)
    assert len(bench.segments()) == 3
    await bench.close()
    tier = await bench.start()
    assert await bench.check_read(1000, *numbers) == [True] * (len(numbers) + 1)


async def test_the_bound_is_held_and_the_least_recently_used_go(bench: TierBench) -> None:
    tier = await bench.start()
    for number in range(6 * SIZE // Division.of(LAYOUT, SIZE).segment_bytes * RECORDS):
        await bench.write(number)
        assert await bench.check_read(0) == [True], "a chunk in use stays"
        if number % RECORDS == 0:
            assert bench.disk_bytes() <= SIZE
            assert tier.stats.used_bytes <= SIZE
    last = tier.stats.written_chunk_count - 1
    assert tier.stats.evicted_chunk_count > 0
    assert tier.stats.chunk_count == tier.stats.written_chunk_count - tier.stats.evicted_chunk_count
    assert tier.stats.used_bytes > SIZE * 3 // 4
    assert await bench.check_read(last, RECORDS + 1) == [True, False]


async def test_a_smaller_bound_holds_from_the_start(bench: TierBench) -> None:
    await bench.start()
    await bench.write(*range(14 * RECORDS))
    await bench.close()
    bench.size_bytes = SIZE // 2
    tier = await bench.start()
    assert bench.disk_bytes() <= SIZE // 2
    assert await bench.check_read(14 * RECORDS - 1, 0) == [True, False]
    assert tier.stats.capacity_bytes == SIZE // 2


async def test_too_small_a_bound_is_refused(bench: TierBench) -> None:
    bench.size_bytes = 64 << 10
    with pytest.raises(InvalidArgument, match="at least 4 chunks"):
        await bench.start()
    assert threads_of("disk-") == []
    bench.size_bytes = bound_of(4, 1)
    await bench.start()
    await bench.write(*range(20))
    assert bench.disk_bytes() <= bench.size_bytes
    assert await bench.check_read(16, 17, 18, 19) == [True] * 4


async def test_segments_of_other_layouts_go_first(bench: TierBench, tmp_path: Path) -> None:
    await bench.start()
    await bench.write(*range(14 * RECORDS))
    await bench.close()
    layout = dataclasses.replace(LAYOUT, model_fingerprint=b"another model")
    other = TierBench(tmp_path / "other", SIZE, layout=layout)
    other.folder = bench.folder
    try:
        tier = await other.start()
        used = tier.stats.used_bytes
        assert used > SIZE // 2
        assert tier.stats.chunk_count == 0
        await other.write(*range(16 * RECORDS))
        assert other.disk_bytes() <= SIZE
        assert await other.check_read(16 * RECORDS - 1, 4 * RECORDS) == [True, True]
        assert tier.stats.used_bytes > used
    finally:
        await other.close()
        other.remove()
    await bench.start()
    assert bench.disk_bytes() <= SIZE


async def test_a_second_store_is_refused_and_names_the_first(bench: TierBench) -> None:
    await bench.start()
    second = TierBench(bench.folder.parent / "second", SIZE)
    second.folder = bench.folder
    with pytest.raises(DiskTierInUse, match=f"process {os.getpid()} on"):
        await second.start()
    await bench.close()
    await second.start()
    await second.close()
    second.remove()


async def test_a_folder_of_others_is_refused(bench: TierBench) -> None:
    bench.folder.mkdir()
    bench.folder.chmod(0o755)
    with pytest.raises(FolderNotPrivate):
        await bench.start()


# -- errors of the disk ----------------------------------------------------------------


async def test_a_full_disk_is_used_as_far_as_it_goes(bench: TierBench) -> None:
    tier = await bench.start()
    await bench.write(*range(4 * RECORDS))
    bench.files.room = lambda: 0
    assert await bench.write(1000) == 0
    assert tier.stats.is_up
    assert "No space left" in tier.stats.message
    used = tier.stats.used_bytes
    assert await bench.check_read(4 * RECORDS - 1) == [True]
    assert await bench.write(1001) == 0, "writes pause"
    bench.files.room = None
    bench.now += 100
    assert await bench.write(1000) == 1
    assert tier.stats.message == ""
    assert tier.stats.used_bytes <= used + Division.of(LAYOUT, SIZE).segment_bytes
    assert await bench.check_read(1000) == [True]


async def test_older_segments_make_room_on_a_full_disk(bench: TierBench) -> None:
    tier = await bench.start()
    await bench.write(*range(4 * RECORDS))

    room = bench.disk_bytes()
    bench.files.room = lambda: room - bench.disk_bytes()
    assert await bench.write(*range(1000, 1000 + RECORDS)) == RECORDS
    assert tier.stats.evicted_chunk_count >= RECORDS
    assert bench.disk_bytes() <= room
    assert await bench.check_read(1000) == [True]


async def test_a_disk_smaller_than_a_segment_still_turns_over(tmp_path: Path) -> None:
    """Its only segment had all of it, and the first chunks stayed for good."""
    bench = TierBench(tmp_path, 64 * SIZE)
    tier = await bench.start()
    segment = Division.of(LAYOUT, 64 * SIZE).segment_bytes
    room = segment // 2
    bench.files.room = lambda: room - bench.disk_bytes()
    held = 0
    while (await bench.write(held)) and not tier.stats.evicted_chunk_count:
        held += 1
    assert held > 4 * RECORDS
    last = held
    for _ in range(4):
        # Once for all after the first segment, then as many as a small segment holds at most.
        before = tier.stats.evicted_chunk_count
        for _ in range(held // 2):
            last += 1
            assert await bench.write(last) == 1
        assert tier.stats.evicted_chunk_count - before <= held
        assert bench.disk_bytes() <= room
        assert await bench.check_read(last, last - 1) == [True, True]
        bench.now += 100  # the tier tries to use more of it again
    assert await bench.check_read(0, 1, 2) == [False] * 3
    kept = sum(await bench.check_read(*range(last - held, last + 1)))
    assert kept >= held // 2
    await bench.close()
    await bench.start()
    assert await bench.check_read(last) == [True]
    await bench.close()
    bench.remove()


@pytest.mark.parametrize("error", [errno.EIO, errno.EROFS])
async def test_writes_pause_after_an_error_while_reads_go_on(bench: TierBench, error: int) -> None:
    tier = await bench.start()
    await bench.write(1, 2)
    bench.files.write_error = error
    assert await bench.write(1, 3) == 1
    assert os.strerror(error) in tier.stats.message
    assert tier.stats.is_up
    assert await bench.check_read(1, 2, 3) == [True, True, False]
    bench.files.write_error = None
    assert await bench.write(3) == 0
    bench.now += 1
    assert await bench.write(3) == 1
    await bench.close()
    await bench.start()
    assert await bench.check_read(1, 2, 3) == [True] * 3


async def test_an_error_of_a_sync_costs_no_chunk(bench: TierBench) -> None:
    tier = await bench.start()
    bench.files.sync_error = errno.EIO
    stored = await bench.write(*range(RECORDS + 1))
    assert stored == RECORDS
    assert "Input/output" in tier.stats.message
    bench.files.sync_error = None
    bench.now += 1
    assert await bench.write(*range(RECORDS + 1)) == RECORDS + 1
    await bench.close()
    await bench.start()
    assert all(await bench.check_read(*range(RECORDS + 1)))


async def test_a_sector_that_cannot_be_read_is_a_miss(bench: TierBench) -> None:
    tier = await bench.start()
    await bench.write(1, 2)
    bench.files.read_error = errno.EIO
    assert await bench.check_read(1) == [False]
    bench.files.read_error = None
    assert tier.stats.damaged_chunk_count == 1
    assert await bench.check_read(1, 2) == [False, True]


async def test_segments_that_cannot_be_read_at_a_start_are_not_used(bench: TierBench) -> None:
    await bench.start()
    await bench.write(*range(2 * RECORDS))
    await bench.close()
    bench.files.read_error = errno.EIO
    tier = await bench.start()
    assert tier.stats.chunk_count == 0
    assert tier.stats.used_bytes > 2 * RECORDS * LAYOUT.chunk_bytes
    bench.files.read_error = None
    await bench.write(*range(1000, 1000 + 14 * RECORDS))
    assert bench.disk_bytes() <= SIZE
    await bench.close()
    await bench.start()
    assert await bench.check_read(1000 + 14 * RECORDS - 1) == [True]


async def test_segments_that_may_be_readable_later_are_kept(bench: TierBench) -> None:
    await bench.start()
    await bench.write(*range(2 * RECORDS))
    await bench.close()
    bench.files.read_error = errno.EMFILE
    with pytest.raises(FailedPrecondition, match="Too many open files"):
        await bench.start()
    bench.files.read_error = None
    await bench.start()
    assert all(await bench.check_read(*range(2 * RECORDS)))


async def test_a_removed_segment_is_a_miss(bench: TierBench) -> None:
    tier = await bench.start()
    told: list[bytes] = []
    await bench.write(*range(2 * RECORDS + 1))
    tier.on_change = told.extend
    bench.segments()[0].unlink()
    assert await bench.check_read(0, RECORDS) == [False, True]
    assert set(told) == set(bench.keys(*range(RECORDS)))
    assert await tier.has(bench.keys(1)) == [False]
    bench.segments()[-1].unlink()  # the one that is written to
    assert await bench.write(1000) == 1
    assert await bench.check_read(1000, 2 * RECORDS) == [True, False]


def put_fifo(path: Path) -> None:
    os.mkfifo(path)


def put_link(path: Path) -> None:
    path.symlink_to(path.with_suffix(".away"))


def put_folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("put", [put_fifo, put_link, put_folder])
async def test_a_replaced_segment_is_a_miss_and_costs_nothing_else(
    bench: TierBench, put: Callable[[Path], None]
) -> None:
    """No thread waits for the other end of a FIFO, and no name that is taken ends the writes."""
    count = 2 * RECORDS + 1
    tier = await bench.start()
    await bench.write(*range(count))
    replaced = [bench.segments()[0], bench.segments()[-1]]
    for path in replaced:
        path.rename(path.with_suffix(".away"))
        put(path)
    assert await bench.check_read(0, RECORDS) == [False, True]
    assert await bench.write(count) == 1  # the segment that was written to is another file now
    assert await bench.check_read(count, count - 1) == [True, False]
    assert tier.stats.is_up
    await bench.close()
    newest = bench.segments()[-1]
    newest.rename(newest.with_suffix(".away"))
    put(newest)
    tier = await bench.start()
    assert await bench.check_read(count, RECORDS) == [False, True]
    assert await bench.write(count) == 1
    assert await bench.check_read(count) == [True]
    # Every other segment makes room at last.
    await bench.write(*range(1000, 1000 + 20 * RECORDS))
    assert tier.stats.message == ""
    assert not any(path.is_file() and not path.is_symlink() for path in (*replaced, newest))


async def test_a_removed_folder_costs_the_chunks_and_comes_back(
    bench: TierBench, caplog: pytest.LogCaptureFixture
) -> None:
    tier = await bench.start()
    await bench.write(1, 2)
    told: list[bytes] = []
    tier.on_change = told.extend
    shutil.rmtree(bench.folder)
    await unavailable(bench.write(3))
    assert not tier.stats.is_up
    assert "removed" in tier.stats.message
    assert not tier.holds(bench.key(1))
    assert sorted(told) == sorted(bench.keys(1, 2))
    await unavailable(tier.has(bench.keys(1)))
    await until(lambda: tier.stats.is_up)
    assert await bench.write(3) == 1
    assert await bench.check_read(1, 3) == [False, True]
    assert tier.stats.written_chunk_count == 3
    # `splitpoint up` shows warnings and worse: both lines, or none.
    told_of_it = [each.message for each in caplog.records if each.levelno >= logging.WARNING]
    assert [message.split(": ")[0] for message in told_of_it] == [
        f"the disk tier {bench.folder} is away",
        f"the disk tier {bench.folder} is back",
    ]


async def test_a_folder_moved_away_and_back_is_found_again(bench: TierBench) -> None:
    tier = await bench.start()
    await bench.write(1, 2)
    aside = bench.folder.with_name("aside")
    bench.folder.rename(aside)
    bench.folder.write_text("in the way")
    await unavailable(tier.read([bench.key(1)], [0]))
    await until(lambda: "mode 700" in tier.stats.message)
    bench.folder.unlink()
    aside.rename(bench.folder)
    await until(lambda: tier.stats.is_up)
    assert await bench.check_read(1, 2) == [True, True]


async def test_a_disk_that_does_not_answer_reads_is_left_alone(bench: TierBench) -> None:
    tier = await bench.start(stall_seconds=STALL_SECONDS)
    await bench.write(1, 2)
    bench.files.answers.clear()
    await unavailable(tier.read(bench.keys(1, 2), [3, 4]))
    assert not tier.stats.is_up
    assert "does not answer" in tier.stats.message
    assert +bench.holds.slots == {3: 1, 4: 1}
    # Nothing waits for it any more.
    await unavailable(tier.has(bench.keys(1)))
    await unavailable(bench.write(3))
    await tier.drop(bench.keys(1))
    bench.files.answers.set()
    await until(lambda: tier.stats.is_up)
    assert +bench.holds.slots == {}
    assert await bench.check_read(1, 2) == [True, True]


async def test_a_disk_that_does_not_answer_writes_is_left_alone(bench: TierBench) -> None:
    tier = await bench.start(stall_seconds=STALL_SECONDS)
    await bench.write(1)
    bench.files.answers.clear()
    await unavailable(bench.write(2, 3))
    assert +bench.holds.slots == {0: 1, 1: 1}
    assert tier.holds(bench.key(1)) is False
    bench.files.answers.set()
    await until(lambda: tier.stats.is_up)
    assert +bench.holds.slots == {}
    # The late write was whole: it is found like after a kill.
    assert await bench.check_read(1, 2, 3) == [True, True, True]


@pytest.mark.parametrize("stall_seconds", [STALL_SECONDS, 60.0])
async def test_a_stop_does_not_wait_for_a_disk_without_an_answer(
    bench: TierBench, stall_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore_service.tiers.disk.tier._CLOSE_SECONDS", 0.1)
    tier = await bench.start(stall_seconds=stall_seconds)
    await bench.write(1)
    bench.files.answers.clear()
    reading = asyncio.create_task(tier.read(bench.keys(1), [0]))
    writing = asyncio.create_task(bench.write(2))
    if stall_seconds == STALL_SECONDS:
        await until(lambda: not tier.stats.is_up)
    else:
        await asyncio.sleep(0.2)
    async with asyncio.timeout(20):
        await bench.close()
    assert tier.stats.message == "closed"
    bench.files.answers.set()
    await asyncio.wait([reading, writing])
    await until(lambda: not threads_of("disk-"))


def threads_of(prefix: str) -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith(prefix)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts file systems")
async def test_a_small_file_system_costs_reuse_only(bench: TierBench) -> None:
    bench.folder.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=384k,mode=700", "tmpfs", str(bench.folder)]
    if await run(*mount) != 0:
        pytest.skip("this container mounts no file system")
    try:
        tier = await bench.start()
        for number in range(20 * RECORDS):
            await bench.write(number)
            bench.now += 0.001
        assert tier.stats.evicted_chunk_count > 0
        newest = list(tier.keys())[-1]
        [checksum] = await tier.read([newest], [0])
        assert checksum == bench.arena.checksum(0)
        await bench.close()
        tier = await bench.start()
        assert tier.stats.chunk_count > 0
        await bench.close()
    finally:
        assert await run("umount", "-l", str(bench.folder)) == 0


async def test_a_cancelled_read_ends_after_its_threads(bench: TierBench) -> None:
    tier = await bench.start()
    await bench.write(1)
    bench.arena.zero(0)
    reading = asyncio.create_task(tier.read([bench.key(1)], [0]))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert tier.stats.read_chunk_count == 1
    assert Arena.checksum(bench.arena, 0) == bench.entry(1, 1).checksum
