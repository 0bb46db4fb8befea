"""The workload and the results of `bench restore`, as JSON and as a table; needs no torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rich.table import Table

from splitpoint.config import format_rate
from splitpoint.costs.profile import Profile
from splitpoint.errors import InvalidArgument
from splitpoint.shapes import BUILT_IN_SHAPES, DataType, ModelShape
from splitpoint_cli.bench.harness import (
    CHUNK_TOKENS,
    Column,
    Line,
    built_in_shape,
    check_data_type,
    contender_table,
    json_report,
    ratio_lines,
    sweep_picture,
    text_of,
)
from splitpoint_cli.output import seconds_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Rebuilt K and V may differ from the stored ones by this share of the largest of them:
# the same products, added up in another order.
TOLERANCES = {DataType.FLOAT32: 1e-5, DataType.BFLOAT16: 2e-2, DataType.FLOAT16: 2e-3}

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
class RestoreWorkload:
    """`batch` prefixes of `prompt` cached tokens, restored one after the other.

    Attributes:
        link_rate: bytes per second of an emulated link; None: the device's own.
        balance: emulate a link on which loading everything takes as long as recomputing
            everything from token ids; that is measured first.
        tile: tokens of X on the link at once; 0: as the planner says.
        layers: layers of the shape that are used; 0: all.
        sweep_points: splits that are measured besides 0; 0: only those near the best.
    """

    shape: str
    dtype: str
    prompt: int
    batch: int
    device: str
    threads: int
    repeats: int
    seed: int
    link_rate: int | None = None
    tile: int = 0
    layers: int = 0
    sweep_points: int = 0
    balance: bool = False

    def __post_init__(self) -> None:
        if self.balance and self.link_rate is not None:
            raise InvalidArgument("give a link rate or balance it, not both", field="balance")
        shape = built_in_shape(self.shape)
        check_data_type(self.dtype)
        if not CHUNK_TOKENS <= self.prompt <= shape.context_length:
            raise InvalidArgument(
                f"{shape.name} takes {CHUNK_TOKENS} to {shape.context_length} tokens",
                field="prompt",
            )
        if self.tile % CHUNK_TOKENS:
            raise InvalidArgument(f"a tile is a multiple of {CHUNK_TOKENS} tokens", field="tile")
        if self.layers > shape.layer_count:
            raise InvalidArgument(f"{shape.name} has {shape.layer_count} layers", field="layers")

    @property
    def data_type(self) -> DataType:
        return DataType(self.dtype)

    @property
    def model_shape(self) -> ModelShape:
        shape = BUILT_IN_SHAPES[self.shape]
        layers = self.layers or shape.layer_count
        return replace(shape, data_type=self.data_type, layer_count=layers)


@dataclass(frozen=True, slots=True)
class Timing:
    """One run: wall-clock seconds, and seconds in which link and device were busy."""

    seconds: float
    link_busy: float
    compute_busy: float
    link_bytes: int


@dataclass(slots=True)
class Result:
    """All timed runs of one contender; `largest_difference` as `Stored` says it.

    `split`, `tile`: tokens; None: the contender has none.
    """

    name: str
    timings: list[Timing] = field(default_factory=list)
    largest_difference: float = 0.0
    split: int | None = None
    tile: int | None = None
    predicted_seconds: float | None = None

    @property
    def seconds(self) -> float:
        return self.median("seconds")

    def median(self, name: str) -> float:
        """Return the median of a field of the timings."""
        return float(statistics.median(getattr(each, name) for each in self.timings))

    def json(self) -> dict[str, Any]:
        return {
            "seconds": round(self.seconds, 5),
            "runs": [round(each.seconds, 5) for each in self.timings],
            "link_busy_seconds": round(self.median("link_busy"), 5),
            "compute_busy_seconds": round(self.median("compute_busy"), 5),
            "link_bytes": self.timings[0].link_bytes,
            "split_tokens": self.split,
            "tile_tokens": self.tile,
            "predicted_seconds": self.predicted_seconds,
            "largest_difference": self.largest_difference,
        }


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


def ratios_of(found: RestoreResults) -> dict[str, float]:
    """Return each ratio of one run with its peer; ratios without both contenders are missing.

    The bound of a pipelined run is the greater of the seconds that link and device had
    work in that very run, which is never above its time. Beside it stands what they need
    when nothing else runs, their busy seconds in the serial twin: other runs, so that
    noise can put it on either side.
    """
    by_name = {each.name: each for each in found.results}
    seconds = {name: each.seconds for name, each in by_name.items()}
    ratios: dict[str, float] = {}
    pipelined, serial = by_name.get(PIPELINED), by_name.get(SERIAL)
    if pipelined is not None:
        ratios["pipelined_to_bound"] = statistics.median(
            each.seconds / max(each.link_busy, each.compute_busy) for each in pipelined.timings
        )
        if serial is not None:
            alone = max(serial.median("link_busy"), serial.median("compute_busy"))
            ratios["pipelined_to_serial_busy"] = pipelined.seconds / alone
    for key, one, other in (
        ("pipelined_to_load", PIPELINED, LOAD),
        ("sequential_to_pipelined", COLUMN, PIPELINED),
        ("both_ends_to_load", BOTH_ENDS, LOAD),
        ("both_ends_to_tokens", BOTH_ENDS, TOKENS),
    ):
        if one in seconds and other in seconds:
            ratios[key] = seconds[one] / seconds[other]
    return {name: round(value, 3) for name, value in ratios.items()}


def report_of(workload: RestoreWorkload, found: RestoreResults) -> dict[str, Any]:
    """Return the JSON object. Times in seconds, rates per second, differences as shares."""
    facts = {
        "link_rate": found.link_rate,
        "memory": found.memory,
        "kernels": found.kernels,
        "profile": asdict(found.profile),
        "profile_at_start": asdict(found.profile_at_start),
        "contenders": {each.name: each.json() for each in found.results},
        "ratios": ratios_of(found),
        "sweep": [asdict(point) for point in found.sweep],
        # Raised as an error otherwise: a wrong answer has no time.
        "verified": True,
        "tolerance": found.tolerance,
        "largest_difference": max(each.largest_difference for each in found.results),
        "skipped": list(found.skipped),
    }
    return json_report("restore", asdict(workload), facts)


def table_of(report: Mapping[str, Any]) -> Table:
    """Return the contenders for people, each against loading everything."""
    rate = report["link_rate"]
    link = f"link emulated at {format_rate(rate)}" if rate else report["memory"]
    load = report["contenders"][LOAD]["seconds"]
    lines = [
        *ratio_lines(report["ratios"]),
        f"restored K and V equal the stored ones: {report['largest_difference']:.1e} of the "
        f"largest at most, {report['tolerance']:g} allowed",
    ]
    if report["device"] == "cpu" and not rate:
        # Loading is computing, too: a CPU copies with the cores that rebuild.
        lines.append(NO_LINK)
    table = contender_table(
        f"{report['shape']} {report['dtype']}: {report['batch']} x {report['prompt']} "
        f"cached tokens, {report['device']}, {report['threads']} threads, {link}",
        "restore",
        (
            Column("split", lambda each: text_of(each["split_tokens"], "{:,}".format)),
            Column("time", lambda each: seconds_text(each["seconds"])),
            Column(
                "min-max",
                lambda each: "-".join(map(seconds_text, (min(each["runs"]), max(each["runs"])))),
            ),
            Column("/ load", lambda each: f"{each['seconds'] / load:.2f}"),
            Column("predicted", lambda each: text_of(each["predicted_seconds"], seconds_text)),
            Column("link", lambda each: f"{each['link_busy_seconds'] / each['seconds']:.0%}"),
            Column("device", lambda each: f"{each['compute_busy_seconds'] / each['seconds']:.0%}"),
        ),
        report["contenders"],
        [*lines, *(f"skipped: {each}" for each in report["skipped"])],
    )
    table.padding = (0, 1, 0, 0)  # so that it fits 80 columns
    return table


def picture_of(report: Mapping[str, Any]) -> Figure:
    """Draw the sweep, if there is one, and the contenders.

    Raises MissingExtra without matplotlib.
    """
    lines = []
    for schedule, name, colour in (
        ("column", COLUMN, "tab:red"),
        ("pipelined", PIPELINED, "tab:blue"),
    ):
        points = [point for point in report["sweep"] if point["schedule"] == schedule]
        splits = [point["split"] for point in points]
        for key, kind, style in (
            ("seconds", "measured", "o"),
            ("predicted_seconds", "predicted", "-"),
        ):
            if points:
                times = [point[key] for point in points]
                lines.append(Line(f"{name}, {kind}", style, splits, times, colour))
    seconds = {name: each["seconds"] for name, each in report["contenders"].items()}
    lines.append(Line(f"{LOAD}, measured", "--", [0, report["prompt"]], [seconds[LOAD]] * 2, "k"))
    rate = report["link_rate"]
    link = f", link emulated at {format_rate(rate)}" if rate else ""
    title = (
        f"{report['shape']} {report['dtype']}, {report['batch']} x {report['prompt']} cached "
        f"tokens, {report['hardware']}, {report['threads']} threads{link}"
    )
    return sweep_picture(title, lines, seconds)
