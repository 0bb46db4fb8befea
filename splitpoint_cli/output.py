"""How commands print: consoles, exit codes, one-line errors, numbers for people."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from google.rpc import code_pb2
from rich.console import Console

from splitpoint import errors
from splitpoint.errors import CANNOT_CONNECT, SplitpointError

# Results go to stdout, everything about them to stderr.
out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)

EXIT_HELP = (
    "Exit codes: 0 done; 2 wrong input (INVALID_ARGUMENT, NOT_FOUND, OUT_OF_RANGE) or a missing "
    "extra; 3 UNAVAILABLE; 4 DEADLINE_EXCEEDED; 5 RESOURCE_EXHAUSTED; 130 interrupted; "
    "1 anything else."
)


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


def picture(width: int) -> Console:
    """Return a console of its own, for `save_picture`."""
    return Console(
        file=io.StringIO(),
        record=True,
        width=width,
        highlight=False,
        force_terminal=True,
        color_system="truecolor",
    )


def save_picture(console: Console, path: str, title: str) -> None:
    """Write what was printed on a console of `picture` as SVG, for the documentation."""
    svg = console.export_svg(title=title)
    # Without the fonts that it would fetch from elsewhere: each viewer has its own.
    own_fonts = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    Path(path).write_text(own_fonts, encoding="utf-8")


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
