"""A trace as a Gantt picture: a row per lane, a colour per kind of work.

What is drawn where is worked out first, as plain data; matplotlib only fills it in.
Knows spans, not what their work was.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from splitpoint.planning.schedule import Lane
from splitpoint_cli.plots import new_figure
from splitpoint_cli.trace.intervals import Interval, merged
from splitpoint_cli.trace.time_axis import TimeAxis
from worker_service.lanes.timeline import Span

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Kinds that every trace has keep their colours; others take the next ones.
_COLOURS = {
    "send X": "#1f77b4",
    "load K,V": "#ff7f0e",
    "rebuild": "#2ca02c",
    "embed": "#9467bd",
}
_MORE_COLOURS = ("#d62728", "#8c564b", "#e377c2", "#bcbd22", "#17becf", "#7f7f7f")
# A layer's number is written where it has this share of the width.
_LABEL_SHARE = 0.012


@dataclass(frozen=True, slots=True)
class Window:
    """What is looked at: seconds from the trace's first span."""

    first: float
    last: float

    @property
    def seconds(self) -> float:
        return self.last - self.first

    def part_of(self, span: Span) -> float:
        """Seconds of the span inside."""
        return max(0.0, min(span.end, self.last) - max(span.start, self.first))

    def intervals_of(self, spans: Iterable[Span]) -> list[Interval]:
        """Where they are inside."""
        return [
            (max(span.start, self.first), min(span.end, self.last))
            for span in spans
            if self.part_of(span) > 0
        ]

    @classmethod
    def around(cls, spans: Sequence[Span]) -> Window:
        """All of them; there is at least one."""
        return cls(min(span.start for span in spans), max(span.end for span in spans))


@dataclass(frozen=True, slots=True)
class LaneRow:
    """One lane in a window. `amount`: bytes, on the compute lane FLOP, of what is inside."""

    lane: Lane
    spans: tuple[Span, ...]
    busy_seconds: float
    busy_share: float
    amount: float


def rows_of(spans: Sequence[Span], window: Window) -> list[LaneRow]:
    """The lanes that did something in the window, in their usual order."""
    rows = []
    for lane in Lane:
        inside = tuple(s for s in spans if s.lane is lane and window.part_of(s) > 0)
        if not inside:
            continue
        busy = sum(window.part_of(span) for span in inside)
        amount = sum(span.amount * window.part_of(span) / span.seconds for span in inside)
        rows.append(LaneRow(lane, inside, busy, busy / window.seconds, amount))
    return rows


def colours_of(spans: Sequence[Span]) -> dict[str, str]:
    """Colour by kind, in the order of first appearance."""
    chosen: dict[str, str] = {}
    others = 0
    for span in spans:
        if span.name in chosen:
            continue
        if span.name in _COLOURS:
            chosen[span.name] = _COLOURS[span.name]
        else:
            chosen[span.name] = _MORE_COLOURS[others % len(_MORE_COLOURS)]
            others += 1
    return chosen


def layer_stretches(spans: Sequence[Span]) -> list[tuple[int, float, float]]:
    """(layer, begin, end) wherever spans of one layer follow each other, of one lane."""
    stretches: list[tuple[int, float, float]] = []
    ordered = sorted(spans, key=lambda span: span.start)
    for layer, group in itertools.groupby(ordered, key=lambda span: span.layer):
        stretch = list(group)
        if layer is not None:
            stretches.append((layer, stretch[0].start, stretch[-1].end))
    return stretches


def gantt(spans: Sequence[Span], window: Window, facts: Mapping[str, str]) -> Figure:
    """The picture, from the first work in the window to the last.

    `facts` are its title. Where all lanes idle for seconds it is cut, and says so.
    Raises FailedPrecondition without matplotlib.
    """
    rows = rows_of(spans, window)
    axis = TimeAxis.around(merged(window.intervals_of(spans)))
    colours = colours_of([span for row in rows for span in row.spans])
    figure = new_figure(16, 1.6 + 1.1 * max(1, len(rows)))
    axes = figure.subplots()
    for number, row in enumerate(rows):
        for name, colour in colours.items():
            mine = [span for span in row.spans if span.name == name]
            # Neighbouring layers differ in strength: where one ends is seen at a glance.
            for odd, strength in ((0, 1.0), (1, 0.6)):
                bars = [
                    (axis.position(s.start), s.seconds) for s in mine if (s.layer or 0) % 2 == odd
                ]
                axes.broken_barh(
                    bars,
                    (number - 0.3, 0.6),
                    facecolors=colour,
                    alpha=strength,
                    edgecolor="white",
                    linewidth=0.4,
                )
        for layer, first, last in layer_stretches(row.spans):
            first = axis.position(max(first, window.first))
            last = axis.position(min(last, window.last))
            if last - first >= _LABEL_SHARE * axis.width:
                middle = (first + last) / 2
                axes.text(middle, number - 0.34, str(layer), ha="center", va="bottom", fontsize=7)
    axes.set_yticks(
        range(len(rows)), [f"{row.lane.value}\n{row.busy_share:.0%} busy" for row in rows]
    )
    axes.set_ylim(len(rows) - 0.5, -0.6)  # the first lane on top
    axes.set_xlim(axis.position(axis.first), axis.position(axis.last))
    axes.set_xlabel("seconds (numbers above the bars: layers)")
    if axis.cuts:
        ticks = axis.ticks()
        axes.set_xticks([axis.position(tick) for tick in ticks], [f"{tick:.6g}" for tick in ticks])
    for begin, end in axis.cuts:
        left = axis.position(begin)
        axes.axvspan(left, left + axis.cut_width, facecolor="#dddddd", zorder=0)
        middle = left + axis.cut_width / 2
        idle = f"{end - begin:,.3g} s idle, cut"
        axes.text(middle, (len(rows) - 1) / 2, idle, rotation=90, ha="center", va="center")
    axes.grid(axis="x", linewidth=0.3)
    axes.set_axisbelow(True)
    axes.set_title(", ".join(f"{name} {fact}" for name, fact in facts.items()), fontsize=10)
    handles = [
        axes.broken_barh([], (0, 0), facecolors=colour, label=name)
        for name, colour in colours.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=max(1, len(handles)))
    return figure
