"""`splitpoint trace`: what a worker's lanes did when, as a table or as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from splitpoint.config import format_size
from splitpoint.errors import InvalidArgument
from splitpoint.planning.schedule import Lane
from splitpoint_cli.output import out, seconds_text
from splitpoint_cli.plots import check_picture, save
from splitpoint_cli.report import AsJson, OutputFile, hand_over, print_table
from splitpoint_cli.trace.gantt import LaneRow, Window, gantt, rows_of
from splitpoint_cli.trace.intervals import merged, seconds_in_both
from worker_service.lanes.timeline import RecordedTrace, Span, read_trace

# Both lanes towards the device share it.
_LINK = Lane.LINK_IN.resource


def trace(
    file: Annotated[
        Path, typer.Argument(help="What `--trace FILE` of a worker wrote.", metavar="FILE")
    ],
    png: Annotated[Path | None, typer.Option(help="Draw it into this file.", metavar="OUT")] = None,
    first_ms: Annotated[
        float | None,
        typer.Option("--from", help="From here on, in ms from the start.", metavar="MS", min=0),
    ] = None,
    last_ms: Annotated[
        float | None, typer.Option("--to", help="Up to here.", metavar="MS", min=0)
    ] = None,
    as_json: AsJson = False,
    output: OutputFile = None,
) -> None:
    """Show how busy each lane was; with --png draw who did what when.

    The file is Chrome trace JSON, so chrome://tracing and ui.perfetto.dev open it, too.
    """
    if png is not None:
        check_picture(png)
    recorded = read_trace(file)
    window = window_of(recorded.spans, first_ms, last_ms)
    rows = rows_of(recorded.spans, window)
    report = report_of(recorded, rows, window)

    def show() -> None:
        if png is not None:
            pieces = sum(len(row.spans) for row in rows)
            out.print(f"{png}: {pieces:,} pieces of work", markup=False)
            return
        print_table(table_of(rows, window))
        for line in lines_of(recorded.spans, window):
            out.print(line)
        for name, fact in recorded.facts.items():
            out.print(f"{name}: {fact}", markup=False)

    if png is not None:
        save(gantt(recorded.spans, window, recorded.facts), png)
    hand_over(report, show, as_json=as_json, output=output)


def report_of(
    recorded: RecordedTrace, rows: Sequence[LaneRow], window: Window
) -> dict[str, object]:
    """The object that `--json` prints; `amount` is in bytes, of the compute lane in FLOP."""
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
                "pieces": len(row.spans),
                "amount": row.amount,
            }
            for row in rows
        ],
    }


def window_of(spans: Sequence[Span], first_ms: float | None, last_ms: float | None) -> Window:
    """Raises InvalidArgument when there is nothing in it, or when it ends before it begins."""
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


def table_of(rows: Sequence[LaneRow], window: Window) -> Table:
    """Per lane: how long it worked, and on how much."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("lane")
    for heading in ("busy", f"of {seconds_text(window.seconds)}", "pieces", "amount"):
        table.add_column(heading, justify="right")
    for row in rows:
        is_compute = row.lane is Lane.COMPUTE
        amount = f"{row.amount / 1e9:,.1f} GFLOP" if is_compute else format_size(int(row.amount))
        if not row.amount:
            amount = "-"  # not counted, which is not none
        table.add_row(
            row.lane.value,
            seconds_text(row.busy_seconds),
            f"{row.busy_share:.1%}",
            f"{len(row.spans):,}",
            amount,
        )
    return table


@dataclass(frozen=True, slots=True)
class Overlap:
    """From when to when there was work, and how long link and compute both had some; seconds."""

    first: float
    last: float
    both_seconds: float


def overlap_of(spans: Sequence[Span], window: Window) -> Overlap:
    busy = merged(window.intervals_of(spans))
    link = merged(window.intervals_of(s for s in spans if s.lane.resource == _LINK))
    compute = merged(window.intervals_of(s for s in spans if s.lane is Lane.COMPUTE))
    return Overlap(busy[0][0], busy[-1][1], seconds_in_both(link, compute))


def lines_of(spans: Sequence[Span], window: Window) -> list[str]:
    """What no lane alone shows, for people."""
    overlap = overlap_of(spans, window)
    both = overlap.both_seconds
    return [
        f"work from {overlap.first * 1e3:,.1f} to {overlap.last * 1e3:,.1f} ms",
        f"both link and compute busy: {seconds_text(both) if both else '0 s'} "
        f"({both / window.seconds:.1%})",
    ]
