"""What a store does by itself: expire sessions, read chunks back, check its own books.

All of it on the event loop, in small pieces; payloads are read in the threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from kvstore_service.integrity.checksums import IntegrityChecker
from kvstore_service.integrity.inspection import Finder
from kvstore_service.integrity.scrubber import Scrubber, Scrubbing
from kvstore_service.pool.prefix_index import Entry
from kvstore_service.pool.store import KvStore

_log = logging.getLogger(__name__)

# Chunks read back between two looks at who else wants the memory's bandwidth.
_VERIFY_BATCH = 8
# A store is idle when nobody called for this long; it then checks its books.
_IDLE_SECONDS = 5.0
_CHECK_SECONDS = 60.0
_CHECK_BATCH = 256


class Upkeep:
    """The background work of one store.

    Attributes:
        violations: what the last check of the books found; empty: all invariants hold.
        scrubber: reads sealed chunks back all the time; None: nothing does.
    """

    def __init__(
        self,
        store: KvStore,
        threads: ThreadPoolExecutor,
        *,
        scrubbing: Scrubbing | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self.integrity = IntegrityChecker(store)
        self.violations: list[str] = []
        self._threads = threads
        self._clock = clock
        self._last_call = clock()
        self._last_check = clock()
        self.scrubber: Scrubber | None = None
        if scrubbing is not None:
            self.scrubber = Scrubber(
                store,
                threads,
                scrubbing,
                idle_seconds=lambda: self._clock() - self._last_call,
                clock=clock,
            )

    def called(self) -> None:
        """Somebody uses the store: it is not idle."""
        self._last_call = self._clock()

    def check_integrity(self) -> list[str]:
        """Everything, now; slow in a large arena."""
        self.violations = self.integrity.check_integrity()
        self._last_check = self._clock()
        return self.violations

    async def run(self) -> None:
        """Until cancelled. Raises what a bug raises: a store must not go on without this."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._sweep(), name="sweep")
            group.create_task(self._verify_adopted(), name="verify adopted chunks")
            group.create_task(self._check_when_idle(), name="check integrity")
            if self.scrubber is not None:
                group.create_task(self.scrubber.run(), name="scrub")

    # -- sessions ------------------------------------------------------------------------

    async def _sweep(self) -> None:
        """Expire silent sessions and free what the dead held, several times a lease."""
        interval = min(1.0, self.store.sessions.lease_seconds / 4)
        while True:
            self.store.sweep()
            await asyncio.sleep(interval)

    # -- adopted chunks ------------------------------------------------------------------

    async def verify(self, find: Callable[[], list[Entry]]) -> None:
        """Check and settle what `find` says is unverified, until it finds nothing."""
        while entries := find():
            await self._verify_batch(entries)

    async def _verify_batch(self, entries: list[Entry]) -> None:
        loop = asyncio.get_running_loop()
        # Guarded from eviction: its slots must not change while they are read.
        with self.store.pool.guard(entry.key for entry in entries):
            damages = await loop.run_in_executor(self._threads, self.store.adopted.check, entries)
            self.store.adopted.settle(entries, damages)

    async def _verify_adopted(self) -> None:
        """Every adopted chunk, at half the speed of one thread at most."""
        total = len(self.store.pool.unverified)
        began = self._clock()
        while entries := self.store.adopted.some(_VERIFY_BATCH):
            batch_began = self._clock()
            await self._verify_batch(entries)
            await asyncio.sleep(self._clock() - batch_began)
        if total:
            _log.info("verified %d adopted chunks in %.1f s", total, self._clock() - began)

    # -- chunks that a worker suspects ---------------------------------------------------

    async def inspect_reported(self, handles: Sequence[tuple[int, int]]) -> int:
        """Read back what a worker suspects, (slot, generation); drop what is damaged.

        Returns how many of the chunks are not there, damaged ones included.
        """
        pool, inspection = self.store.pool, self.store.inspection
        found = (pool.find(slot) for slot, _ in handles)
        entries = [
            entry
            for entry, (_, generation) in zip(found, handles, strict=True)
            if entry is not None and entry.generation == generation
        ]
        loop = asyncio.get_running_loop()
        for start in range(0, len(entries), _VERIFY_BATCH):
            batch = entries[start : start + _VERIFY_BATCH]
            with pool.guard(entry.key for entry in batch):
                damages = await loop.run_in_executor(self._threads, inspection.inspect, batch)
                inspection.settle(batch, damages, Finder.REPORT)
        return len(handles) - sum(pool.holds(entry) for entry in entries)

    # -- integrity -----------------------------------------------------------------------

    async def _check_when_idle(self) -> None:
        while True:
            await asyncio.sleep(_IDLE_SECONDS)
            now = self._clock()
            if now - self._last_call < _IDLE_SECONDS or now - self._last_check < _CHECK_SECONDS:
                continue
            self._last_check = now
            self.violations = await self._check_in_pieces()
            for violation in self.violations:
                _log.error("integrity: %s", violation)

    async def _check_in_pieces(self) -> list[str]:
        """The counts at one moment, then chunk after chunk, letting calls in between.

        Bytes that changed are no violation: they are found, dropped and counted
        by the scrubber.
        """
        self.store.inspection.check_words()
        violations = self.integrity.check_counts()
        entries = iter(self.store.pool.chunks().values())
        while piece := list(islice(entries, _CHECK_BATCH)):
            violations += self.integrity.check_parents(piece)
            await asyncio.sleep(0)
        return violations
