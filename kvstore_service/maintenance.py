"""Background work of a store: expires sessions, verifies chunks, checks invariants.

It runs on the event loop in small steps. Payloads are read in threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from kvstore_service.integrity.checker import IntegrityChecker
from kvstore_service.integrity.inspection import Finder
from kvstore_service.integrity.scrubber import Scrubber, Scrubbing
from kvstore_service.pool.prefix_index import Entry
from kvstore_service.store import KvStore

_log = logging.getLogger(__name__)

# Chunks that are read back without a break.
_VERIFY_BATCH = 8
# A store without calls for this long is idle, and checks its invariants.
_IDLE_SECONDS = 5.0
_CHECK_SECONDS = 60.0
_CHECK_BATCH = 256


class Maintenance:
    """The background work of one store.

    Attributes:
        violations: result of the last integrity check; empty if all invariants hold.
        scrubber: reads all sealed chunks back regularly. None if scrubbing is off.
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
        self.integrity = IntegrityChecker(store.pool, store.sessions)
        self.violations: list[str] = []
        self._threads = threads
        self._clock = clock
        self._last_call = clock()
        self._last_check = clock()
        self.scrubber: Scrubber | None = None
        if scrubbing is not None:
            self.scrubber = Scrubber(
                store.pool,
                store.inspection,
                threads,
                scrubbing,
                idle_seconds=lambda: self._clock() - self._last_call,
                clock=clock,
            )

    def called(self) -> None:
        """Note a call: the store is not idle."""
        self._last_call = self._clock()

    def check_integrity(self) -> list[str]:
        """Check all invariants now; slow in a large arena."""
        self.violations = self.integrity.check_integrity()
        self._last_check = self._clock()
        return self.violations

    async def run(self) -> None:
        """Run until cancelled. Errors are raised: a store must not run without maintenance."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._sweep(), name="sweep")
            group.create_task(self._verify_recovered(), name="verify recovered chunks")
            group.create_task(self._check_when_idle(), name="check integrity")
            if self.scrubber is not None:
                group.create_task(self.scrubber.run(), name="scrub")

    # -- sessions ------------------------------------------------------------------------

    async def _sweep(self) -> None:
        """Expire silent sessions and free what dead clients held, several times a lease."""
        interval = min(1.0, self.store.sessions.lease_seconds / 4)
        while True:
            self.store.sessions.sweep()
            await asyncio.sleep(interval)

    # -- recovered chunks ------------------------------------------------------------------

    async def verify(self, find: Callable[[], list[Entry]]) -> None:
        """Verify the chunks that `find` returns until it returns none."""
        while entries := find():
            await self._verify_batch(entries)

    async def _verify_batch(self, entries: list[Entry]) -> None:
        loop = asyncio.get_running_loop()
        # The slots must not be reused while they are read.
        with self.store.pool.guard(entry.key for entry in entries):
            damages = await loop.run_in_executor(self._threads, self.store.recovered.check, entries)
            self.store.recovered.settle(entries, damages)

    async def _verify_recovered(self) -> None:
        """Verify every recovered chunk, at most at half the speed of one thread."""
        total = len(self.store.pool.unverified)
        began = self._clock()
        while entries := self.store.recovered.some(_VERIFY_BATCH):
            batch_began = self._clock()
            await self._verify_batch(entries)
            await asyncio.sleep(self._clock() - batch_began)
        if total:
            _log.info("verified %d recovered chunks in %.1f s", total, self._clock() - began)

    # -- chunks that a worker reported ---------------------------------------------------

    async def inspect_reported(self, handles: Sequence[tuple[int, int]]) -> int:
        """Read reported chunks (slot, generation) back, and drop the damaged ones.

        Return how many of the reported chunks the store does not have any more.
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
        """Check the counts at one moment, then the chunks batch by batch between calls.

        Changed bytes are no violation: the scrubber finds, drops and counts them.
        """
        self.store.inspection.check_words()
        violations = self.integrity.check_counts()
        entries = iter(self.store.pool.chunks().values())
        while piece := list(islice(entries, _CHECK_BATCH)):
            violations += self.integrity.check_parents(piece)
            await asyncio.sleep(0)
        return violations
