"""How commands print: consoles, exit codes, one-line errors, numbers for people, and results.

`--json` is a flag, and nothing but the object is on standard output then. `--output FILE`
writes the same object into a file, whatever standard output gets. Every command that has
the one has the other.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from google.rpc import code_pb2
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from splitpoint import errors
from splitpoint.errors import CANNOT_CONNECT, InvalidArgument, SplitpointError
from splitpoint.extras import need
from splitpoint.planning.words import ExplainedPlan
from splitpoint_cli.files import check_output

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Command = TypeVar("Command", bound=Callable[..., None])

# Results go to stdout, everything about them to stderr.
out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

EXIT_HELP = (
    "Exit codes: 0 done; 2 wrong input (INVALID_ARGUMENT, NOT_FOUND, OUT_OF_RANGE) or a missing "
    "extra; 3 UNAVAILABLE; 4 DEADLINE_EXCEEDED; 5 RESOURCE_EXHAUSTED; 130 interrupted; "
    "1 anything else."
)


def with_exit_codes(command: Command) -> Command:
    """Return a command whose help ends with the exit codes."""
    command.__doc__ = f"{inspect.cleandoc(command.__doc__ or '')}\n\n{EXIT_HELP}"
    return command


def code_name(error: SplitpointError) -> str:
    """Return INVALID_ARGUMENT and so on, as gRPC spells it."""
    return str(code_pb2.Code.Name(error.code))


def print_error(error: SplitpointError) -> None:
    """Print one line on stderr: the code's name and what went wrong."""
    message = " ".join(error.message.split())
    if isinstance(error, errors.Unavailable) and (failed := _NOT_CONNECTED.search(message)):
        message = (
            f"no scheduler answers at {failed['address']}, is `splitpoint up` running? "
            f"({failed['reason']})"
        )
    print(f"splitpoint: {code_name(error)}: {message}", file=sys.stderr)


_NOT_CONNECTED = re.compile(rf"{CANNOT_CONNECT} (?P<address>.*?): (?P<reason>.+)$")


def plain_reason(message: str) -> str:
    """Return the reason alone of a connection that failed; its address stands beside it."""
    return _NOT_CONNECTED.sub(r"cannot connect: \g<reason>", message)


def print_json(value: Mapping[str, object], *, indent: int | None = 2) -> None:
    """Print one object on stdout and nothing else."""
    print(json.dumps(value, indent=indent, ensure_ascii=False))


def seconds_text(seconds: float) -> str:
    """Return "1.23 s", "45.6 ms", "7.8 µs"."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def duration_text(seconds: float) -> str:
    """Return "42 s", "7 min", "3.2 h", "5 d"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} d"


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
        to.out("\n".join(map(str.rstrip, captured.get().strip("\n").splitlines())), highlight=False)
    if caption:
        to.print(caption)


def show_reason(plan: ExplainedPlan) -> None:
    """Print the headline of a plan on stderr, and a line for each detail."""
    err.print(f"why: {escape(plan.reason)}")
    for detail in plan.reason_details:
        err.print(f"[dim]  {escape(detail)}[/dim]")


def check_picture(path: Path | None) -> None:
    """Check that a picture can be drawn and has a place, before the work for it. Accept None.

    Raises MissingExtra when matplotlib is missing, InvalidArgument for the path.
    """
    if path is None:
        return
    new_figure()
    if path.suffix.lower() != ".png":
        raise InvalidArgument(f"{path}: pictures are PNG files", field="png")
    check_output(path, "png")


def save_picture(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, and say on stderr where it is."""
    figure.savefig(path, format="png")
    err.print(f"wrote {escape(str(path))}")


def new_figure() -> Figure:
    """Return an empty figure, without a display. Raises MissingExtra without matplotlib."""
    need("a picture", "plots")
    from matplotlib.figure import Figure

    return Figure(figsize=(13, 5), dpi=150, layout="constrained")
