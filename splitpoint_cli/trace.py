"""`splitpoint trace`: what a worker's lanes did when, as a table or as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from splitpoint.config import format_size
from splitpoint.errors import InvalidArgument
from splitpoint.schedule import Lane
from splitpoint_cli.gantt import LaneRow, Window, gantt, rows_of
from splitpoint_cli.intervals import merged, seconds_in_both
from splitpoint_cli.output import out, seconds_text
from splitpoint_cli.plots import check_picture, save
from worker_service.timeline import Span, read_trace

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
) -> None:
    """Show how busy each lane was; with --png draw who did what when.

    The file is Chrome trace JSON, so chrome://tracing and ui.perfetto.dev open it, too.
    """
    if png is not None:
        check_picture(png)
    recorded = read_trace(file)
    window = window_of(recorded.spans, first_ms, last_ms)
    rows = rows_of(recorded.spans, window)
    if png is None:
        out.print(table_of(rows, window))
        for line in lines_of(recorded.spans, window):
            out.print(line)
        for name, fact in recorded.facts.items():
            out.print(f"{name}: {fact}", markup=False)
        return
    save(gantt(recorded.spans, window, recorded.facts), png)
    out.print(f"{png}: {sum(len(row.spans) for row in rows):,} pieces of work", markup=False)


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


def lines_of(spans: Sequence[Span], window: Window) -> list[str]:
    """What no lane alone shows: from when to when there was work, and how much overlapped."""
    busy = merged(window.intervals_of(spans))
    link = merged(window.intervals_of(s for s in spans if s.lane.resource == _LINK))
    compute = merged(window.intervals_of(s for s in spans if s.lane is Lane.COMPUTE))
    both = seconds_in_both(link, compute)
    return [
        f"work from {busy[0][0] * 1e3:,.1f} to {busy[-1][1] * 1e3:,.1f} ms",
        f"both link and compute busy: {seconds_text(both) if both else '0 s'} "
        f"({both / window.seconds:.1%})",
    ]
