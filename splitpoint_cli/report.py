"""Hand over a command's result: for people, as one JSON object, or into a file.

`--json` is a flag, and nothing but the object is on standard output then. `--output FILE`
writes the same object into a file, whatever standard output gets. Every command that has
the one has the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from splitpoint.planning.plan import Plan
from splitpoint_cli.files import check_output
from splitpoint_cli.output import err, out, print_json

FLAG_HELP = "Print one JSON object and nothing else."
FILE_HELP = "Also write the JSON object to this file."

_ANY_WIDTH = 100_000

AsJson = Annotated[bool, typer.Option("--json", help=FLAG_HELP)]
OutputFile = Annotated[
    Path | None,
    typer.Option("--output", help=FILE_HELP, metavar="FILE", callback=lambda path: _checked(path)),
]


def _checked(path: Path | None) -> Path | None:
    """Return the path. Raises InvalidArgument, before any work, if it cannot be written."""
    check_output(path, "output")
    return path


def hand_over(
    report: Mapping[str, Any],
    show: Callable[[], None],
    *,
    as_json: bool,
    output: Path | None,
    indent: int | None = 2,
) -> None:
    """Write `report` to `output`, if any; then print it as JSON, or `show` it to people."""
    if output is not None:
        output.write_text(json.dumps(report, ensure_ascii=False) + "\n", encoding="utf-8")
    if as_json:
        print_json(report, indent=indent)
    else:
        show()


def facts_table(rows: Iterable[tuple[str, str]]) -> Table:
    """Return a table of names and values."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    for name, value in rows:
        table.add_row(name, value)
    return table


def print_table(table: Table, to: Console = out) -> None:
    """Print title, table and caption; to standard output unless `to` is another console.

    A terminal gets lines of its width at most. Anything else gets each row in one line,
    however long, without blanks at its end: a pipe has no width.
    """
    title, caption = table.title, table.caption
    table.title = table.caption = None
    if title:
        to.print(title, style="bold")
    if to.is_terminal:
        to.print(table, soft_wrap=False)
    else:
        width = Measurement.get(to, to.options.update(max_width=_ANY_WIDTH), table).maximum
        console = Console(highlight=False, width=width, stderr=to.stderr)
        with console.capture() as captured:
            console.print(table, soft_wrap=False)
        to.out("\n".join(map(str.rstrip, captured.get().splitlines())), highlight=False)
    if caption:
        to.print(caption)


def show_reason(plan: Plan) -> None:
    """Print the headline of a plan on stderr, and a line for each detail."""
    err.print(f"why: {escape(plan.reason)}")
    for detail in plan.reason_details:
        err.print(f"[dim]  {escape(detail)}[/dim]")
