"""What a traced request did in a worker, as spans: looked up, restored, prefilled, decoded.

How many spans a request makes does not depend on its length: a phase of many steps is one
span with their number, and a lane's work in a phase is one span from its first piece to its
last, with how long it was busy and on how much. (Every single piece is in `--trace FILE`.)

    run
      look up, fetch
      restore            link in, compute, ...
      prefill            link in, compute, ... when it streams
      decode             likewise
      write-back         link out

Requests that nobody traces have no `RequestSpans`. Phases are added by the engine's thread;
the event loop ends the request once the engine is done with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from splitpoint.observe import tracing
from splitpoint.observe.tracing import Fact
from splitpoint.planning.schedule import Lane
from worker_service.lanes import timeline

# Batches of chunks, fetched or written back, whose calls the store traces too: a long
# request has many.
TRACED_BATCHES = 8


@dataclass(slots=True)
class LaneUse:
    """One lane's pieces of work, summed up. Seconds on the clock of `time.perf_counter`."""

    first: float
    last: float
    busy_seconds: float = 0.0
    pieces: int = 0
    tokens: int = 0
    amount: float = 0.0

    def add(self, span: timeline.Span) -> None:
        self.first = min(self.first, span.start)
        self.last = max(self.last, span.end)
        self.busy_seconds += span.seconds
        self.pieces += 1
        self.tokens += span.tokens
        self.amount += span.amount

    def join(self, later: LaneUse) -> None:
        """What the lane did in another step."""
        self.first = min(self.first, later.first)
        self.last = max(self.last, later.last)
        self.busy_seconds += later.busy_seconds
        self.pieces += later.pieces
        self.tokens += later.tokens
        self.amount += later.amount

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
            if lane not in self.lanes:
                self.lanes[lane] = replace(use)
            else:
                self.lanes[lane].join(use)


def add_lanes(lanes: dict[Lane, LaneUse], work: Iterable[timeline.Span]) -> None:
    """Sum pieces of work up, lane by lane."""
    for span in work:
        if span.lane not in lanes:
            lanes[span.lane] = LaneUse(span.start, span.end)
        lanes[span.lane].add(span)


@dataclass(slots=True, eq=False)
class RequestSpans:
    """Of one request, from its admission to its end."""

    run: tracing.Span
    prefill: Phase = field(default_factory=Phase)
    decode: Phase = field(default_factory=Phase)

    @classmethod
    def begin(
        cls, traceparent: str, request_id: str, *, attempt: int, prompt_tokens: int, residency: str
    ) -> RequestSpans | None:
        """None: nobody traces it."""
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
        """A prefix came in between these times; `facts` is the account of it."""
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
        """It took part in a step; `work` is the whole step's, whoever else was in it: summed up
        once for all of them, since a step may have hundreds of pieces."""
        (self.prefill if is_prefill else self.decode).add(first, last, tokens, work)

    def end(self, *, reason: str = "", error: str = "") -> None:
        """How it finished: names. Nothing is added any more."""
        for name, phase in (("prefill", self.prefill), ("decode", self.decode)):
            if phase.steps:
                counts: dict[str, Fact] = {"steps": phase.steps, "tokens": phase.tokens}
                _record(self.run, name, phase.first, phase.last, phase.lanes, counts)
        self.run.set(reason=reason or None)
        self.run.end(error=error)


@dataclass(slots=True, eq=False)
class WriteBackSpans:
    """Of what one request leaves in the store; on the event loop."""

    request: tracing.Span
    writing: tracing.Span = tracing.NO_SPAN
    batches: int = 0
    chunks: int = 0
    lanes: dict[Lane, LaneUse] = field(default_factory=dict)

    @classmethod
    def of(cls, request: tracing.Span) -> WriteBackSpans | None:
        """None: nobody traces it."""
        return cls(request) if request.is_recorded else None

    def batch(self, chunks: int) -> tracing.Span:
        """Some chunks are about to be stored: whose context the store gets with the calls."""
        if not self.batches:
            self.writing = self.request.begin("write-back")
        self.batches += 1
        self.chunks += chunks
        return self.writing if self.batches <= TRACED_BATCHES else tracing.NO_SPAN

    def copied(self, work: timeline.Span) -> None:
        """They left the device."""
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
