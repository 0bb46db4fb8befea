"""A circuit breaker for a peer that keeps failing. Pure: the caller gives the time.

While it is closed, every call may try. After some failures in a row it opens and no call
tries, so that none waits. After the open time, one call may probe (half open): its success
closes the breaker, its failure opens it again for twice as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class State(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half open"


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """Failures in a row that open the breaker; seconds that it stays open then."""

    failure_count: int = 3
    first_open_seconds: float = 1.0
    longest_open_seconds: float = 10.0


class Breaker:
    """The breaker of one peer.

    After each `True` from `may_try`, call `succeeded`, `failed` or `gave_up`.
    """

    def __init__(self, limits: BreakerLimits | None = None) -> None:
        self.state = State.CLOSED
        self._limits = limits or BreakerLimits()
        self._failures = 0
        self._open_seconds = self._limits.first_open_seconds
        self._opens_until = 0.0

    def may_try(self, now: float, *, is_heartbeat: bool = False) -> bool:
        """Return True if the peer may be called now. `now` is monotonic seconds.

        A heartbeat always may: it runs in the background, once a second at most, and so
        serves as a probe.
        """
        if self.state is State.OPEN and (now >= self._opens_until or is_heartbeat):
            self.state = State.HALF_OPEN
            return True
        return self.state is State.CLOSED or is_heartbeat

    def succeeded(self) -> None:
        self.state = State.CLOSED
        self._failures = 0
        self._open_seconds = self._limits.first_open_seconds

    def failed(self, now: float) -> None:
        self._failures += 1
        if self.state is State.CLOSED and self._failures < self._limits.failure_count:
            return
        if self.state is State.HALF_OPEN:
            longest = self._limits.longest_open_seconds
            self._open_seconds = min(2 * self._open_seconds, longest)
        if self.state is not State.OPEN:  # late failures do not extend it
            self.state = State.OPEN
            self._opens_until = now + self._open_seconds

    def gave_up(self, now: float) -> None:
        """Record a call that ended before an answer: it tells nothing about the peer."""
        if self.state is State.HALF_OPEN:
            self.state = State.OPEN
            self._opens_until = now
