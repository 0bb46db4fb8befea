"""Latencies of a load as a report has them, under the keys of `vllm bench serve`, and their goals.

Pure: the simulator and `benchmarks.load` report the same figures.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from splitpoint.errors import InvalidArgument
from splitpoint_cli.traces.statistics import quantile

# Metrics of a request that may have a goal, in milliseconds.
GOALS = ("ttft", "tpot", "e2el")
PERCENTILES = (90.0, 99.0)


def distribution(
    metric: str, values: Iterable[float], percentiles: Sequence[float] = PERCENTILES
) -> dict[str, float]:
    """Return `mean_<metric>_ms` and so on; zeros if there are no values."""
    ordered = sorted(values)
    found = {
        f"mean_{metric}_ms": statistics.fmean(ordered) if ordered else 0.0,
        f"median_{metric}_ms": quantile(ordered, 0.5),
        f"std_{metric}_ms": statistics.pstdev(ordered) if ordered else 0.0,
    }
    for percent in percentiles:
        found[f"p{percent:g}_{metric}_ms"] = quantile(ordered, percent / 100)
    return found


def read_goals(words: Iterable[str]) -> dict[str, float]:
    """Return the goals of words such as "ttft:500", in milliseconds. Raises InvalidArgument."""
    goals: dict[str, float] = {}
    for word in (part for text in words for part in text.replace(",", " ").split()):
        metric, _, limit = word.partition(":")
        try:
            milliseconds = float(limit)
        except ValueError:
            milliseconds = -1.0
        if metric not in GOALS or not 0 <= milliseconds < math.inf:
            raise InvalidArgument(
                f"{word!r} is no goal: ttft:500 asks for a first token within 500 ms; there are "
                f"{', '.join(GOALS)}",
                field="goodput",
            )
        goals[metric] = milliseconds
    return goals
