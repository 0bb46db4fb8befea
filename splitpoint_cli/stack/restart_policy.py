"""The policy of restarts: when a dead service starts again, and when it is given up.

Pure: no clock, no processes. Times are the caller's, in seconds of one monotonic clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """Limits of the policy.

    Attributes:
        first_delay_seconds, longest_delay_seconds: the pause doubles from one to the other.
        good_seconds: a service that served this long starts over with the first delay.
        most_deaths, within_seconds: number of deaths within this time at which it is given up.
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
    """Decision to start the service again after a pause; `recent_deaths` includes this one."""

    seconds: float
    recent_deaths: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Decision to go on without the service.

    Attributes:
        reason: completes "X ended by SIGKILL, ..."; may be empty.
        retry_seconds: pause before the next attempt, if the stack can serve without it.
    """

    reason: str
    retry_seconds: float = 0.0


class RestartPolicy:
    """The recent deaths of one service, and the decision after the next one.

    With `limits` None no service is started again.
    """

    def __init__(self, limits: RestartLimits | None) -> None:
        self._limits = limits
        self._deaths: deque[float] = deque()
        self._last_delay = 0.0
        # The last pause of a given-up service; 0 if it is not given up.
        self._last_retry = 0.0

    def died(self, at: float, *, served_seconds: float) -> RestartAfter | GiveUp:
        """Decide after a death at `at`, after `served_seconds` of service (0: never ready)."""
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
