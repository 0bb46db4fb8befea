"""What ran on which lane, when: spans, and Chrome's trace format for them.

Spans are kept for whoever refits a profile and, while a trace is wanted, for a
file. Knows nothing of what the spans' work was.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from splitpoint.schedule import Lane

# Some minutes of a busy worker; a trace that runs longer keeps its end.
TRACE_SPANS = 200_000


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work. Seconds on the clock of `time.perf_counter`.

    `amount`: bytes of a copy, FLOP of a product; 0: not counted.
    """

    lane: Lane
    name: str
    start: float
    end: float
    layer: int | None = None
    tokens: int = 0
    amount: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.start


class Trace:
    """The latest spans of a process, for a file."""

    def __init__(self, limit: int = TRACE_SPANS) -> None:
        self._spans: deque[Span] = deque(maxlen=limit)

    def extend(self, spans: Iterable[Span]) -> None:
        self._spans.extend(spans)

    @property
    def spans(self) -> list[Span]:
        return list(self._spans)

    def write(self, path: Path) -> None:
        """As Chrome trace JSON: open it in chrome://tracing or ui.perfetto.dev."""
        path.write_text(chrome_trace(self._spans))


def chrome_trace(spans: Iterable[Span]) -> str:
    """The trace event format: one row per lane, times in microseconds from the first span."""
    listed = sorted(spans, key=lambda span: span.start)
    origin = listed[0].start if listed else 0.0
    rows = {lane: number for number, lane in enumerate(Lane)}
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": lane.value}}
        for lane, row in rows.items()
    ]
    for span in listed:
        facts: dict[str, object] = {"tokens": span.tokens, "amount": span.amount}
        if span.layer is not None:
            facts["layer"] = span.layer
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "pid": 0,
                "tid": rows[span.lane],
                "ts": (span.start - origin) * 1e6,
                "dur": span.seconds * 1e6,
                "args": facts,
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
