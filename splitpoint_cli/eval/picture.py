"""An evaluation as a picture: perplexity and distant tokens against the KV that is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from splitpoint.selection import Selection
from splitpoint.words import counted
from splitpoint_cli.plots import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKS = "os^Dv<>ph*"
_TICKS = (1, 2, 5, 10, 20, 50, 100)
_SCREENED_BY = {"own": "a layer's own query", "previous": "the residual before the previous layer"}


def picture_of(report: Mapping[str, Any]) -> Figure:
    """Draw the JSON object. Raises MissingExtra without matplotlib."""
    figure = new_figure(13, 5)
    left, right = figure.subplots(1, 2)
    _draw(left, report, "perplexity_over_full", interval="interval")
    # Linear below a tenth of a percent, where a selection may be better than full attention.
    left.set_yscale("symlog", linthresh=0.1)
    left.set_ylabel("perplexity over full attention, %")
    left.axhline(0, color="black", linewidth=0.8)
    left.legend(fontsize=7)
    _draw(right, report, "far_right")
    right.set_ylabel("distant tokens still right, %")
    figure.suptitle(
        f"{report['model']} {report['dtype']}, {report['windows']} texts of "
        f"{counted(report['tokens'], 'token')}, screened by {_SCREENED_BY[report['guess']]}",
        fontsize=10,
    )
    return figure


def _draw(axes: Axes, report: Mapping[str, Any], measure: str, interval: str | None = None) -> None:
    """Draw one curve for each screen: its ratios joined, other budgets as single points.

    `interval`: has the bounds of the measure, drawn as a bar; None: no bars.
    """
    curves: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for each in report["selections"]:
        if each["method"] != "full" and each[measure] is not None:
            bounds = each[interval] if interval else (each[measure],) * 2
            point = (each["screened_ratio"], each[measure], *bounds)
            curves[_screen_of(each["selection"])].append(tuple(100 * value for value in point))
    for number, (name, points) in enumerate(curves.items()):
        ratios, values, lows, highs = zip(*sorted(points), strict=True)
        if interval:
            axes.vlines(ratios, lows, highs, color=f"C{number}", linewidth=0.8, alpha=0.5)
        # Colours repeat after ten; marks then differ.
        mark = _MARKS[(number + number // 10) % len(_MARKS)]
        axes.plot(ratios, values, f"{mark}-", color=f"C{number}", label=name, linewidth=1)
    axes.set_xscale("log")
    axes.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
    axes.minorticks_off()
    axes.set_xlabel("tokens read, % of the visible ones, layers that select")
    axes.grid(linewidth=0.3)


def _screen_of(text: str) -> str:
    """Return a selection's text without its ratio."""
    selection = Selection.parsed(text)
    return (
        text
        if selection.ratio is None
        else text.replace(f":{selection.ratio!r}", ":", 1).rstrip(":").replace(":,", ", ")
    )
