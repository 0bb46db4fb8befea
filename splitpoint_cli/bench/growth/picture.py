"""A growth benchmark as a picture: time over the bucket for each point, and growths over N."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from splitpoint.config import counted
from splitpoint_cli.bench.growth.report import Growth
from splitpoint_cli.plots import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {Growth.MASKED: "#d62728", Growth.SLICED: "#2ca02c", Growth.PAGES: "#1f77b4"}
_LABELS = {
    Growth.MASKED: "buckets behind a mask",
    Growth.SLICED: "buckets, a slice is read",
    Growth.PAGES: "our pages",
}
_MARKS = "os^Dv"


def picture_of(report: Mapping[str, Any]) -> Figure:
    """Draw the JSON object. Raises MissingExtra without matplotlib."""
    points = report["points"]
    figure = new_figure(4.2 * (len(points) + 1), 4.4)
    *curves, growths = figure.subplots(1, len(points) + 1)
    for axes, point in zip(curves, points, strict=True):
        _draw_point(axes, point)
    curves[0].legend(fontsize=7)
    _draw_growths(growths, points)
    figure.suptitle(
        f"{report['shape']} {report['dtype']}, attention of {report['layers']} layers after "
        f"{report['prompt']} rows, {report['hardware']}, {counted(report['threads'], 'thread')}, "
        f"{report['clock']} time; points: "
        f"medians of {report['repeats']} rounds, lines: the model",
        fontsize=10,
    )
    return figure


def _draw_point(axes: Axes, point: Mapping[str, Any]) -> None:
    """Draw measured sizes as points and the model as lines, in milliseconds a token."""
    for kind in Growth:
        found = point["growth"][kind.value]
        sizes = [each["size"] for each in found["sizes"]]
        scale = 1e3 / point["new"]
        colour = _COLOURS[kind]
        axes.plot(
            sizes,
            [scale * each["seconds"] for each in found["sizes"]],
            "o",
            color=colour,
            label=f"{_LABELS[kind]}, measured",
        )
        axes.plot(
            sizes,
            [scale * each["predicted_seconds"] for each in found["sizes"]],
            "-",
            color=colour,
            alpha=0.6,
        )
        if kind is not Growth.SLICED:
            axes.axvline(found["model"], color=colour, linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("r: rows of a bucket or page (dashed: the model's best)")
    axes.set_ylabel("ms a token")
    axes.set_title(f"{point['batch']} x {point['new']:,} tokens", fontsize=10)
    axes.grid(linewidth=0.3)


def _draw_growths(axes: Axes, points: Sequence[Mapping[str, Any]]) -> None:
    """Draw T, the growths at the best r, over N: measured, and the model's line."""
    batches = sorted({point["batch"] for point in points})
    for index, batch in enumerate(batches):
        mine = sorted(
            (point for point in points if point["batch"] == batch), key=lambda each: each["new"]
        )
        masked = [point["growth"][Growth.MASKED.value] for point in mine]
        news = [point["new"] for point in mine]
        colour = f"C{index}"
        axes.plot(
            news,
            [new / each["best"] for new, each in zip(news, masked, strict=True)],
            _MARKS[index % len(_MARKS)],
            color=colour,
            label=f"batch {batch}, measured",
        )
        axes.plot(
            news,
            [new / each["model"] for new, each in zip(news, masked, strict=True)],
            "-",
            color=colour,
            alpha=0.6,
            label=f"batch {batch}, model",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("N: new tokens")
    axes.set_ylabel("T = N / r at the best r")
    axes.set_title("growths: T ~ sqrt(N)", fontsize=10)
    axes.grid(linewidth=0.3)
    axes.legend(fontsize=7)
