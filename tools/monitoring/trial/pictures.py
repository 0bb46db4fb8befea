"""Draw a dashboard's main panels from the answers to their queries."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from splitpoint_cli.plots import new_figure
from tools.monitoring.dashboards import Dashboard, Panel, Query
from tools.monitoring.trial.prometheus import Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Ask = Callable[[str], Sequence[Series]]

# What an overview needs; six panels to a picture, so that they can be read.
DRAWN = {
    "overview": (
        "Time to first token",
        "Between tokens",
        "In the queue, and in all",
        "Tokens",
        "Requests by how they ended",
        "Running and waiting",
    ),
    "link": (
        "Link busy",
        "Bytes by method",
        "Cached tokens by method",
        "kappa",
        "Split point",
        "Predicted and measured time",
    ),
}
# Of rates in a picture: Grafana takes some scrapes, too, when the range is short.
WINDOW = "15s"
_SCALES = {
    "Bps": (1e6, "MB/s"),
    "percentunit": (0.01, "%"),
    "s": (1.0, "s"),
    "short": (1.0, ""),
    "cps": (1.0, "per second"),
    "si:tok/s": (1.0, "tokens/s"),
}


def picture_of(dashboard: Dashboard, ask: Ask, start: float, subtitle: str) -> Figure:
    """Draw two rows of panels; time counts from `start`.

    Raises FailedPrecondition without matplotlib.
    """
    figure = new_figure(15, 8.2)
    panels = {panel.title: panel for panel in dashboard.panels()}
    names = DRAWN[dashboard.name]
    for axes, name in zip(figure.subplots(2, 3).flat, names, strict=True):
        _draw(axes, panels[name], ask, start)
    figure.suptitle(f"{dashboard.json['title']}", fontsize=13)
    figure.supxlabel(subtitle, fontsize=9)
    return figure


def _draw(axes: Axes, panel: Panel, ask: Ask, start: float) -> None:
    scale, unit = _SCALES[panel.defaults["unit"]]
    is_stack = panel.defaults["custom"]["stacking"]["mode"] == "normal"
    overrides = panel.overrides
    stacked: list[tuple[str, Series, str]] = []
    for query in panel.queries:
        for series in ask(query.plain(WINDOW)):
            name = legend(query, series.labels)
            properties = overrides.get(query.ref_id) or overrides.get(name) or {}
            if is_stack:
                colour = properties.get("color", {}).get("fixedColor", "")
                stacked.append((name, series, colour.replace("dark-", "dark")))
            else:
                axes.plot(
                    [at - start for at, _ in series.points],
                    [value / scale for _, value in series.points],
                    label=name,
                    linewidth=1.3,
                    linestyle="--" if "custom.lineStyle" in properties else "-",
                )
    if stacked:
        _stack(axes, stacked, start, scale)
    for step in panel.defaults["thresholds"]["steps"]:
        bound = step["value"]
        # Far above all values it would only flatten them.
        if bound is not None and bound / scale < 2 * axes.get_ylim()[1]:
            axes.axhline(bound / scale, color=step["color"], linewidth=0.8, linestyle=":")
    axes.set_title(panel.title, fontsize=11, loc="left")
    axes.set_ylabel(unit, fontsize=9)
    # Room for the legend above the lines.
    axes.set_ylim(bottom=0, top=1.3 * axes.get_ylim()[1])
    axes.tick_params(labelsize=8)
    axes.grid(linewidth=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7.5, loc="upper left", ncols=2)


def _stack(
    axes: Axes, stacked: Sequence[tuple[str, Series, str]], start: float, scale: float
) -> None:
    """Stack the series; those that are 0 throughout would only fill the legend."""
    shown = [each for each in stacked if any(value for _, value in each[1].points)]
    times = sorted({at for _, series, _ in shown for at, _ in series.points})
    rows = []
    for _, series, _ in shown:
        values = dict(series.points)
        rows.append([values.get(at, 0.0) / scale for at in times])
    if rows:
        axes.stackplot(
            [at - start for at in times],
            rows,
            labels=[name for name, _, _ in shown],
            colors=[colour or f"C{index}" for index, (_, _, colour) in enumerate(shown)],
            alpha=0.75,
        )


def legend(query: Query, labels: Mapping[str, str]) -> str:
    """Return the legend with its labels filled in."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), query.legend).strip()
