"""ReadChunks and WriteChunks over a real connection: order, damage, retries, sessions' ends."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import xxhash
from fuzzing import call_with_bytes, random_messages
from kvstore_helpers import LAYOUT, Bench, payload_of, store_sequence

from kvstore_service.server import SERVICE_NAME, KvStoreServicer
from splitpoint.errors import (
    AlreadyExists,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    SplitpointError,
    Unavailable,
)
from splitpoint.keys import chunk_key
from splitpoint.transport.channels import open_channel
from splitpoint.transport.servers import create_server, listen
from splitpoint.transport.statuses import error_of
from splitpoint.transport.store_session import remote_session
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import kvstore_pb2_grpc

SLOTS = 8
TOKENS = list(range(100, 110))  # two full chunks and a tail of two


class Remote:
    """A client on "another host": it has a stub and no mapping."""

    def __init__(self, bench: Bench, channel: grpc.aio.Channel) -> None:
        self.bench = bench
        self.channel = channel
        self.stub: Any = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        self.session = b""
        self._requests = 0
        self._keeper: Any = None

    def request_id(self) -> bytes:
        self._requests += 1
        return b"r%d" % self._requests

    async def attach(self) -> pb.AttachResponse:
        answer: pb.AttachResponse = await call(
            self.stub.Attach(pb.AttachRequest(client_name="remote", is_remote=True))
        )
        self.session = answer.session_id
        self._keeper = self.stub.KeepAlive()
        await self._keeper.write(pb.KeepAliveRequest(session_id=self.session))
        await self._keeper.read()
        return answer

    async def end_session(self) -> None:
        await self._keeper.done_writing()
        while await self._keeper.read() is not grpc.aio.EOF:
            pass

    async def match(self, tokens: list[int]) -> pb.MatchResponse:
        request = pb.MatchRequest(
            session_id=self.session, request_id=self.request_id(), token_ids=tokens
        )
        answer: pb.MatchResponse = await call(self.stub.Match(request))
        return answer

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

    def header(self, tokens: list[int], **changes: Any) -> tuple[pb.WriteChunksHeader, list[bytes]]:
        """Return a header for a whole sequence, and its payloads."""
        header = pb.WriteChunksHeader(session_id=self.session, request_id=self.request_id())
        payloads, parent, size = [], b"", LAYOUT.chunk_tokens
        for start in range(0, len(tokens), size):
            piece = tuple(tokens[start : start + size])
            planes = payload_of(LAYOUT, start, len(piece))
            payload = b"".join(planes.values())
            header.chunks.add(
                parent_key=parent, token_ids=piece, checksum=xxhash.xxh3_64_intdigest(payload)
            )
            payloads.append(payload)
            parent = chunk_key(LAYOUT.layout_hash, b"", parent, piece)
        header.MergeFrom(pb.WriteChunksHeader(**changes))
        return header, payloads

    async def send(self, *parts: pb.WriteChunksRequest) -> pb.WriteChunksResponse:
        """Repeat the call if gRPC lost the answer while it was sending, as a worker does."""
        answer: pb.WriteChunksResponse
        for tries_left in range(4, -1, -1):
            try:
                answer = await call(self.stub.WriteChunks(iter(parts), timeout=20))
            except Unavailable as error:
                if error.reason != "CALL_ENDED" or not tries_left:
                    raise
            else:
                break
        return answer

    async def write(self, tokens: list[int], **changes: Any) -> pb.WriteChunksResponse:
        header, payloads = self.header(tokens, **changes)
        return await self.send(*parts_of(header, payloads))

    async def stats(self) -> pb.GetStatsResponse:
        answer: pb.GetStatsResponse
        answer = await call(self.stub.GetStats(pb.GetStatsRequest(check_integrity=True)))
        assert list(answer.integrity_violations) == []
        return answer


def parts_of(
    header: pb.WriteChunksHeader, payloads: list[bytes], size: int = 100
) -> list[pb.WriteChunksRequest]:
    """Yield the messages of a whole stream, in small pieces."""
    return [
        pb.WriteChunksRequest(header=header),
        *(
            pb.WriteChunksRequest(
                piece=pb.ChunkPiece(
                    chunk_index=index, offset=offset, data=payload[offset : offset + size]
                )
            )
            for index, payload in enumerate(payloads)
            for offset in range(0, len(payload), size)
        ),
    ]


async def call(pending: Any) -> Any:
    try:
        return await pending
    except grpc.RpcError as error:
        raise error_of(error) from error


@pytest.fixture
async def remote(shm_folder: Path, socket_address: str) -> AsyncIterator[Remote]:
    # Only the end of its stream ends the client's session: it sends one heartbeat.
    bench = Bench(shm_folder, SLOTS, lease_seconds=3600)
    servicer = KvStoreServicer(bench.store)
    server = create_server()
    kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server(servicer, server)
    listen(server, socket_address)
    await server.start()
    async with open_channel(socket_address) as channel:
        client = Remote(bench, channel)
        await client.attach()
        yield client
    servicer.stop()
    await server.stop(1)
    await servicer.close()
    bench.close()


async def test_a_remote_session_is_told_no_path_and_gives_no_process(remote: Remote) -> None:
    assert (await remote.attach()).arena_path == ""
    request = pb.AttachRequest(client_name="x", is_remote=True, process_id=7)
    with pytest.raises(InvalidArgument) as caught:
        await call(remote.stub.Attach(request))
    assert caught.value.field == "process_id"


async def test_written_chunks_are_read(remote: Remote) -> None:
    header, payloads = remote.header(TOKENS, keep_leased=True)
    answer = await remote.send(*parts_of(header, payloads))
    assert [chunk.duplicate for chunk in answer.chunks] == [False] * 3
    assert await remote.read([chunk.handle for chunk in answer.chunks]) == payloads
    found = await remote.match(TOKENS)
    assert found.cached_tokens == len(TOKENS)
    assert list(found.chunk_keys) == [chunk.key for chunk in answer.chunks]
    stats = await remote.stats()
    assert stats.remote_read_bytes == stats.remote_written_bytes == sum(map(len, payloads))


async def test_pieces_of_a_mebibyte(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    header, payloads = remote.header(TOKENS[:4], keep_leased=True)
    answer = await remote.send(*parts_of(header, payloads, size=1 << 20))
    monkeypatch.setattr("splitpoint.arena.mapping.PIECE_BYTES", 100)  # smaller than a plane's part
    assert await remote.read([answer.chunks[0].handle]) == payloads


async def test_only_own_leased_chunks_of_this_generation_are_read(remote: Remote) -> None:
    answer = await remote.write(TOKENS[:4])
    handle = answer.chunks[0].handle
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
    await remote.write(TOKENS)
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
        await call(
            remote.stub.Reserve(
                pb.ReserveRequest(session_id=remote.session, request_id=b"x", slot_count=1)
            )
        )
    assert caught.value.reason == "REMOTE_SESSION"
    mapped = remote.bench.attach()
    store_sequence(remote.bench.store, mapped, b"", TOKENS[:4], keep_leased=True)
    found = await remote.match(TOKENS[:4])
    remote.session = mapped
    with pytest.raises(FailedPrecondition) as caught:
        await remote.read(found.chunks)
    assert caught.value.reason == "NOT_REMOTE"


async def test_a_flipped_byte_is_data_loss_and_the_chunk_goes(remote: Remote) -> None:
    answer = await remote.write(TOKENS, keep_leased=True)
    damaged = answer.chunks[1].handle
    remote.bench.arena.plane(1, "V")[damaged.slot, 3] ^= 1
    with pytest.raises(DataLoss):
        await remote.read([chunk.handle for chunk in answer.chunks])
    assert (await remote.match(TOKENS)).cached_tokens == 4
    stats = await remote.stats()
    assert (stats.sealed_slot_count, stats.quarantined_slot_count) == (1, 2)
    assert stats.checksum_failure_count == 1
    await call(
        remote.stub.Release(
            pb.ReleaseRequest(
                session_id=remote.session, request_id=b"x", lease_ids=[answer.lease_id]
            )
        )
    )
    stats = await remote.stats()
    assert (stats.sealed_slot_count, stats.free_slot_count) == (1, SLOTS - 1)


async def test_a_chunk_that_is_released_and_evicted_is_not_read(remote: Remote) -> None:
    answer = await remote.write(TOKENS[:4], keep_leased=True)
    await call(
        remote.stub.Release(
            pb.ReleaseRequest(
                session_id=remote.session, request_id=b"x", lease_ids=[answer.lease_id]
            )
        )
    )
    assert (await call(remote.stub.Evict(pb.EvictRequest()))).evicted_chunk_count == 1
    with pytest.raises(FailedPrecondition):
        await remote.read([answer.chunks[0].handle])


async def test_a_repeated_write_gets_its_first_answer(remote: Remote) -> None:
    header, payloads = remote.header(TOKENS)
    parts = parts_of(header, payloads)
    first = await remote.send(*parts)
    before = await remote.stats()
    assert await remote.send(*parts) == first
    # Also when it breaks off, and when two come at once.
    assert await remote.send(parts[0]) == first
    after = await remote.stats()
    assert after.remote_written_bytes == before.remote_written_bytes
    assert after.sealed_chunk_count == before.sealed_chunk_count
    header.chunks[0].checksum += 1
    with pytest.raises(AlreadyExists):
        await remote.send(*parts_of(header, payloads))


async def test_two_equal_streams_at_once_store_once(remote: Remote) -> None:
    header, payloads = remote.header(TOKENS[:8])
    parts = parts_of(header, payloads)
    answers = await asyncio.gather(remote.send(*parts), remote.send(*parts))
    assert answers[0] == answers[1]
    stats = await remote.stats()
    assert (stats.sealed_slot_count, stats.free_slot_count) == (2, SLOTS - 2)


Parts = list[pb.WriteChunksRequest]
BROKEN: dict[str, tuple[Callable[[Parts], Parts], type[SplitpointError]]] = {
    "no header": (lambda parts: parts[1:], InvalidArgument),
    "nothing": (lambda parts: [], InvalidArgument),
    "ends early": (lambda parts: parts[:-1], InvalidArgument),
    "header only": (lambda parts: parts[:1], InvalidArgument),
    "a piece twice": (lambda parts: [*parts[:2], *parts[1:]], InvalidArgument),
    "out of order": (lambda parts: [parts[0], parts[2], parts[1], *parts[3:]], InvalidArgument),
    "too long": (lambda parts: [*parts, parts[-1]], InvalidArgument),
    "a second header": (lambda parts: [*parts[:2], parts[0], *parts[2:]], InvalidArgument),
    "empty message": (
        lambda parts: [*parts[:2], pb.WriteChunksRequest(), *parts[2:]],
        InvalidArgument,
    ),
}


@pytest.mark.parametrize("case", BROKEN)
async def test_a_broken_stream_leaves_nothing(remote: Remote, case: str) -> None:
    change, kind = BROKEN[case]
    header, payloads = remote.header(TOKENS)
    with pytest.raises(kind):
        await remote.send(*change(parts_of(header, payloads)))
    stats = await remote.stats()
    assert stats.free_slot_count == SLOTS
    # Its id is free: nothing happened under it.
    await remote.send(*parts_of(header, payloads))


async def test_a_status_that_grpc_lost_is_no_internal_error(remote: Remote) -> None:
    """grpc.aio loses the server's status if the call ends during a write."""
    stream = remote.stub.WriteChunks()
    await stream.write(pb.WriteChunksRequest())
    assert await stream.code() == grpc.StatusCode.INVALID_ARGUMENT
    stream._cython_call.set_internal_error("what its write() does then")
    with pytest.raises(Unavailable) as caught:
        await call(stream)
    assert caught.value.reason == "CALL_ENDED"


async def test_a_stream_without_a_header_ends(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore_service.remote.reader.PIECE_SECONDS", 0.05)
    with pytest.raises(DeadlineExceeded) as caught:
        await call(remote.stub.WriteChunks())
    assert caught.value.reason == "STALLED"


async def test_wrong_bytes_and_rows_past_the_tokens_are_not_sealed(remote: Remote) -> None:
    header, payloads = remote.header(TOKENS)
    torn = bytearray(payloads[1])
    torn[5] ^= 1
    with pytest.raises(DataLoss):
        await remote.send(*parts_of(header, [payloads[0], bytes(torn), payloads[2]]))
    assert (await remote.stats()).sealed_slot_count == 1  # those before it stay
    header, payloads = remote.header(TOKENS[:2])
    full = b"".join(payload_of(LAYOUT, 9, 4).values())
    header.chunks[0].checksum = xxhash.xxh3_64_intdigest(full)
    with pytest.raises(DataLoss) as caught:
        await remote.send(*parts_of(header, [full]))
    assert caught.value.reason == "ROWS_NOT_ZERO"
    stats = await remote.stats()
    assert (stats.sealed_slot_count, stats.free_slot_count) == (1, SLOTS - 1)


async def test_more_than_the_arena_holds_is_refused_whole(remote: Remote) -> None:
    with pytest.raises(ResourceExhausted):
        await remote.write(list(range(3, 3 + 4 * (SLOTS + 1))))
    assert (await remote.stats()).free_slot_count == SLOTS


async def test_a_caller_that_goes_away_leaves_nothing(remote: Remote) -> None:
    header, payloads = remote.header(TOKENS)
    stream = remote.stub.WriteChunks()
    for part in parts_of(header, payloads)[:4]:
        await stream.write(part)
    await eventually(remote, lambda stats: stats.writing_slot_count == 3)
    stream.cancel()
    await eventually(remote, lambda stats: stats.free_slot_count == SLOTS)


async def test_a_session_that_ends_while_writing_frees_all_at_once(remote: Remote) -> None:
    kept = await remote.write(list(range(3, 7)), keep_leased=True)
    assert kept.lease_id
    header, payloads = remote.header(TOKENS)
    parts = parts_of(header, payloads)
    stream = remote.stub.WriteChunks()
    for part in parts[:4]:
        await stream.write(part)
    await eventually(remote, lambda stats: stats.writing_slot_count == 3)
    await remote.end_session()
    stats = await remote.stats()
    assert (stats.quarantined_slot_count, stats.writing_slot_count) == (0, 0)
    assert (stats.lease_count, stats.session_count) == (0, 0)
    with pytest.raises((FailedPrecondition, NotFound)):
        await call(stream)


async def test_a_session_that_ends_ends_its_reads(remote: Remote) -> None:
    answer = await remote.write(TOKENS[:4], keep_leased=True)
    # Far more than fits the flow-control window, to a reader that takes nothing.
    handles = [answer.chunks[0].handle] * 4000
    stream = remote.stub.ReadChunks(
        pb.ReadChunksRequest(session_id=remote.session, chunks=handles), timeout=20
    )
    assert await stream.read() is not grpc.aio.EOF
    await remote.end_session()
    with pytest.raises((FailedPrecondition, NotFound)):
        await call(drain(stream))
    assert (await remote.stats()).lease_count == 0


async def drain(stream: Any) -> None:
    while await stream.read() is not grpc.aio.EOF:
        pass


async def eventually(remote: Remote, condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition(await remote.stats()):
            await asyncio.sleep(0.01)


async def test_random_bytes(remote: Remote) -> None:
    rng = random.Random(5)
    seen = set()
    for method in ("ReadChunks", "WriteChunks"):
        path = f"/{SERVICE_NAME}/{method}"
        for payload in random_messages(rng, 300):
            seen.add(await call_with_bytes(remote.channel, path, payload, streams=True))
    assert seen <= {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION,
    }, seen
    assert (await remote.stats()).free_slot_count == SLOTS


async def test_random_streams_of_valid_messages(remote: Remote) -> None:
    """Shuffled, doubled, cut and altered streams are refused, or stored exactly."""
    rng = random.Random(6)
    codes = set()
    for _ in range(150):
        header, payloads = remote.header([rng.randrange(3, 9) for _ in range(rng.randrange(1, 9))])
        parts = parts_of(header, payloads, size=rng.choice([64, 100, 1 << 20]))
        for _ in range(rng.randrange(3)):
            index = rng.randrange(len(parts))
            change = rng.randrange(3)
            if change == 0:
                del parts[index:]
            elif change == 1:
                parts.insert(index, parts[rng.randrange(len(parts))])
            else:
                parts[index] = pb.WriteChunksRequest.FromString(
                    np.random.default_rng(index).bytes(0)
                )
            if not parts:
                break
        try:
            answer = await remote.send(*parts)
        except SplitpointError as error:
            codes.add(error.code)
        else:
            assert len(answer.chunks) == len(header.chunks)
    assert codes <= {3, 8, 9, 15}
    stats = await remote.stats()
    assert (stats.writing_slot_count, stats.quarantined_slot_count) == (0, 0)
    assert stats.lease_count == 0
