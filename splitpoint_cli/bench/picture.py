"""A sweep as a picture: time over the split, and the contenders side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from splitpoint_cli.plots import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Line:
    """A line over the split; `style`, `colour`: as matplotlib has them. None: the next colour."""

    label: str
    style: str
    splits: Sequence[float]
    seconds: Sequence[float]
    colour: str | None = None


def sweep_picture(title: str, lines: Sequence[Line], contenders: Mapping[str, float]) -> Figure:
    """Draw lines over the split, and a bar for the seconds of each contender, the first on top.

    Raises FailedPrecondition without matplotlib.
    """
    figure = new_figure(13, 5)
    curves, bars = figure.subplots(1, 2, width_ratios=(3, 2))
    for line in lines:
        curves.plot(line.splits, line.seconds, line.style, label=line.label, color=line.colour)
    curves.set_xlabel("split: tokens rebuilt from activations")
    curves.set_ylabel("seconds, median")
    curves.set_ylim(bottom=0)
    curves.grid(linewidth=0.3)
    curves.legend(fontsize=8)
    places, seconds = range(len(contenders)), list(contenders.values())
    drawn = bars.barh(places, seconds, color="#7f7f7f")
    bars.bar_label(drawn, [f"{value:.3g} s" for value in seconds], padding=3, fontsize=8)
    bars.set_yticks(places, list(contenders), fontsize=8)
    bars.invert_yaxis()
    bars.set_xlim(0, 1.15 * max(seconds))
    bars.set_xlabel("seconds, median")
    figure.suptitle(title, fontsize=10)
    return figure
