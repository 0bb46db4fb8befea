"""Traces by name: made ones, and files in either of two formats, whose values are checked.

JSON lines, as those of the published conversations, have `timestamp` (ms), lengths, and ids of
blocks of 512 tokens; `tenant` and `priority` are ours.

CSV files have a user's own columns, or those of Azure's public traces. The first line names the
columns, in any order:

    seconds,input_length,output_length[,tenant][,priority][,hash_ids]
    TIMESTAMP,ContextTokens,GeneratedTokens

`hash_ids` are numbers with spaces between them. Azure's TIMESTAMP is a date and time; the first
request then arrives at 0. Other columns are passed over.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeGuard

from scheduler_service.limits import LEAST_PRIORITY, MOST_PRIORITY
from splitpoint.config import counted
from splitpoint.errors import InvalidArgument
from splitpoint_cli.traces.arrival import BLOCK_TOKENS, Arrival, Trace
from splitpoint_cli.traces.generators import PUBLISHED, generate

# No model reads more; a larger number is a column in the wrong place.
MOST_TOKENS = 100_000_000


class BadLine(InvalidArgument):
    """A line of a trace file that is no request; the message begins with its number."""


class BadValue(ValueError):
    """What is wrong with a line."""

    def in_line(self, number: int) -> BadLine:
        """Return the error for a user, which names the line."""
        return BadLine(f"line {number:,}: {self}", field="trace")


def checked(
    seconds: float,
    input_length: object,
    output_length: object,
    hash_ids: object = (),
    tenant: object = "",
    priority: object = 0,
) -> Arrival:
    """Return a request of values from a file. Raises BadValue."""
    if not math.isfinite(seconds) or seconds < 0:
        raise BadValue(f"a request arrives at {seconds:g} s")
    inputs = _tokens("input_length", input_length)
    if not isinstance(hash_ids, list | tuple) or not all(map(_is_whole, hash_ids)):
        raise BadValue(f"hash_ids is a list of whole numbers, not {hash_ids!r:.60}")
    if len(hash_ids) > -(-inputs // BLOCK_TOKENS):
        raise BadValue(
            f"{len(hash_ids):,} hash_ids are more than the blocks of {BLOCK_TOKENS} in "
            f"{counted(inputs, 'token')}"
        )
    if not isinstance(tenant, str):
        raise BadValue(f"tenant is a text, not {tenant!r:.60}")
    if not _is_whole(priority) or not LEAST_PRIORITY <= priority <= MOST_PRIORITY:
        raise BadValue(
            f"priority is a whole number from {LEAST_PRIORITY} to {MOST_PRIORITY}, "
            f"not {priority!r:.60}"
        )
    outputs = _tokens("output_length", output_length)
    return Arrival(seconds, inputs, outputs, tuple(hash_ids), tenant, priority)


def _tokens(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_TOKENS:
        raise BadValue(f"{name} is a whole number from 1 to {MOST_TOKENS:,}, not {value!r:.60}")
    return value


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def parse_lines(lines: Iterable[str]) -> Iterator[Arrival]:
    """Yield the requests of a file's lines; empty lines are passed over. Raises BadLine."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield _json_arrival(line)
            except BadValue as error:
                raise error.in_line(number) from error


def _json_arrival(line: str) -> Arrival:
    try:
        fields: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadValue(f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BadValue("not a JSON object")
    try:
        timestamp = fields["timestamp"]
        input_length, output_length = fields["input_length"], fields["output_length"]
    except KeyError as error:
        raise BadValue(f"{error} is missing") from error
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float):
        raise BadValue(f"timestamp is a number of milliseconds, not {timestamp!r:.60}")
    try:
        seconds = timestamp / 1e3
    except OverflowError as error:
        raise BadValue(f"a timestamp of {len(str(timestamp)):,} digits") from error
    return checked(
        seconds,
        input_length,
        output_length,
        fields.get("hash_ids", []),
        fields.get("tenant", ""),
        fields.get("priority", 0),
    )


COLUMNS = ("seconds", "input_length", "output_length")
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def parse_rows(lines: Iterable[str]) -> Iterator[Arrival]:
    """Yield the requests of a file's lines. Raises BadLine with the line's number."""
    rows = csv.DictReader(lines, skipinitialspace=True, strict=True)
    try:
        names = {name.strip(): name for name in rows.fieldnames or () if name}
        columns = _columns(names)
        first: float | None = None
        for row in rows:
            if any(row.get(names[column]) is None for column in columns):
                raise BadValue(f"fewer values than the {len(names)} columns")
            found = _row_arrival({name: row[key] or "" for name, key in names.items()}, columns)
            if columns == AZURE_COLUMNS:
                first = found.seconds if first is None else first
                if found.seconds < first:
                    raise BadValue("earlier than the first request")
                found = replace(found, seconds=found.seconds - first)
            yield found
    except (BadValue, csv.Error) as error:
        wrong = error if isinstance(error, BadValue) else BadValue(str(error))
        raise wrong.in_line(max(1, rows.line_num)) from error


def _columns(names: Mapping[str, str]) -> tuple[str, ...]:
    for columns in (COLUMNS, AZURE_COLUMNS):
        if names.keys() >= set(columns):
            return columns
    raise BadValue(
        f"the columns are {', '.join(COLUMNS)} (also tenant, priority, hash_ids), or "
        f"{', '.join(AZURE_COLUMNS)}; not {', '.join(names) or 'none'}"
    )


def _row_arrival(row: Mapping[str, str], columns: tuple[str, ...]) -> Arrival:
    when, inputs, outputs = (row[column].strip() for column in columns)
    return checked(
        _seconds(when, is_date=columns == AZURE_COLUMNS),
        _whole(columns[1], inputs),
        _whole(columns[2], outputs),
        [_whole("hash_ids", block) for block in row.get("hash_ids", "").split()],
        row.get("tenant", "").strip(),
        _whole("priority", row.get("priority", "").strip() or "0"),
    )


def _seconds(text: str, *, is_date: bool) -> float:
    try:
        if not is_date:
            return float(text)
        moment = datetime.fromisoformat(text)
        # A time without a zone: of any zone without a change of clocks.
        return moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()
    except ValueError as error:
        kind = "a date and time" if is_date else "a number of seconds"
        raise BadValue(f"{text!r:.60} is not {kind}") from error


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise BadValue(f"{name} is a whole number, not {text!r:.60}") from error


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
    """Read a file: CSV if its name ends with .csv, else JSON lines.

    Requests are put in order of arrival. Raises InvalidArgument with the file and the line.
    """
    parse = parse_rows if path.suffix.lower() == ".csv" else parse_lines
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
