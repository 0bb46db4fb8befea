"""How fast tiers and other stores are, as fetches measured it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from splitpoint.costs.fetching import ASSUMED_BYTES_PER_SECOND
from worker_service.fetching.results import FetchResult

# Smaller fetches measure round trips, not the link.
MEASURABLE_BYTES = 1 << 20
# A rate below the assumed one that is not measured again for so long is doubled: a source that was
# slow while the machine was busy is tried again, the sooner the less slow it was.
AGING_SECONDS = 10.0
# Weight of a new rate in the moving average.
NEW_RATE_SHARE = 0.3


class SourceRates:
    """Moving averages, which go back to the assumed rate if nothing is measured for a while.

    Attributes:
        by_key: bytes per second by `ChunkSource.rate_key`.
        aged: the keys among them whose rate was doubled since it was measured.
    """

    def __init__(self, on_change: Callable[[Mapping[str, float]], None]) -> None:
        """`on_change` is called with all rates when one has changed."""
        self.by_key: dict[str, float] = {}
        self.aged: set[str] = set()
        self._on_change = on_change
        self._aging: dict[str, asyncio.TimerHandle] = {}

    def learn(self, key: str, result: FetchResult) -> None:
        """Let a rate follow the result of a fetch, if it was large enough to measure one."""
        if result.late_rate:
            # Else the next request would wait as long.
            self.by_key[key] = min(self.by_key.get(key, ASSUMED_BYTES_PER_SECOND), result.late_rate)
        elif result.bytes >= MEASURABLE_BYTES and result.rate > 0:
            before = self.by_key.get(key, result.rate)
            if before == ASSUMED_BYTES_PER_SECOND:  # aged back: nothing is known any more
                before = result.rate
            self.by_key[key] = before + NEW_RATE_SHARE * (result.rate - before)
        else:
            return
        self.aged.discard(key)
        self._changed(key)

    def forget(self, key: str) -> None:
        """Plan with the assumed rate again, or with that of another transfer."""
        self.aged.discard(key)
        if self.by_key.pop(key, None) is not None:
            self._changed(key)

    def close(self) -> None:
        """Let no rate age any more."""
        for timer in self._aging.values():
            timer.cancel()

    def _changed(self, key: str) -> None:
        """Let the rate age if nothing is measured for a while, and report all rates."""
        if (timer := self._aging.pop(key, None)) is not None:
            timer.cancel()
        if self.by_key.get(key, ASSUMED_BYTES_PER_SECOND) < ASSUMED_BYTES_PER_SECOND:
            loop = asyncio.get_running_loop()
            self._aging[key] = loop.call_later(AGING_SECONDS, self._age, key)
        self._on_change(self.by_key)

    def _age(self, key: str) -> None:
        self.by_key[key] = min(2 * self.by_key[key], ASSUMED_BYTES_PER_SECOND)
        self.aged.add(key)
        self._changed(key)
