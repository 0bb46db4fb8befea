"""Spans: which work ran on which lane and when; Chrome's trace format for them, and their totals.

Spans refit the profile of costs; while a trace is wanted, they are kept for a file. Lanes keep the
totals, by purpose, so that each way to use them counts. The names of work come from
pipeline/transfer.py; this module knows no requests.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from splitpoint.planning.schedule import Lane


@dataclass(slots=True)
class LaneTotals:
    """Copies to the device and products on it, since the totals were begun.

    Attributes:
        kv_bytes, activation_bytes, weight_bytes: over the link, to the device.
        link_seconds: sum over these copies; two lanes copy side by side.
        compute_seconds: all work of the compute lane.
        rebuild_seconds: the part of it that computes K and V from activations.
        prefill_seconds: the part of it that computes K and V from token ids.
    """

    kv_bytes: int = 0
    activation_bytes: int = 0
    weight_bytes: int = 0
    link_seconds: float = 0.0
    compute_seconds: float = 0.0
    rebuild_seconds: float = 0.0
    prefill_seconds: float = 0.0

    def add(self, spans: Iterable[Span]) -> None:
        """Add spans; other copies, such as those that measure the link, do not count."""
        for span in spans:
            seconds = span.end - span.start
            if span.lane is Lane.COMPUTE:
                self.compute_seconds += seconds
                if span.name in REBUILDING:
                    self.rebuild_seconds += seconds
                elif span.name == "prefill":
                    self.prefill_seconds += seconds
            elif span.lane is Lane.WEIGHTS_IN:
                self.weight_bytes += int(span.amount)
                self.link_seconds += seconds
            elif span.name == "load K,V":
                self.kv_bytes += int(span.amount)
                self.link_seconds += seconds
            elif span.name == "send X":
                self.activation_bytes += int(span.amount)
                self.link_seconds += seconds


_Kind = TypeVar("_Kind")

# Some minutes of a busy worker; a trace that runs longer keeps its end.
TRACE_SPANS = 200_000
# Work of the compute lane that makes K and V from X.
REBUILDING = ("rebuild", "embed")
# Work of the link that brings single rows of K and V, which a selection chose.
FETCHING_ROWS = "fetch rows"


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
    """The duration of one engine step and of its parts.

    Link and tokens are 0 if neither cache nor weights streamed.

    Attributes:
        seconds: laying the step out, running the model, and sampling.
        link_busy, compute_busy: seconds that these had work; neither includes waiting.
        link_bytes: bytes over the link, weights included.
        rebuilt_tokens, loaded_tokens: tokens from the store, summed over layers.
        predicted_seconds: the prediction for the step; None if there was none.
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
        """Sum the step's spans, by the names that pipeline/transfer.py gives to work."""
        link_busy = compute_busy = link_bytes = 0.0
        rebuilt = loaded = 0
        # One pass: a step has hundreds of spans, and the device idles meanwhile.
        for span in spans:
            if span.lane is Lane.COMPUTE:
                compute_busy += span.end - span.start
                if span.name == "rebuild":
                    rebuilt += span.tokens
            elif span.lane is not Lane.LINK_OUT:
                link_busy += span.end - span.start
                link_bytes += span.amount
                if span.name == "load K,V":
                    loaded += span.tokens
        return cls(
            seconds=seconds,
            link_busy=link_busy,
            compute_busy=compute_busy,
            link_bytes=int(link_bytes),
            rebuilt_tokens=rebuilt,
            loaded_tokens=loaded,
            predicted_seconds=predicted_seconds,
        )


class Trace:
    """The latest spans of a process, for a file.

    Attributes:
        facts: facts for the file's readers, such as the device.
    """

    def __init__(self, facts: Mapping[str, str] | None = None, limit: int = TRACE_SPANS) -> None:
        self.facts = dict(facts or {})
        self._spans: deque[Span] = deque(maxlen=limit)

    def extend(self, spans: Iterable[Span]) -> None:
        self._spans.extend(spans)

    @property
    def spans(self) -> list[Span]:
        return list(self._spans)

    def take(self) -> list[Span]:
        """Return the spans, and forget them."""
        taken = self.spans
        self._spans.clear()
        return taken

    def write(self, path: Path) -> None:
        """Write Chrome trace JSON: open it in chrome://tracing or ui.perfetto.dev."""
        path.write_text(chrome_trace(self._spans, self.facts))


def chrome_trace(spans: Iterable[Span], facts: Mapping[str, str] | None = None) -> str:
    """Return Chrome's trace event format: a row per lane, microseconds since the first span."""
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
