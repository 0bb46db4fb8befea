"""What every kind of lanes has in common: work, events, the interface, and the serial twin.

What the work does is not known here, nor how a thread or a stream carries it out.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from splitpoint.errors import InvalidArgument
from splitpoint.planning.schedule import Lane, Schedule
from worker_service.lanes.timeline import Span
from worker_service.lanes.totals import LaneTotals

# The way out belongs to write-back, which works between and beside steps, in a thread of
# its own: see `carry_out`.
SIDE_LANES = (Lane.LINK_IN, Lane.WEIGHTS_IN)


@dataclass(frozen=True, slots=True)
class Work:
    """Something for a lane: what to call, and what a span of it says.

    Attributes:
        call: enqueues (CUDA) or does (CPU) the work.
        size_bytes: bytes that cross the link; 0 for work that moves none.
        amount: bytes of a copy or FLOP of a product, for whoever fits costs.
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
    """A point in a lane, reached when the work it stands for is done."""

    @abstractmethod
    def wait(self) -> None:
        """Until it is reached, on the host. Raises what the work raised."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether it was reached, without waiting."""


class EmulatedLink:
    """A link with a rate of its own, so that a CPU has something to overlap with.

    Transfers of one direction follow each other without gaps, as those of a copy
    engine do: a transfer that was ready in time starts when the one before ends,
    however late the thread that stands for the engine woke up. Nobody sees a
    transfer as done before its bytes are there and its time is over.

    Attributes:
        bytes_per_second: may be changed at any time; counts from the next transfer on.
    """

    def __init__(self, bytes_per_second: float) -> None:
        if not 0 < bytes_per_second < float("inf"):
            raise InvalidArgument("the link rate must be above 0", field="link_rate")
        self.bytes_per_second = bytes_per_second
        self._free_at: dict[str, float] = {}
        self._booking = threading.Lock()

    def transfer(self, work: Work, resource: str, ready: float) -> tuple[float, float]:
        """Do the work, and take as long as the link would; returns start and end."""
        seconds = work.size_bytes / self.bytes_per_second
        # Both lanes towards the device book turns on one link, each its next transfer
        # only, so neither starves; the way back has a link of its own.
        with self._booking:
            start = max(ready, self._free_at.get(resource, 0.0))
            self._free_at[resource] = start + seconds
        began = time.thread_time()
        work.call()
        # A copy that is slower than the link; that the thread was kept off its core
        # is not the link's time.
        more = max(0.0, time.thread_time() - began - seconds)
        if more:
            with self._booking:
                self._free_at[resource] += more
        end = start + seconds + more
        left = end - time.perf_counter()
        if left > 0:
            time.sleep(left)
        return start, end


# Asked for the next pieces of work whenever a lane is about to be idle; none: no more, ever.
Source = Callable[[], Sequence[Work]]


class Lanes(ABC):
    """The lanes of one device, given work by one thread.

    Attributes:
        before: called in the lane before each piece of work; tests delay lanes with it.
        overlapping: lanes run side by side; False for the serial twin.
        ahead: how many of the latest answers of a source are not done when it is asked again.
    """

    overlapping = True
    ahead = 0

    def __init__(self, device: torch.device, link: EmulatedLink | None = None) -> None:
        if link is not None and device.type != "cpu":
            raise InvalidArgument("a link rate can only be emulated on a CPU", field="link_rate")
        self.device = device
        self.link = link
        self.before: Callable[[Lane], None] | None = None
        self._totals: LaneTotals | None = None

    @property
    def schedule(self) -> Schedule:
        """What restores on these lanes take as long as."""
        return Schedule.PIPELINED if self.overlapping else Schedule.SERIAL

    @abstractmethod
    def run(self, lane: Lane, work: Work, after: Sequence[Event] = ()) -> Event:
        """Put work into a lane, to begin once all of `after` is reached.

        Work of the compute lane belongs to the caller: on a CPU it is done, and what
        it or an event in `after` raises is raised here.
        """

    def run_all(self, steps: Iterable[Step]) -> None:
        """Run what is known in advance, as it comes; raises as `run` does.

        Unlike a loop over `run`, this lets side lanes go ahead of the caller's own
        compute work, which on a CPU is done inside the call.
        """
        events: list[Event] = []
        for step in steps:
            after = [events[index] for index in step.after]
            events.append(self.run(step.lane, step.work, after))

    @abstractmethod
    def run_on_demand(self, lane: Lane, source: Source) -> Event:
        """Work drawn a few pieces at a time, when the lane needs it; reached at the end.

        For work that is not known in advance, since it depends on how far other lanes
        have come. `source` is called from a thread of the lanes, never twice at once;
        the serial twin draws everything before it returns. Not for the compute lane,
        which belongs to the caller.
        """

    @abstractmethod
    def wait_event(self, event: Event) -> None:
        """Let what compute is given from now on begin only once the event is reached.

        For compute that is given to the device directly, without `run`.
        """

    @abstractmethod
    def record_event(self) -> Event:
        """Reached when all that compute was given until now is done, by `run` or directly."""

    def collect(self) -> list[Span]:
        """The spans of what has ended since the last call, for someone who goes on.

        Waits for compute alone. Raises the first error of what has ended.
        """
        return self.counted(self._collect())

    def finish(self) -> list[Span]:
        """Wait on the host until every lane is empty; the spans since the last call.

        Raises the first error of a lane's work, after all of it has ended.
        """
        return self.counted(self._finish())

    @abstractmethod
    def _collect(self) -> list[Span]:
        """As `collect` says."""

    @abstractmethod
    def _finish(self) -> list[Span]:
        """As `finish` says."""

    def counted(self, spans: list[Span]) -> list[Span]:
        """Add spans to the tally. Callers count only work that they did not give to a lane."""
        if spans:
            if self._totals is None:
                self._totals = LaneTotals()
            self._totals.add(spans)
        return spans

    def pop_totals(self) -> LaneTotals | None:
        """What `collect`, `finish` and `settle` saw since the last call; None: nothing.

        Callers of `carry_out` count their own work.
        """
        tally, self._totals = self._totals, None
        return tally

    def settle(self) -> None:
        """`finish` for someone who has an error already: its spans and errors are dropped."""
        try:
            self.finish()
        except Exception:  # the caller has the one that counts
            pass

    def close(self) -> None:
        """Wait for everything, and end the lanes' threads."""
        self.settle()

    @staticmethod
    def _require_side(lane: Lane) -> None:
        if lane not in SIDE_LANES:
            raise ValueError(f"nothing can be drawn by the {lane.value} lane: it is the caller's")

    def _enter(self, lane: Lane) -> None:
        if self.before is not None:
            self.before(lane)

    def carry_out(self, lane: Lane, work: Work) -> Span:
        """Do the work now, in the caller's thread, which is the lane; from any thread.

        For whoever has a thread of its own for a lane that nobody else gives work to. It
        is in none of the spans of `finish`. On a GPU the work waits for its own end.
        """
        return self._carry_out(lane, work, time.perf_counter())

    def _carry_out(self, lane: Lane, work: Work, ready: float) -> Span:
        """On a CPU: do it now, in this thread."""
        self._enter(lane)
        if self.link is not None and lane is not Lane.COMPUTE:
            start, end = self.link.transfer(work, lane.resource, ready)
        else:
            start = time.perf_counter()
            work.call()
            end = time.perf_counter()
        return span_of(lane, work, start, end)


class Reached(Event):
    """Of work that is done before anybody can ask."""

    def wait(self) -> None:
        return

    @property
    def is_done(self) -> bool:
        return True


class SerialLanes(Lanes):
    """The serial twin: everything in the caller's thread and stream, one after the other."""

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
        return Reached()

    def wait_event(self, event: Event) -> None:
        event.wait()

    def record_event(self) -> Event:
        return Reached()

    def run_on_demand(self, lane: Lane, source: Source) -> Event:
        self._require_side(lane)
        while works := source():
            for work in works:
                self.run(lane, work)
        return Reached()

    def _collect(self) -> list[Span]:
        return self._finish()

    def _finish(self) -> list[Span]:
        spans, self._spans = self._spans, []
        return spans


def span_of(lane: Lane, work: Work, start: float, end: float) -> Span:
    return Span(lane, work.name, start, end, work.layer, work.tokens, work.amount)
