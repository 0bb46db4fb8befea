"""An evaluation as a picture: perplexity and changed choices against the KV that is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from splitpoint.config import counted
from splitpoint.selection import Selection
from splitpoint_cli.plots import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKS = "os^Dv<>ph*"
_TICKS = (1, 2, 5, 10, 20, 50, 100)
_SCREENED_BY = {"own": "a layer's own query", "previous": "the residual before the previous layer"}


def picture_of(report: Mapping[str, Any]) -> Figure:
    """Draw the JSON object. Raises MissingExtra without matplotlib."""
    figure = new_figure(14, 5)
    left, right = figure.subplots(1, 2)
    selections = [each for each in report["selections"] if each["method"] != "full"]
    _draw(left, selections, lambda each: (each["perplexity_over_full"], *each["interval"]))
    # Linear below a tenth of a percent, where a selection may be better than full attention.
    left.set_yscale("symlog", linthresh=0.1)
    left.set_ylabel("perplexity over full attention, %, and its 95 % interval")
    left.axhline(0, color="black", linewidth=0.8)
    _draw(right, selections, lambda each: (1 - each["agreement"],) * 3)
    right.set_yscale("log")
    right.set_ylabel("greedy choices unlike those of full attention, %")
    for axes in (left, right):
        axes.yaxis.set_major_formatter("{x:g}")
    figure.legend(*left.get_legend_handles_labels(), loc="outside right upper", fontsize=7)
    figure.suptitle(
        f"{report['model']} {report['dtype']}, {report['windows']} texts of "
        f"{counted(report['tokens'], 'token')}, screened by {_SCREENED_BY[report['guess']]}",
        fontsize=10,
    )
    return figure


def _draw(
    axes: Axes,
    selections: Sequence[Mapping[str, Any]],
    measured: Callable[[Mapping[str, Any]], tuple[float, float, float]],
) -> None:
    """Draw one curve for each screen: its ratios joined, other budgets as single points.

    `measured`: returns a selection's value with its bounds, drawn as a bar.
    """
    curves: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    for each in selections:
        point = (each["screened_ratio"], *measured(each))
        curves[_screen_of(each["selection"])].append(tuple(100 * value for value in point))
    for number, (name, points) in enumerate(curves.items()):
        ratios, values, lows, highs = zip(*sorted(points), strict=True)
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
