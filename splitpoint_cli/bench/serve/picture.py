"""A load as a picture: what came when, and how the latencies are distributed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from splitpoint_cli.bench.serve import measures
from splitpoint_cli.bench.serve.load import Record
from splitpoint_cli.plots import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def picture_of(report: Mapping[str, Any], records: Sequence[Record]) -> Figure:
    """Draw a run. Raises MissingExtra without matplotlib."""
    figure = new_figure(12, 4.2)
    rates, latencies, waits = figure.subplots(1, 3)
    _draw_rates(rates, records)
    _draw_distribution(latencies, records)
    _draw_first_tokens(waits, records)
    figure.suptitle(
        f"{report['model_id']} behind {report['backend']}: {report['completed']:,} of "
        f"{report['num_prompts']:,} requests, {report['output_throughput']:,.0f} output tokens/s, "
        f"{report['hardware']}",
        fontsize=10,
    )
    return figure


def _draw_rates(axes: Axes, records: Sequence[Record]) -> None:
    """Draw output tokens of each second, and requests under way."""
    tokens: Counter[int] = Counter()
    for record in records:
        for when, count in zip(record.times, record.counts, strict=True):
            tokens[int(when)] += count
    seconds = range(max(tokens, default=0) + 1)
    axes.step(
        [*seconds], [tokens[second] for second in seconds], where="post", label="output tokens/s"
    )
    under_way = axes.twinx()
    times = sorted((at, step) for r in records for at, step in ((r.sent, 1), (r.ended, -1)))
    counts, now = [], 0
    for _, step in times:
        now += step
        counts.append(now)
    under_way.step(
        [at for at, _ in times], counts, where="post", color="C1", linewidth=0.8, alpha=0.7
    )
    under_way.set_ylabel("requests under way", color="C1")
    under_way.set_ylim(bottom=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds")
    axes.set_ylabel("output tokens/s", color="C0")
    axes.grid(linewidth=0.3)


def _draw_distribution(axes: Axes, records: Sequence[Record]) -> None:
    """Draw the share of requests that a latency was enough for."""
    done = [record for record in measures.completed(records) if record.times]
    for name, measure in (
        ("first token", measures.ttft_ms),
        ("each token after it", measures.tpot_ms),
        ("whole answer", measures.e2el_ms),
    ):
        values = sorted(map(measure, done))
        shares = [(place + 1) / len(values) for place in range(len(values))]
        axes.step(values, shares, where="post", label=name)
    axes.set_xscale("log")
    axes.set_ylim(0, 1)
    axes.set_xlabel("ms")
    axes.set_ylabel("share of requests")
    axes.grid(linewidth=0.3)
    axes.legend(fontsize=8)


def _draw_first_tokens(axes: Axes, records: Sequence[Record]) -> None:
    """Draw the time to the first token over the moment at which a request was due."""
    done = [record for record in measures.completed(records) if record.times]
    axes.plot(
        [record.due for record in done],
        [measures.ttft_ms(record) for record in done],
        ".",
        markersize=3,
        alpha=0.6,
    )
    failed = [record.due for record in records if record.error]
    if failed:
        axes.plot(failed, [0.0] * len(failed), "x", color="C3", label="failed")
        axes.legend(fontsize=8)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("due after seconds")
    axes.set_ylabel("ms to the first token")
    axes.grid(linewidth=0.3)
