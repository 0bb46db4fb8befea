"""Rates of loads from tiers: the measured one, and the largest that is allowed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

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
