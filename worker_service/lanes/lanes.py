"""Lanes: ordered queues of work that run side by side on one device.

Lanes are CUDA streams on a GPU and threads on a CPU. Compute runs in the caller's own
stream or thread. Events order the work of different lanes; nothing stops the whole
device. `SerialLanes` is the serial twin: the same calls, each done before the next.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from splitpoint.errors import InvalidArgument
from splitpoint.planning.schedule import Lane, Schedule
from worker_service.lanes.timeline import Span
from worker_service.lanes.totals import LaneTotals

# Write-back uses the lane LINK_OUT from a thread of its own: see `run_in_this_thread`.
SIDE_LANES = (Lane.LINK_IN, Lane.WEIGHTS_IN)


@dataclass(frozen=True, slots=True)
class Work:
    """A piece of work for a lane, and the values of its span.

    Attributes:
        call: enqueues (CUDA) or does (CPU) the work.
        size_bytes: bytes that cross the link; 0 for work that moves none.
        amount: bytes of a copy or FLOP of a product, to which costs are fitted.
    """

    name: str
    call: Callable[[], None]
    size_bytes: int = 0
    amount: float = 0.0
    layer: int | None = None
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One entry for `Lanes.run_all`; `after`: indices of earlier entries."""

    lane: Lane
    work: Work
    after: tuple[int, ...] = ()


class Event(ABC):
    """A point in a lane, reached when the work before it is done."""

    @abstractmethod
    def wait(self) -> None:
        """Wait on the host until the event is reached. Raises the work's error."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """True if the event was reached; never waits."""


class DoneEvent(Event):
    """An event of work that was done before the event was made."""

    def wait(self) -> None:
        return

    @property
    def is_done(self) -> bool:
        return True


class FutureEvent(Event):
    """An event that is reached when a thread of the lanes completes the future."""

    def __init__(self, future: Future[Any]) -> None:
        self.future = future

    def wait(self) -> None:
        self.future.result()

    @property
    def is_done(self) -> bool:
        return self.future.done()


class EmulatedLink:
    """A link of a given rate, so that a CPU has transfers to overlap with.

    Transfers of one direction follow each other without gaps, like those of a copy
    engine: a transfer that was ready in time starts when the one before ends, even if
    the emulating thread woke up late. A transfer is done when its bytes were copied and
    its time is over.

    Attributes:
        bytes_per_second: may change at any time; applies from the next transfer on.
    """

    def __init__(self, bytes_per_second: float) -> None:
        if not 0 < bytes_per_second < float("inf"):
            raise InvalidArgument("the link rate must be above 0", field="link_rate")
        self.bytes_per_second = bytes_per_second
        self._free_at: dict[str, float] = {}
        self._booking = threading.Lock()

    def transfer(self, work: Work, resource: str, ready: float) -> tuple[float, float]:
        """Do the work, taking as long as the link would; return start and end."""
        seconds = work.size_bytes / self.bytes_per_second
        # Both lanes towards the device share one link. Each books only its next transfer,
        # so neither starves; the way back is a separate resource.
        with self._booking:
            start = max(ready, self._free_at.get(resource, 0.0))
            self._free_at[resource] = start + seconds
        began = time.thread_time()
        work.call()
        # A copy may be slower than the link. CPU time is counted, because time in which
        # the thread was kept off its core is not the link's.
        more = max(0.0, time.thread_time() - began - seconds)
        if more:
            with self._booking:
                self._free_at[resource] += more
        end = start + seconds + more
        left = end - time.perf_counter()
        if left > 0:
            time.sleep(left)
        return start, end


# Returns a lane's next pieces of work; called when the lane is about to be idle. Empty: the end.
Source = Callable[[], Sequence[Work]]


class Lanes(ABC):
    """The lanes of one device, given work by one thread.

    Attributes:
        before: called in the lane before each piece of work; tests delay lanes with it.
        overlapping: lanes run side by side; False for the serial twin.
        unfinished_batches: most batches of a source that may still run when it is called again.
        schedule: the order of a streamed step, and the schedule whose costs describe restores.
            COLUMN is KVPR's order, which `splitpoint bench offload` measures beside ours.
    """

    overlapping = True
    unfinished_batches = 0

    def __init__(self, device: torch.device, link: EmulatedLink | None = None) -> None:
        if link is not None and device.type != "cpu":
            raise InvalidArgument("a link rate can only be emulated on a CPU", field="link_rate")
        self.device = device
        self.link = link
        self.before: Callable[[Lane], None] | None = None
        self.schedule = Schedule.PIPELINED if self.overlapping else Schedule.SERIAL
        self._totals: LaneTotals | None = None

    @abstractmethod
    def run(self, lane: Lane, work: Work, after: Sequence[Event] = ()) -> Event:
        """Put work into a lane, to begin once all of `after` are reached.

        Work of the compute lane belongs to the caller: on a CPU it is done in this call,
        which raises the errors of the work and of the events in `after`.
        """

    def run_all(self, steps: Iterable[Step]) -> None:
        """Run steps that are known in advance; raises as `run` does.

        Unlike a loop over `run`, this lets side lanes go unfinished_batches of the caller's own
        compute work, which on a CPU is done in this call.
        """
        events: list[Event] = []
        for step in steps:
            after = [events[index] for index in step.after]
            events.append(self.run(step.lane, step.work, after))

    @abstractmethod
    def run_on_demand(self, lane: Lane, source: Source) -> Event:
        """Run the work that `source` returns, until it returns none; then reach the event.

        This is for work that depends on how far other lanes have come. A thread of the
        lanes calls `source`, one call at a time; the serial twin runs everything before it
        returns. The compute lane belongs to the caller and is not allowed.
        """

    def wait_event(self, event: Event) -> None:
        """Let compute that is issued from now on, also without `run`, begin after the event."""
        event.wait()

    def record_event(self) -> Event:
        """Return an event after all compute that was issued until now, also without `run`."""
        return DoneEvent()

    def collect(self) -> list[Span]:
        """Return the spans of the work that ended since the last call.

        Waits for compute alone. Raises the first error of the work that ended.
        """
        return self.count_spans(self._collect())

    def finish(self) -> list[Span]:
        """Wait on the host until every lane is empty; return the spans since the last call.

        Raises the first error of a lane's work, after all of it has ended.
        """
        return self.count_spans(self._finish())

    @abstractmethod
    def _collect(self) -> list[Span]:
        """Do what `collect` says, without counting."""

    @abstractmethod
    def _finish(self) -> list[Span]:
        """Do what `finish` says, without counting."""

    def count_spans(self, spans: list[Span]) -> list[Span]:
        """Count and return spans. Callers use it only for work that no lane ran."""
        if spans:
            if self._totals is None:
                self._totals = LaneTotals()
            self._totals.add(spans)
        return spans

    def pop_totals(self) -> LaneTotals | None:
        """Return and reset the totals of all work that was collected; None if empty.

        Callers of `run_in_this_thread` count their own work.
        """
        totals, self._totals = self._totals, None
        return totals

    def finish_after_error(self) -> None:
        """Finish after an error: drop the spans and any further error."""
        with contextlib.suppress(Exception):
            self.finish()

    def close(self) -> None:
        """Wait for all work, and end the lanes' threads."""
        self.finish_after_error()

    @staticmethod
    def _require_side(lane: Lane) -> None:
        if lane not in SIDE_LANES:
            raise ValueError(f"the {lane.value} lane belongs to the caller: it runs no source")

    def _enter(self, lane: Lane) -> None:
        if self.before is not None:
            self.before(lane)

    def run_in_this_thread(self, lane: Lane, work: Work) -> Span:
        """Do the work now, in the calling thread, and return its span.

        This is for a lane that has a single user, with a thread of its own. `finish` does
        not return the span. On a GPU the work itself must wait until it is done.
        """
        return self._carry_out(lane, work, time.perf_counter())

    def _carry_out(self, lane: Lane, work: Work, ready: float) -> Span:
        self._enter(lane)
        if self.link is not None and lane is not Lane.COMPUTE:
            start, end = self.link.transfer(work, lane.resource, ready)
        else:
            start = time.perf_counter()
            work.call()
            end = time.perf_counter()
        return span_of(lane, work, start, end)


class SerialLanes(Lanes):
    """The serial twin: all work runs in the caller's thread and stream, one after the other."""

    overlapping = False

    def __init__(self, device: torch.device, link: EmulatedLink | None = None) -> None:
        super().__init__(device, link)
        self._spans: list[Span] = []

    def run(self, lane: Lane, work: Work, after: Sequence[Event] = ()) -> Event:
        span = self._carry_out(lane, work, time.perf_counter())
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
            span = span_of(lane, work, span.start, time.perf_counter())
        self._spans.append(span)
        return DoneEvent()

    def run_on_demand(self, lane: Lane, source: Source) -> Event:
        self._require_side(lane)
        while works := source():
            for work in works:
                self.run(lane, work)
        return DoneEvent()

    def _collect(self) -> list[Span]:
        return self._finish()

    def _finish(self) -> list[Span]:
        spans, self._spans = self._spans, []
        return spans


def span_of(lane: Lane, work: Work, start: float, end: float) -> Span:
    return Span(lane, work.name, start, end, work.layer, work.tokens, work.amount)
