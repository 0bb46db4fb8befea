"""Busy time of each lane in a window of a trace, and of lanes at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from splitpoint.planning.schedule import Lane
from worker_service.lanes.timeline import Span

# Begin and end in seconds, begin < end.
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a trace to look at, in seconds from its first span."""

    first: float
    last: float

    @property
    def seconds(self) -> float:
        return self.last - self.first

    def part_of(self, span: Span) -> float:
        """Return the span's seconds inside the window."""
        return max(0.0, min(span.end, self.last) - max(span.start, self.first))

    def intervals_of(self, spans: Iterable[Span]) -> list[Interval]:
        """Return the parts of the spans inside the window."""
        return [
            (max(span.start, self.first), min(span.end, self.last))
            for span in spans
            if self.part_of(span) > 0
        ]

    @classmethod
    def around(cls, spans: Sequence[Span]) -> Window:
        """Return the window of all spans; there is at least one."""
        return cls(min(span.start for span in spans), max(span.end for span in spans))


@dataclass(frozen=True, slots=True)
class LaneUse:
    """A lane's work in a window. `amount` is in bytes, on the compute lane in FLOP."""

    lane: Lane
    pieces: int
    busy_seconds: float
    busy_share: float
    amount: float


def lane_uses(spans: Sequence[Span], window: Window) -> list[LaneUse]:
    """Return the lanes that worked in the window, in their usual order."""
    uses = []
    for lane in Lane:
        inside = [span for span in spans if span.lane is lane and window.part_of(span) > 0]
        if inside:
            busy = sum(window.part_of(span) for span in inside)
            amount = sum(span.amount * window.part_of(span) / span.seconds for span in inside)
            uses.append(LaneUse(lane, len(inside), busy, busy / window.seconds, amount))
    return uses


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return what at least one interval covers, in order and without overlaps."""
    covered: list[Interval] = []
    for begin, end in sorted(intervals):
        if covered and begin <= covered[-1][1]:
            covered[-1] = (covered[-1][0], max(covered[-1][1], end))
        else:
            covered.append((begin, end))
    return covered


def seconds_in_both(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """Return the seconds that both cover; each as `merged` gives it."""
    seconds, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        seconds += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return seconds
