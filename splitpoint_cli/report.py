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
from rich.measure import Measurement
from rich.table import Table

from splitpoint_cli.files import check_output
from splitpoint_cli.output import out, print_json

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
    however long: a pipe has no width.
    """
    title, caption = table.title, table.caption
    table.title = table.caption = None
    console = to
    if not to.is_terminal:
        width = Measurement.get(to, to.options.update(max_width=_ANY_WIDTH), table).maximum
        console = Console(highlight=False, width=width, stderr=to.stderr)
    if title:
        to.print(title, style="bold")
    console.print(table, soft_wrap=False)
    if caption:
        to.print(caption)
