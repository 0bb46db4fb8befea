"""CSV traces: a user's own columns, or those of Azure's public traces.

The first line names the columns, in any order:

    seconds,input_length,output_length[,tenant][,priority][,hash_ids]
    TIMESTAMP,ContextTokens,GeneratedTokens

`hash_ids` are numbers with spaces between them. Azure's TIMESTAMP is a date and time; the first
request then arrives at 0. Other columns are passed over.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime

from splitpoint_cli.traces.arrival import Arrival, Trace
from splitpoint_cli.traces.fields import BadValue, checked

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
            found = _arrival({name: row[key] or "" for name, key in names.items()}, columns)
            if columns == AZURE_COLUMNS:
                first = found.seconds if first is None else first
                if found.seconds < first:
                    raise BadValue("earlier than the first request")
                found = replace(found, seconds=found.seconds - first)
            yield found
    except (BadValue, csv.Error) as error:
        wrong = error if isinstance(error, BadValue) else BadValue(str(error))
        raise wrong.in_line(max(1, rows.line_num)) from error


def format_rows(trace: Trace) -> Iterator[str]:
    """Yield the heading, and a line for each request, all columns of ours in each."""
    yield ",".join((*COLUMNS, "tenant", "priority", "hash_ids"))
    for each in trace.arrivals:
        tenant = f'"{quoted}"' if (quoted := each.tenant.replace('"', '""')) else ""
        blocks = " ".join(map(str, each.hash_ids))
        lengths = f"{each.input_length},{each.output_length}"
        yield f"{each.seconds!r},{lengths},{tenant},{each.priority},{blocks}"


def _columns(names: Mapping[str, str]) -> tuple[str, ...]:
    for columns in (COLUMNS, AZURE_COLUMNS):
        if names.keys() >= set(columns):
            return columns
    raise BadValue(
        f"the columns are {', '.join(COLUMNS)} (also tenant, priority, hash_ids), or "
        f"{', '.join(AZURE_COLUMNS)}; not {', '.join(names) or 'none'}"
    )


def _arrival(row: Mapping[str, str], columns: tuple[str, ...]) -> Arrival:
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
