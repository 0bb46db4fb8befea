"""When a dead service comes back, and when it is given up. Pure: no clock, no processes.

The times are the caller's: seconds on any one monotonic clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """How patient the policy is.

    Attributes:
        first_delay_seconds, longest_delay_seconds: the pause doubles from one to the other.
        good_seconds: who served this long starts over with the first delay.
        most_deaths, within_seconds: so many deaths within this time, and it is given up.
        first_retry_seconds, longest_retry_seconds: the pause before a given-up service is
            tried again doubles from one to the other.
    """

    first_delay_seconds: float = 0.5
    longest_delay_seconds: float = 30.0
    good_seconds: float = 60.0
    most_deaths: int = 5
    within_seconds: float = 120.0
    first_retry_seconds: float = 300.0
    longest_retry_seconds: float = 1800.0


@dataclass(frozen=True, slots=True)
class RestartAfter:
    """Start it again after a pause. `recent_deaths` counts this one too."""

    seconds: float
    recent_deaths: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do without the service.

    Attributes:
        reason: completes "X ended by SIGKILL, ..."; it may be empty.
        retry_seconds: when to try it again all the same, if the rest can serve without it.
    """

    reason: str
    retry_seconds: float = 0.0


class RestartPolicy:
    """The deaths of one service so far, and what follows from the next one.

    `limits` None: nothing is ever started again.
    """

    def __init__(self, limits: RestartLimits | None) -> None:
        self._limits = limits
        self._deaths: deque[float] = deque()
        self._last_delay = 0.0
        # The last pause of a service that was given up; 0: it is not.
        self._last_retry = 0.0

    def died(self, at: float, *, served_seconds: float) -> RestartAfter | GiveUp:
        """Decide after a death at `at`; it had served for `served_seconds` (0: never ready)."""
        limits = self._limits
        if limits is None:
            return GiveUp("")
        if served_seconds >= limits.good_seconds and self._last_retry:
            self._last_retry = 0.0
            self._deaths.clear()
        self._deaths.append(at)
        while self._deaths[0] <= at - limits.within_seconds:
            self._deaths.popleft()
        if self._last_retry:
            self._last_retry = min(2 * self._last_retry, limits.longest_retry_seconds)
            return GiveUp("given up again", self._last_retry)
        if len(self._deaths) >= limits.most_deaths:
            self._last_retry = limits.first_retry_seconds
            return GiveUp(
                f"given up after {len(self._deaths)} deaths within {limits.within_seconds:g} s",
                self._last_retry,
            )
        if not self._last_delay or served_seconds >= limits.good_seconds:
            self._last_delay = limits.first_delay_seconds
        else:
            self._last_delay = min(2 * self._last_delay, limits.longest_delay_seconds)
        return RestartAfter(self._last_delay, len(self._deaths))
