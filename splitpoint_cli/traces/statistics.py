"""What a trace is like: its rate, its lengths, and how much of it was seen before."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from splitpoint_cli.traces.arrival import Arrival, Trace


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens: mean and quantiles."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class TraceStatistics:
    """Statistics of a trace.

    Attributes:
        request_rate: requests per second between the first and the last arrival.
        gap_cv: coefficient of variation of the gaps between arrivals; 1 for a Poisson process.
        seen_share: part of all blocks that an earlier request had, too.
    """

    count: int
    request_rate: float
    gap_cv: float
    input: Lengths
    output: Lengths
    seen_share: float


def describe(trace: Trace) -> TraceStatistics:
    """Return the statistics of a trace, which may be empty."""
    arrivals = trace.arrivals
    times = [each.seconds for each in arrivals]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return TraceStatistics(
        len(arrivals),
        1 / _mean(gaps) if sum(gaps) else 0.0,
        _variation(gaps),
        _lengths([each.input_length for each in arrivals]),
        _lengths([each.output_length for each in arrivals]),
        seen_share(arrivals),
    )


def seen_share(arrivals: Iterable[Arrival]) -> float:
    """Return the part of all blocks that an earlier request had; 0 if there are no blocks."""
    known: set[int] = set()
    total = seen = 0
    for each in arrivals:
        total += len(each.hash_ids)
        seen += sum(block in known for block in each.hash_ids)
        known.update(each.hash_ids)
    return seen / total if total else 0.0


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of sorted values, between its neighbours linearly; 0 for no values."""
    if not ordered:
        return 0.0
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _lengths(values: Sequence[int]) -> Lengths:
    ordered = sorted(values)
    return Lengths(_mean(ordered), *(quantile(ordered, share) for share in (0.5, 0.9, 0.99)))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _variation(gaps: Sequence[float]) -> float:
    mean = _mean(gaps)
    if not mean:
        return 0.0
    return math.sqrt(_mean([(gap - mean) ** 2 for gap in gaps])) / mean
