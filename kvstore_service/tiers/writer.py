"""Writes chunks to one tier: those that leave the arena, and those that will leave it next.

An evicted chunk is out of the index at once, but its slot keeps the bytes until the tier has
copied them. A tier that is away, full or too slow costs the chunk, never the request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from kvstore_service.pool.chunk_pool import ChunkPool
from kvstore_service.pool.prefix_index import Entry
from kvstore_service.tiers.tier import ChunkTier
from splitpoint.errors import SplitpointError

_log = logging.getLogger(__name__)

# Most bytes of one write.
BATCH_BYTES = 16 << 20
# Evicted chunks that wait for a tier hold at most this share of the slots, and these bytes.
WAITING_SHARE = 0.25
WAITING_BYTES = 256 << 20
# A write that takes longer makes the tier too slow: chunks leave the arena without it.
SLOW_SECONDS = 1.0
# The writer keeps this share of all slots free or written, so that eviction rarely waits.
CLEAN_SHARE = 0.125
_CLEAN_MOST = 256
_CLEAN_SECONDS = 0.05
# Pause after a write that did not store everything.
_RETRY_SECONDS = 1.0
# Chunks that were written and not missed since. A pool tells nothing else without I/O.
_MOST_KNOWN = 65_536
# They are written again after this time, since a pool evicts by itself, and hosts leave it.
# A pool moves no payload for a chunk that it has.
KNOWN_SECONDS = 60.0


class TierWriter:
    """The writer of one tier: `run` it as a task.

    Args:
        on_eviction: chunks are written when they leave the arena, or soon before. False: only
            those passed to `want`.

    Attributes:
        dropped_chunk_count: chunks that left the arena without being written.
        progress: replaced and set after every write.
    """

    def __init__(
        self,
        pool: ChunkPool,
        tier: ChunkTier,
        *,
        on_eviction: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.dropped_chunk_count = 0
        self.progress = asyncio.Event()
        self._pool = pool
        self._tier = tier
        self._on_eviction = on_eviction
        self._clock = clock
        chunk_bytes = pool.layout.chunk_bytes
        self._batch = max(1, BATCH_BYTES // chunk_bytes)
        self._most_waiting = max(
            1, min(int(pool.slot_count * WAITING_SHARE), WAITING_BYTES // chunk_bytes)
        )
        # Evicted; their slots wait for the write.
        self._leaving: OrderedDict[bytes, Entry] = OrderedDict()
        self._wanted: OrderedDict[bytes, Entry] = OrderedDict()
        self._writing: dict[bytes, int] = {}  # their slots
        self._write_began = 0.0
        self._known: OrderedDict[bytes, float] = OrderedDict()  # since when
        self._wake = asyncio.Event()
        # Counts of the pool when the next victims were last looked at.
        self._seen: tuple[int, ...] = ()

    @property
    def waiting_count(self) -> int:
        """Chunks that wait to be written."""
        return len(self._leaving) + len(self._wanted)

    def accepts(self) -> bool:
        """Return False if the tier is away, or a write takes too long."""
        is_slow = bool(self._writing) and self._clock() - self._write_began > SLOW_SECONDS
        return self._tier.stats.is_up and not is_slow

    def coming_slots(self) -> list[int]:
        """Return the slots whose copies will end soon."""
        if not self.accepts():
            return []
        return [*self._writing.values(), *(entry.slot for entry in self._leaving.values())]

    def has_room(self) -> bool:
        """Return False if an evicted chunk should wait for earlier ones."""
        return len(self._leaving) < self._most_waiting or not self.accepts()

    # -- chunks to write -----------------------------------------------------------------------

    def evicting(self, entry: Entry, *, may_wait: bool) -> None:
        """Set a chunk aside that leaves the arena, if the tier lacks it; see `Demotions`."""
        if entry.key in self._writing or entry.key in self._leaving or not self._lacks(entry):
            return
        if not self._on_eviction and entry.key not in self._wanted:
            return
        self._wanted.pop(entry.key, None)
        if may_wait and self.accepts() and len(self._leaving) < self._most_waiting:
            self._pool.grants.begin_copy([entry.slot])
            self._leaving[entry.key] = entry
            self._wake.set()
        else:
            self.dropped_chunk_count += 1

    def want(self, entries: Sequence[Entry]) -> None:
        """Write chunks of the arena in the background."""
        for entry in entries:
            if self._lacks(entry) and len(self._wanted) < self._pool.slot_count:
                self._wanted[entry.key] = entry
                self._wake.set()

    def know(self, keys: Sequence[bytes]) -> None:
        """Note chunks that the tier holds."""
        now = self._clock()
        for key in keys:
            self._known[key] = now
            self._known.move_to_end(key)
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Note chunks that the tier may lack: they are written again."""
        for key in keys:
            self._known.pop(key, None)

    def _lacks(self, entry: Entry) -> bool:
        if entry.token_count != self._pool.layout.chunk_tokens:
            return False
        is_held = self._tier.holds(entry.key)
        return not (self._is_known(entry) if is_held is None else is_held)

    def _is_known(self, entry: Entry) -> bool:
        since = self._known.get(entry.key)
        return since is not None and self._clock() - since < KNOWN_SECONDS

    def give_up_waiting(self) -> None:
        """Free the slots of evicted chunks whose write has not begun."""
        self._release(list(self._leaving.values()))
        self.dropped_chunk_count += len(self._leaving)
        self._leaving.clear()

    # -- the task ------------------------------------------------------------------------------

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            self._wake.clear()
            if not self._tier.stats.is_up:
                self._known.clear()  # what the tier keeps is unknown when it comes back
                if self._leaving:
                    self.give_up_waiting()
            batch, leaving = self._next_batch()
            pause = _CLEAN_SECONDS
            if batch:
                if await self._write(batch, leaving) or self._leaving:
                    continue
                pause = _RETRY_SECONDS
            try:
                async with asyncio.timeout(pause):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def flush(self) -> None:
        """Write what the arena holds, most valuable chunks first, instead of `run`.

        Chunks before those that follow them: a tier finds leading chunks only.
        """
        pool = self._pool
        while self._leaving:
            await self._write(*self._next_batch())
        last_first = pool.next_victims(pool.slot_count)[::-1]
        victims = {entry.slot for entry in last_first}
        protected = [entry for slot, entry in pool.chunks().items() if slot not in victims]
        protected.sort(key=lambda entry: entry.chunk_index)
        entries = [e for e in (*protected, *last_first) if self._lacks(e)]
        for start in range(0, len(entries), self._batch):
            batch = entries[start : start + self._batch]
            pool.grants.begin_copy(entry.slot for entry in batch)
            if not await self._write(batch, 0):
                return

    def _next_batch(self) -> tuple[list[Entry], int]:
        """Return chunks to write, their copies begun, and how many of them left the arena."""
        count = min(self._batch, len(self._leaving))
        batch = [self._leaving.popitem(last=False)[1] for _ in range(count)]
        leaving = len(batch)
        if not batch and self._tier.stats.is_up:
            batch = self._next_wanted() or self._next_unclean()
            self._pool.grants.begin_copy(entry.slot for entry in batch)
        return batch, leaving

    def _next_wanted(self) -> list[Entry]:
        batch: list[Entry] = []
        while self._wanted and len(batch) < self._batch:
            _, entry = self._wanted.popitem(last=False)
            if self._pool.holds(entry) and self._lacks(entry):
                batch.append(entry)
        return batch

    def _next_unclean(self) -> list[Entry]:
        """Return the chunks that will be evicted next and are not in the tier yet."""
        pool = self._pool
        counts = (pool.sealed_total, pool.evicted_total, len(pool.leases))
        if not self._on_eviction or counts == self._seen:
            return []
        margin = min(max(1, int(pool.slot_count * CLEAN_SHARE)), _CLEAN_MOST)
        victims = pool.next_victims(margin - pool.free_count) if pool.free_count < margin else []
        unclean = [e for e in victims if not self._is_known(e) and self._lacks(e)]
        if len(unclean) <= self._batch:
            self._seen = counts
        return unclean[: self._batch]

    async def _write(self, batch: Sequence[Entry], leaving: int) -> bool:
        """Write chunks whose copies have begun. Return True if the tier has all of them.

        The first `leaving` ones left the arena.
        """
        self._writing = {entry.key: entry.slot for entry in batch}
        self._write_began = self._clock()
        stored = 0
        try:
            stored = await self._tier.write(batch)
            if stored == len(batch):
                self.know([entry.key for entry in batch])
        except SplitpointError as error:
            _log.info("%s tier: chunks were not written: %s", self._tier.tier, error.message)
        finally:
            # Chunks of the arena that were evicted during the write are lost, too.
            lost = leaving + sum(not self._pool.holds(entry) for entry in batch[leaving:])
            self.dropped_chunk_count += min(lost, len(batch) - stored)
            self._writing = {}
            self._release(batch)
        return stored == len(batch)

    def _release(self, entries: Sequence[Entry]) -> None:
        self._pool.grants.end_copy(entry.slot for entry in entries)
        self.progress.set()
        self.progress = asyncio.Event()
