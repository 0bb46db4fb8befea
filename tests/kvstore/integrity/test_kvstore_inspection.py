"""Sealed chunks that change while a store runs are found and dropped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from kvstore_client import Service, call
from kvstore_helpers import (
    LAYOUT,
    Bench,
    granted_slots,
    store_sequence,
    write_chunks,
)
from waiting import until

from kvstore_service.integrity.inspection import Finder
from kvstore_service.integrity.scrubber import Scrubber, Scrubbing
from kvstore_service.pool.prefix_index import Entry
from splitpoint.arena.format import RECORD_BYTES, RECORDS_OFFSET
from splitpoint.arena.records import CHUNK_OFFSET
from splitpoint.errors import FailedPrecondition
from splitpoint.keys import chunk_key
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import types_pb2

SALT = b"tenant"


def flip_payload(bench: Bench, slot: int) -> None:
    bench.arena.plane(1, "V")[slot, 7] ^= 1


def flip_record(bench: Bench, slot: int) -> None:
    bench.arena.metadata[RECORDS_OFFSET + slot * RECORD_BYTES + CHUNK_OFFSET + 30] ^= 1


def flip_word(bench: Bench, slot: int) -> None:
    bench.arena.metadata[RECORDS_OFFSET + slot * RECORD_BYTES + 1] ^= 1


def flip_token(bench: Bench, slot: int) -> None:
    offset = bench.arena.geometry.tokens_offset + slot * bench.arena.geometry.token_row_bytes
    bench.arena.metadata[offset] ^= 1


EVERY_DAMAGE = pytest.mark.parametrize(
    "flip", [flip_payload, flip_record, flip_word, flip_token], ids=lambda flip: flip.__name__
)


def by_index(bench: Bench, index: int) -> Entry:
    return next(entry for entry in bench.store.pool.index if entry.chunk_index == index)


def inspect_all(bench: Bench) -> None:
    entries = list(bench.store.pool.index)
    inspection = bench.store.inspection
    inspection.settle(entries, inspection.inspect(entries), Finder.SCRUB)


@EVERY_DAMAGE
def test_a_damaged_chunk_goes_with_all_below_it_and_its_slot_is_whole_again(
    bench: Bench, flip: Callable[[Bench, int], None]
) -> None:
    session = bench.attach()
    store_sequence(bench.store, session, SALT, [1] * 12)
    inspect_all(bench)
    assert bench.states() == (5, 0, 3, 0)
    flip(bench, by_index(bench, 1).slot)
    inspect_all(bench)
    assert bench.states() == (7, 0, 1, 0)
    assert bench.store.match(session, SALT, [1] * 12).cached_tokens == 4
    assert bench.store.inspection.damaged == {Finder.SCRUB: 1, Finder.REPORT: 0}
    store_sequence(bench.store, session, SALT, [1] * 12)
    inspect_all(bench)
    assert bench.states() == (5, 0, 3, 0)


def test_a_leased_slot_is_not_used_again_before_its_lease_ended(bench: Bench) -> None:
    session, reader = bench.attach(), bench.attach()
    store_sequence(bench.store, session, SALT, [1] * 8)
    found = bench.store.match(reader, SALT, [1] * 8)
    flip_payload(bench, by_index(bench, 0).slot)
    inspect_all(bench)
    assert bench.states() == (6, 0, 0, 2)
    bench.store.sessions.release(reader, [found.lease_id], [])
    assert bench.states() == (8, 0, 0, 0)


def test_chunks_computed_under_a_lease_of_a_damaged_chunk_are_not_sealed(bench: Bench) -> None:
    """It would have a matching checksum and wrong contents."""
    session, reader = bench.attach(), bench.attach()
    store_sequence(bench.store, session, SALT, [1] * 4)
    lease = bench.store.match(reader, SALT, [1] * 4).lease_id
    flip_payload(bench, by_index(bench, 0).slot)
    inspect_all(bench)
    # Another writer stores the parent anew, so that its key is there again.
    store_sequence(bench.store, session, SALT, [1] * 4)
    parent = chunk_key(LAYOUT.layout_hash, SALT, b"", [1] * 4)
    granted = granted_slots(bench.store.reserve(reader, 1, SALT))
    [chunk] = write_chunks(bench.arena, granted, [(2,)], parent=parent)
    with pytest.raises(FailedPrecondition) as caught:
        bench.store.seal(reader, SALT, [chunk], [None], lease_id=lease)
    assert caught.value.reason == "CHUNK_LOST"
    fresh = bench.store.match(reader, SALT, [1] * 4).lease_id
    assert bench.store.seal(reader, SALT, [chunk], [None], lease_id=fresh).chunks


def test_commit_words_of_slots_without_a_chunk_are_written_again(bench: Bench) -> None:
    session = bench.attach()
    bench.store.reserve(session, 1, SALT)
    for slot in (0, 5):  # one that is being written, one that is free
        flip_word(bench, slot)
    assert len(bench.integrity.check_integrity()) == 2
    bench.store.inspection.check_words()
    assert bench.store.inspection.mended_words == 2
    assert bench.states() == (7, 1, 0, 0)


async def report(service: Service, *handles: tuple[int, int]) -> int:
    request = pb.ReportChunksRequest(
        session_id=service.session,
        request_id=service.request_id(),
        chunks=[types_pb2.SlotHandle(slot=slot, generation=gen) for slot, gen in handles],
    )
    answer = await call(service.stub.ReportChunks(request))
    assert await call(service.stub.ReportChunks(request)) == answer  # a retry
    return int(answer.lost_chunk_count)


async def test_a_report_drops_damaged_chunks_and_keeps_the_rest(service: Service) -> None:
    await service.seal(await service.written((1, 2, 3, 4), (5, 6, 7, 8), (9,)))
    entries = sorted(service.bench.store.pool.index, key=lambda entry: entry.chunk_index)
    handles = [(entry.slot, entry.generation) for entry in entries]
    assert await report(service, *handles) == 0
    flip_payload(service.bench, handles[1][0])
    assert await report(service, handles[0]) == 0
    assert await report(service, *handles) == 2
    assert await report(service, *handles) == 2  # they are gone, and stay so
    stats = await service.stats()
    assert (stats.damaged_chunk_count, stats.checksum_failure_count) == (1, 0)
    assert stats.HasField("last_damage_seconds_ago")
    assert (await service.match([1, 2, 3, 4, 5, 6, 7, 8, 9])).cached_tokens == 4


async def passes(
    service: Service, scrubbing: Scrubbing, threads: ThreadPoolExecutor, count: int
) -> Scrubber:
    """Scrub three chunks until this many passes are over. Return the scrubber."""
    await service.seal(await service.written((1, 2, 3, 4), (5, 6, 7, 8), (9,)))
    store = service.bench.store
    scrubber = Scrubber(store.pool, store.inspection, threads, scrubbing, idle_seconds=lambda: 1.0)
    running = asyncio.create_task(scrubber.run())

    async def has_passed() -> bool:
        return scrubber.pass_count >= count

    await until(has_passed)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return scrubber


async def test_a_scrubber_passes_again_and_again(service: Service) -> None:
    """Three chunks at 10 chunks a second take longer than the configured pass."""
    scrubbing = Scrubbing(pass_seconds=0.1, bytes_per_second=10 * LAYOUT.chunk_bytes)
    with ThreadPoolExecutor(1) as threads:
        scrubber = await passes(service, scrubbing, threads, 2)
    assert scrubber.byte_count >= 6 * LAYOUT.chunk_bytes
    # It slept for its bound's sake, however fast the machine is.
    assert scrubber.last_pass_seconds is not None
    assert scrubber.last_pass_seconds > 0.1
    assert service.bench.store.inspection.damaged_count == 0


class CountedThreads(ThreadPoolExecutor):
    """Counts the submitted calls."""

    def __init__(self) -> None:
        super().__init__(1)
        self.count = 0

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return super().submit(*args, **kwargs)


async def test_a_scrubber_wakes_for_a_batch_and_not_for_each_slot(service: Service) -> None:
    """All eight slots are due within 0.1 s, and are read at once."""
    scrubbing = Scrubbing(pass_seconds=0.1, bytes_per_second=1 << 40)
    with CountedThreads() as threads:
        scrubber = await passes(service, scrubbing, threads, 3)
    assert scrubber.pass_count <= threads.count <= scrubber.pass_count + 1
    assert scrubber.byte_count >= 9 * LAYOUT.chunk_bytes
