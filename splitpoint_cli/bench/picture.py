"""A restore benchmark as a picture: time over the split, or the contenders side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from splitpoint.config import format_rate
from splitpoint_cli.bench.restore_report import LOAD
from splitpoint_cli.plots import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {"column": "#d62728", "pipelined": "#1f77b4"}
_LABELS = {"column": "sequential (KVPR)", "pipelined": "pipelined"}


def picture_of(report: Mapping[str, Any]) -> Figure:
    """Draw the JSON object. Raises FailedPrecondition without matplotlib."""
    figure = new_figure(13, 5)
    curves, bars = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_sweep(curves, report)
    _draw_contenders(bars, report)
    rate = report["link_rate"]
    link = f", link emulated at {format_rate(rate)}" if rate else ""
    figure.suptitle(
        f"{report['shape']} {report['dtype']}, {report['batch']} x {report['prompt']} cached "
        f"tokens, {report['hardware']}, {report['threads']} threads{link}",
        fontsize=10,
    )
    return figure


def _draw_sweep(axes: Axes, report: Mapping[str, Any]) -> None:
    """Draw measured points and the planner's lines, one colour for each schedule."""
    for schedule, colour in _COLOURS.items():
        points = [point for point in report["sweep"] if point["schedule"] == schedule]
        if not points:
            continue
        splits = [point["split"] for point in points]
        label = _LABELS[schedule]
        axes.plot(
            splits,
            [point["seconds"] for point in points],
            "o",
            color=colour,
            label=f"{label}, measured",
        )
        axes.plot(
            splits,
            [point["predicted_seconds"] for point in points],
            "-",
            color=colour,
            alpha=0.6,
            label=f"{label}, predicted",
        )
    load = report["contenders"][LOAD]["seconds"]
    axes.axhline(load, color="black", linewidth=0.8, linestyle="--", label=f"{LOAD}, measured")
    axes.set_xlabel("split: tokens rebuilt from activations")
    axes.set_ylabel("seconds")
    axes.set_ylim(bottom=0)
    axes.grid(linewidth=0.3)
    axes.legend(fontsize=8)


def _draw_contenders(axes: Axes, report: Mapping[str, Any]) -> None:
    """Draw one bar for each contender, the first on top."""
    names = list(report["contenders"])
    seconds = [report["contenders"][name]["seconds"] for name in names]
    bars = axes.barh(range(len(names)), seconds, color="#7f7f7f")
    axes.bar_label(bars, [f"{value:.3g} s" for value in seconds], padding=3, fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(seconds))
    axes.set_xlabel("seconds, median")
