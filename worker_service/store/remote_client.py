"""The client of a store on another host: the same calls, with a mirror in place of the arena.

Matched chunks are read into mirror slots and verified. Chunks written there are sent when they
are sealed. A lease protects chunks on both hosts, under the remote store's lease id.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from splitpoint.arena.mapping import Payload
from splitpoint.errors import ResourceExhausted, SplitpointError
from splitpoint.shapes import ArenaLayout
from splitpoint.transport.store_session import CALL_SECONDS
from splitpoint.transport.tls import PLAIN, Identity
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import types_pb2
from worker_service.device.pinning import Pinning
from worker_service.lanes.cpu import passed
from worker_service.store.arena_tensors import ArenaTensors, StoredChunk
from worker_service.store.chunk_streams import (
    BATCH_BYTES,
    ReadTarget,
    read_chunks,
    write_chunks,
)
from worker_service.store.client import (
    Match,
    Sealed,
    StoreClient,
    WrittenChunk,
    storable_tokens,
)
from worker_service.store.mirror_cache import MirrorCache, name_of
from worker_service.store.session import ArenaAccess, Connection

log = logging.getLogger(__name__)

# Sets the time limit of a write: links slower than 10 MB/s are not worth using.
SLOWEST_BYTES_PER_SECOND = 10e6
LONGEST_READ_SECONDS = 30.0

# Session id and lease id: lease ids begin anew with every store.
_LeaseName = tuple[bytes, int]


class RemoteStoreClient(StoreClient):
    """Like `StoreClient`. `start` allocates the mirror, too."""

    def __init__(
        self,
        address: str,
        client_name: str,
        *,
        mirror_bytes: int,
        identity: Identity = PLAIN,
        pinning: Pinning | None = None,
    ) -> None:
        super().__init__(address, client_name, identity=identity, pinning=pinning)
        self._mirror_bytes = mirror_bytes
        self._lane = ThreadPoolExecutor(1, thread_name_prefix="remote-store")
        # Names of the mirror chunks under each lease.
        self._held: dict[_LeaseName, list[bytes]] = {}
        self.mirror: MirrorCache | None = None

    async def start(self, layout: ArenaLayout) -> None:
        """Allocate the mirror and attach.

        Raises ResourceExhausted if the mirror does not fit, and what Attach raises.
        """
        self.mirror = await asyncio.to_thread(MirrorCache, layout, self._mirror_bytes)
        if self.pinning is not None:
            self.pinning.attach(self.mirror.arena)
        await super().start(layout)

    async def close(self) -> None:
        await super().close()
        self._lane.shutdown()

    def _arena_access(self) -> ArenaAccess:
        return self

    def attach_request(
        self, client_name: str, layout_hash: bytes, previous_session_id: bytes
    ) -> pb.AttachRequest:
        # The store freed everything when the previous session ended.
        return pb.AttachRequest(client_name=client_name, layout_hash=layout_hash, is_remote=True)

    def tensors(self, answer: pb.AttachResponse) -> ArenaTensors:
        return self._started().tensors

    # -- calls ------------------------------------------------------------------

    async def match(
        self, salt: bytes, token_ids: Sequence[int], *, is_patient: bool = True
    ) -> Match:
        """Lease the longest cached prefix and read it, as far as the mirror has room."""
        connection, mirror = self._session.require(), self._started()
        answer = await self._match(connection, salt, token_ids, is_patient=is_patient)
        storable = storable_tokens(answer)
        if not answer.lease_id:
            return Match(connection, 0, (), 0, storable)
        # Retained one by one as they arrive, so that none is evicted for the next.
        held = self._held.setdefault((connection.session_id, answer.lease_id), [])
        try:
            async with asyncio.timeout(LONGEST_READ_SECONDS):
                await self._read_match(connection, answer, held)
        except TimeoutError:
            log.warning("a prefix came too slowly: %d of its chunks are used", len(held))
        except SplitpointError as error:
            log.warning("a prefix came in part: %s", error.message)
        except BaseException:
            # Release the lease at the store, too. The cancelled caller does not wait for it.
            self._cleanups.start(self.release(connection, lease_ids=[answer.lease_id]))
            raise
        chunks = tuple(chunk for name in held if (chunk := mirror.find(name)) is not None)
        held_tokens = sum(chunk.token_count for chunk in chunks)
        cached = min(answer.cached_tokens, held_tokens)
        return Match(connection, cached, chunks, answer.lease_id, storable)

    async def _read_match(
        self, connection: Connection, answer: pb.MatchResponse, held: list[bytes]
    ) -> None:
        """Read the chunks of a match into the mirror, front to back."""
        mirror = self._started()
        keys = list(answer.chunk_keys)
        names = [
            name_of(key, handle.checksum) for key, handle in zip(keys, answer.chunks, strict=True)
        ]
        batch = max(1, BATCH_BYTES // mirror.arena.layout.chunk_bytes)
        while (start := len(held)) < len(keys):
            if mirror.find(names[start]) is not None:
                self._retain(held, names[start])
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
            target = ReadTarget(Payload(mirror.arena), slots, self._lane)
            await read_chunks(self._session.stub, connection.session_id, handles, target)
        except BaseException:
            # The lane may hold a last copy. The slots are free after it.
            self._cleanups.start(self._give_back(granted))
            raise
        for place, handle, key in zip(granted, handles, keys, strict=True):
            name = name_of(key, handle.checksum)
            mirror.publish(place, name, key, handle.token_count)
            self._retain(held, name)

    async def _give_back(self, granted: Sequence[tuple[int, int]]) -> None:
        await passed(self._lane)
        self._started().give_back(granted)

    def _retain(self, held: list[bytes], name: bytes) -> None:
        self._started().retain([name])
        held.append(name)

    async def reserve(
        self, connection: Connection, salt: bytes, slot_count: int, *, is_patient: bool = True
    ) -> list[tuple[int, int]]:
        """Reserve mirror slots, which no store is asked for. Raises ResourceExhausted."""
        return self._started().grant(slot_count)

    async def seal(
        self, connection: Connection, salt: bytes, chunks: Sequence[WrittenChunk], lease_id: int
    ) -> Sealed:
        """Send written mirror slots to the store. They stay in the mirror until `release`."""
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
        slots = [chunk.slot for chunk in chunks]
        payload = Payload(self._started().arena)
        limit = CALL_SECONDS + len(slots) * payload.size_bytes / SLOWEST_BYTES_PER_SECOND
        answer = await self._session.retried(
            connection,
            lambda: write_chunks(self._session.stub, header, payload, slots, self._lane, limit),
        )
        try:
            return self._publish(connection, chunks, answer)
        except SplitpointError:
            # A cancelled caller gave the slots back while they were sent.
            if not lease_id:
                self._cleanups.start(self.release(connection, lease_ids=[answer.lease_id]))
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
            # Named by the bytes in the mirror: the store may have a duplicate with others.
            name = name_of(sealed.key, chunk.checksum)
            place = (chunk.slot, chunk.generation)
            stored.append(mirror.publish(place, name, sealed.key, sealed.handle.token_count))
            self._retain(held, name)
        return Sealed(tuple(stored), answer.lease_id)

    async def release(
        self,
        connection: Connection,
        *,
        lease_ids: Sequence[int] = (),
        slots: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Free the mirror's slots at once, and release the leases at the store."""
        mirror = self._started()
        mirror.give_back(slots)
        for lease_id in lease_ids:
            mirror.release(self._held.pop((connection.session_id, lease_id), []))
        if self.connection is connection:
            await super().release(connection, lease_ids=lease_ids)

    async def report(self, connection: Connection, chunks: Sequence[StoredChunk]) -> int:
        """Drop damaged chunks of the mirror. Return how many chunks it no longer has.

        The store is not asked: it verified its chunks when it sent them.
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
