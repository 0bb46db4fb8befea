"""Groups of work: the pieces of one restore, which lanes do beside the work of steps.

A group's copies are drawn piece by piece, by the thread of the lane that has time for them.
Pieces, spans and errors of a group are its own: a step never waits for them or raises them.
The owner polls a group and is called when it changed; it waits only where nothing else can
go on. This module knows neither restores nor devices.

Groups share link and compute with each other and with the steps beside them. Of several restores
the one with the largest saving per second goes first: seconds that it spares its request, by the
seconds of link and compute that it still needs. A restore that waits gains claim with time, so none
starves. Steps and restores share a lane by the seconds that each used it. Restores compute between
steps for a fixed share of the time. The sharing reads no clock: callers pass seconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from worker_service.lanes.timeline import Span
from worker_service.lanes.work import Work

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


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of a group's work.

    Attributes:
        ended: called once the work is done, while the group is locked.
        ready: when the work could begin, by `time.perf_counter`.
    """

    work: Work
    ended: Callable[[], None]
    ready: float = 0.0


# Returns the next piece for the link; None: there is none for now. The group is locked.
Draw = Callable[[], Piece | None]


def _nothing() -> None:
    """Ignore the change of a group whose owner waits for it."""


class Group:
    """The work of one restore.

    Attributes:
        changed: locks the state of `draw` and the group; notified at each change.
        claim: the restore's claim on the link; the owner updates it.
        error: the first error of a piece; None if there was none. Nothing is drawn after it.
    """

    def __init__(self, draw: Draw, on_change: Callable[[], None] | None = None) -> None:
        """`on_change`, if given, is called from any thread after each piece; it must not wait."""
        self.changed = threading.Condition()
        self.claim = Claim(0.0, 0.0)
        self.error: BaseException | None = None
        self._draw = draw
        self._on_change = on_change or _nothing
        self._is_closed = False
        self._under_way = 0
        self._has_more = True
        self._spans: list[Span] = []
        self._served = time.perf_counter()

    # -- for the owner ----------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """True if `close` was called."""
        with self.changed:
            return self._is_closed

    @property
    def is_open(self) -> bool:
        """True if more work of the group may begin."""
        with self.changed:
            return not (self._is_closed or self.error is not None)

    @property
    def is_quiet(self) -> bool:
        """True if no piece is under way."""
        with self.changed:
            return not self._under_way

    def close(self) -> None:
        """Draw nothing any more. Pieces may still be under way until `is_quiet`."""
        with self.changed:
            self._is_closed = True

    def take_spans(self) -> list[Span]:
        """Return the spans of the pieces that ended since the last call."""
        with self.changed:
            spans, self._spans = self._spans, []
            return spans

    def wait_quiet(self) -> None:
        """Wait until no piece is under way."""
        with self.changed:
            self.changed.wait_for(lambda: not self._under_way)

    # -- for the lanes ------------------------------------------------------------------

    def draw(self) -> Piece | None:
        """Return the next piece for the link, which is under way from now on."""
        with self.changed:
            if not self.is_open:
                return None
            try:
                piece = self._draw()
            except Exception as error:
                self.error, piece = error, None
            if piece is not None:
                self._under_way += 1
                self._has_more = True
            elif self._has_more or self.error is not None:
                # That nothing is left to draw is news, too, and so is an error.
                self._has_more = False
                self.changed.notify_all()
                self._on_change()
            return piece

    def begin(self) -> None:
        """Count a piece that its owner gives to a lane."""
        with self.changed:
            self._under_way += 1

    def end(self, piece: Piece, span: Span) -> None:
        """Note that a piece is done."""
        with self.changed:
            self._under_way -= 1
            self._spans.append(span)
            self._served = span.end
            piece.ended()
            self.changed.notify_all()
        self._on_change()

    def fail(self, error: BaseException) -> None:
        """Note that a piece ended with an error."""
        with self.changed:
            self._under_way -= 1
            if self.error is None:
                self.error = error
            self.changed.notify_all()
        self._on_change()

    def claim_at(self, now: float) -> Claim:
        """Return the claim with the time since the link did the last piece."""
        return Claim(self.claim.saved, self.claim.left, max(0.0, now - self._served))


def draw_first(groups: Sequence[Group]) -> tuple[Group, Piece] | None:
    """Draw a piece from the group with the largest claim that has one; None if none has."""
    now = time.perf_counter()
    for index in by_claim([group.claim_at(now) for group in groups]):
        piece = groups[index].draw()
        if piece is not None:
            return groups[index], piece
    return None
