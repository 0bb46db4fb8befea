"""Mooncake's format: JSON lines with `timestamp` (ms), lengths, and ids of blocks of 512 tokens.

`tenant` and `priority` are ours; other readers pass them over. They are written only if a request
has them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from splitpoint_cli.traces.arrival import Arrival, Trace
from splitpoint_cli.traces.fields import BadValue, checked


def parse_lines(lines: Iterable[str]) -> Iterator[Arrival]:
    """Yield the requests of a file's lines; empty lines are passed over. Raises BadLine."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield _arrival(line)
            except BadValue as error:
                raise error.in_line(number) from error


def format_lines(trace: Trace) -> Iterator[str]:
    """Yield a line for each request."""
    for each in trace.arrivals:
        fields: dict[str, object] = {
            "timestamp": round(each.seconds * 1e3),
            "input_length": each.input_length,
            "output_length": each.output_length,
            "hash_ids": list(each.hash_ids),
        }
        if each.tenant:
            fields["tenant"] = each.tenant
        if each.priority:
            fields["priority"] = each.priority
        yield json.dumps(fields, ensure_ascii=False)


def _arrival(line: str) -> Arrival:
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
