"""`splitpoint trace`: how busy each lane of a worker was, and lanes at once, as a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from splitpoint.config import format_size
from splitpoint.errors import InvalidArgument
from splitpoint.planning.schedule import Lane
from splitpoint_cli.output import AsJson, OutputFile, hand_over, out, print_table, seconds_text
from worker_service.lanes.timeline import RecordedTrace, Span, read_trace

# Begin and end in seconds, begin < end.
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a trace to look at, in seconds from its first span."""

    first: float
    last: float

    @property
    def seconds(self) -> float:
        return self.last - self.first

    def part_of(self, span: Span) -> float:
        """Return the span's seconds inside the window."""
        return max(0.0, min(span.end, self.last) - max(span.start, self.first))

    def intervals_of(self, spans: Iterable[Span]) -> list[Interval]:
        """Return the parts of the spans inside the window."""
        return [
            (max(span.start, self.first), min(span.end, self.last))
            for span in spans
            if self.part_of(span) > 0
        ]

    @classmethod
    def around(cls, spans: Sequence[Span]) -> Window:
        """Return the window of all spans; there is at least one."""
        return cls(min(span.start for span in spans), max(span.end for span in spans))


@dataclass(frozen=True, slots=True)
class LaneUse:
    """A lane's work in a window. `amount` is in bytes, on the compute lane in FLOP."""

    lane: Lane
    pieces: int
    busy_seconds: float
    busy_share: float
    amount: float


def lane_uses(spans: Sequence[Span], window: Window) -> list[LaneUse]:
    """Return the lanes that worked in the window, in their usual order."""
    uses = []
    for lane in Lane:
        inside = [span for span in spans if span.lane is lane and window.part_of(span) > 0]
        if inside:
            busy = sum(window.part_of(span) for span in inside)
            amount = sum(span.amount * window.part_of(span) / span.seconds for span in inside)
            uses.append(LaneUse(lane, len(inside), busy, busy / window.seconds, amount))
    return uses


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return what at least one interval covers, in order and without overlaps."""
    covered: list[Interval] = []
    for begin, end in sorted(intervals):
        if covered and begin <= covered[-1][1]:
            covered[-1] = (covered[-1][0], max(covered[-1][1], end))
        else:
            covered.append((begin, end))
    return covered


def seconds_in_both(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """Return the seconds that both cover; each as `merged` gives it."""
    seconds, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        seconds += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return seconds


# Both lanes towards the device share it.
_LINK = Lane.LINK_IN.resource


def trace(
    file: Annotated[
        Path, typer.Argument(help="File that `--trace FILE` of a worker wrote.", metavar="FILE")
    ],
    first_ms: Annotated[
        float | None,
        typer.Option(
            "--from", help="Begin this many ms after the first work.", metavar="MS", min=0
        ),
    ] = None,
    last_ms: Annotated[
        float | None,
        typer.Option("--to", help="End this many ms after the first work.", metavar="MS", min=0),
    ] = None,
    as_json: AsJson = False,
    output: OutputFile = None,
) -> None:
    """Show how busy each lane was.

    The file is Chrome trace JSON: open it at https://ui.perfetto.dev to see each piece of work.
    """
    recorded = read_trace(file)
    window = window_of(recorded.spans, first_ms, last_ms)
    rows = lane_uses(recorded.spans, window)
    report = report_of(recorded, rows, window)

    def show() -> None:
        print_table(table_of(rows, window))
        for line in lines_of(recorded.spans, window):
            out.print(line)
        for name, fact in recorded.facts.items():
            out.print(f"{name}: {fact}", markup=False)

    hand_over(report, show, as_json=as_json, output=output)


def report_of(
    recorded: RecordedTrace, rows: Sequence[LaneUse], window: Window
) -> dict[str, object]:
    """Return the object that `--json` prints; `amount` is in bytes, of the compute lane in FLOP."""
    overlap = overlap_of(recorded.spans, window)
    return {
        "facts": recorded.facts,
        "window_seconds": window.seconds,
        "first_seconds": overlap.first,
        "last_seconds": overlap.last,
        "link_and_compute_busy_seconds": overlap.both_seconds,
        "lanes": [
            {
                "lane": row.lane.value,
                "busy_seconds": row.busy_seconds,
                "busy_share": row.busy_share,
                "pieces": row.pieces,
                "amount": row.amount,
            }
            for row in rows
        ],
    }


def window_of(spans: Sequence[Span], first_ms: float | None, last_ms: float | None) -> Window:
    """Return the chosen window. Raises InvalidArgument if it is empty or ends before it begins."""
    if not spans:
        raise InvalidArgument("the trace is empty", field="file")
    if first_ms is not None and last_ms is not None and first_ms >= last_ms:
        raise InvalidArgument(
            f"--from {first_ms:g} is not before --to {last_ms:g}: nothing is between", field="from"
        )
    whole = Window.around(spans)
    window = Window(
        whole.first if first_ms is None else first_ms / 1e3,
        whole.last if last_ms is None else min(last_ms / 1e3, whole.last),
    )
    if not any(window.part_of(span) > 0 for span in spans):
        raise InvalidArgument(
            f"nothing ran between {window.first * 1e3:g} and {window.last * 1e3:g} ms: "
            f"the trace is {whole.last * 1e3:g} ms long",
            field="from",
        )
    return window


def table_of(rows: Sequence[LaneUse], window: Window) -> Table:
    """Return a row for each lane: how long it worked, and on how much."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("lane")
    for heading in ("busy", f"of {seconds_text(window.seconds)}", "pieces", "amount"):
        table.add_column(heading, justify="right")
    for row in rows:
        is_compute = row.lane is Lane.COMPUTE
        amount = f"{row.amount / 1e9:,.1f} GFLOP" if is_compute else format_size(int(row.amount))
        if not row.amount:
            amount = "-"  # not counted, which is not zero
        table.add_row(
            row.lane.value,
            seconds_text(row.busy_seconds),
            f"{row.busy_share:.1%}",
            f"{row.pieces:,}",
            amount,
        )
    return table


@dataclass(frozen=True, slots=True)
class Overlap:
    """First and last moment of work, and how long link and compute worked at once; seconds."""

    first: float
    last: float
    both_seconds: float


def overlap_of(spans: Sequence[Span], window: Window) -> Overlap:
    busy = merged(window.intervals_of(spans))
    link = merged(window.intervals_of(s for s in spans if s.lane.resource == _LINK))
    compute = merged(window.intervals_of(s for s in spans if s.lane is Lane.COMPUTE))
    return Overlap(busy[0][0], busy[-1][1], seconds_in_both(link, compute))


def lines_of(spans: Sequence[Span], window: Window) -> list[str]:
    """Return the sentences below the table."""
    overlap = overlap_of(spans, window)
    both = overlap.both_seconds
    return [
        f"work from {overlap.first * 1e3:,.1f} to {overlap.last * 1e3:,.1f} ms",
        f"both link and compute busy: {seconds_text(both) if both else '0 s'} "
        f"({both / window.seconds:.1%})",
    ]
