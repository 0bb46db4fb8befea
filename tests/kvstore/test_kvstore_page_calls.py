"""Pages by calls: look-ups, seals, refusals, and what sessions count."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import xxhash
from kvstore_client import Service, call, serve
from kvstore_helpers import LAYOUT, SLOTS, Bench
from page_helpers import (
    PAGES,
    assert_pages,
    bytes_of,
    key_of,
    keys_of,
    match_pages,
    seal_pages,
    store_pages,
    write_pages,
)

from kvstore_service.metrics import readings
from kvstore_service.session_manager import OTHER_OUTCOME, OUTCOME_NAMES
from kvstore_service.validation import OUTCOME_LIMIT, PAGE_LIMIT
from splitpoint.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound
from splitpoint.observe import metrics as m
from splitpoint.transport.convert import layout_to_proto
from splitpoint.transport.statuses import error_of
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import types_pb2


@pytest.fixture
async def pages(shm_folder: Path, socket_address: str) -> AsyncIterator[Service]:
    """A store of pages, and a session of it."""
    async with serve(Bench(shm_folder, SLOTS, layout=PAGES), socket_address) as service:
        yield service


async def refused(pending: Any, reason: str) -> None:
    with pytest.raises(FailedPrecondition) as caught:
        await call(pending)
    assert caught.value.reason == reason


# -- look-ups and seals ---------------------------------------------------------------------


async def test_attach_says_what_the_arena_is(pages: Service) -> None:
    answer = await pages.attach(page_bytes=PAGES.page_bytes)
    assert answer.layout == layout_to_proto(PAGES)
    assert (answer.layout.page_bytes, answer.layout.layer_count) == (PAGES.page_bytes, 0)
    await pages.attach(page_bytes=1)  # a smaller page fits, too
    await pages.attach(layout_hash=PAGES.layout_hash)


async def test_sealed_pages_are_found_in_the_order_of_the_keys(pages: Service) -> None:
    sealed = await seal_pages(pages, keys_of(1, 2, 3))
    assert [chunk.handle.token_count for chunk in sealed.chunks] == [PAGES.chunk_tokens] * 3
    keys = keys_of(3, 8, 1, 1, 3, 9)
    answer = await match_pages(pages, keys)
    found = assert_pages(pages.bench.arena, answer.pages, keys)
    assert found == [True, False, True, True, True, False]
    assert answer.epoch == sealed.epoch
    stats = await pages.stats()
    assert (stats.lease_count, stats.leased_slot_count) == (1, 2)
    assert (stats.query_token_count, stats.hit_token_count) == (4, 2)
    assert stats.layout.page_bytes == PAGES.page_bytes
    released = await pages.release(lease_ids=[answer.lease_id])
    assert released.released_lease_count == 1
    nothing = await match_pages(pages, keys_of(8, 9))
    assert (nothing.lease_id, [page.generation for page in nothing.pages]) == (0, [0, 0])


async def test_other_calls_run_during_a_look_up_of_many_pages(pages: Service) -> None:
    await seal_pages(pages, keys_of(1, 2, 3))
    keys = [*keys_of(2), *keys_of(*range(100, 20_100)), *keys_of(3, 2)]
    looking = asyncio.ensure_future(match_pages(pages, keys))
    await pages.stats()
    assert not looking.done()
    answer = await looking
    found = assert_pages(pages.bench.arena, answer.pages, keys)
    assert found == [True, *[False] * 20_000, True, True]
    assert (await pages.stats()).leased_slot_count == 2


async def test_a_repeated_look_up_has_one_effect(pages: Service) -> None:
    await seal_pages(pages, keys_of(1, 2))
    first = await match_pages(pages, keys_of(1, 2, 3), request_id=b"same")
    assert await match_pages(pages, keys_of(1, 2, 3), request_id=b"same") == first
    stats = await pages.stats()
    assert (stats.match_count, stats.lease_count) == (1, 1)
    with pytest.raises(Exception, match="another request"):
        await match_pages(pages, keys_of(1, 2), request_id=b"same")


async def test_a_repeated_seal_has_one_effect(pages: Service) -> None:
    granted = await pages.granted(2)
    request = pages.seal_request(write_pages(pages.bench.arena, granted, keys_of(1, 2)))
    first = await call(pages.stub.Seal(request))
    assert await call(pages.stub.Seal(request)) == first
    assert (await pages.stats()).sealed_chunk_count == 2


async def test_pages_are_sealed_from_the_last_to_the_first(pages: Service) -> None:
    chunks = write_pages(pages.bench.arena, await pages.granted(3), keys_of(1, 2, 3))
    pages.bench.arena.plane(0, "P")[chunks[1].slot, 0] ^= 1
    with pytest.raises(DataLoss):
        await pages.seal(chunks, keep_leased=True)
    answer = await match_pages(pages, keys_of(1, 2, 3))
    found = assert_pages(pages.bench.arena, answer.pages, keys_of(1, 2, 3))
    assert found == [False, False, True]
    assert pages.bench.states() == (SLOTS - 2, 1, 1, 0)
    await pages.seal(chunks[:1])


async def test_a_namespace_sees_its_own_pages_only(pages: Service) -> None:
    await seal_pages(pages, keys_of(1))
    answer = await match_pages(pages, keys_of(1), tenant_salt=b"n" * 32)
    assert [page.generation for page in answer.pages] == [0]


async def test_a_remote_session_finds_and_reads_pages(pages: Service) -> None:
    await seal_pages(pages, keys_of(1, 2))
    remote = await call(
        pages.stub.Attach(
            pb.AttachRequest(client_name="other", is_remote=True, page_bytes=PAGES.page_bytes)
        )
    )
    answer = await match_pages(pages, keys_of(2, 1), session_id=remote.session_id)
    request = pb.ReadChunksRequest(session_id=remote.session_id, chunks=answer.pages)
    payloads = [b"", b""]
    async for piece in pages.stub.ReadChunks(request):
        payloads[piece.chunk_index] += piece.data
    assert payloads == [bytes_of(PAGES, key) for key in keys_of(2, 1)]
    assert [xxhash.xxh3_64_intdigest(each) for each in payloads] == [
        page.checksum for page in answer.pages
    ]


async def test_a_reported_page_that_changed_is_dropped(pages: Service) -> None:
    sealed = await seal_pages(pages, keys_of(1, 2))
    pages.bench.arena.plane(0, "P")[sealed.chunks[0].handle.slot, 3] ^= 1
    request = pb.ReportChunksRequest(
        session_id=pages.session,
        request_id=pages.request_id(),
        chunks=[chunk.handle for chunk in sealed.chunks],
    )
    assert (await call(pages.stub.ReportChunks(request))).lost_chunk_count == 1
    answer = await match_pages(pages, keys_of(1, 2))
    assert assert_pages(pages.bench.arena, answer.pages, keys_of(1, 2)) == [False, True]


async def test_recovered_pages_are_verified_before_they_are_served(
    shm_folder: Path, socket_address: str
) -> None:
    bench = Bench(shm_folder, SLOTS, layout=PAGES)

    slots = store_pages(bench.store, bench.attach(), keys_of(1, 2, 3))
    bench.arena.plane(0, "P")[slots[2], 0] ^= 1
    bench.crash()
    async with serve(bench, socket_address) as service:
        answer = await match_pages(service, keys_of(1, 3))
        assert assert_pages(bench.arena, answer.pages, keys_of(1, 3)) == [True, False]
        stats = await service.stats()
        assert (stats.unverified_chunk_count, stats.checksum_failure_count) == (1, 1)


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"page_keys": []},
        {"page_keys": [b""]},
        {"page_keys": [key_of(1), b"k" * 31]},
        {"page_keys": [key_of(1)] * (PAGE_LIMIT + 1)},
        {"page_keys": [key_of(1)], "tenant_salt": bytes(129)},
        {"page_keys": [key_of(1)], "request_id": bytes(65)},
    ],
)
async def test_bad_look_ups(pages: Service, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        await match_pages(pages, [], **changes)


async def test_a_look_up_of_the_most_pages(pages: Service) -> None:
    answer = await match_pages(pages, [key_of(1)] * PAGE_LIMIT)
    assert len(answer.pages) == PAGE_LIMIT


@pytest.mark.parametrize(
    "changes",
    [{"page_key": b"k" * 31}, {"parent_key": b"p" * 32}, {"token_ids": [1]}],
)
async def test_bad_pages_are_not_sealed(pages: Service, changes: dict[str, Any]) -> None:
    [chunk] = write_pages(pages.bench.arena, await pages.granted(1), keys_of(1))
    chunk.MergeFrom(pb.SealChunk(**changes))
    with pytest.raises(InvalidArgument):
        await pages.seal([chunk])


async def test_calls_by_tokens_are_refused(pages: Service) -> None:
    ids: Any = {"session_id": pages.session, "request_id": b"r"}
    stub, reason = pages.stub, "OTHER_ARENA_KIND"
    await refused(stub.Match(pb.MatchRequest(token_ids=[1], **ids)), reason)
    await refused(stub.Match(pb.MatchRequest(token_ids=[1])), reason)
    fill = pb.FillSlotsRequest(session_id=pages.session, tier=types_pb2.TIER_DISK)
    await refused(stub.FillSlots(fill), reason)
    load = pb.LoadChunksRequest(token_ids=[1], tier=types_pb2.TIER_DISK, **ids)
    with pytest.raises(grpc.RpcError) as caught:
        async for _ in stub.LoadChunks(load):
            pass
    assert error_of(caught.value).reason == reason
    [(slot, generation)] = await pages.granted(1)
    chunk = pb.SealChunk(slot=slot, generation=generation, token_ids=[1])
    await refused(stub.Seal(pages.seal_request([chunk])), reason)


async def test_calls_by_pages_are_refused_in_an_arena_of_tokens(service: Service) -> None:
    with pytest.raises(FailedPrecondition) as caught:
        await match_pages(service, keys_of(1))
    assert caught.value.reason == "OTHER_ARENA_KIND"
    [chunk] = await service.written((1, 2, 3))
    chunk.page_key = key_of(1)
    await refused(service.stub.Seal(service.seal_request([chunk])), "OTHER_ARENA_KIND")
    with pytest.raises(FailedPrecondition) as caught:
        await service.attach(page_bytes=1)
    assert caught.value.reason == "OTHER_ARENA_KIND"


async def test_attach_refuses_pages_that_do_not_fit(pages: Service) -> None:
    with pytest.raises(FailedPrecondition) as caught:
        await pages.attach(page_bytes=PAGES.page_bytes + 1)
    assert caught.value.reason == "PAGES_DO_NOT_FIT"
    with pytest.raises(InvalidArgument):
        await pages.attach(page_bytes=-1)
    with pytest.raises(FailedPrecondition) as caught:
        await pages.attach(layout_hash=LAYOUT.layout_hash)
    assert caught.value.reason == "LAYOUT_MISMATCH"


async def test_an_unknown_session_finds_nothing(pages: Service) -> None:
    with pytest.raises(NotFound):
        await match_pages(pages, keys_of(1), session_id=b"u" * 16)


# -- what sessions count --------------------------------------------------------------------


def outcomes_of(service: Service) -> dict[str, float]:
    return {
        reading.labels[0]: reading.value
        for reading in readings(service.servicer)
        if reading.metric is m.STORE_OUTCOMES
    }


async def beat(stream: Any, session_id: bytes, outcomes: dict[str, int]) -> None:
    await stream.write(pb.KeepAliveRequest(session_id=session_id, outcomes=outcomes))
    assert await stream.read() is not grpc.aio.EOF


async def test_outcomes_of_sessions_are_shown_and_summed(pages: Service) -> None:
    await seal_pages(pages, keys_of(1, 2))
    await match_pages(pages, keys_of(1, 2, 3))
    other = (await pages.attach(client_name="other")).session_id
    one, two = pages.stub.KeepAlive(), pages.stub.KeepAlive()
    await beat(one, pages.session, {"loaded": 2, "miss": 1})
    await beat(two, other, {"loaded": 5})
    await beat(one, pages.session, {"loaded": 3, "miss": 1})
    await beat(one, pages.session, {})
    sessions = {each.client_name: each for each in (await pages.stats()).sessions}
    first = sessions["test"]
    assert (first.query_count, first.hit_count, first.lease_count) == (3, 2, 1)
    assert dict(first.outcomes) == {"loaded": 3, "miss": 1}
    assert dict(sessions["other"].outcomes) == {"loaded": 5}
    assert outcomes_of(pages) == {OTHER_OUTCOME: 0, "loaded": 8, "miss": 1}
    await two.done_writing()
    assert await two.read() is grpc.aio.EOF
    assert outcomes_of(pages)["loaded"] == 8  # also without the session


async def test_names_of_outcomes_are_bounded(pages: Service) -> None:
    stream = pages.stub.KeepAlive()
    for start in range(0, 3 * OUTCOME_LIMIT, OUTCOME_LIMIT):
        names = {f"name_{start + number}": 1 for number in range(OUTCOME_LIMIT)}
        await beat(stream, pages.session, names)
    found = outcomes_of(pages)
    assert len(found) == OUTCOME_NAMES
    assert sum(found.values()) == 3 * OUTCOME_LIMIT


@pytest.mark.parametrize(
    "outcomes",
    [
        {"": 1},
        {"Loaded": 1},
        {"a b": 1},
        {"n" * 65: 1},
        {"loaded": -1},
        {f"n{number}": 1 for number in range(OUTCOME_LIMIT + 1)},
    ],
)
async def test_bad_outcomes_end_the_stream(pages: Service, outcomes: dict[str, int]) -> None:
    stream = pages.stub.KeepAlive()
    await stream.write(pb.KeepAliveRequest(session_id=pages.session, outcomes=outcomes))
    with pytest.raises(grpc.RpcError) as caught:
        await asyncio.wait_for(stream.read(), 10)
    assert isinstance(error_of(caught.value), InvalidArgument)
