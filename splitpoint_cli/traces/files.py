"""Traces by name: made ones, and files in either format."""

from __future__ import annotations

from pathlib import Path

from splitpoint.errors import InvalidArgument
from splitpoint_cli.traces import mooncake, table
from splitpoint_cli.traces.arrival import BLOCK_TOKENS, Trace
from splitpoint_cli.traces.fields import BadLine
from splitpoint_cli.traces.generators import PUBLISHED, generate


def load_trace(
    name_or_path: str, *, seed: int = 0, count: int | None = None, tenants: int = 1
) -> Trace:
    """Return a made trace by name, else that of a file (`seed` and `tenants` do not change it).

    Raises InvalidArgument if it is neither, and for a line that is no request.
    """
    if name_or_path in PUBLISHED:
        return generate(name_or_path, seed=seed, count=count, tenants=tenants)
    path = Path(name_or_path)
    if not path.is_file():
        raise InvalidArgument(
            f"trace {name_or_path!r} is neither a file nor one of {', '.join(PUBLISHED)}",
            field="trace",
        )
    trace = read_trace(path)
    return Trace(trace.name, trace.arrivals[:count])


def read_trace(path: Path) -> Trace:
    """Read a file: CSV if its name ends with .csv, else Mooncake's JSON lines.

    Requests are put in order of arrival. Raises InvalidArgument with the file and the line.
    """
    parse = table.parse_rows if path.suffix.lower() == ".csv" else mooncake.parse_lines
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            arrivals = sorted(parse(lines), key=lambda each: each.seconds)
    except BadLine as error:
        raise InvalidArgument(f"{path}, {error.message}", field="trace") from error
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"{path} cannot be read: {error}", field="trace") from error
    if not arrivals:
        raise InvalidArgument(f"{path} has no request", field="trace")
    return Trace(path.stem, tuple(arrivals))


def write_trace(trace: Trace, path: Path) -> None:
    """Write a file in the format that its name says, as `read_trace` reads it.

    Raises InvalidArgument for blocks of another size than the formats have.
    """
    if trace.block_tokens != BLOCK_TOKENS and any(each.hash_ids for each in trace.arrivals):
        raise InvalidArgument(
            f"blocks in a file have {BLOCK_TOKENS} tokens, those of {trace.name} "
            f"{trace.block_tokens}: write the trace before it is scaled",
            field="trace",
        )
    form = table.format_rows if path.suffix.lower() == ".csv" else mooncake.format_lines
    text = "".join(f"{line}\n" for line in form(trace))
    path.write_text(text, encoding="utf-8")
