"""WriteChunks: receives the payloads of new chunks from a client on another host."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace

from kvstore_service.calls import validation
from kvstore_service.calls.slots import Reserver, Sealer, places
from kvstore_service.calls.validation import next_message, sealed_chunks
from kvstore_service.idempotency import Call, IdempotentCalls
from kvstore_service.pool.chunk_pool import WrittenChunk
from kvstore_service.remote import reader
from kvstore_service.remote.reader import StreamTurns
from kvstore_service.sessions import Session
from kvstore_service.store import KvStore
from splitpoint.arena.mapping import PIECE_BYTES, Payload
from splitpoint.errors import FailedPrecondition, InvalidArgument
from splitpoint.v1 import kvstore_pb2 as pb


class ChunkWriter:
    """Carries out the WriteChunks calls of one store."""

    def __init__(
        self,
        store: KvStore,
        streams: StreamTurns,
        sealer: Sealer,
        calls: IdempotentCalls,
        reserver: Reserver,
    ) -> None:
        self._store = store
        self._streams = streams
        self._sealer = sealer
        self._calls = calls
        self._reserver = reserver
        self._payload = Payload(store.arena)

    async def write(self, requests: AsyncIterator[pb.WriteChunksRequest]) -> pb.WriteChunksResponse:
        """Reserve, fill and seal. See WriteChunks in kvstore.proto."""
        parts = aiter(requests)
        first = await self._next(None, parts)
        if first is None or first.WhichOneof("part") != "header":
            raise InvalidArgument("the first message is the header", field="header")
        header = first.header
        chunks = validation.check_write(header, self._store.arena.layout.chunk_tokens)
        session = self._streams.remote_session(header.session_id)
        call = Call.of(header, session.answers, pb.WriteChunksResponse)
        known = await self._calls.known(call)
        if known is not None:
            await self._drain(session, parts, len(chunks))
            return known
        async with self._streams.turn():
            granted = places(
                await self._reserver.reserve(header.session_id, len(chunks), header.tenant_salt)
            )
            is_sealing = False
            try:
                await self._fill(session, parts, [slot for slot, _ in granted])
                # A repetition of the same stream may have been faster.
                known = await self._calls.known(call)
                if known is not None:
                    return known
                written = [
                    replace(chunk, slot=slot, generation=generation)
                    for chunk, (slot, generation) in zip(chunks, granted, strict=True)
                ]
                is_sealing = True  # frees the slots itself, and survives cancellation
                return await self._calls.run(call, self._seal(header, written), keep_errors=True)
            finally:
                if not is_sealing:
                    self._store.sessions.give_up_writing(session.session_id, granted)

    async def _fill(
        self, session: Session, parts: AsyncIterator[pb.WriteChunksRequest], slots: Sequence[int]
    ) -> None:
        """Copy the pieces, which come in order, into the slots."""
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
        """Read what a repeated stream sends, and no more than it announced."""
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
            # Chunks after one that failed. Sealed ones are not granted any more.
            self._store.sessions.give_up_writing(header.session_id, _places(chunks))
        return pb.WriteChunksResponse(
            chunks=sealed_chunks(outcome), lease_id=outcome.lease_id, epoch=self._store.epoch
        )

    async def _next(
        self, session: Session | None, parts: AsyncIterator[pb.WriteChunksRequest]
    ) -> pb.WriteChunksRequest | None:
        """Return the next message. None at the end of the stream.

        Raises DeadlineExceeded if the peer is too slow, and an error if the session or the
        store ends.
        """
        ends = [self._streams.stopping] + ([] if session is None else [session.ended])
        try:
            return await next_message(parts, reader.PIECE_SECONDS, *ends)
        except TimeoutError:
            self._streams.check_stopping()
            if session is not None and session.ended.is_set():
                raise FailedPrecondition("the session ended", reason="SESSION_EXPIRED") from None
            raise reader.stalled() from None


def _places(chunks: Iterable[WrittenChunk]) -> list[tuple[int, int]]:
    return [(chunk.slot, chunk.generation) for chunk in chunks]
