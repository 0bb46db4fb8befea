"""ReadChunks: sends the payloads of leased chunks to a client on another host.

A read checks the slot's commit word before and after it copies each piece. If the slot is freed
meanwhile the stream fails, and bytes of another chunk are never sent.
"""

from __future__ import annotations

import asyncio
from typing import Any

import xxhash

from kvstore_service.calls import validation
from kvstore_service.pool.prefix_index import Entry
from kvstore_service.remote import turns
from kvstore_service.remote.turns import StreamTurns
from kvstore_service.store import KvStore
from splitpoint.arena.payload import Payload, pieces
from splitpoint.errors import ChunkLost, DataLoss
from splitpoint.v1 import kvstore_pb2 as pb

# Time limit of the last piece when a stream fails.
LAST_PIECE_SECONDS = 2.0


class ChunkReader:
    """Carries out the ReadChunks calls of one store."""

    def __init__(self, store: KvStore, streams: StreamTurns) -> None:
        self._store = store
        self._streams = streams
        self._payload = Payload(store.arena)

    async def read(self, request: pb.ReadChunksRequest, context: Any) -> None:
        """Send every chunk's pieces to the context. See ReadChunks in kvstore.proto."""
        slots = validation.check_read(request, self._store.arena.slot_count)
        session_id = self._streams.remote_session(request.session_id).session_id
        for slot, generation in slots:
            self._store.leased_chunk(session_id, slot, generation)
        async with self._streams.turn():
            sending: asyncio.Task[None] | None = None
            try:
                for index, (slot, generation) in enumerate(slots):
                    entry = self._store.leased_chunk(session_id, slot, generation)
                    digest = xxhash.xxh3_64()
                    for offset, size in pieces(self._payload.size_bytes):
                        # Read the next piece while this one is sent.
                        message = self._read_piece(entry, index, offset, size, digest)
                        if sending is not None:
                            await self._sent(sending)
                        self._store.sessions.live(session_id)
                        sending = asyncio.create_task(context.write(message))
                        self._store.counters.remote_read_bytes += size
                if sending is not None:
                    await self._sent(sending)
            finally:
                if sending is not None:
                    await _settled(sending)

    async def _sent(self, sending: asyncio.Task[None]) -> None:
        """Wait until the peer took a piece. Raises DeadlineExceeded and Unavailable."""
        await asyncio.wait({sending}, timeout=turns.PIECE_SECONDS)
        if not sending.done():
            raise turns.stalled()
        sending.result()
        self._streams.check_stopping()

    def _read_piece(
        self, entry: Entry, index: int, offset: int, size: int, digest: xxhash.xxh3_64
    ) -> bytes:
        """Return an encoded answer. Raises DataLoss if the chunk ends with a wrong checksum."""
        self._check_current(entry)
        data = self._payload.gather(entry.slot, offset, size)
        self._check_current(entry)
        digest.update(data)
        if offset + size == self._payload.size_bytes and digest.intdigest() != entry.checksum:
            self._store.drop_damaged(entry)
            raise DataLoss(
                f"the payload of slot {entry.slot} differs from its checksum",
                reason="PAYLOAD_MISMATCH",
            )
        answer = pb.ReadChunksResponse(chunk_index=index, offset=offset, data=data)
        return answer.SerializeToString()

    def _check_current(self, entry: Entry) -> None:
        if not self._store.arena.is_current([entry.slot], [entry.generation]):
            raise ChunkLost(f"slot {entry.slot} was given up while it was being read")


async def _settled(sending: asyncio.Task[None]) -> None:
    """Wait until gRPC accepts a status, which it does not while a message is being sent.

    A reader that takes nothing gets no status; its call just ends.
    """
    await asyncio.wait({sending}, timeout=LAST_PIECE_SECONDS)
    if not sending.done():
        sending.cancel()
        raise asyncio.CancelledError
    if not sending.cancelled():
        sending.exception()  # of a peer that went away
