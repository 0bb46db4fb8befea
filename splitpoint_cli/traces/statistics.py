"""What a trace is like: its rate, its lengths, and how much of it was seen before."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from splitpoint_cli.traces.arrival import Arrival, Trace


@dataclass(frozen=True, slots=True)
class TraceStatistics:
    """Statistics of a trace.

    Attributes:
        request_rate: requests per second between the first and the last arrival.
        mean_input, mean_output: tokens.
        seen_share: part of all blocks that an earlier request had, too.
    """

    count: int
    request_rate: float
    mean_input: float
    mean_output: float
    seen_share: float


def describe(trace: Trace) -> TraceStatistics:
    """Return the statistics of a trace of at least one request."""
    arrivals = trace.arrivals
    count = len(arrivals)
    seconds = arrivals[-1].seconds - arrivals[0].seconds
    return TraceStatistics(
        count,
        (count - 1) / seconds if seconds else 0.0,
        sum(each.input_length for each in arrivals) / count,
        sum(each.output_length for each in arrivals) / count,
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
