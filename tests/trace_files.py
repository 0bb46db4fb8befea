"""Read the trace files that workers and benchmarks write."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from splitpoint.planning.schedule import Lane
from worker_service.lanes.timeline import Span


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    """Spans by start, in seconds since the first one's start, and facts."""

    spans: tuple[Span, ...]
    facts: dict[str, str]


def read_trace(path: Path) -> RecordedTrace:
    """Read Chrome trace JSON as `Trace.write` makes it."""
    content = json.loads(path.read_text())
    events = content["traceEvents"]
    lanes = {
        event["tid"]: Lane(event["args"]["name"])
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    spans = [
        Span(
            lanes[event["tid"]],
            event["name"],
            event["ts"] / 1e6,
            (event["ts"] + event["dur"]) / 1e6,
            event["args"].get("layer"),
            event["args"]["tokens"],
            event["args"]["amount"],
        )
        for event in events
        if event["ph"] == "X"
    ]
    return RecordedTrace(
        tuple(sorted(spans, key=lambda span: span.start)), content.get("otherData", {})
    )
