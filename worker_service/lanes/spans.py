"""Spans of a traced request in a worker: look up, restore, prefill, decode, write-back.

The number of spans does not depend on a request's length: a phase of many steps is one
span with their number, and a lane's work in a phase is one span from its first piece to
its last, with its busy seconds and amount. (`--trace FILE` records every single piece.)

    run
      look up, fetch
      restore            link in, compute, ...
      prefill            link in, compute, ... when it streams
      decode             likewise
      write-back         link out

Requests that are not traced have no `RequestSpans`. The engine's thread adds phases; the
event loop ends the request once the engine is done with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from splitpoint.observe import tracing
from splitpoint.observe.tracing import Fact
from splitpoint.planning.schedule import Lane
from worker_service.lanes import timeline

# The store traces its calls for this many batches of chunks, fetched or written back.
TRACED_BATCHES = 8


@dataclass(slots=True)
class LaneUse:
    """Sums over one lane's pieces of work. Seconds on the clock of `time.perf_counter`."""

    first: float
    last: float
    busy_seconds: float = 0.0
    pieces: int = 0
    tokens: int = 0
    amount: float = 0.0

    def add(self, other: LaneUse) -> None:
        self.first = min(self.first, other.first)
        self.last = max(self.last, other.last)
        self.busy_seconds += other.busy_seconds
        self.pieces += other.pieces
        self.tokens += other.tokens
        self.amount += other.amount

    def facts(self, lane: Lane) -> Mapping[str, float]:
        return {
            "flops" if lane is Lane.COMPUTE else "bytes": self.amount,
            "busy_seconds": self.busy_seconds,
            "pieces": self.pieces,
            "tokens": self.tokens,
        }


@dataclass(slots=True)
class Phase:
    """Some steps of one request. `tokens`: computed in them."""

    first: float = 0.0
    last: float = 0.0
    steps: int = 0
    tokens: int = 0
    lanes: dict[Lane, LaneUse] = field(default_factory=dict)

    def add(self, first: float, last: float, tokens: int, work: Mapping[Lane, LaneUse]) -> None:
        if not self.steps:
            self.first = first
        self.last = last
        self.steps += 1
        self.tokens += tokens
        for lane, use in work.items():
            self.lanes.setdefault(lane, LaneUse(use.first, use.last)).add(use)


def add_lanes(lanes: dict[Lane, LaneUse], work: Iterable[timeline.Span]) -> None:
    """Add pieces of work to the sums of their lanes."""
    for span in work:
        use = LaneUse(span.start, span.end, span.seconds, 1, span.tokens, span.amount)
        lanes.setdefault(span.lane, LaneUse(span.start, span.end)).add(use)


@dataclass(slots=True, eq=False)
class RequestSpans:
    """The spans of one request, from its admission to its end."""

    run: tracing.Span
    prefill: Phase = field(default_factory=Phase)
    decode: Phase = field(default_factory=Phase)

    @classmethod
    def begin(
        cls, traceparent: str, request_id: str, *, attempt: int, prompt_tokens: int, residency: str
    ) -> RequestSpans | None:
        """Begin the span `run`; None if the request is not traced."""
        run = tracing.begin(
            "run",
            traceparent,
            request_id=request_id,
            attempt=attempt,
            prompt_tokens=prompt_tokens,
            residency=residency,
        )
        return cls(run) if run.is_recorded else None

    def restored(
        self, first: float, last: float, work: Iterable[timeline.Span], **facts: Fact
    ) -> None:
        """Record a restore between these times, with its facts."""
        lanes: dict[Lane, LaneUse] = {}
        add_lanes(lanes, work)
        _record(self.run, "restore", first, last, lanes, facts)

    def stepped(
        self,
        first: float,
        last: float,
        tokens: int,
        work: Mapping[Lane, LaneUse],
        *,
        is_prefill: bool,
    ) -> None:
        """Add a step in which the request took part.

        `work` sums up the whole step once for all its requests, because a step may have
        hundreds of pieces.
        """
        (self.prefill if is_prefill else self.decode).add(first, last, tokens, work)

    def end(self, *, reason: str = "", error: str = "") -> None:
        """End the spans, with the name of the finish reason or error."""
        for name, phase in (("prefill", self.prefill), ("decode", self.decode)):
            if phase.steps:
                counts: dict[str, Fact] = {"steps": phase.steps, "tokens": phase.tokens}
                _record(self.run, name, phase.first, phase.last, phase.lanes, counts)
        self.run.set(reason=reason or None)
        self.run.end(error=error)


@dataclass(slots=True, eq=False)
class WriteBackSpans:
    """The spans of one request's write-back; used on the event loop."""

    request: tracing.Span
    writing: tracing.Span = tracing.NO_SPAN
    batches: int = 0
    chunks: int = 0
    lanes: dict[Lane, LaneUse] = field(default_factory=dict)

    @classmethod
    def of(cls, request: tracing.Span) -> WriteBackSpans | None:
        """Return None if the request is not traced."""
        return cls(request) if request.is_recorded else None

    def batch(self, chunks: int) -> tracing.Span:
        """Count a batch of chunks; return the span whose context goes with the store's calls."""
        if not self.batches:
            self.writing = self.request.begin("write-back")
        self.batches += 1
        self.chunks += chunks
        return self.writing if self.batches <= TRACED_BATCHES else tracing.NO_SPAN

    def copied(self, work: timeline.Span) -> None:
        """Add a copy from the device."""
        add_lanes(self.lanes, [work])

    def end(self) -> None:
        for lane, use in self.lanes.items():
            self.writing.record(lane.value, use.first, use.last, **use.facts(lane))
        self.writing.set(chunks=self.chunks, batches=self.batches)
        self.writing.end()


def _record(
    parent: tracing.Span,
    name: str,
    first: float,
    last: float,
    lanes: dict[Lane, LaneUse],
    facts: dict[str, Fact],
) -> None:
    part = parent.begin(name, first)
    part.set(**facts)
    for lane, use in lanes.items():
        # Weights may be under way for a step before it begins.
        start, end = max(first, use.first), min(last, use.last)
        part.record(lane.value, start, end, **use.facts(lane))
    part.end(last)
