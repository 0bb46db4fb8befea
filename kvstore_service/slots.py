"""Reserves slots and seals what was written into them: the two halves of a slot's life.

Reserving waits for room, zeroes what another tenant left, and grants the slots. Sealing reads
payloads back, compares checksums, and publishes the chunks. Every call that brings chunks uses
both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from kvstore_service.maintenance import Maintenance
from kvstore_service.pool.chunk_pool import WrittenChunk
from kvstore_service.pool.slot_grants import GrantedRun, Preparation
from kvstore_service.store import KvStore, SealOutcome
from splitpoint.arena.format import ArenaFormatError


class RoomMaker(Protocol):
    """Evicts chunks to the tiers."""

    async def make_room(self, slot_count: int) -> None:
        """Evict until this many slots are free. Return after a bounded time, perhaps with fewer."""


class Reserver:
    """Reserves the slots of one store.

    Args:
        threads: zero slots.
        room: makes room before slots are taken. None: the store evicts at once.
    """

    def __init__(
        self, store: KvStore, threads: ThreadPoolExecutor, room: RoomMaker | None = None
    ) -> None:
        self._room = room
        self._store = store
        self._threads = threads

    def must_wait(self, slot_count: int) -> bool:
        """Return True if chunks must be evicted to a tier first."""
        return self._room is not None and self._store.pool.free_count < slot_count

    async def reserve(self, session_id: bytes, slot_count: int, salt: bytes) -> list[GrantedRun]:
        """Grant slots. Raises what `KvStore.prepare` raises."""
        if self._room is not None and self.must_wait(slot_count):
            self._store.sessions.arena_user(session_id)
            self._store.sessions.sweep()  # frees the slots of dead clients
            await self._room.make_room(slot_count)
        # Nothing else runs between the two calls, so the room is still there.
        return await self.grant(session_id, self._store.prepare(session_id, slot_count, salt))

    async def grant(self, session_id: bytes, prepared: Preparation) -> list[GrantedRun]:
        """Zero prepared slots that need it, and grant them."""
        if prepared.dirty_slots:
            loop = asyncio.get_running_loop()
            zeroing = loop.run_in_executor(self._threads, self._store.zero, prepared)
            try:
                await asyncio.shield(zeroing)
            except BaseException:
                # Only after the thread is done.
                zeroing.add_done_callback(lambda _: self._store.pool.grants.abandon(prepared))
                raise
        return self._store.grant(session_id, prepared)


def places(runs: Iterable[GrantedRun]) -> list[tuple[int, int]]:
    """Return each granted slot with its generation."""
    return [
        (run.first_slot + offset, generation)
        for run in runs
        for offset, generation in enumerate(run.generations)
    ]


# Payload that is read back on the event loop: about 0.1 ms, which is less than a switch to
# another thread takes.
READ_AT_ONCE_BYTES = 256 << 10


class Sealer:
    """Seals the chunks of one store.

    Args:
        threads: read the payloads of calls with more than `read_at_once_bytes`.
    """

    def __init__(
        self,
        store: KvStore,
        maintenance: Maintenance,
        threads: ThreadPoolExecutor,
        read_at_once_bytes: int = READ_AT_ONCE_BYTES,
    ) -> None:
        self._store = store
        self._maintenance = maintenance
        self._threads = threads
        self._read_at_once_bytes = read_at_once_bytes

    async def seal(
        self,
        session_id: bytes,
        salt: bytes,
        chunks: Sequence[WrittenChunk],
        *,
        lease_id: int,
        keep_leased: bool,
    ) -> SealOutcome:
        """Seal each chunk whose payload has its checksum. Raises what `KvStore.seal` raises."""
        unchanged = self._store.pool.grants.checking([chunk.slot for chunk in chunks])
        with self._store.protect_parents(chunks), unchanged:
            await self._maintenance.verify(lambda: self._store.recovered.in_seal(salt, chunks))
            damages = await self.read_back(chunks)
            return self._store.seal(
                session_id, salt, chunks, damages, lease_id=lease_id, keep_leased=keep_leased
            )

    async def read_back(self, chunks: Sequence[WrittenChunk]) -> Sequence[ArenaFormatError | None]:
        """Compare each payload with its checksum. Return None for an intact one."""
        if len(chunks) * self._store.arena.layout.chunk_bytes <= self._read_at_once_bytes:
            return self._store.verify(chunks)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._store.verify, chunks)
