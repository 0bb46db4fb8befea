"""Lanes: ordered queues of work that run side by side on one device.

On a GPU a lane is a CUDA stream, on a CPU a thread; compute is the caller's own
stream or thread. What must wait for what is said with events, never by stopping the
whole device. `SerialLanes` is the serial twin: the same calls, each carried out
before the next. What the work does is not known here.
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from splitpoint.errors import InvalidArgument
from splitpoint.schedule import Lane, Schedule
from worker_service.timeline import Span

# So many products of a list are known to the side lanes before the first of them is done:
# enough for copies to go ahead, few enough that compute need not wait for the list's end.
PRODUCTS_AHEAD = 16

# The way out belongs to write-back, which works between and beside steps, in a thread of
# its own: see `carry_out`.
_SIDE_LANES = (Lane.LINK_IN, Lane.WEIGHTS_IN)


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
    def draw(self, lane: Lane, source: Source) -> Event:
        """Work drawn a few pieces at a time, when the lane needs it; reached at the end.

        For work that is not known in advance, since it depends on how far other lanes
        have come. `source` is called from a thread of the lanes, never twice at once;
        the serial twin draws everything before it returns. Not for the compute lane,
        which belongs to the caller.
        """

    @abstractmethod
    def hold(self, event: Event) -> None:
        """Let what compute is given from now on begin only once the event is reached.

        For compute that is given to the device directly, without `run`.
        """

    @abstractmethod
    def mark(self) -> Event:
        """Reached when all that compute was given until now is done, by `run` or directly."""

    @abstractmethod
    def collect(self) -> list[Span]:
        """The spans of what has ended since the last call, for someone who goes on.

        Waits for compute alone. Raises the first error of what has ended.
        """

    @abstractmethod
    def finish(self) -> list[Span]:
        """Wait on the host until every lane is empty; the spans since the last call.

        Raises the first error of a lane's work, after all of it has ended.
        """

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
        if lane not in _SIDE_LANES:
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
        return _span(lane, work, start, end)


class Reached(Event):
    """Of work that is done before anybody can ask."""

    def wait(self) -> None:
        return

    @property
    def is_done(self) -> bool:
        return True


# The spans of a piece of work, or of all that was drawn.
_Done = Future[list[Span]]


class _ThreadEvent(Event):
    def __init__(self, future: _Done) -> None:
        self.future = future

    def wait(self) -> None:
        self.future.result()

    @property
    def is_done(self) -> bool:
        return self.future.done()


@dataclass(frozen=True, slots=True)
class _Promised:
    """Compute that others may already wait for, to be done in the caller's thread."""

    work: Work
    after: list[_Done]
    done: _Done


class ThreadLanes(Lanes):
    """Lanes of a CPU: one thread each, and the caller's for compute."""

    def __init__(self, device: torch.device, link: EmulatedLink | None = None) -> None:
        super().__init__(device, link)
        self._threads = {
            lane: ThreadPoolExecutor(1, thread_name_prefix=lane.value) for lane in _SIDE_LANES
        }
        self._pending: deque[_Done] = deque()
        self._spans: list[Span] = []

    def run(self, lane: Lane, work: Work, after: Sequence[Event] = ()) -> Event:
        if lane is Lane.COMPUTE:
            for event in after:
                event.wait()
            self._spans.append(self._carry_out(lane, work, time.perf_counter()))
            return Reached()
        futures = [event.future for event in after if isinstance(event, _ThreadEvent)]
        return _ThreadEvent(self._run_in(lane, work, futures))

    def run_all(self, steps: Iterable[Step]) -> None:
        # Compute's ends are promised, so that copies can be queued behind them.
        futures: list[_Done] = []
        promised: deque[_Promised] = deque()
        try:
            for step in steps:
                after = [futures[earlier] for earlier in step.after]
                if step.lane is not Lane.COMPUTE:
                    futures.append(self._run_in(step.lane, step.work, after))
                    continue
                promised.append(_Promised(step.work, after, _Done()))
                futures.append(promised[-1].done)
                if len(promised) > PRODUCTS_AHEAD:
                    self._keep_first(promised)
            while promised:
                self._keep_first(promised)
        except BaseException as error:
            # Nobody may wait for what will not come.
            for each in promised:
                each.done.set_exception(error)
            raise

    def _keep_first(self, promised: deque[_Promised]) -> None:
        first = promised[0]
        for future in first.after:
            future.result()
        span = self._carry_out(Lane.COMPUTE, first.work, time.perf_counter())
        self._spans.append(span)
        promised.popleft()
        first.done.set_result([span])

    def draw(self, lane: Lane, source: Source) -> Event:
        self._require_side(lane)
        submitted = time.perf_counter()

        def carry_out() -> list[Span]:
            spans: list[Span] = []
            with torch.inference_mode():
                while works := source():
                    for work in works:
                        # A copy engine would have had it at hand when the one before ended.
                        ready = spans[-1].end if spans else submitted
                        spans.append(self._carry_out(lane, work, ready))
            return spans

        return _ThreadEvent(self._submit(lane, carry_out))

    def _run_in(self, lane: Lane, work: Work, after: Sequence[_Done]) -> _Done:
        submitted = time.perf_counter()

        def carry_out() -> list[Span]:
            ends = [span.end for future in after for span in future.result()]
            with torch.inference_mode():
                return [self._carry_out(lane, work, max([submitted, *ends]))]

        return self._submit(lane, carry_out)

    def _submit(self, lane: Lane, carry_out: Callable[[], list[Span]]) -> _Done:
        future = self._threads[lane].submit(carry_out)
        self._pending.append(future)
        return future

    def hold(self, event: Event) -> None:
        event.wait()

    def mark(self) -> Event:
        return Reached()

    def collect(self) -> list[Span]:
        ended: list[Future[list[Span]]] = []
        going: deque[Future[list[Span]]] = deque()
        for future in self._pending:
            (ended if future.done() else going).append(future)
        self._pending = going
        spans, self._spans = self._spans, []
        for future in ended:
            spans += future.result()
        return spans

    def finish(self) -> list[Span]:
        error: BaseException | None = None
        spans: list[Span] = []
        while self._pending:
            future = self._pending[0]
            failure = future.exception()  # waits
            # Only now: whoever is interrupted here still has to wait for it in `settle`.
            self._pending.popleft()
            if failure is None:
                spans += future.result()
            elif error is None:
                error = failure
        spans += self._spans
        self._spans = []
        if error is not None:
            raise error
        return spans

    def close(self) -> None:
        super().close()
        for thread in self._threads.values():
            thread.shutdown()


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
            span = _span(lane, work, span.start, time.perf_counter())
        self._spans.append(span)
        return Reached()

    def hold(self, event: Event) -> None:
        event.wait()

    def mark(self) -> Event:
        return Reached()

    def draw(self, lane: Lane, source: Source) -> Event:
        self._require_side(lane)
        while works := source():
            for work in works:
                self.run(lane, work)
        return Reached()

    def collect(self) -> list[Span]:
        return self.finish()

    def finish(self) -> list[Span]:
        spans, self._spans = self._spans, []
        return spans


class _StreamEvent(Event):
    def __init__(self, event: Any) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()

    @property
    def is_done(self) -> bool:
        return bool(self.event.query())


class _DrawnEvent(Event):
    """Drawn work is given to its stream by a thread of the host, which waits for it, too."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()

    @property
    def is_done(self) -> bool:
        return self._future.done()


@dataclass(frozen=True, slots=True)
class _Timed:
    """A piece of work between two events; `first`: one that all lanes had reached before."""

    lane: Lane
    work: Work
    start: Any
    end: Any
    first: Any


class StreamLanes(Lanes):
    """Lanes of a GPU: a CUDA stream each, and the caller's current stream for compute.

    No GPU has confirmed this class yet: `cuda` is torch.cuda, or in tests a double of
    its streams and events.
    """

    # One answer is under way while the next is drawn and given to its stream.
    ahead = 1

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        super().__init__(device)
        self._cuda = cuda
        self._streams = {lane: cuda.Stream(device) for lane in _SIDE_LANES}
        # In order; read once the host has waited.
        self._timed: list[_Timed] = []
        # Lanes began behind it; None: since the last `finish` or `collect` none did.
        self._first: Any = None
        self._drawers = {
            lane: ThreadPoolExecutor(1, thread_name_prefix=lane.value) for lane in _SIDE_LANES
        }
        self._drawn: deque[tuple[Lane, Future[None]]] = deque()

    def run(self, lane: Lane, work: Work, after: Sequence[Event] = ()) -> Event:
        compute = self._cuda.current_stream(self.device)
        stream = compute if lane is Lane.COMPUTE else self._streams[lane]
        if self._first is None:
            self._begin(compute)
        for event in (*after, *self._drawing(lane)):
            if isinstance(event, _StreamEvent):
                stream.wait_event(event.event)
            else:
                event.wait()
        return _StreamEvent(self._enqueue(lane, stream, work))

    def draw(self, lane: Lane, source: Source) -> Event:
        self._require_side(lane)
        if self._first is None:
            self._begin(self._cuda.current_stream(self.device))
        stream = self._streams[lane]

        def carry_out() -> None:
            under_way: deque[Any] = deque()
            with torch.inference_mode():
                while works := source():
                    under_way.append([self._enqueue(lane, stream, work) for work in works][-1])
                    if len(under_way) > self.ahead:
                        under_way.popleft().synchronize()
            for end in under_way:
                end.synchronize()

        future = self._drawers[lane].submit(carry_out)
        self._drawn.append((lane, future))
        return _DrawnEvent(future)

    def _drawing(self, lane: Lane) -> list[Event]:
        """What a lane was asked to draw: all of it comes before anything else there."""
        return [_DrawnEvent(future) for drawer, future in self._drawn if drawer is lane]

    def _enqueue(self, lane: Lane, stream: Any, work: Work) -> Any:
        """Put work into its stream; the event at its end."""
        with self._cuda.stream(stream):
            self._enter(lane)
            start = self._record(stream)
            try:
                work.call()
            finally:
                # Work that failed half way has put something into the stream, too.
                end = self._record(stream)
                self._timed.append(_Timed(lane, work, start, end, self._first))
        return end

    def hold(self, event: Event) -> None:
        if isinstance(event, _StreamEvent):
            self._cuda.current_stream(self.device).wait_event(event.event)
        else:
            event.wait()

    def mark(self) -> Event:
        return _StreamEvent(self._record(self._cuda.current_stream(self.device)))

    def collect(self) -> list[Span]:
        # What compute is given from here on must be waited for, too, before a lane
        # touches its memory; and an event of hours ago is too far for a float's milliseconds.
        self._first = None
        if not self._timed:
            return []
        now = self._record(self._cuda.current_stream(self.device))
        now.synchronize()
        origin = time.perf_counter() - self._timed[0].first.elapsed_time(now) / 1e3
        ended: list[_Timed] = []
        going: list[_Timed] = []
        for entry in self._timed:
            (ended if entry.end.query() else going).append(entry)
        spans = self._spans_of(ended, self._timed[0].first, origin)
        self._timed = going
        return spans

    def finish(self) -> list[Span]:
        error: BaseException | None = None
        while self._drawn:
            error = error or self._drawn[0][1].exception()  # waits
            self._drawn.popleft()
        timed, self._timed = self._timed, []
        self._first = None
        for lane in Lane:
            last = [entry for entry in timed if entry.lane is lane][-1:]
            for entry in last:
                entry.end.synchronize()
        if error is not None:
            raise error
        if not timed:
            return []
        # The host has just seen the last of them end. When `first` was reached it cannot
        # tell: the stream may have been far behind the host.
        first = timed[0].first
        longest = max(first.elapsed_time(entry.end) for entry in timed) / 1e3
        return self._spans_of(timed, first, time.perf_counter() - longest)

    @staticmethod
    def _spans_of(timed: Sequence[_Timed], first: Any, origin: float) -> list[Span]:
        """`origin`: when `first` was reached, on the clock of the host."""
        return [
            _span(
                entry.lane,
                entry.work,
                origin + first.elapsed_time(entry.start) / 1e3,
                origin + first.elapsed_time(entry.end) / 1e3,
            )
            for entry in timed
        ]

    def close(self) -> None:
        super().close()
        for drawer in self._drawers.values():
            drawer.shutdown()

    def _begin(self, compute: Any) -> None:
        """What compute was given before must be over before a lane touches its memory."""
        self._first = self._record(compute)
        for stream in self._streams.values():
            stream.wait_event(self._first)

    def _record(self, stream: Any) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record(stream)
        return event


def lanes_of(
    device: torch.device, *, overlapped: bool = True, link: EmulatedLink | None = None
) -> Lanes:
    """The lanes a worker uses; `overlapped=False` is the serial twin.

    Raises InvalidArgument for an emulated link on a GPU.
    """
    if not overlapped:
        return SerialLanes(device, link)
    if device.type == "cuda":
        if link is not None:
            raise InvalidArgument("a link rate can only be emulated on a CPU", field="link_rate")
        return StreamLanes(device)
    return ThreadLanes(device, link)


async def passed(lane: ThreadPoolExecutor) -> None:
    """Return once all that the lane was given until now is done: behind it is after it."""
    await asyncio.get_running_loop().run_in_executor(lane, _nothing)


def _nothing() -> None:
    """A place in the lane."""


def _span(lane: Lane, work: Work, start: float, end: float) -> Span:
    return Span(lane, work.name, start, end, work.layer, work.tokens, work.amount)
