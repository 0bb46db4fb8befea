"""A worker's store on another host: the same calls, with a mirror in place of the mapping.

What is matched is brought into mirror slots and verified; what is written there is
sent when it is sealed. A lease is held on both sides, under the remote store's id.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from splitpoint.arena.payload import Payload
from splitpoint.errors import DeadlineExceeded, ResourceExhausted, SplitpointError, Unavailable
from splitpoint.shapes import ArenaLayout
from splitpoint.transport.tls import PLAIN, Identity
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import types_pb2
from worker_service.lanes.lanes import passed
from worker_service.store.arena_tensors import ArenaTensors, StoredChunk
from worker_service.store.chunk_streams import BATCH_BYTES, read_chunks, write_chunks
from worker_service.store.client import (
    CALL_SECONDS,
    GOODBYE_SECONDS,
    Connection,
    Match,
    Sealed,
    StoreClient,
    WrittenChunk,
    storable_tokens,
)
from worker_service.store.mirror_cache import MirrorCache, name_of

log = logging.getLogger(__name__)

# A write may take as long as the slowest link that is worth having: 10 MB/s.
SLOWEST_BYTES_PER_SECOND = 10e6
LONGEST_READ_SECONDS = 30.0

_LeaseName = tuple[bytes, int]  # session, lease: ids begin anew with every store


class RemoteStoreClient(StoreClient):
    """`start` allocates the mirror, too."""

    def __init__(
        self, address: str, client_name: str, *, mirror_bytes: int, identity: Identity = PLAIN
    ) -> None:
        super().__init__(address, client_name, identity=identity)
        self._mirror_bytes = mirror_bytes
        self._lane = ThreadPoolExecutor(1, thread_name_prefix="remote-store")
        self._held: dict[_LeaseName, list[bytes]] = {}
        self.mirror: MirrorCache | None = None
        self._cleanups: set[asyncio.Task[None]] = set()

    async def start(self, layout: ArenaLayout) -> None:
        """Raises ResourceExhausted when the mirror does not fit, and what Attach raises."""
        self.mirror = await asyncio.to_thread(MirrorCache, layout, self._mirror_bytes)
        if self.pinning is not None:
            self.pinning.attach(self.mirror.arena)
        await super().start(layout)

    async def close(self) -> None:
        if self._cleanups:
            await asyncio.wait(self._cleanups, timeout=GOODBYE_SECONDS)
        await super().close()
        self._lane.shutdown()

    def _spawn(self, cleanup: Coroutine[Any, Any, None]) -> None:
        """To its end, whoever is cancelled meanwhile."""

        async def logged() -> None:
            try:
                await cleanup
            except SplitpointError as error:
                # The session is gone, and what it held with it.
                log.info("giving back at the store failed: %s", error.message)

        task = asyncio.create_task(logged())
        self._cleanups.add(task)
        task.add_done_callback(self._cleanups.discard)

    def _attach_request(self, previous: bytes) -> pb.AttachRequest:
        # Nothing of an earlier session is left there that could be acknowledged.
        return pb.AttachRequest(
            client_name=self.client_name, layout_hash=self._layout_hash, is_remote=True
        )

    def _tensors_of(self, answer: pb.AttachResponse) -> ArenaTensors:
        return self._started().tensors

    # -- calls ------------------------------------------------------------------

    async def match(self, salt: bytes, token_ids: Sequence[int]) -> Match:
        """Lease the longest cached prefix and bring it here, as far as the mirror has room."""
        connection, mirror = self._require(), self._started()
        answer = await self._match(connection, salt, token_ids)
        storable = storable_tokens(answer)
        if not answer.lease_id:
            return Match(connection, 0, (), 0, storable)
        # Held one by one as they arrive, so that none makes room for the next.
        held = self._held.setdefault((connection.session_id, answer.lease_id), [])
        try:
            async with asyncio.timeout(LONGEST_READ_SECONDS):
                await self._bring(connection, answer, held)
        except TimeoutError:
            log.warning("a prefix came too slowly: %d of its chunks are used", len(held))
        except SplitpointError as error:
            log.warning("a prefix came in part: %s", error.message)
        except BaseException:
            # The lease at the store, too; whoever cancelled us does not wait for it.
            self._spawn(self.release(connection, lease_ids=[answer.lease_id]))
            raise
        chunks = tuple(chunk for name in held if (chunk := mirror.find(name)) is not None)
        held_tokens = sum(chunk.token_count for chunk in chunks)
        cached = min(answer.cached_tokens, held_tokens)
        return Match(connection, cached, chunks, answer.lease_id, storable)

    async def _bring(
        self, connection: Connection, answer: pb.MatchResponse, held: list[bytes]
    ) -> None:
        """Chunks of the match into the mirror, front to back."""
        mirror = self._started()
        keys = list(answer.chunk_keys)
        names = [
            name_of(key, handle.checksum) for key, handle in zip(keys, answer.chunks, strict=True)
        ]
        batch = max(1, BATCH_BYTES // mirror.arena.layout.chunk_bytes)
        while (start := len(held)) < len(keys):
            if mirror.find(names[start]) is not None:
                self._take_hold(held, names[start])
                continue
            missing = start + 1
            while missing < min(start + batch, len(keys)) and mirror.find(names[missing]) is None:
                missing += 1
            count = min(missing - start, mirror.free_count)
            if not count:
                raise ResourceExhausted("the mirror is full of running sequences")
            await self._read(
                connection, answer.chunks[start : start + count], keys[start : start + count], held
            )

    async def _read(
        self,
        connection: Connection,
        handles: Sequence[types_pb2.SlotHandle],
        keys: Sequence[bytes],
        held: list[bytes],
    ) -> None:
        mirror = self._started()
        granted = mirror.grant(len(handles))
        slots = [slot for slot, _ in granted]
        try:
            await read_chunks(
                self._stub,
                connection.session_id,
                handles,
                Payload(mirror.arena),
                slots,
                self._lane,
                _always,
            )
        except BaseException:
            # A last copy may be in the lane; the slots are free behind it.
            self._spawn(self._give_back(granted))
            raise
        for place, handle, key in zip(granted, handles, keys, strict=True):
            name = name_of(key, handle.checksum)
            mirror.publish(place, name, key, handle.token_count)
            self._take_hold(held, name)

    async def _give_back(self, granted: Sequence[tuple[int, int]]) -> None:
        await passed(self._lane)
        self._started().give_back(granted)

    def _take_hold(self, held: list[bytes], name: bytes) -> None:
        self._started().hold([name])
        held.append(name)

    async def reserve(
        self, connection: Connection, salt: bytes, slot_count: int
    ) -> list[tuple[int, int]]:
        """MirrorCache slots. Raises ResourceExhausted."""
        return self._started().grant(slot_count)

    async def seal(
        self, connection: Connection, salt: bytes, chunks: Sequence[WrittenChunk], lease_id: int
    ) -> Sealed:
        """Send written mirror slots to the store; they stay here until `release`."""
        header = pb.WriteChunksHeader(
            session_id=connection.session_id,
            request_id=self._request_id(),
            tenant_salt=salt,
            chunks=[
                pb.SealChunk(
                    parent_key=chunk.parent_key,
                    token_ids=chunk.token_ids,
                    checksum=chunk.checksum,
                )
                for chunk in chunks
            ],
            lease_id=lease_id,
            keep_leased=True,
        )
        answer = await self._send(connection, header, [chunk.slot for chunk in chunks])
        try:
            return self._publish(connection, chunks, answer)
        except SplitpointError:
            # Given back while they were sent, by a caller that did not wait for it.
            if not lease_id:
                self._spawn(self.release(connection, lease_ids=[answer.lease_id]))
            raise

    def _publish(
        self,
        connection: Connection,
        chunks: Sequence[WrittenChunk],
        answer: pb.WriteChunksResponse,
    ) -> Sealed:
        mirror = self._started()
        stored: list[StoredChunk] = []
        held = self._held.setdefault((connection.session_id, answer.lease_id), [])
        for chunk, sealed in zip(chunks, answer.chunks, strict=True):
            # Of the bytes that are here: the store may have had the chunk with others.
            name = name_of(sealed.key, chunk.checksum)
            place = (chunk.slot, chunk.generation)
            stored.append(mirror.publish(place, name, sealed.key, sealed.handle.token_count))
            self._take_hold(held, name)
        return Sealed(tuple(stored), answer.lease_id)

    async def _send(
        self, connection: Connection, header: pb.WriteChunksHeader, slots: Sequence[int]
    ) -> pb.WriteChunksResponse:
        """Once more if no answer came: the store stores nothing twice."""
        payload = Payload(self._started().arena)
        limit = CALL_SECONDS + len(slots) * payload.size_bytes / SLOWEST_BYTES_PER_SECOND
        try:
            return await write_chunks(self._stub, header, payload, slots, self._lane, limit)
        except (DeadlineExceeded, Unavailable):
            try:
                return await write_chunks(self._stub, header, payload, slots, self._lane, limit)
            except (DeadlineExceeded, Unavailable):
                self._give_up(connection)
                raise

    async def release(
        self,
        connection: Connection,
        *,
        lease_ids: Sequence[int] = (),
        slots: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Give the mirror's slots up at once, and the leases at the store."""
        mirror = self._started()
        mirror.give_back(slots)
        for lease_id in lease_ids:
            mirror.drop(self._held.pop((connection.session_id, lease_id), []))
        if self.connection is connection:
            await super().release(connection, lease_ids=lease_ids)

    async def report(self, connection: Connection, chunks: Sequence[StoredChunk]) -> int:
        """What is read is the mirror: its damaged chunks are dropped and read again.

        The store compared its own with the same checksums when it sent them.
        """
        mirror = self._started()
        loop = asyncio.get_running_loop()
        held = [chunk for chunk in chunks if mirror.has(chunk)]
        for chunk in await loop.run_in_executor(self._lane, mirror.damaged, held):
            log.error("slot %d of the mirror is damaged and was dropped", chunk.slot)
            mirror.discard(chunk)
        return sum(not mirror.has(chunk) for chunk in chunks)

    def _started(self) -> MirrorCache:
        if self.mirror is None:
            raise RuntimeError("the remote store client was not started")
        return self.mirror


def _always() -> None:
    """MirrorCache slots may always be written: nobody else does."""
