"""Figures of a load from its records, under the keys of `vllm bench serve`. Pure.

Latencies are in milliseconds, from the moment at which a request was due. A token's gap (itl) is
that of its message: tokens that came together have one gap.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from splitpoint_cli.bench.serve.load import Record
from splitpoint_cli.bench.serve.workload import Figures
from splitpoint_cli.traces.statistics import quantile


def completed(records: Iterable[Record]) -> list[Record]:
    return [record for record in records if not record.error]


def ttft_ms(record: Record) -> float:
    """Return the time to the first token."""
    return 1e3 * (record.times[0] - record.due) if record.times else 0.0


def tpot_ms(record: Record) -> float:
    """Return the mean time of a token after the first; 0 if there was only one."""
    tokens = record.output_tokens
    if tokens < 2:
        return 0.0
    return 1e3 * (record.times[-1] - record.times[0]) / (tokens - 1)


def e2el_ms(record: Record) -> float:
    """Return the time to the whole answer."""
    return 1e3 * (record.ended - record.due)


def itls_ms(record: Record) -> list[float]:
    """Return the gaps between messages."""
    return [
        1e3 * (after - before)
        for before, after in zip(record.times, record.times[1:], strict=False)
    ]


def is_good(record: Record, goals: Mapping[str, float]) -> bool:
    """Return whether an answer keeps all goals."""
    measured = {"ttft": ttft_ms, "tpot": tpot_ms, "e2el": e2el_ms}
    return all(measured[metric](record) <= limit for metric, limit in goals.items())


def throughput(records: Sequence[Record], figures: Figures) -> dict[str, Any]:
    """Return counts and rates. Failed requests count in nothing but `failed`."""
    done = completed(records)
    seconds = max((record.ended for record in records), default=0.0)
    prompt = sum(len(record.sample.prompt) for record in done)
    output = sum(record.output_tokens for record in done)
    good = sum(is_good(record, figures.goals) for record in done)

    def rate(count: int) -> float:
        return count / seconds if seconds else 0.0

    return {
        "duration": seconds,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": rate(len(done)),
        "request_goodput": rate(good) if figures.goals else None,
        "output_throughput": rate(output),
        "total_token_throughput": rate(prompt + output),
        "max_output_tokens_per_s": _most_in_a_second(done),
        "max_concurrent_requests": _most_at_once(records),
    }


def _most_in_a_second(records: Iterable[Record]) -> float:
    """Return the most tokens that came within one second of the clock."""
    found: Counter[int] = Counter()
    for record in records:
        for when, count in zip(record.times, record.counts, strict=True):
            found[int(when)] += count
    return float(max(found.values(), default=0))


def _most_at_once(records: Iterable[Record]) -> int:
    """Return the most requests that were under way at a time."""
    # An end comes before a start at the same moment.
    changes = sorted((at, step) for r in records for at, step in ((r.sent, 1), (r.ended, -1)))
    most = now = 0
    for _, step in changes:
        now += step
        most = max(most, now)
    return most


def latencies(records: Sequence[Record], figures: Figures) -> dict[str, float]:
    """Return mean, median, deviation and percentiles of each wanted metric."""
    done = [record for record in completed(records) if record.times]
    values = {
        "ttft": [ttft_ms(record) for record in done],
        "tpot": [tpot_ms(record) for record in done if record.output_tokens > 1],
        "itl": [gap for record in done for gap in itls_ms(record)],
        "e2el": [e2el_ms(record) for record in done],
    }
    found: dict[str, float] = {}
    for metric in figures.metrics:
        found |= distribution(metric, values[metric], figures.percentiles)
    return found


def distribution(
    metric: str, values: Sequence[float], percentiles: Iterable[float]
) -> dict[str, float]:
    """Return `mean_<metric>_ms` and so on; zeros of no values."""
    ordered = sorted(values)
    found = {
        f"mean_{metric}_ms": statistics.fmean(ordered) if ordered else 0.0,
        f"median_{metric}_ms": quantile(ordered, 0.5),
        f"std_{metric}_ms": statistics.pstdev(ordered) if ordered else 0.0,
    }
    for percent in percentiles:
        name = f"{percent:g}"
        found[f"p{name}_{metric}_ms"] = quantile(ordered, percent / 100)
    return found
