"""What ran on which lane, when: spans, and Chrome's trace format for them.

Spans are kept for whoever refits a profile and, while a trace is wanted, for a
file. Knows nothing of what the spans' work was.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitpoint.errors import InvalidArgument, NotFound
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


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What one step of the engine took; all but `seconds` is 0 when nothing streamed, be
    it cache or weights.

    Attributes:
        seconds: laying the step out, running the model, and sampling.
        link_busy, compute_busy: seconds that these had work; waiting is in neither.
        link_bytes: what came over the link, weights included.
        rebuilt_tokens, loaded_tokens: of the store's, summed over layers.
        predicted_seconds: said beforehand; None: nothing was.
    """

    seconds: float
    link_busy: float = 0.0
    compute_busy: float = 0.0
    link_bytes: int = 0
    rebuilt_tokens: int = 0
    loaded_tokens: int = 0
    predicted_seconds: float | None = None

    @classmethod
    def of(
        cls, seconds: float, spans: Iterable[Span], predicted_seconds: float | None = None
    ) -> StepTimes:
        """From the step's spans, as pieces of work name them (mover.py, feed.py)."""
        listed = list(spans)
        link = [span for span in listed if span.lane.resource == Lane.LINK_IN.resource]
        return cls(
            seconds=seconds,
            link_busy=sum(span.seconds for span in link),
            compute_busy=sum(span.seconds for span in listed if span.lane is Lane.COMPUTE),
            link_bytes=int(sum(span.amount for span in link)),
            rebuilt_tokens=sum(span.tokens for span in listed if span.name == "rebuild"),
            loaded_tokens=sum(span.tokens for span in listed if span.name == "load K,V"),
            predicted_seconds=predicted_seconds,
        )


class Trace:
    """The latest spans of a process, for a file.

    Attributes:
        facts: what whoever looks at the file should know, such as the device.
    """

    def __init__(self, facts: Mapping[str, str] | None = None, limit: int = TRACE_SPANS) -> None:
        self.facts = dict(facts or {})
        self._spans: deque[Span] = deque(maxlen=limit)

    def extend(self, spans: Iterable[Span]) -> None:
        self._spans.extend(spans)

    @property
    def spans(self) -> list[Span]:
        return list(self._spans)

    def write(self, path: Path) -> None:
        """As Chrome trace JSON: open it in chrome://tracing or ui.perfetto.dev."""
        path.write_text(chrome_trace(self._spans, self.facts))


def chrome_trace(spans: Iterable[Span], facts: Mapping[str, str] | None = None) -> str:
    """The trace event format: one row per lane, times in microseconds from the first span."""
    listed = sorted(spans, key=lambda span: span.start)
    origin = listed[0].start if listed else 0.0
    rows = {lane: number for number, lane in enumerate(Lane)}
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": lane.value}}
        for lane, row in rows.items()
    ]
    for span in listed:
        details: dict[str, object] = {"tokens": span.tokens, "amount": span.amount}
        if span.layer is not None:
            details["layer"] = span.layer
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "pid": 0,
                "tid": rows[span.lane],
                "ts": (span.start - origin) * 1e6,
                "dur": span.seconds * 1e6,
                "args": details,
            }
        )
    return json.dumps(
        {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(facts or {})}
    )


@dataclass(frozen=True, slots=True)
class RecordedTrace:
    """What a trace file says: spans by start, seconds from the first one's, and facts."""

    spans: tuple[Span, ...]
    facts: Mapping[str, str]


def read_trace(path: Path) -> RecordedTrace:
    """A file that `Trace.write` made. Raises NotFound, or InvalidArgument for anything else."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise NotFound(f"there is no file {path}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} cannot be read as a trace: {error}", field="file") from error
    try:
        lanes: dict[int, Lane] = {}
        spans: list[Span] = []
        for event in content["traceEvents"]:
            if event["ph"] == "M" and event["name"] == "thread_name":
                lanes[event["tid"]] = Lane(event["args"]["name"])
            elif event["ph"] == "X":
                spans.append(_span_of(event, lanes))
        facts = {str(name): str(fact) for name, fact in content.get("otherData", {}).items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(
            f"{path} is not a trace that a worker wrote: {error!r}", field="file"
        ) from error
    return RecordedTrace(tuple(sorted(spans, key=lambda span: span.start)), facts)


def _span_of(event: Mapping[str, Any], lanes: Mapping[int, Lane]) -> Span:
    """Raises KeyError, TypeError or ValueError."""
    details = event["args"]
    start, seconds = float(event["ts"]) / 1e6, float(event["dur"]) / 1e6
    amount = float(details["amount"])
    if not all(0 <= value < math.inf for value in (start, seconds, amount)):
        raise ValueError("a time or an amount is negative or not a number")
    layer = details.get("layer")
    return Span(
        lanes[event["tid"]],
        str(event["name"]),
        start,
        start + seconds,
        None if layer is None else int(layer),
        int(details["tokens"]),
        amount,
    )
