"""Reads every sealed chunk back again and again: memory that changes must not go unnoticed.

One pass over all slots takes a stated time, or longer where that would read faster than
the bound allows. Runs on the event loop; chunks are read in the payload threads, a few at
a time, and are guarded from eviction only while they are read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvstore_service.integrity.inspection import Finder
from kvstore_service.pool.prefix_index import Entry
from kvstore_service.pool.store import KvStore

DEFAULT_PASS_SECONDS = 600.0
LEAST_PASS_SECONDS = 0.1
# Read in one go: some 0.1 ms of a thread, and at least one chunk.
_BATCH_BYTES = 1 << 20
_BATCH_CHUNKS = 64
# A sleep until the next batch is due: as long as a batch takes to be due, within this.
_LEAST_SLEEP_SECONDS = 0.05
_MOST_SLEEP_SECONDS = 1.0
# After a call this lately scrubbing rests, unless its pass is late by this share.
_BUSY_SECONDS = 0.02
_LATE = 0.05
# Between two comparisons of all commit words, which take some 10 ns a slot.
_WORDS_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Scrubbing:
    """How often and how fast. `pass_seconds`: of one pass over the whole arena."""

    pass_seconds: float
    bytes_per_second: int


class Scrubber:
    """The scrubber of one store.

    Attributes:
        byte_count: payload read back since start.
        pass_count: passes completed.
        last_pass_seconds: how long the last one took; None: none is complete.
        progress: share of the arena that the present pass has seen, 0 to 1.
    """

    def __init__(
        self,
        store: KvStore,
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
        self._store = store
        self._threads = threads
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._words_checked_at = clock()

    async def run(self) -> None:
        """Pass after pass, until cancelled."""
        while True:
            began = self._clock()
            await self._pass(began)
            self.last_pass_seconds = self._clock() - began
            self.pass_count += 1

    async def _pass(self, began: float) -> None:
        slot_count = self._store.arena.slot_count
        seconds_per_slot = self.scrubbing.pass_seconds / slot_count
        step = _slots_at_once(seconds_per_slot)
        first = 0
        while first < slot_count:
            last = min(first + step, slot_count)
            due = began + (last - 1) * seconds_per_slot
            await self._sleep(due - self._clock())
            # More than these, where the pass is late.
            last = min(max(last, self._due_slot(began, seconds_per_slot)), slot_count)
            await self._scrub_slots(first, last, due)
            first = last
        await self._sleep(began + self.scrubbing.pass_seconds - self._clock())

    async def _scrub_slots(self, first: int, last: int, due: float) -> None:
        """Batch after batch; what the bound wants of rest is slept in few long naps."""
        slot_count, rest = self._store.arena.slot_count, 0.0
        while first < last:
            await self._yield_to_calls(due)
            first, entries = self._next_batch(first, last)
            rest += await self._scrub(entries)
            self.progress = first / slot_count
            if rest >= _LEAST_SLEEP_SECONDS or first == last:
                await self._sleep(rest)
                rest = 0.0

    async def _sleep(self, seconds: float) -> None:
        """At least one turn of the loop; commit words are compared meanwhile."""
        until = self._clock() + max(0.0, seconds)
        while True:
            if self._clock() - self._words_checked_at >= _WORDS_SECONDS:
                self._words_checked_at = self._clock()
                self._store.inspection.check_words()
            left = until - self._clock()
            await asyncio.sleep(max(0.0, min(left, _WORDS_SECONDS)))
            if left <= _WORDS_SECONDS:
                return

    async def _yield_to_calls(self, due: float) -> None:
        is_late = self._clock() - due > _LATE * self.scrubbing.pass_seconds
        if not is_late and self._idle_seconds() < _BUSY_SECONDS:
            await asyncio.sleep(_BUSY_SECONDS)

    def _due_slot(self, began: float, seconds_per_slot: float) -> int:
        """The slots before this one are due by now."""
        return int((self._clock() - began) / seconds_per_slot) + 1

    def _next_batch(self, first: int, end: int) -> tuple[int, list[Entry]]:
        """The chunks in the slots from `first` to `end`, up to a batch; where it ends."""
        pool = self._store.pool
        most = max(1, min(_BATCH_CHUNKS, _BATCH_BYTES // pool.layout.chunk_bytes))
        entries: list[Entry] = []
        slot = first
        while slot < end and len(entries) < most:
            entry = pool.find(slot)
            # Adopted chunks are read back before their first use anyway.
            if entry is not None and slot not in pool.unverified:
                entries.append(entry)
            slot += 1
        return slot, entries

    async def _scrub(self, entries: list[Entry]) -> float:
        """Read the chunks back; returns the seconds to rest, for the bound's sake."""
        if not entries:
            return 0.0
        store, began = self._store, self._clock()
        with store.pool.guard(entry.key for entry in entries):
            damages = await asyncio.get_running_loop().run_in_executor(
                self._threads, store.inspection.inspect, entries
            )
            store.inspection.settle(entries, damages, Finder.SCRUB)
        size = len(entries) * store.arena.layout.chunk_bytes
        self.byte_count += size
        return max(0.0, size / self.scrubbing.bytes_per_second - (self._clock() - began))


def _slots_at_once(seconds_per_slot: float) -> int:
    """A slot each is too little: thousands may be due in a second."""
    least = _LEAST_SLEEP_SECONDS / seconds_per_slot
    most = _MOST_SLEEP_SECONDS / seconds_per_slot
    return max(1, int(min(max(_BATCH_CHUNKS, least), most)))
