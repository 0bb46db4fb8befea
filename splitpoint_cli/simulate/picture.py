"""A simulation as a picture: how long requests took, and what the devices did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from splitpoint.config import counted
from splitpoint_cli.plots import new_figure
from splitpoint_cli.simulate.outcome import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Points of a curve; more cannot be told apart.
_MOST_POINTS = 2_000


def picture_of(report: Mapping[str, Any], outcomes: Sequence[tuple[str, Outcome]]) -> Figure:
    """Draw the runs of a report. Raises MissingExtra without matplotlib."""
    figure = new_figure(12, 4.2)
    first, token, use = figure.subplots(1, 3)
    for name, outcome in outcomes:
        _draw_shares(first, name, outcome.ttft)
        _draw_shares(token, name, [each for each in outcome.tpot if each >= 0])
    first.set_xlabel("ms to the first token")
    token.set_xlabel("ms per token after it")
    first.legend(fontsize=8)
    _draw_use(use, report["runs"])
    devices = ", ".join(f"{count:,} {name}" for name, count in report["devices"].items())
    figure.suptitle(
        f"{report['model_id']} on {devices}, simulated: "
        f"{counted(report['num_prompts'], 'request')} of {report['trace']}, "
        f"{report['request_rate']:,.3g} a second",
        fontsize=10,
    )
    return figure


def _draw_shares(axes: Axes, name: str, seconds: Iterable[float]) -> None:
    """Draw the share of requests that a latency was enough for."""
    values = sorted(1e3 * each for each in seconds)
    step = max(1, len(values) // _MOST_POINTS)
    places = range(0, len(values), step)
    axes.step(
        [max(values[place], 1e-3) for place in places],
        [(place + 1) / len(values) for place in places],
        where="post",
        label=name,
    )
    axes.set_xscale("log")
    axes.set_ylim(0, 1)
    axes.set_ylabel("share of requests")
    axes.grid(linewidth=0.3)


def _draw_use(axes: Axes, runs: Sequence[Mapping[str, Any]]) -> None:
    keys = ("compute_use", "link_use", "memory_use", "fairness")
    width = 0.8 / len(runs)
    for index, run in enumerate(runs):
        places = [place + index * width for place in range(len(keys))]
        axes.bar(places, [run[key] for key in keys], width, label=run["policy"])
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(keys))])
    axes.set_xticklabels(["computing", "link", "cache", "fairness"])
    axes.set_ylim(0, 1.05)
    axes.grid(linewidth=0.3, axis="y")
