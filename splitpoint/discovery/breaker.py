"""When to leave a peer alone that keeps failing. Pure: the caller brings the time.

Closed, every call may try. After some failures in a row it opens: nobody tries,
so nobody waits. Once the open time is over one caller may probe (half open); its
success closes the breaker, its failure opens it again for twice as long.
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
    """Failures in a row that open it; seconds that it then stays open."""

    failure_count: int = 3
    first_open_seconds: float = 1.0
    longest_open_seconds: float = 10.0


class Breaker:
    """One peer's. Every `True` of `may_try` must be followed by `succeeded`, `failed` or
    `gave_up`.

    Attributes:
        state: for people and tests.
    """

    def __init__(self, limits: BreakerLimits | None = None) -> None:
        self.state = State.CLOSED
        self._limits = limits or BreakerLimits()
        self._failures = 0
        self._open_seconds = self._limits.first_open_seconds
        self._opens_until = 0.0

    def may_try(self, now: float, *, is_heartbeat: bool = False) -> bool:
        """Whether to call the peer now. `now` is monotonic seconds.

        A heartbeat always may: it runs in the background where nobody waits for
        it, comes once a second at most, and is thus a probe by nature.
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
        if self.state is not State.OPEN:  # late failures do not prolong it
            self.state = State.OPEN
            self._opens_until = now + self._open_seconds

    def gave_up(self, now: float) -> None:
        """The caller left before there was an answer: that tells nothing about the peer."""
        if self.state is State.HALF_OPEN:
            self.state = State.OPEN
            self._opens_until = now
