"""KvStoreService over a real connection: codes, field names, retries, streams."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvstore_client import Service, call, serve
from kvstore_helpers import LAYOUT, SLOTS, Bench, granted_slots, write_payload
from waiting import until

from kvstore_service.server import SERVICE_NAME
from splitpoint.errors import (
    AlreadyExists,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from splitpoint.keys import chunk_key
from splitpoint.transport.channels import open_channel
from splitpoint.transport.convert import layout_from_proto
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import kvstore_pb2_grpc, types_pb2


def handles(slots: Iterable[tuple[int, int]]) -> list[types_pb2.SlotHandle]:
    return [types_pb2.SlotHandle(slot=slot, generation=generation) for slot, generation in slots]


# -- the whole way --------------------------------------------------------------------


async def test_attach_tells_where_the_arena_is(service: Service) -> None:
    answer = await service.attach(layout_hash=LAYOUT.layout_hash)
    arena = service.bench.arena
    assert answer.arena_path == str(arena.path)
    assert answer.arena_size_bytes == arena.size_bytes
    assert answer.slot_count == SLOTS
    assert answer.epoch == 1
    assert answer.instance_id == arena.superblock.instance_id
    assert layout_from_proto(answer.layout) == LAYOUT
    assert answer.lease_duration.ToSeconds() == 10
    assert len(answer.session_id) == 16
    assert answer.session_id != service.session


async def test_reserve_seal_match_release(service: Service) -> None:
    chunks = await service.written((1, 2, 3, 4), (5, 6))
    sealed = await service.seal(chunks, keep_leased=True)
    assert [chunk.handle.slot for chunk in sealed.chunks] == [chunk.slot for chunk in chunks]
    assert [chunk.handle.checksum for chunk in sealed.chunks] == [c.checksum for c in chunks]
    assert [chunk.handle.token_count for chunk in sealed.chunks] == [4, 2]
    found = await service.match([1, 2, 3, 4, 5, 9])
    assert found.cached_tokens == 5
    assert list(found.chunks) == [chunk.handle for chunk in sealed.chunks]
    assert list(found.chunk_keys) == [chunk.key for chunk in sealed.chunks]
    stats = await service.stats()
    assert stats.sealed_slot_count == stats.leased_slot_count == 2
    assert (stats.lease_count, stats.session_count) == (2, 1)
    assert (stats.match_count, stats.match_hit_count) == (1, 1)
    assert (stats.query_token_count, stats.hit_token_count) == (6, 5)
    released = await service.release(lease_ids=[found.lease_id, sealed.lease_id, 99])
    assert released.released_lease_count == 2
    assert (await service.stats()).lease_count == 0


async def test_peeking_leaves_no_trace(service: Service) -> None:
    await service.seal(await service.written((1, 2, 3, 4)))
    request = pb.MatchRequest(token_ids=[1, 2, 3, 4, 5])
    found = await call(service.stub.Match(request))
    assert (found.cached_tokens, found.lease_id) == (4, 0)
    stats = await service.stats()
    assert (stats.lease_count, stats.match_count) == (0, 0)
    foreign = await call(service.stub.Match(pb.MatchRequest(token_ids=[1], tenant_salt=b"other")))
    assert foreign.cached_tokens == 0


# -- retries --------------------------------------------------------------------------


async def test_a_retry_gets_the_first_answer(service: Service) -> None:
    request = pb.ReserveRequest(session_id=service.session, request_id=b"once", slot_count=2)
    first = await service.stub.Reserve(request)
    assert await service.stub.Reserve(request) == first
    assert (await service.stats()).writing_slot_count == 2
    await service.release(slots=handles(granted_slots(first.runs)))
    seal = service.seal_request(await service.written((1, 2, 3, 4)), keep_leased=True)
    first = await service.stub.Seal(seal)
    assert await service.stub.Seal(seal) == first
    match = pb.MatchRequest(session_id=service.session, request_id=b"m", token_ids=[1, 2])
    assert await service.stub.Match(match) == await service.stub.Match(match)
    stats = await service.stats()
    assert (stats.lease_count, stats.sealed_slot_count, stats.match_count) == (2, 1, 1)
    release = pb.ReleaseRequest(
        session_id=service.session, request_id=b"rel", lease_ids=[first.lease_id]
    )
    for _ in range(2):
        assert (await service.stub.Release(release)).released_lease_count == 1
    again = pb.ReleaseRequest(
        session_id=service.session, request_id=b"rel2", lease_ids=[first.lease_id]
    )
    assert (await service.stub.Release(again)).released_lease_count == 0


async def test_the_same_id_with_other_content_is_refused(service: Service) -> None:
    await service.reserve(1, request_id=b"same")
    with pytest.raises(AlreadyExists):
        await service.reserve(2, request_id=b"same")
    with pytest.raises(AlreadyExists):
        await service.match([1], request_id=b"same")
    # Another session may use it.
    other = (await service.attach()).session_id
    await service.reserve(2, request_id=b"same", session_id=other)


async def test_a_refused_seal_is_refused_again(service: Service) -> None:
    chunks = await service.written((1, 2, 3, 4))
    chunks[0].checksum ^= 1
    request = service.seal_request(chunks)
    for _ in range(2):
        with pytest.raises(DataLoss) as caught:
            await call(service.stub.Seal(request))
        assert caught.value.reason == "PAYLOAD_MISMATCH"
    stats = await service.stats()
    assert (stats.checksum_failure_count, stats.free_slot_count) == (1, SLOTS)


async def test_wrong_bytes_and_rows_past_the_tokens_are_not_sealed(service: Service) -> None:
    chunks = await service.written((1, 2, 3, 4), (5, 6, 7, 8), (9,))
    service.bench.arena.plane(1, "K")[chunks[1].slot, 5] ^= 1
    with pytest.raises(DataLoss):
        await service.seal(chunks)
    assert (await service.stats()).sealed_slot_count == 1  # those before it stay
    await service.release(slots=handles((c.slot, c.generation) for c in chunks))
    [chunk] = await service.written((1, 2))
    chunk.checksum = write_payload(service.bench.arena, chunk.slot, 9, LAYOUT.chunk_tokens)
    with pytest.raises(DataLoss) as caught:
        await service.seal([chunk])
    assert caught.value.reason == "ROWS_NOT_ZERO"
    stats = await service.stats()
    assert (stats.sealed_slot_count, stats.writing_slot_count) == (1, 0)


async def test_a_full_arena_may_be_asked_again(service: Service) -> None:
    first = await service.reserve(SLOTS)
    request = pb.ReserveRequest(session_id=service.session, request_id=b"again", slot_count=1)
    with pytest.raises(ResourceExhausted, match="0 are free") as caught:
        await call(service.stub.Reserve(request))
    assert caught.value.retry_after_seconds == pytest.approx(0.25)
    await service.release(slots=handles(granted_slots(first.runs)[:1]))
    assert len((await call(service.stub.Reserve(request))).runs) == 1
    with pytest.raises(ResourceExhausted, match="the arena has 8") as caught:
        await service.reserve(SLOTS + 1)
    assert caught.value.retry_after_seconds is None


class GatedThreads(ThreadPoolExecutor):
    """Accepts work at once and carries it out when the gate is open."""

    def __init__(self) -> None:
        super().__init__(1)
        self.gate = threading.Event()
        self.asked = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.asked += 1
        return super().submit(lambda: (self.gate.wait(), fn(*args, **kwargs))[1])


async def test_seals_under_way_are_shared_by_retries(shm_folder: Path, socket_address: str) -> None:
    """Equal calls while the payload is read back; one of the callers is cancelled."""
    threads = GatedThreads()
    async with serve(Bench(shm_folder, SLOTS), socket_address, threads) as service:
        request = service.seal_request(await service.written((1, 2, 3, 4)), keep_leased=True)
        leaving = service.stub.Seal(request)

        async def is_asked() -> bool:
            return threads.asked == 1

        await until(is_asked)
        leaving.cancel()
        first, second = service.stub.Seal(request), service.stub.Seal(request)
        other = pb.SealRequest()
        other.CopyFrom(request)
        other.keep_leased = False
        with pytest.raises(AlreadyExists):
            await call(service.stub.Seal(other))
        threads.gate.set()
        answers = await asyncio.gather(call(first), call(second))
        assert answers[0] == answers[1]
        assert not answers[0].chunks[0].duplicate
        stats = await service.stats()
        assert (stats.sealed_chunk_count, stats.lease_count, threads.asked) == (1, 1, 1)


# -- bad input ------------------------------------------------------------------------

BAD: list[tuple[str, str, Any]] = [
    ("Attach", "client_name", pb.AttachRequest(process_id=1)),
    ("Attach", "client_name", pb.AttachRequest(client_name="x" * 65, process_id=1)),
    ("Attach", "process_id", pb.AttachRequest(client_name="x")),
    ("Attach", "process_id", pb.AttachRequest(client_name="x", process_id=-1)),
    (
        "Attach",
        "process_start_ticks",
        pb.AttachRequest(client_name="x", process_id=1, process_start_ticks=-1),
    ),
    ("Attach", "layout_hash", pb.AttachRequest(client_name="x", process_id=1, layout_hash=b"x")),
    (
        "Attach",
        "previous_session_id",
        pb.AttachRequest(client_name="x", process_id=1, previous_session_id=b"x"),
    ),
    ("Match", "token_ids", pb.MatchRequest()),
    ("Match", "token_ids", pb.MatchRequest(token_ids=[1, -1])),
    ("Match", "tenant_salt", pb.MatchRequest(token_ids=[1], tenant_salt=bytes(129))),
    ("Match", "session_id", pb.MatchRequest(token_ids=[1], session_id=b"short", request_id=b"r")),
    ("Match", "request_id", pb.MatchRequest(token_ids=[1], session_id=bytes(16))),
    (
        "Match",
        "request_id",
        pb.MatchRequest(token_ids=[1], session_id=bytes(16), request_id=bytes(65)),
    ),
    ("Reserve", "session_id", pb.ReserveRequest(request_id=b"r", slot_count=1)),
    ("Reserve", "request_id", pb.ReserveRequest(session_id=bytes(16), slot_count=1)),
    ("Reserve", "slot_count", pb.ReserveRequest(session_id=bytes(16), request_id=b"r")),
    (
        "Reserve",
        "slot_count",
        pb.ReserveRequest(session_id=bytes(16), request_id=b"r", slot_count=-5),
    ),
    ("Seal", "chunks", pb.SealRequest(session_id=bytes(16), request_id=b"r")),
    ("ReportChunks", "session_id", pb.ReportChunksRequest(request_id=b"r")),
    ("ReportChunks", "request_id", pb.ReportChunksRequest(session_id=bytes(16))),
    ("ReportChunks", "chunks", pb.ReportChunksRequest(session_id=bytes(16), request_id=b"r")),
    (
        "ReportChunks",
        "chunks[0].slot",
        pb.ReportChunksRequest(
            session_id=bytes(16), request_id=b"r", chunks=[types_pb2.SlotHandle(slot=8)]
        ),
    ),
    ("Release", "session_id", pb.ReleaseRequest(request_id=b"r")),
    (
        "Release",
        "lease_ids",
        pb.ReleaseRequest(session_id=bytes(16), request_id=b"r", lease_ids=[-1]),
    ),
    (
        "Release",
        "slots[0].slot",
        pb.ReleaseRequest(
            session_id=bytes(16), request_id=b"r", slots=[types_pb2.SlotHandle(slot=8)]
        ),
    ),
    (
        "Release",
        "slots[0].generation",
        pb.ReleaseRequest(
            session_id=bytes(16), request_id=b"r", slots=[types_pb2.SlotHandle(slot=7)]
        ),
    ),
]


@pytest.mark.parametrize(("method", "field", "request_message"), BAD)
async def test_bad_fields_are_named(
    service: Service, method: str, field: str, request_message: Any
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await call(getattr(service.stub, method)(request_message))
    assert caught.value.field == field


SEAL_CHANGES: list[tuple[str, Callable[[pb.SealRequest], object]]] = [
    ("chunks[0].slot", lambda r: setattr(r.chunks[0], "slot", SLOTS)),
    ("chunks[0].slot", lambda r: setattr(r.chunks[0], "slot", -1)),
    ("chunks[0].generation", lambda r: setattr(r.chunks[0], "generation", 0)),
    ("chunks[0].parent_key", lambda r: setattr(r.chunks[0], "parent_key", b"short")),
    ("chunks[0].token_ids", lambda r: r.chunks[0].ClearField("token_ids")),
    ("chunks[0].token_ids", lambda r: r.chunks[0].token_ids.append(5)),
    ("chunks[0].token_ids", lambda r: r.chunks[0].token_ids.__setitem__(0, -1)),
    ("chunks[1].slot", lambda r: r.chunks.append(r.chunks[0])),
    ("tenant_salt", lambda r: setattr(r, "tenant_salt", bytes(129))),
    ("lease_id", lambda r: setattr(r, "lease_id", -1)),
]


@pytest.mark.parametrize(("field", "change"), SEAL_CHANGES)
async def test_bad_seals_are_named_and_change_nothing(
    service: Service, field: str, change: Callable[[pb.SealRequest], object]
) -> None:
    request = service.seal_request(await service.written((1, 2, 3, 4)))
    good = pb.SealRequest()
    good.CopyFrom(request)
    change(request)
    with pytest.raises(InvalidArgument) as caught:
        await call(service.stub.Seal(request))
    assert caught.value.field == field
    assert (await service.stats()).writing_slot_count == 1
    assert len((await call(service.stub.Seal(good))).chunks) == 1


async def test_malformed_messages_are_refused(service: Service) -> None:
    for method in ("Attach", "Match", "Reserve", "Seal", "Release", "GetStats"):
        raw: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
        raw = service.channel.unary_unary(f"/{SERVICE_NAME}/{method}")
        with pytest.raises(InvalidArgument):
            await call(raw(b"\xff\xff\xff"))


async def test_states_have_their_codes(service: Service) -> None:
    with pytest.raises(NotFound, match="attach again"):
        await service.reserve(1, session_id=os.urandom(16))
    with pytest.raises(FailedPrecondition) as caught:
        await service.attach(layout_hash=bytes(16))
    assert caught.value.reason == "LAYOUT_MISMATCH"
    chunks = await service.written((1, 2, 3, 4), (5, 6))
    stale = pb.SealChunk()
    stale.CopyFrom(chunks[0])
    stale.generation += 1
    with pytest.raises(FailedPrecondition) as caught:
        await service.seal([stale])
    assert caught.value.reason == "NOT_GRANTED"
    with pytest.raises(FailedPrecondition) as caught:
        await service.seal(chunks[1:])
    assert caught.value.reason == "NO_PARENT"
    with pytest.raises(FailedPrecondition) as caught:
        await service.seal(chunks, lease_id=5)
    assert caught.value.reason == "NO_LEASE"
    await service.seal(chunks)
    tail_key = chunk_key(
        LAYOUT.layout_hash, b"", chunk_key(LAYOUT.layout_hash, b"", b"", (1, 2, 3, 4)), (5, 6)
    )
    with pytest.raises(FailedPrecondition) as caught:
        await service.seal(await service.written((7,), parent=tail_key))
    assert caught.value.reason == "PARTIAL_PARENT"


# -- KeepAlive -------------------------------------------------------------------------


async def test_a_session_lives_as_long_as_its_stream(service: Service) -> None:
    await service.reserve(2)
    stream = service.stub.KeepAlive()
    for _ in range(3):
        service.bench.clock.now += 9
        await stream.write(pb.KeepAliveRequest(session_id=service.session))
        answer = await stream.read()
        assert answer.lease_duration.ToSeconds() == 10
        assert answer.epoch == 1
    await service.reserve(1)
    await stream.done_writing()
    assert await stream.read() == grpc.aio.EOF
    assert (await service.stats()).quarantined_slot_count == 3
    with pytest.raises(FailedPrecondition, match="expired"):
        await service.reserve(1)
    await service.attach(previous_session_id=service.session)
    assert (await service.stats()).free_slot_count == SLOTS


async def test_a_broken_connection_ends_the_session(service: Service, socket_address: str) -> None:
    async with open_channel(socket_address) as channel:
        stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        stream = stub.KeepAlive()
        await stream.write(pb.KeepAliveRequest(session_id=service.session))
        await stream.read()
        await service.reserve(2)

    async def is_noticed() -> bool:
        return (await service.stats()).quarantined_slot_count == 2

    await until(is_noticed)


async def test_one_stream_a_session_and_one_session_a_stream(service: Service) -> None:
    stream = service.stub.KeepAlive()
    await stream.write(pb.KeepAliveRequest(session_id=service.session))
    await stream.read()
    second = service.stub.KeepAlive()
    await second.write(pb.KeepAliveRequest(session_id=service.session))
    with pytest.raises(FailedPrecondition, match="another KeepAlive stream"):
        await call(second.read())
    await service.reserve(1)
    await stream.write(pb.KeepAliveRequest(session_id=bytes(16)))
    with pytest.raises(InvalidArgument, match="one session"):
        await call(stream.read())


async def test_streams_that_name_no_session(service: Service) -> None:
    for session_id, error in ((b"short", InvalidArgument), (bytes(16), NotFound)):
        stream = service.stub.KeepAlive()
        await stream.write(pb.KeepAliveRequest(session_id=session_id))
        with pytest.raises(error):
            await call(stream.read())
    empty = service.stub.KeepAlive()
    await empty.done_writing()
    assert await empty.read() == grpc.aio.EOF


async def test_a_silent_stream_expires(shm_folder: Path, socket_address: str) -> None:
    async with serve(Bench(shm_folder, SLOTS, lease_seconds=0.2), socket_address) as service:
        stream = service.stub.KeepAlive()
        await stream.write(pb.KeepAliveRequest(session_id=service.session))
        await stream.read()
        with pytest.raises(FailedPrecondition, match="expired"):
            await call(stream.read())
        assert (await service.stats()).session_count == 0


async def test_a_stopping_store_ends_the_streams(service: Service) -> None:
    stream = service.stub.KeepAlive()
    await stream.write(pb.KeepAliveRequest(session_id=service.session))
    await stream.read()
    service.servicer.stop()
    with pytest.raises(Unavailable, match="stopping"):
        await call(stream.read())
