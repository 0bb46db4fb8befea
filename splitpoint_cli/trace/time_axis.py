"""Where moments lie on a picture's axis when long idle stretches are cut short.

A trace of some restores among minutes of waiting would be a line of dots. Stretches of
work keep their scale; an idle one of seconds keeps a little width, for a mark. Pure:
knows no spans and no matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from splitpoint_cli.trace.intervals import Interval, gaps_between

# Seconds of idling that are still drawn to scale.
LONGEST_IDLE = 1.0
# What one cut takes of the width that work has, and what all together may take.
_CUT_SHARE = 0.02
_ALL_CUTS_SHARE = 0.2
_TICKS = 8


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """From `first` to `last`, seconds, with each of `cuts` drawn `cut_width` seconds wide.

    Cuts are in order, apart from each other, and wider than `cut_width`.
    """

    first: float
    last: float
    cuts: tuple[Interval, ...] = ()
    cut_width: float = 0.0

    @classmethod
    def around(cls, covered: Sequence[Interval]) -> TimeAxis:
        """From the first work to the last; `covered` as `merged` gives it, at least one."""
        first, last = covered[0][0], covered[-1][1]
        idle = gaps_between(covered, LONGEST_IDLE)
        if not idle:
            return cls(first, last)
        work = last - first - sum(end - begin for begin, end in idle)
        width = work * min(_CUT_SHARE, _ALL_CUTS_SHARE / len(idle))
        return cls(first, last, tuple((b, e) for b, e in idle if e - b > width), width)

    def position(self, moment: float) -> float:
        """Where it is drawn: itself before the first cut, earlier by what was cut after."""
        at = moment
        for begin, end in self.cuts:
            if moment >= end:
                at -= end - begin - self.cut_width
            elif moment > begin:
                at -= (moment - begin) * (1 - self.cut_width / (end - begin))
        return at

    @property
    def width(self) -> float:
        return self.position(self.last) - self.position(self.first)

    def ticks(self) -> list[float]:
        """Round moments outside the cuts, about eight for all."""
        step = _round_step(self.width / _TICKS)
        ends = [self.first, *(edge for cut in self.cuts for edge in cut), self.last]
        return [
            number * step
            for begin, end in zip(ends[::2], ends[1::2], strict=True)
            for number in range(math.ceil(begin / step), math.floor(end / step) + 1)
        ]


def _round_step(least: float) -> float:
    """1, 2 or 5 times a power of ten, not under that."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)
