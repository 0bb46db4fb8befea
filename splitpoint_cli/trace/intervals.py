"""Stretches of time: where some work went on, where nothing did, where two things did at once.

Plain pairs (begin, end) in seconds, begin < end. Knows no spans and no pictures.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """What at least one of them covers, in order, without overlaps."""
    covered: list[Interval] = []
    for begin, end in sorted(intervals):
        if covered and begin <= covered[-1][1]:
            covered[-1] = (covered[-1][0], max(covered[-1][1], end))
        else:
            covered.append((begin, end))
    return covered


def gaps_between(covered: Sequence[Interval], longer_than: float) -> list[Interval]:
    """Between stretches that `merged` gave, those of more seconds than that."""
    pairs = itertools.pairwise(covered)
    return [(before[1], after[0]) for before, after in pairs if after[0] - before[1] > longer_than]


def seconds_in_both(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """Seconds that both cover; each as `merged` gives it."""
    seconds, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        seconds += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return seconds
