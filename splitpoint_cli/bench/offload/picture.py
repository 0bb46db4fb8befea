"""`bench offload` as pictures: step time over the split, and speed-up by a selection."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from splitpoint_cli.bench.offload.report import FULL_LOAD, PIPELINED, RESIDENT
from splitpoint_cli.bench.offload.selections_report import ANEW, SELECTED
from splitpoint_cli.plots import new_figure, save


def draw_sweep(report: Mapping[str, Any], path: Path) -> None:
    """Write the picture of a report that has a sweep. Raises FailedPrecondition without
    matplotlib."""
    figure = new_figure(8, 5)
    axes = figure.subplots()
    points = report["sweep_points"]
    splits = [point["split_tokens"] for point in points]

    def line(key: str, label: str, style: str) -> None:
        axes.plot(splits, [1e3 * point[key] for point in points], style, label=label)

    line("sequential_seconds", "in turn (serial twin), measured", "s:")
    line("kvpr_seconds", "KVPR's order, measured", "^-.")
    line("seconds", "pipelined, measured", "o-")
    line("predicted_seconds", "predicted by the planner", "--")
    line("bound_seconds", "max(link, compute)", "-")
    chosen = report["contenders"][PIPELINED]["split_tokens"]
    axes.axvline(chosen, linewidth=0.8, label=f"the planner's l = {chosen}")
    axes.set_xlabel("l: tokens rebuilt from activations; the rest is loaded")
    axes.set_ylabel("a decode step, ms (median)")
    axes.set_ylim(bottom=0)
    axes.grid(linewidth=0.3)
    rate = report["link_rate"]
    link = f", link {rate / 1e6:g} MB/s emulated" if rate else ""
    axes.set_title(
        f"{report['shape']} {report['dtype']}, {report['batch']} × {report['prompt']} tokens on "
        f"the host, {report['device']}{link}",
        fontsize=10,
    )
    axes.legend()
    save(figure, path)


def draw_selections(report: Mapping[str, Any], path: Path) -> None:
    """Write the picture of a report of selections, over its lengths.

    Raises FailedPrecondition without matplotlib.
    """
    figure = new_figure(9, 4.5)
    times, gains = figure.subplots(1, 2)
    results = report["results"]
    lengths = [each["cached"] for each in results]
    for name, style in ((FULL_LOAD, "s-"), (ANEW, "^-."), (SELECTED, "o-"), (RESIDENT, ":")):
        steps = [1e3 * each["contenders"][name]["step_seconds"] for each in results]
        times.plot(lengths, steps, style, label=name)
    gains.plot(lengths, [each["speed_up"] for each in results], "o-")
    times.set_ylabel("a decode step, ms (median)")
    gains.set_ylabel("speed-up over full load")
    times.legend()
    for axes in (times, gains):
        axes.set_xlabel("cached tokens")
        axes.set_xticks(lengths, [f"{each:,}" for each in lengths])
        axes.set_ylim(bottom=0)
        axes.grid(linewidth=0.3)
    rate = report["link_rate"]
    link = f", link {rate / 1e6:g} MB/s emulated" if rate else ""
    figure.suptitle(
        f"{report['shape']} {report['dtype']}, {report['layers']} layers, "
        f"{report['query_heads']}/{report['kv_heads']} heads, {report['select']}, "
        f"{report['device']}{link}",
        fontsize=10,
    )
    save(figure, path)
