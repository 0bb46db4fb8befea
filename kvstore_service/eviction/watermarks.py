"""Watermark eviction: evicts in the background, so that Reserve finds free slots."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from splitpoint.errors import InvalidArgument

# Between two batches the event loop answers calls; evicting one chunk takes microseconds.
BATCH_CHUNKS = 64
_CHECK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Eviction begins when more than `above` of all slots are in use, and ends at `to`.

    A slot that is not free is in use. Both are fractions, 0 <= to < above <= 1; others raise
    InvalidArgument.
    """

    above: float
    to: float

    def __post_init__(self) -> None:
        if not 0.0 < self.above <= 1.0:  # NaN, too
            raise InvalidArgument(
                "--evict-above is a fraction in (0, 1]", field="evict-above", value=self.above
            )
        if not 0.0 <= self.to < self.above:
            raise InvalidArgument(
                "--evict-to is a fraction below --evict-above", field="evict-to", value=self.to
            )

    def chunks_to_evict(self, slot_count: int, free_count: int, *, is_evicting: bool) -> int:
        """Return how many chunks to evict now, at most one batch.

        `is_evicting`: the last result was not 0, so the lower mark is not reached.
        """
        used = slot_count - free_count
        if used <= (self.to if is_evicting else self.above) * slot_count:
            return 0
        excess = used - int(self.to * slot_count)
        return min(excess, BATCH_CHUNKS)


class EvictablePool(Protocol):
    """The part of `ChunkPool` that eviction in the background needs."""

    @property
    def slot_count(self) -> int: ...

    @property
    def soon_free_count(self) -> int: ...

    @property
    def awaits_tiers(self) -> bool:
        """True if eviction should wait until a tier has copied earlier chunks."""

    def evict(self, limit: int) -> int:
        """Evict up to `limit` chunks. Return how many were evicted."""


class WatermarkEvictor:
    """Keeps a pool below its upper watermark. `evicted_total`: chunks that it evicted."""

    def __init__(self, pool: EvictablePool, watermarks: Watermarks) -> None:
        self.evicted_total = 0
        self._pool = pool
        self._watermarks = watermarks
        self._is_evicting = False

    async def run(self) -> None:
        """Evict batch after batch until cancelled, on the event loop."""
        while True:
            # Other tasks run between two batches.
            pause = 0.0 if self.step() else _CHECK_SECONDS
            await asyncio.sleep(pause)

    def step(self) -> bool:
        """Evict a batch if needed. Return True if there may be more to evict at once."""
        pool = self._pool
        wanted = self._watermarks.chunks_to_evict(
            pool.slot_count, pool.soon_free_count, is_evicting=self._is_evicting
        )
        evicted = pool.evict(wanted)
        self.evicted_total += evicted
        # If fewer were evicted, a tier is busy with them, or the other chunks are protected or
        # have protected ones below.
        is_busy = pool.awaits_tiers
        self._is_evicting = wanted > 0 and (evicted == wanted or is_busy)
        return self._is_evicting and not is_busy
