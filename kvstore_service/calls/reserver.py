"""Reserves slots: waits for room, zeroes what another tenant left, and grants the slots.

Used by Reserve, WriteChunks and LoadChunks alike.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from kvstore_service.pool.slot_grants import GrantedRun, Preparation
from kvstore_service.store import KvStore


class RoomMaker(Protocol):
    """Evicts chunks to the tiers."""

    async def make_room(self, slot_count: int) -> None:
        """Evict until so many slots are free. Returns after a bounded time, with fewer perhaps."""


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


def places(runs: list[GrantedRun]) -> list[tuple[int, int]]:
    """Return each granted slot with its generation."""
    return [
        (run.first + offset, generation)
        for run in runs
        for offset, generation in enumerate(run.generations)
    ]
