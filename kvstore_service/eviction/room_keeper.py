"""Evicts in the background, a small batch at a time, so that Reserve finds free slots.

A task on the event loop, as everything that touches the store's tables is.
"""

from __future__ import annotations

import asyncio

from kvstore_service.eviction.watermarks import Watermarks
from kvstore_service.pool.store import KvStore

_CHECK_SECONDS = 0.05


class RoomKeeper:
    """Keeps the store below its upper watermark.

    Attributes:
        evicted_total: chunks that went because of it.
    """

    def __init__(self, store: KvStore, watermarks: Watermarks) -> None:
        self.evicted_total = 0
        self._store = store
        self._watermarks = watermarks
        self._is_evicting = False

    async def run(self) -> None:
        """For ever; cancel it to stop."""
        while True:
            # A batch, then a turn for everybody else; a pause when there is nothing to do.
            pause = 0.0 if self.step() else _CHECK_SECONDS
            await asyncio.sleep(pause)

    def step(self) -> bool:
        """Evict one batch if it is time; whether there may be more to do at once."""
        pool = self._store.pool
        wanted = self._watermarks.chunks_to_evict(
            self._store.arena.slot_count, pool.allocator.free_count, is_evicting=self._is_evicting
        )
        evicted = pool.evict(wanted)
        self.evicted_total += evicted
        # Nothing more can go: what is left is leased, being written, or above such.
        self._is_evicting = wanted > 0 and evicted == wanted
        return self._is_evicting
