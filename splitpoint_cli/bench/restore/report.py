"""Results of `bench restore`, as JSON and as a table; runs nothing, needs no torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from splitpoint.config import format_rate
from splitpoint.costs.profile import Profile
from splitpoint_cli.bench.restore.workload import RestoreWorkload
from splitpoint_cli.bench.shared.report import commit, hardware, ratio_lines, report_table
from splitpoint_cli.output import seconds_text

# Names of contenders, in the order in which they are shown.
LOAD = "load everything"
TOKENS = "recompute token ids"
BOTH_ENDS = "both ends"  # recompute token ids from the front, load from the back
ACTIVATIONS = "recompute activations"
COLUMN = "sequential (KVPR)"
SERIAL = "serial twin"  # of the pipelined split
PIPELINED = "pipelined"
NO_LINK = "no link to overlap here: --link-rate emulates one"


@dataclass(frozen=True, slots=True)
class Timing:
    """One run: wall-clock seconds, and seconds in which link and device were busy."""

    seconds: float
    link_busy: float
    compute_busy: float
    link_bytes: int


@dataclass(frozen=True, slots=True)
class Result:
    """All timed runs of one contender; `largest_difference` as `Stored` says it.

    `split`, `tile`: tokens; None: the contender has none.
    """

    name: str
    timings: tuple[Timing, ...]
    largest_difference: float
    split: int | None = None
    tile: int | None = None
    predicted_seconds: float | None = None

    @property
    def seconds(self) -> float:
        return statistics.median(each.seconds for each in self.timings)

    @property
    def link_busy(self) -> float:
        return statistics.median(each.link_busy for each in self.timings)

    @property
    def compute_busy(self) -> float:
        return statistics.median(each.compute_busy for each in self.timings)


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One split under one schedule: the median of its runs, and what was predicted."""

    schedule: str
    split: int
    seconds: float
    predicted_seconds: float


@dataclass(frozen=True, slots=True)
class RestoreResults:
    """`skipped`: what was not measured, and why. `memory`: how the device sees the arena.
    `profile` is `profile_at_start` refitted by the first restores: predictions are its.
    `link_rate`: bytes per second of the emulated link; None: there was none. `kernels`: of the
    CPU, as a worker's; empty on a GPU."""

    profile: Profile
    profile_at_start: Profile
    memory: str
    results: tuple[Result, ...]
    sweep: tuple[SweepPoint, ...]
    skipped: tuple[str, ...]
    tolerance: float
    link_rate: float | None = None
    kernels: str = ""

    def result(self, name: str) -> Result | None:
        return next((each for each in self.results if each.name == name), None)


def ratios_of(found: RestoreResults, *, swept: bool) -> dict[str, float]:
    """Return each ratio of one run with its peer; ratios without both contenders are missing.

    The bound of a pipelined run is the greater of the seconds that link and device had
    work in that very run, which is never above its time. Beside it stands what they need
    when nothing else runs, their busy seconds in the serial twin: other runs, so that
    noise can put it on either side. `swept`: all splits were measured, not only those
    near the best.
    """
    load, pipelined = found.result(LOAD), found.result(PIPELINED)
    column, serial = found.result(COLUMN), found.result(SERIAL)
    ratios: dict[str, float] = {}
    if load is not None and pipelined is not None:
        ratios["pipelined_to_load"] = pipelined.seconds / load.seconds
    if pipelined is not None:
        ratios["pipelined_to_bound"] = statistics.median(
            each.seconds / max(each.link_busy, each.compute_busy) for each in pipelined.timings
        )
    if pipelined is not None and serial is not None:
        alone = max(serial.link_busy, serial.compute_busy)
        ratios["pipelined_to_serial_busy"] = pipelined.seconds / alone
        ratios["serial_to_pipelined"] = serial.seconds / pipelined.seconds
    if column is not None and pipelined is not None:
        ratios["sequential_to_pipelined"] = column.seconds / pipelined.seconds
    if column is not None and column.predicted_seconds is not None:
        ratios["sequential_to_formula"] = column.seconds / column.predicted_seconds
    if pipelined is not None and pipelined.predicted_seconds is not None:
        ratios["pipelined_to_prediction"] = pipelined.seconds / pipelined.predicted_seconds
    worst = worst_in_sweep(found.sweep)
    if swept and worst is not None:
        ratios["worst_pipelined_to_sequential_in_sweep"] = worst
    both = found.result(BOTH_ENDS)
    for name, key in ((LOAD, "both_ends_to_load"), (TOKENS, "both_ends_to_tokens")):
        peer = found.result(name)
        if both is not None and peer is not None:
            ratios[key] = both.seconds / peer.seconds
    return {name: round(value, 3) for name, value in ratios.items()}


def has_no_link(device: str, link_rate: float | None) -> bool:
    """Return True if loading is computing, too: a CPU copies with the cores that rebuild."""
    return device == "cpu" and link_rate is None


def worst_in_sweep(sweep: Sequence[SweepPoint]) -> float | None:
    """Return the greatest pipelined / sequential at any split; None without a sweep."""
    column = {point.split: point.seconds for point in sweep if point.schedule == "column"}
    ratios = [
        point.seconds / column[point.split]
        for point in sweep
        if point.schedule == "pipelined" and point.split in column
    ]
    return max(ratios, default=None)


def report_of(workload: RestoreWorkload, found: RestoreResults) -> dict[str, Any]:
    """Return the JSON object. Times in seconds, rates per second, differences as shares."""
    return {
        "benchmark": "restore",
        **asdict(workload),
        "link_rate": found.link_rate,
        "hardware": hardware(),
        "commit": commit(),
        "memory": found.memory,
        "kernels": found.kernels,
        "profile": asdict(found.profile),
        "profile_at_start": asdict(found.profile_at_start),
        "contenders": {each.name: _result_json(each) for each in found.results},
        "ratios": ratios_of(found, swept=workload.sweep_points > 0),
        "sweep": [asdict(point) for point in found.sweep],
        # Raised as an error otherwise: a wrong answer has no time.
        "verified": True,
        "tolerance": found.tolerance,
        "largest_difference": max(each.largest_difference for each in found.results),
        "skipped": list(found.skipped),
    }


def _result_json(result: Result) -> dict[str, Any]:
    return {
        "seconds": round(result.seconds, 5),
        "runs": [round(each.seconds, 5) for each in result.timings],
        "link_busy_seconds": round(result.link_busy, 5),
        "compute_busy_seconds": round(result.compute_busy, 5),
        "link_bytes": result.timings[0].link_bytes,
        "split_tokens": result.split,
        "tile_tokens": result.tile,
        "predicted_seconds": result.predicted_seconds,
        "largest_difference": result.largest_difference,
    }


def table_of(report: Mapping[str, Any]) -> Table:
    """Return the contenders for people, each against loading everything."""
    rate = report["link_rate"]
    link = f"link emulated at {format_rate(rate)}" if rate else report["memory"]
    table = report_table(
        f"{report['shape']} {report['dtype']}: {report['batch']} x {report['prompt']} "
        f"cached tokens, {report['device']}, {report['threads']} threads, {link}",
        *("restore", "split", "time", "min-max", "/ load", "predicted", "link", "device"),
    )
    table.padding = (0, 1, 0, 0)  # so that it fits 80 columns
    load = report["contenders"][LOAD]["seconds"]
    for name, facts in report["contenders"].items():
        predicted = facts["predicted_seconds"]
        table.add_row(
            name,
            "" if facts["split_tokens"] is None else f"{facts['split_tokens']:,}",
            seconds_text(facts["seconds"]),
            f"{seconds_text(min(facts['runs']))}-{seconds_text(max(facts['runs']))}",
            f"{facts['seconds'] / load:.2f}",
            "" if predicted is None else seconds_text(predicted),
            f"{facts['link_busy_seconds'] / facts['seconds']:.0%}",
            f"{facts['compute_busy_seconds'] / facts['seconds']:.0%}",
        )
    lines = ratio_lines(report["ratios"])
    lines.append(
        f"restored K and V equal the stored ones: {report['largest_difference']:.1e} of the "
        f"largest at most, {report['tolerance']:g} allowed"
    )
    if has_no_link(report["device"], rate):
        lines.append(NO_LINK)
    lines += [f"skipped: {each}" for each in report["skipped"]]
    table.caption = "\n".join(lines)
    return table
