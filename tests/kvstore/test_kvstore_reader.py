"""ReadChunks over a real connection: order, damage, readers that stall, sessions' ends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from fuzzing import call_with_bytes, random_messages
from kvstore_client import Service, call, served
from kvstore_helpers import LAYOUT as SMALL
from kvstore_helpers import SLOTS, Bench, read_payload, store_sequence

from kvstore_service import reader
from kvstore_service.server import SERVICE_NAME, KvStoreServicer
from kvstore_service.validation import handle_of
from splitpoint.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from splitpoint.transport.statuses import error_of
from splitpoint.transport.store_session import remote_session
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import types_pb2

# Chunks of 12 KiB, so that a stream of 4,000 is more than any buffer takes.
LAYOUT = replace(SMALL, head_dim=64, hidden_size=128)
TOKENS = list(range(100, 110))  # two full chunks and a tail of two


class Remote(Service):
    """A client on "another host": it maps nothing."""

    keeper: Any

    async def attach(self, **changes: Any) -> pb.AttachResponse:
        request = pb.AttachRequest(client_name="remote", is_remote=True, **changes)
        answer: pb.AttachResponse = await call(self.stub.Attach(request))
        self.session = answer.session_id
        self.keeper = self.stub.KeepAlive()
        await self.keeper.write(pb.KeepAliveRequest(session_id=self.session))
        await self.keeper.read()
        return answer

    async def end_session(self) -> None:
        await self.keeper.done_writing()
        while await self.keeper.read() is not grpc.aio.EOF:
            pass

    async def read(self, handles: Any) -> list[bytes]:
        payloads = [bytearray() for _ in handles]
        stream = self.stub.ReadChunks(
            pb.ReadChunksRequest(session_id=self.session, chunks=handles), timeout=20
        )
        try:
            async for response in stream:
                piece = response
                assert piece.offset == len(payloads[piece.chunk_index])
                payloads[piece.chunk_index] += piece.data
        except grpc.RpcError as error:
            raise error_of(error) from error
        return [bytes(payload) for payload in payloads]

    async def stalled_read(self, handle: types_pb2.SlotHandle) -> Any:
        """Return a stream of far more than fits the flow-control window, of one taken piece."""
        stream = self.stub.ReadChunks(
            pb.ReadChunksRequest(session_id=self.session, chunks=[handle] * 4000), timeout=20
        )
        assert await stream.read() is not grpc.aio.EOF
        return stream

    def store(self, tokens: list[int]) -> list[bytes]:
        """Store a sequence from a mapped session, which ends. Return its payloads."""
        session = self.bench.attach()
        store_sequence(self.bench.store, session, b"", tokens)
        self.bench.store.sessions.end(session)
        return [
            b"".join(read_payload(self.bench.arena, handle.slot).values())
            for handle in self.handles(tokens)
        ]

    def handles(self, tokens: list[int]) -> list[types_pb2.SlotHandle]:
        return [handle_of(entry) for entry in self.bench.store.peek(b"", tokens).entries]


@pytest.fixture
async def remote(shm_folder: Path, socket_address: str) -> AsyncIterator[Remote]:
    # Only the end of its stream ends the client's session: it sends one heartbeat.
    bench = Bench(shm_folder, SLOTS, layout=LAYOUT, lease_seconds=3600)
    servicer = KvStoreServicer(bench.store)
    async with served(servicer, socket_address) as channel:
        client = Remote(bench, servicer, channel)
        await client.attach()
        yield client
    bench.close()


async def test_a_remote_session_is_told_no_path_and_gives_no_process(remote: Remote) -> None:
    assert (await remote.attach()).arena_path == ""
    with pytest.raises(InvalidArgument) as caught:
        await remote.attach(process_id=7)
    assert caught.value.field == "process_id"


async def test_stored_chunks_are_read(remote: Remote) -> None:
    payloads = remote.store(TOKENS)
    found = await remote.match(TOKENS)
    assert found.cached_tokens == len(TOKENS)
    assert await remote.read(found.chunks) == payloads
    assert (await remote.stats()).remote_read_bytes == sum(map(len, payloads))


async def test_a_chunk_comes_in_pieces(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitpoint.arena.mapping.PIECE_BYTES", 100)  # smaller than a plane's part
    payloads = remote.store(TOKENS)
    assert await remote.read((await remote.match(TOKENS)).chunks) == payloads


async def test_only_own_leased_chunks_of_this_generation_are_read(remote: Remote) -> None:
    remote.store(TOKENS[:4])
    [handle] = remote.handles(TOKENS[:4])
    with pytest.raises(FailedPrecondition) as caught:
        await remote.read([handle])
    assert caught.value.reason == "NOT_LEASED"
    await remote.match(TOKENS[:4])
    handle.generation += 1
    with pytest.raises(FailedPrecondition) as caught:
        await remote.read([handle])
    assert caught.value.reason == "CHUNK_LOST"
    handle.slot = SLOTS
    with pytest.raises(InvalidArgument):
        await remote.read([handle])
    with pytest.raises(InvalidArgument):
        await remote.read([])


@pytest.mark.parametrize("ending", ["done", "failed", "cancelled"])
async def test_a_short_session_has_ended_there_when_its_block_ends(
    remote: Remote, socket_address: str, ending: str
) -> None:
    """Also if it ends before its KeepAlive stream has begun. A lease would stay for an hour."""
    remote.store(TOKENS)
    before = await remote.stats()

    async def use() -> None:
        async with remote_session(socket_address, "short", LAYOUT.layout_hash) as session:
            await session.match(b"", TOKENS)
            if ending == "failed":
                raise NotFound("of the test")
            if ending == "cancelled":
                await asyncio.Event().wait()

    for _ in range(20):
        work = asyncio.create_task(use())
        if ending == "cancelled":
            while (await remote.stats()).lease_count == before.lease_count:
                await asyncio.sleep(0)
            work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        after = await remote.stats()
        assert (after.lease_count, after.session_count) == (0, before.session_count)


async def test_mapped_and_remote_sessions_keep_to_their_ways(remote: Remote) -> None:
    with pytest.raises(FailedPrecondition) as caught:
        await remote.reserve(1)
    assert caught.value.reason == "REMOTE_SESSION"
    mapped = remote.bench.attach()
    store_sequence(remote.bench.store, mapped, b"", TOKENS[:4], keep_leased=True)
    found = await remote.match(TOKENS[:4])
    remote.session = mapped
    with pytest.raises(FailedPrecondition) as caught:
        await remote.read(found.chunks)
    assert caught.value.reason == "NOT_REMOTE"


async def test_a_flipped_byte_is_data_loss_and_the_chunk_goes(remote: Remote) -> None:
    remote.store(TOKENS)
    found = await remote.match(TOKENS)
    damaged = found.chunks[1]
    remote.bench.arena.plane(1, "V")[damaged.slot, 3] ^= 1
    with pytest.raises(DataLoss):
        await remote.read(found.chunks)
    assert (await remote.match(TOKENS)).cached_tokens == 4
    stats = await remote.stats()
    assert (stats.sealed_slot_count, stats.quarantined_slot_count) == (1, 2)
    assert stats.checksum_failure_count == 1
    await remote.release(lease_ids=[found.lease_id])
    stats = await remote.stats()
    assert (stats.sealed_slot_count, stats.free_slot_count) == (1, SLOTS - 1)


async def test_a_chunk_that_is_released_and_evicted_is_not_read(remote: Remote) -> None:
    remote.store(TOKENS[:4])
    found = await remote.match(TOKENS[:4])
    await remote.release(lease_ids=[found.lease_id])
    assert (await call(remote.stub.Evict(pb.EvictRequest()))).evicted_chunk_count == 1
    with pytest.raises(FailedPrecondition):
        await remote.read(found.chunks)


async def test_a_status_that_grpc_lost_is_no_internal_error(remote: Remote) -> None:
    """grpc.aio loses the server's status if the call ends during a write."""
    stream = remote.stub.KeepAlive()
    await stream.write(pb.KeepAliveRequest())
    assert await stream.code() == grpc.StatusCode.INVALID_ARGUMENT
    stream._cython_call.set_internal_error("what its write() does then")
    with pytest.raises(Unavailable) as caught:
        await call(stream.read())
    assert caught.value.reason == "CALL_ENDED"


async def test_readers_that_take_nothing_lose_their_turns(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "PIECE_SECONDS", 0.2)
    monkeypatch.setattr(reader, "LAST_PIECE_SECONDS", 0.2)
    payloads = remote.store(TOKENS[:4])
    found = await remote.match(TOKENS[:4])
    stalled = [await remote.stalled_read(found.chunks[0]) for _ in range(reader.STREAM_LIMIT)]
    assert await remote.read(found.chunks) == payloads
    for stream in stalled:
        stream.cancel()


async def test_more_streams_than_turns_are_refused(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "TURN_SECONDS", 0.1)
    remote.store(TOKENS[:4])
    found = await remote.match(TOKENS[:4])
    stalled = [await remote.stalled_read(found.chunks[0]) for _ in range(reader.STREAM_LIMIT)]
    with pytest.raises(ResourceExhausted) as caught:
        await remote.read(found.chunks)
    assert caught.value.reason == "TOO_MANY_STREAMS"
    for stream in stalled:
        stream.cancel()


async def test_a_session_that_ends_ends_its_reads(remote: Remote) -> None:
    remote.store(TOKENS[:4])
    found = await remote.match(TOKENS[:4])
    stream = await remote.stalled_read(found.chunks[0])
    await remote.end_session()
    with pytest.raises((FailedPrecondition, NotFound)):
        await call(drain(stream))
    stats = await remote.stats()
    assert (stats.lease_count, stats.session_count, stats.quarantined_slot_count) == (0, 0, 0)


async def drain(stream: Any) -> None:
    while await stream.read() is not grpc.aio.EOF:
        pass


async def test_random_bytes(remote: Remote) -> None:
    rng = random.Random(5)
    path = f"/{SERVICE_NAME}/ReadChunks"
    seen = {
        await call_with_bytes(remote.channel, path, payload, streams=True)
        for payload in random_messages(rng, 300)
    }
    assert seen <= {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION,
    }, seen
    assert (await remote.stats()).free_slot_count == SLOTS
