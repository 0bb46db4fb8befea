"""Reads all sealed chunks back, pass after pass, to detect bytes that changed in memory.

One pass over all slots takes a configured time, or longer if the configured rate is too low.
The scrubber runs on the event loop. Threads read a few chunks at a time, which are protected
from eviction meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvstore_service.integrity.inspection import Finder, Inspection
from kvstore_service.pool.chunk_pool import ChunkPool
from kvstore_service.pool.prefix_index import Entry

# Read at once: about 0.1 ms of a thread, and at least one chunk.
_BATCH_BYTES = 1 << 20
_BATCH_CHUNKS = 64
# Bounds of the sleep until the next batch is due.
_LEAST_SLEEP_SECONDS = 0.05
_MOST_SLEEP_SECONDS = 1.0
# Scrubbing pauses after a call within this time, unless its pass is late by this share.
_BUSY_SECONDS = 0.02
_LATE = 0.05
# Seconds between two comparisons of all commit words; one takes about 10 ns a slot.
_WORDS_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Scrubbing:
    """Duration of one pass over the whole arena, and the highest read rate."""

    pass_seconds: float
    bytes_per_second: int


class Scrubber:
    """The scrubber of one store.

    Attributes:
        byte_count: payload bytes read back since start.
        pass_count: completed passes.
        last_pass_seconds: duration of the last completed pass. None before the first.
        progress: share of the arena that the current pass has read, 0 to 1.
    """

    def __init__(
        self,
        pool: ChunkPool,
        inspection: Inspection,
        threads: ThreadPoolExecutor,
        scrubbing: Scrubbing,
        *,
        idle_seconds: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scrubbing = scrubbing
        self.byte_count = 0
        self.pass_count = 0
        self.last_pass_seconds: float | None = None
        self.progress = 0.0
        self._pool = pool
        self._inspection = inspection
        self._threads = threads
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._words_checked_at = clock()

    async def run(self) -> None:
        """Scrub pass after pass until cancelled."""
        while True:
            began = self._clock()
            await self._pass(began)
            self.last_pass_seconds = self._clock() - began
            self.pass_count += 1

    async def _pass(self, began: float) -> None:
        slot_count = self._pool.slot_count
        seconds_per_slot = self.scrubbing.pass_seconds / slot_count
        step = _slots_at_once(seconds_per_slot)
        first = 0
        while first < slot_count:
            last = min(first + step, slot_count)
            due = began + (last - 1) * seconds_per_slot
            await self._sleep(due - self._clock())
            # Take more slots if the pass is late.
            last = min(max(last, self._due_slot(began, seconds_per_slot)), slot_count)
            await self._scrub_slots(first, last, due)
            first = last
        await self._sleep(began + self.scrubbing.pass_seconds - self._clock())

    async def _scrub_slots(self, first: int, last: int, due: float) -> None:
        """Scrub batch after batch; join the short rests between them to longer sleeps."""
        slot_count, rest = self._pool.slot_count, 0.0
        while first < last:
            await self._yield_to_calls(due)
            first, entries = self._next_batch(first, last)
            rest += await self._scrub(entries)
            self.progress = first / slot_count
            if rest >= _LEAST_SLEEP_SECONDS or first == last:
                await self._sleep(rest)
                rest = 0.0

    async def _sleep(self, seconds: float) -> None:
        """Sleep, at least until the next loop iteration; compare commit words when due."""
        until = self._clock() + max(0.0, seconds)
        while True:
            if self._clock() - self._words_checked_at >= _WORDS_SECONDS:
                self._words_checked_at = self._clock()
                self._inspection.check_words()
            left = until - self._clock()
            await asyncio.sleep(max(0.0, min(left, _WORDS_SECONDS)))
            if left <= _WORDS_SECONDS:
                return

    async def _yield_to_calls(self, due: float) -> None:
        is_late = self._clock() - due > _LATE * self.scrubbing.pass_seconds
        if not is_late and self._idle_seconds() < _BUSY_SECONDS:
            await asyncio.sleep(_BUSY_SECONDS)

    def _due_slot(self, began: float, seconds_per_slot: float) -> int:
        """Return the end of the slots that are due by now."""
        return int((self._clock() - began) / seconds_per_slot) + 1

    def _next_batch(self, first: int, end: int) -> tuple[int, list[Entry]]:
        """Return the end of the next batch of slots in [first, end), and its chunks."""
        pool = self._pool
        most = max(1, min(_BATCH_CHUNKS, _BATCH_BYTES // pool.layout.chunk_bytes))
        entries: list[Entry] = []
        slot = first
        while slot < end and len(entries) < most:
            entry = pool.find(slot)
            # Recovered chunks are verified before their first use anyway.
            if entry is not None and slot not in pool.unverified:
                entries.append(entry)
            slot += 1
        return slot, entries

    async def _scrub(self, entries: list[Entry]) -> float:
        """Read the chunks back. Return the seconds to rest, to keep to the read rate."""
        if not entries:
            return 0.0
        began = self._clock()
        with self._pool.guard(entry.key for entry in entries):
            damages = await asyncio.get_running_loop().run_in_executor(
                self._threads, self._inspection.inspect, entries
            )
            self._inspection.settle(entries, damages, Finder.SCRUB)
        size = len(entries) * self._pool.layout.chunk_bytes
        self.byte_count += size
        return max(0.0, size / self.scrubbing.bytes_per_second - (self._clock() - began))


def _slots_at_once(seconds_per_slot: float) -> int:
    """Return the number of slots per step: thousands may be due in a second."""
    least = _LEAST_SLEEP_SECONDS / seconds_per_slot
    most = _MOST_SLEEP_SECONDS / seconds_per_slot
    return max(1, int(min(max(_BATCH_CHUNKS, least), most)))
