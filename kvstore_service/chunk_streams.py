"""ReadChunks and WriteChunks: payloads over the wire, for clients on other hosts.

Both copy one piece at a time on the event loop, some 0.3 ms for 1 MiB: threads that
hold the interpreter for the encoding anyway made a stream five times slower. When a
session ends between two pieces, nothing is touching its slots, and they are free at
once. A read looks at the slot's commit word before and after each piece: a slot that
is freed meanwhile costs the reader its stream, and no foreign byte is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import xxhash

from kvstore_service import validation
from kvstore_service.idempotency import Call, IdempotentCalls
from kvstore_service.messages import sealed_chunks
from kvstore_service.pool.chunk_pool import WrittenChunk
from kvstore_service.pool.prefix_index import Entry
from kvstore_service.sealer import Sealer
from kvstore_service.sessions import Session
from kvstore_service.store import KvStore
from splitpoint.arena.payload import PIECE_BYTES, Payload, pieces
from splitpoint.errors import (
    ChunkLost,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from splitpoint.v1 import kvstore_pb2 as pb

STREAM_LIMIT = 8
# How long a stream waits for its turn, and for its peer to take or send one piece.
TURN_SECONDS = 10.0
PIECE_SECONDS = 30.0
# For the piece under way when a stream fails.
LAST_PIECE_SECONDS = 2.0

Result = TypeVar("Result")


class ChunkStreams:
    """All streams of one store. `stopping` ends them.

    Args:
        threads: zero slots; nobody uses the store any more once they are shut down.
    """

    def __init__(
        self,
        store: KvStore,
        sealer: Sealer,
        calls: IdempotentCalls,
        threads: ThreadPoolExecutor,
        stopping: asyncio.Event,
    ) -> None:
        self._store = store
        self._sealer = sealer
        self._calls = calls
        self._threads = threads
        self._stopping = stopping
        self._payload = Payload(store.arena)
        self._turns = asyncio.Semaphore(STREAM_LIMIT)

    # -- reading -------------------------------------------------------------------------

    async def read(self, request: pb.ReadChunksRequest, context: Any) -> None:
        """Write every chunk's pieces to the context. See ReadChunks in kvstore.proto."""
        slots = validation.check_read(request, self._store.arena.slot_count)
        session = self._remote_session(request.session_id)
        for slot, generation in slots:
            self._store.leased_chunk(session.session_id, slot, generation)
        async with self._turn():
            writing: asyncio.Task[None] | None = None
            try:
                for index, (slot, generation) in enumerate(slots):
                    entry = self._store.leased_chunk(session.session_id, slot, generation)
                    digest = xxhash.xxh3_64()
                    ranges = list(pieces(self._payload.size_bytes))
                    for offset, size in ranges:
                        # The next piece is read while this one is on its way.
                        message = self._read_piece(entry, index, offset, size, digest)
                        if message is None:
                            self._store.found_damaged(entry)
                            raise DataLoss(
                                f"the payload of slot {slot} differs from its checksum",
                                reason="PAYLOAD_MISMATCH",
                            )
                        if writing is not None:
                            await self._sent(writing)
                        self._store.sessions.live(session.session_id)
                        writing = asyncio.create_task(context.write(message))
                        self._store.counters.remote_read_bytes += size
                if writing is not None:
                    await self._sent(writing)
            finally:
                if writing is not None:
                    await _settled(writing)

    async def _sent(self, writing: asyncio.Task[None]) -> None:
        """Return once the peer took a piece. Raises DeadlineExceeded and Unavailable."""
        await asyncio.wait({writing}, timeout=PIECE_SECONDS)
        if not writing.done():
            raise DeadlineExceeded(f"no piece moved for {PIECE_SECONDS:g} s", reason="STALLED")
        writing.result()
        if self._stopping.is_set():
            raise Unavailable("the store is stopping", reason="STOPPING")

    def _read_piece(
        self, entry: Entry, index: int, offset: int, size: int, digest: xxhash.xxh3_64
    ) -> bytes | None:
        """An encoded answer; None when the chunk ends with it and its checksum is wrong."""
        self._check_current(entry)
        data = self._payload.gather(entry.slot, offset, size)
        self._check_current(entry)
        digest.update(data)
        if offset + size == self._payload.size_bytes and digest.intdigest() != entry.checksum:
            return None
        answer = pb.ReadChunksResponse(chunk_index=index, offset=offset, data=data)
        return answer.SerializeToString()

    def _check_current(self, entry: Entry) -> None:
        if not self._store.arena.is_current([entry.slot], [entry.generation]):
            raise ChunkLost(f"slot {entry.slot} was given up while it was being read")

    # -- writing -------------------------------------------------------------------------

    async def write(self, requests: AsyncIterator[pb.WriteChunksRequest]) -> pb.WriteChunksResponse:
        """Reserve, fill and seal. See WriteChunks in kvstore.proto."""
        parts = aiter(requests)
        first = await self._next(None, parts)
        if first is None or first.WhichOneof("part") != "header":
            raise InvalidArgument("the first message is the header", field="header")
        header = first.header
        chunks = validation.check_write(header, self._store.arena.layout.chunk_tokens)
        session = self._remote_session(header.session_id)
        call = Call.of(header, session.answers, pb.WriteChunksResponse)
        known = await self._calls.known(call)
        if known is not None:
            await self._drain(session, parts, len(chunks))
            return known
        async with self._turn():
            granted = await self._reserve(header, len(chunks))
            is_sealing = False
            try:
                await self._fill(session, parts, [slot for slot, _ in granted])
                # The same stream, sent again meanwhile, may have been quicker.
                known = await self._calls.known(call)
                if known is not None:
                    return known
                written = [
                    replace(chunk, slot=slot, generation=generation)
                    for chunk, (slot, generation) in zip(chunks, granted, strict=True)
                ]
                is_sealing = True  # which sees to the slots itself, and outlives the caller
                return await self._calls.run(call, self._seal(header, written), keep_errors=True)
            finally:
                if not is_sealing:
                    self._store.sessions.give_up_writing(session.session_id, granted)

    async def _reserve(self, header: pb.WriteChunksHeader, count: int) -> list[tuple[int, int]]:
        """Slots for the chunks with their generations. Raises ResourceExhausted."""
        prepared = self._store.prepare(header.session_id, count, header.tenant_salt)
        if prepared.dirty_slots:
            loop = asyncio.get_running_loop()
            zeroing = loop.run_in_executor(self._threads, self._store.zero, prepared)
            try:
                await asyncio.shield(zeroing)
            except BaseException:
                # Not while the thread is at it.
                zeroing.add_done_callback(lambda _: self._store.pool.abandon(prepared))
                raise
        return [
            (run.first + offset, generation)
            for run in self._store.grant(header.session_id, prepared)
            for offset, generation in enumerate(run.generations)
        ]

    async def _fill(
        self, session: Session, parts: AsyncIterator[pb.WriteChunksRequest], slots: Sequence[int]
    ) -> None:
        """Take the pieces in order, straight into the slots."""
        expected = self._payload.size_bytes
        index = offset = 0
        while (part := await self._next(session, parts)) is not None:
            if part.WhichOneof("part") != "piece":
                raise InvalidArgument("a piece must follow", field="piece")
            piece = part.piece
            if index == len(slots) or (piece.chunk_index, piece.offset) != (index, offset):
                raise InvalidArgument(
                    f"a piece of chunk {piece.chunk_index} at {piece.offset} came instead of "
                    f"chunk {index} at {offset}",
                    field="piece",
                    reason="OUT_OF_ORDER",
                )
            size = len(piece.data)
            if not 1 <= size <= min(PIECE_BYTES, expected - offset):
                raise InvalidArgument(
                    f"{size} bytes at {offset} of a payload of {expected}", field="piece.data"
                )
            self._store.sessions.live(session.session_id)
            self._payload.scatter(slots[index], offset, piece.data)
            self._store.counters.remote_written_bytes += size
            offset += size
            if offset == expected:
                index, offset = index + 1, 0
        if index < len(slots):
            raise InvalidArgument(
                f"the stream ended in chunk {index} of {len(slots)} at byte {offset}",
                field="piece",
                reason="PIECES_MISSING",
            )

    async def _drain(
        self, session: Session, parts: AsyncIterator[pb.WriteChunksRequest], chunk_count: int
    ) -> None:
        """Take what a repeated stream sends, and no more than it announced."""
        left = chunk_count * self._payload.size_bytes
        while left > 0 and (part := await self._next(session, parts)) is not None:
            left -= max(1, len(part.piece.data))

    async def _seal(
        self, header: pb.WriteChunksHeader, chunks: Sequence[WrittenChunk]
    ) -> pb.WriteChunksResponse:
        try:
            outcome = await self._sealer.seal(
                header.session_id,
                header.tenant_salt,
                chunks,
                lease_id=header.lease_id,
                keep_leased=header.keep_leased,
            )
        finally:
            # Behind a chunk that failed; sealed ones are not granted any more.
            self._store.sessions.give_up_writing(header.session_id, _places(chunks))
        return pb.WriteChunksResponse(
            chunks=sealed_chunks(outcome), lease_id=outcome.lease_id, epoch=self._store.epoch
        )

    async def _next(
        self, session: Session | None, parts: AsyncIterator[pb.WriteChunksRequest]
    ) -> pb.WriteChunksRequest | None:
        task = asyncio.ensure_future(_anext(parts))
        try:
            return await self._until_end(session, task)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # -- both ----------------------------------------------------------------------------

    def _remote_session(self, session_id: bytes) -> Session:
        session = self._store.sessions.live(session_id)
        if not session.is_remote:
            raise FailedPrecondition(
                "the session maps the arena: it needs no stream", reason="NOT_REMOTE"
            )
        return session

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(TURN_SECONDS):
                await self._turns.acquire()
        except TimeoutError:
            raise ResourceExhausted(
                f"{STREAM_LIMIT} streams are open already",
                retry_after_seconds=1.0,
                reason="TOO_MANY_STREAMS",
            ) from None
        try:
            yield
        finally:
            self._turns.release()

    async def _until_end(self, session: Session | None, task: asyncio.Task[Result]) -> Result:
        """What the peer does next, unless it takes too long or its session or the store ends."""
        events = [self._stopping] if session is None else [self._stopping, session.ended]
        ends = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            await asyncio.wait(
                {task, *ends}, timeout=PIECE_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            if task.done():
                return task.result()
        finally:
            for end in ends:
                end.cancel()
        if self._stopping.is_set():
            raise Unavailable("the store is stopping", reason="STOPPING")
        if session is not None and session.ended.is_set():
            raise FailedPrecondition("the session ended", reason="SESSION_EXPIRED")
        raise DeadlineExceeded(f"no piece moved for {PIECE_SECONDS:g} s", reason="STALLED")


async def _anext(parts: AsyncIterator[pb.WriteChunksRequest]) -> pb.WriteChunksRequest | None:
    return await anext(parts, None)


async def _settled(writing: asyncio.Task[None]) -> None:
    """Return once gRPC would take a status: not while a message is on its way.

    A reader that takes nothing is not told why; its call just ends.
    """
    await asyncio.wait({writing}, timeout=LAST_PIECE_SECONDS)
    if not writing.done():
        writing.cancel()
        raise asyncio.CancelledError
    if not writing.cancelled():
        writing.exception()  # of a peer that went away


def _places(chunks: Iterable[WrittenChunk]) -> list[tuple[int, int]]:
    return [(chunk.slot, chunk.generation) for chunk in chunks]
