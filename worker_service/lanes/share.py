"""Shares link and compute among restores, and between restores and the steps beside them.

Of several restores the one with the largest saving per second goes first: seconds that it
spares its request, by the seconds of link and compute that it still needs. A restore that
waits gains claim with time, so none starves. Steps and restores share a lane by the seconds
that each used it. Restores compute between steps for a fixed share of the time.

This module reads no clock and knows no lanes: callers pass seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# The share of the time that restores compute between steps while other requests decode.
COMPUTE_SHARE = 0.1
# Seconds of compute that are saved up at most: the longest pause of a decoding request,
# beside that of a single product.
MOST_SAVED_SECONDS = 0.02
# Below it, what a restore still needs is not known any better.
_LEAST_SECONDS = 1e-3


@dataclass(frozen=True, slots=True)
class Claim:
    """A restore's claim on a lane, in seconds.

    Attributes:
        saved: what the restore spares its request, against computing the prefix.
        left: what link and compute still need for it.
        waited: how long ago the lane did its last piece, or since it began to wait.
    """

    saved: float
    left: float
    waited: float = 0.0

    @property
    def saving_per_second(self) -> float:
        """The saving for a second of work; each second of waiting counts as one saved."""
        return (max(0.0, self.saved) + self.waited) / max(self.left, _LEAST_SECONDS)


def by_claim(claims: Sequence[Claim]) -> list[int]:
    """Return the indices of the claims, the largest saving per second first."""
    return sorted(range(len(claims)), key=lambda index: -claims[index].saving_per_second)


class LaneShare:
    """Decides whether a step's work or a restore's is next in a lane, if both have some.

    The side with less time in the lane is next, so each gets half while both have work. Time
    that one side used alone does not count against it later.
    """

    def __init__(self) -> None:
        self._steps_ahead = 0.0

    @property
    def steps_are_next(self) -> bool:
        return self._steps_ahead <= 0

    def used(self, seconds: float, *, by_step: bool) -> None:
        """Count the seconds of a piece."""
        self._steps_ahead += seconds if by_step else -seconds

    def alone(self) -> None:
        """Note that the other side has no work: both begin anew."""
        self._steps_ahead = 0.0


class ComputeShare:
    """The compute that restores may do between steps: a bucket of seconds."""

    def __init__(
        self, share: float = COMPUTE_SHARE, most_saved: float = MOST_SAVED_SECONDS
    ) -> None:
        if not 0 < share <= 1 or most_saved <= 0:
            raise ValueError("a share of the time is in (0, 1], and some of it can be saved up")
        self._share = share
        self._most_saved = most_saved
        self._saved = most_saved

    @property
    def has_seconds(self) -> bool:
        """True if a product may run. It may take more than is saved: that is paid back first."""
        return self._saved > 0

    def pass_time(self, seconds: float) -> None:
        """Add the share of the seconds that have passed."""
        self._saved = min(self._most_saved, self._saved + self._share * seconds)

    def spend(self, seconds: float) -> None:
        """Take away the seconds of a product."""
        self._saved -= seconds
