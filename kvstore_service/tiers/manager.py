"""The tiers of one store: what goes down to them, how fast they are, and what they hold.

The rate of loads from a tier is the measured one, and at most the one that is allowed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from kvstore_service.pool.chunk_pool import ChunkPool
from kvstore_service.pool.prefix_index import Entry
from kvstore_service.tiers.tier import ChunkTier, leading
from kvstore_service.tiers.writer import TierWriter
from splitpoint.errors import FailedPrecondition, SplitpointError
from splitpoint.tiers import Tier

# Share of the newest load in the average.
_NEWEST = 0.3


class ReadRate:
    """Moving average of loads. `bytes_per_second` is 0 until the first load."""

    def __init__(self) -> None:
        self.bytes_per_second = 0.0

    def measured(self, byte_count: int, seconds: float) -> None:
        """Note a load."""
        if byte_count <= 0 or seconds <= 0:
            return
        rate = byte_count / seconds
        known = self.bytes_per_second
        self.bytes_per_second = rate if not known else known + _NEWEST * (rate - known)


class RateLimit:
    """Delays loads so that all of them together stay below a rate.

    Args:
        bytes_per_second: None: no limit.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        bytes_per_second: float | None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.bytes_per_second = bytes_per_second
        self._clock = clock
        self._free_at = 0.0

    def begin(self, byte_count: int) -> float:
        """Take the next turn of these bytes. Return the clock value at which they may arrive."""
        if self.bytes_per_second is None:
            return 0.0
        self._free_at = max(self._free_at, self._now()) + byte_count / self.bytes_per_second
        return self._free_at

    async def end(self, due: float) -> None:
        """Wait until the moment that `begin` returned."""
        delay = due - self._now()
        if delay > 0:
            await asyncio.sleep(delay)

    def _now(self) -> float:
        return asyncio.get_running_loop().time() if self._clock is None else self._clock()


_log = logging.getLogger(__name__)

# How long a reservation waits for tiers.
ROOM_SECONDS = 1.0
# How often it looks whether they are too slow.
_LOOK_SECONDS = 0.05
# How long the end of a store waits for tiers.
FLUSH_SECONDS = 3.0
# How long a peek waits for tiers that need I/O.
HELD_SECONDS = 0.05


class TierManager:
    """All tiers of one store, fastest first.

    Args:
        on_eviction: chunks go down when they are evicted. False: when they are used again.
        rate_limit: bytes per second that are loaded from tiers. None: no limit.

    Attributes:
        tiers: by their names.
        writers, rates: of each tier.
        limit: shared by all loads.
    """

    def __init__(
        self,
        pool: ChunkPool,
        tiers: Sequence[ChunkTier] = (),
        *,
        on_eviction: bool = True,
        rate_limit: float | None = None,
    ) -> None:
        self.tiers = {tier.tier: tier for tier in tiers}
        self.writers = {
            tier.tier: TierWriter(pool, tier, on_eviction=on_eviction) for tier in tiers
        }
        self.rates = {tier.tier: ReadRate() for tier in tiers}
        self.limit = RateLimit(rate_limit)
        self._opened: list[ChunkTier] = []
        self._pool = pool
        self._on_eviction = on_eviction
        if tiers:
            pool.demotions = self

    async def start(self) -> None:
        """Open the tiers in order. Call `close` also if one of them cannot be opened."""
        for tier in self.tiers.values():
            await tier.start()
            self._opened.append(tier)

    async def close(self) -> None:
        while self._opened:
            await self._opened.pop().close()

    async def run(self) -> None:
        """Write chunks until cancelled."""
        async with asyncio.TaskGroup() as group:
            for name, writer in self.writers.items():
                group.create_task(writer.run(), name=f"write to the {name} tier")

    async def flush(self, *, is_arena_kept: bool) -> None:
        """Write what the arena holds before it goes, for at most FLUSH_SECONDS.

        Call it after `run` was cancelled. The disk tier needs no copy of an arena that is kept.
        """
        if not self._on_eviction:
            return
        flushes = [
            asyncio.create_task(self.writers[tier.tier].flush())
            for tier in self._opened
            if tier.stats.is_up and not (is_arena_kept and tier.tier is Tier.DISK)
        ]
        if not flushes:
            return
        _, late = await asyncio.wait(flushes, timeout=FLUSH_SECONDS)
        for task in late:
            task.cancel()
        await asyncio.wait(flushes)
        for task in flushes:
            if not task.cancelled():
                task.result()

    def on_change(self, listener: Callable[[Sequence[bytes]], None]) -> None:
        """Tell a listener the keys of chunks that a tier stored or lost."""
        for tier in self.tiers.values():
            tier.on_change = listener

    def tier(self, tier: Tier) -> ChunkTier:
        """Raises FailedPrecondition if the store has no such tier."""
        found = self.tiers.get(tier)
        if found is None:
            raise FailedPrecondition(f"this store has no {tier} tier", reason="NO_TIER")
        return found

    def is_on_disk(self, key: bytes) -> bool:
        """Return True if the disk tier holds a chunk."""
        disk = self.tiers.get(Tier.DISK)
        return disk is not None and disk.holds(key) is True

    def keys_on_disk(self) -> Iterable[bytes]:
        """Return the keys of all chunks that the disk tier holds."""
        disk = self.tiers.get(Tier.DISK)
        return () if disk is None else disk.keys()

    # -- down ----------------------------------------------------------------------------------

    def used(self, entries: Sequence[Entry]) -> None:
        """Note that chunks of the arena were used again."""
        if not self._on_eviction:
            for writer in self.writers.values():
                writer.want(entries)

    def has_room(self) -> bool:
        return all(writer.has_room() for writer in self.writers.values())

    def coming_count(self) -> int:
        """Count evicted chunks whose last copies will end soon."""
        grants = self._pool.grants
        if not grants.set_aside:
            return 0
        ending = Counter(slot for each in self.writers.values() for slot in each.coming_slots())
        return sum(ending[slot] == grants.copied[slot] for slot in grants.set_aside)

    def evicting(self, entry: Entry, *, may_wait: bool) -> None:
        for writer in self.writers.values():
            writer.evicting(entry, may_wait=may_wait)

    async def make_room(self, slot_count: int) -> None:
        """Evict until this many slots are free, waiting for the tiers for at most ROOM_SECONDS.

        Evicts nothing if that could not free enough. The caller evicts what is missing then.
        """
        pool = self._pool
        try:
            async with asyncio.timeout(ROOM_SECONDS):
                while (
                    pool.free_count
                    < slot_count
                    <= (pool.soon_free_count + pool.reclaimable_count())
                ):
                    missing = slot_count - pool.soon_free_count
                    evicted = pool.evict(missing) if missing > 0 else 0
                    if pool.free_count < slot_count and not evicted:
                        await self._progress()
        except TimeoutError:
            for writer in self.writers.values():
                writer.give_up_waiting()

    async def _progress(self) -> None:
        """Wait until a tier has copied chunks, or may have become too slow."""
        waits = [asyncio.create_task(each.progress.wait()) for each in self.writers.values()]
        try:
            await asyncio.wait(waits, timeout=_LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    # -- up ------------------------------------------------------------------------------------

    async def read(
        self, tier: Tier, keys: Sequence[bytes], slots: Sequence[int]
    ) -> list[int | None]:
        """Read chunks into slots as `ChunkTier.read` does, within the limit; measure the rate."""
        size = self._pool.layout.chunk_bytes
        began = time.monotonic()
        due = self.limit.begin(len(keys) * size)
        checksums = await self.tier(tier).read(keys, slots)
        await self.limit.end(due)
        read_count = sum(checksum is not None for checksum in checksums)
        self.rates[tier].measured(read_count * size, time.monotonic() - began)
        return checksums

    async def held(self, keys: Sequence[bytes]) -> dict[Tier, int]:
        """Return how many leading keys each tier holds; tiers without an answer are missing."""
        if not keys or not self.tiers:
            return {}
        asked = {
            asyncio.create_task(tier.has(keys)): name
            for name, tier in self.tiers.items()
            if tier.stats.is_up
        }
        if not asked:
            return {}
        done, late = await asyncio.wait(asked, timeout=HELD_SECONDS)
        for task in late:
            task.cancel()
        found = {}
        for task in done:
            error = task.exception()
            if error is None:
                name, count = asked[task], leading(task.result())
                found[name] = count
                self.writers[name].forget(keys[count:])
            elif not isinstance(error, SplitpointError):
                raise error
        return found
