"""Copies the chunks of a prefix from another store's gRPC stream into slots of the own store."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
import xxhash

from splitpoint.arena.mapping import Payload
from splitpoint.errors import DataLoss, Internal, Unavailable
from splitpoint.observe import tracing
from splitpoint.observe.tracing import NO_SPAN
from splitpoint.shapes import ArenaLayout
from splitpoint.tiers import Transfer
from splitpoint.transport.cleanups import Cleanups
from splitpoint.transport.statuses import error_of
from splitpoint.transport.store_session import RemoteSession, remote_session
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import types_pb2
from worker_service.fetching.results import BATCH_BYTES, FetchResult, FetchSource
from worker_service.lanes.cpu import passed
from worker_service.lanes.spans import TRACED_BATCHES
from worker_service.store.arena_tensors import ArenaTensors
from worker_service.store.client import Match, StoreClient, written_chunks
from worker_service.store.session import Connection

# Time limit between two pieces of a stream.
SILENCE_SECONDS = 10.0


@dataclass(slots=True)
class _Fetch:
    """One stream under way. `parent` is the key of the chunk before the next batch.

    `bytes` came in `seconds`, waits for slots and seals excluded.
    """

    session: RemoteSession
    found: pb.MatchResponse
    connection: Connection
    salt: bytes
    lease_ids: list[int]
    result: FetchResult
    parent: bytes = b""
    bytes: int = 0
    seconds: float = 0.0


class StreamFetcher:
    """The streams of one worker. Copies run on a lane of their own."""

    def __init__(self, store: StoreClient, layout: ArenaLayout, cleanups: Cleanups) -> None:
        self._store = store
        self._layout = layout
        self._cleanups = cleanups
        self._lane = ThreadPoolExecutor(1, thread_name_prefix="fetch")

    async def quiesce(self) -> None:
        """Return when all copies that had begun are done."""
        await passed(self._lane)

    def close(self) -> None:
        """Release resources. No fetch and no cleanup may run any more."""
        self._lane.shutdown()

    async def fetch(
        self, source: FetchSource, salt: bytes, tokens: Sequence[int], result: FetchResult
    ) -> None:
        """Copy what another store's gRPC stream brings into slots of the own store."""
        own = await self._cleanups.obtain(
            self._store.match(salt, tokens),
            lambda match: self._store.release(match.connection, lease_ids=[match.lease_id]),
        )
        lease_ids = [own.lease_id]
        try:
            if own.cached_tokens >= min(source.cached_tokens, len(tokens) - 1):
                return
            name = self._store.client_name
            async with remote_session(
                source.place.address, name, self._layout.layout_hash, self._store.identity
            ) as session:
                found = await session.match(salt, tokens)
                if found.cached_tokens > own.cached_tokens:
                    fetch = _Fetch(session, found, own.connection, salt, lease_ids, result)
                    await self._fetch_chunks(fetch, own, tokens)
        finally:
            await self._cleanups.finish(self._store.release(own.connection, lease_ids=lease_ids))

    async def _fetch_chunks(self, fetch: _Fetch, own: Match, tokens: Sequence[int]) -> None:
        """Fetch the chunks after the own full ones, batch by batch."""
        size = self._layout.chunk_tokens
        found = fetch.found
        before = fetch.result.tokens
        start = own.cached_tokens // size
        fetch.parent = own.chunks[start - 1].key if start else b""
        batch = max(1, BATCH_BYTES // self._layout.chunk_bytes)
        # Only the first batches of a long fetch are traced in the store.
        spans = itertools.chain([tracing.current()] * TRACED_BATCHES, itertools.repeat(NO_SPAN))
        while start < len(found.chunks):
            end = min(start + batch, len(found.chunks))
            last = min(end * size, found.cached_tokens)
            pieces = [
                tuple(tokens[index * size : min((index + 1) * size, last)])
                for index in range(start, end)
            ]
            with next(spans).current():
                await self._fetch_batch(fetch, found.chunks[start:end], pieces)
            fetch.result.came(before + last - own.cached_tokens, Transfer.STREAM)
            start = end

    async def _fetch_batch(
        self,
        fetch: _Fetch,
        handles: Sequence[types_pb2.SlotHandle],
        pieces: Sequence[tuple[int, ...]],
    ) -> None:
        """Reserve slots, read the chunks of `handles` with the tokens `pieces`, and seal them."""
        connection = fetch.connection
        self._check_session(connection)
        granted = await self._cleanups.obtain(
            self._store.reserve(connection, fetch.salt, len(pieces)),
            lambda granted: self._store.release(connection, slots=granted),
        )
        try:
            checksums = await self._read(fetch, handles, [slot for slot, _ in granted], pieces)
            written, parent = written_chunks(
                self._layout.layout_hash, fetch.salt, fetch.parent, granted, pieces, checksums
            )
            sealed = await self._cleanups.obtain(
                self._store.seal(connection, fetch.salt, written, fetch.lease_ids[-1]),
                lambda sealed: self._store.release(connection, lease_ids=[sealed.lease_id]),
            )
        except BaseException:
            await self._cleanups.finish(self._give_up(connection, granted))
            raise
        if sealed.lease_id not in fetch.lease_ids:
            fetch.lease_ids.append(sealed.lease_id)
        if sealed.chunks[-1].key != parent:
            raise DataLoss("the own store names a fetched chunk by another key")
        fetch.parent = parent

    async def _read(
        self,
        fetch: _Fetch,
        handles: Sequence[types_pb2.SlotHandle],
        slots: Sequence[int],
        pieces: Sequence[tuple[int, ...]],
    ) -> list[int]:
        """Read chunks into own slots. Return their checksums."""
        connection, session = fetch.connection, fetch.session
        began = time.monotonic()
        await self._read_chunks(session, handles, connection, slots)
        size = len(slots) * self._layout.chunk_bytes
        fetch.seconds += time.monotonic() - began
        fetch.bytes += size
        fetch.result.bytes += size
        fetch.result.rate = fetch.bytes / fetch.seconds
        checksums = [handle.checksum for handle in handles]
        if len(pieces[-1]) < handles[-1].token_count:
            # Keep only the beginning: the rest belongs to another sequence.
            self._check_session(connection)
            checksums[-1] = await asyncio.get_running_loop().run_in_executor(
                self._lane, cut_tail, connection.tensors, slots[-1], len(pieces[-1])
            )
        return checksums

    async def _read_chunks(
        self,
        session: RemoteSession,
        handles: Sequence[types_pb2.SlotHandle],
        connection: Connection,
        slots: Sequence[int],
    ) -> None:
        """Fill `slots[i]` with the chunk of `handles[i]`, and compare its checksum.

        When this returns or raises, the lane may hold one last copy: wait for the lane before
        you give the slots up.

        Raises DataLoss if a payload differs from its handle's checksum, Internal if the store
        sends other pieces, Unavailable if a session ends, and what the store answers.
        """
        loop = asyncio.get_running_loop()
        payload = Payload(connection.tensors.arena)
        request = pb.ReadChunksRequest(session_id=session.session_id, chunks=handles)
        call = session.stub.ReadChunks(request)
        index = offset = 0
        digest = xxhash.xxh3_64()
        copying: asyncio.Future[None] | None = None

        def copy(slot: int, start: int, data: bytes) -> None:
            digest.update(data)
            payload.scatter(slot, start, data)

        try:
            while True:
                async with asyncio.timeout(SILENCE_SECONDS):
                    response = await call.read()
                # One copy at a time, while the next piece arrives.
                if copying is not None:
                    await copying
                if offset == payload.size_bytes:
                    if digest.intdigest() != handles[index].checksum:
                        raise DataLoss("a chunk came with other bytes than its checksum says")
                    index, offset = index + 1, 0
                    digest.reset()
                if response is grpc.aio.EOF:
                    break
                data = response.data
                end = offset + len(data)
                if (
                    index == len(slots)
                    or (response.chunk_index, response.offset) != (index, offset)
                    or not offset < end <= payload.size_bytes
                ):
                    raise Internal("the store sent other pieces than were asked for")
                # Nothing awaits between this check and the copy's place in the lane.
                self._check_session(connection)
                copying = loop.run_in_executor(self._lane, copy, slots[index], offset, data)
                offset = end
            if index < len(slots):
                raise Unavailable(f"the stream ended in chunk {index} of {len(slots)}")
        except TimeoutError:
            raise Unavailable(
                f"no piece came for {SILENCE_SECONDS:g} s", reason="STALLED"
            ) from None
        except grpc.RpcError as error:
            raise error_of(error) from error
        finally:
            call.cancel()

    async def _give_up(self, connection: Connection, slots: Sequence[tuple[int, int]]) -> None:
        await self.quiesce()  # a copy may still be writing
        # Sealed slots among them are no longer granted: releasing is idempotent.
        await self._store.release(connection, slots=slots)

    def _check_session(self, connection: Connection) -> None:
        if self._store.connection is not connection:
            raise Unavailable("the own store's session changed", reason="STORE_LOST")


def cut_tail(tensors: ArenaTensors, slot: int, token_count: int) -> int:
    """Zero the rows from `token_count` on. Return the slot's new checksum."""
    tensors.zero_rows(slot, token_count)
    return tensors.arena.checksum(slot)
