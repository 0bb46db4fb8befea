"""Lanes of a GPU: CUDA streams, and events between them. Not confirmed on a GPU yet."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from splitpoint.planning.schedule import Lane
from worker_service.lanes.lanes import SIDE_LANES, Event, FutureEvent, Lanes, Source, Work, span_of
from worker_service.lanes.timeline import Span


class _StreamEvent(Event):
    def __init__(self, event: Any) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()

    @property
    def is_done(self) -> bool:
        return bool(self.event.query())


@dataclass(frozen=True, slots=True)
class _Timed:
    """A piece of work between two events, after `first`, which all lanes had reached."""

    lane: Lane
    work: Work
    start: Any
    end: Any
    first: Any


class StreamLanes(Lanes):
    """Lanes of a GPU: a CUDA stream each, and the caller's current stream for compute.

    Not confirmed on a GPU yet. `cuda` is torch.cuda, or in tests a double of its streams
    and events.
    """

    # One answer of a source is under way while the next is given to its stream.
    unfinished_batches = 1

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        super().__init__(device)
        self._cuda = cuda
        self._streams = {lane: cuda.Stream(device) for lane in SIDE_LANES}
        # In order; read once the host has waited.
        self._timed: list[_Timed] = []
        # The lanes wait for it; None if no work began since the last `finish` or `collect`.
        self._first: Any = None
        # Threads of the host that call sources and give their work to the streams.
        self._threads = {
            lane: ThreadPoolExecutor(1, thread_name_prefix=lane.value) for lane in SIDE_LANES
        }
        self._sources: deque[tuple[Lane, Future[None]]] = deque()

    def run(self, lane: Lane, work: Work, after: Sequence[Event] = ()) -> Event:
        compute = self._cuda.current_stream(self.device)
        stream = compute if lane is Lane.COMPUTE else self._streams[lane]
        if self._first is None:
            self._begin(compute)
        # All work of a lane's sources comes before anything else in that lane.
        sources = [FutureEvent(future) for busy, future in self._sources if busy is lane]
        for event in (*after, *sources):
            if isinstance(event, _StreamEvent):
                stream.wait_event(event.event)
            else:
                event.wait()
        return _StreamEvent(self._enqueue(lane, stream, work))

    def run_on_demand(self, lane: Lane, source: Source) -> Event:
        self._require_side(lane)
        if self._first is None:
            self._begin(self._cuda.current_stream(self.device))
        stream = self._streams[lane]

        def carry_out() -> None:
            under_way: deque[Any] = deque()
            with torch.inference_mode():
                while works := source():
                    under_way.append([self._enqueue(lane, stream, work) for work in works][-1])
                    if len(under_way) > self.unfinished_batches:
                        under_way.popleft().synchronize()
            for end in under_way:
                end.synchronize()

        future = self._threads[lane].submit(carry_out)
        self._sources.append((lane, future))
        return FutureEvent(future)

    def _enqueue(self, lane: Lane, stream: Any, work: Work) -> Any:
        """Put work into its stream; return the event at its end."""
        with self._cuda.stream(stream):
            self._enter(lane)
            start = self._record(stream)
            try:
                work.call()
            finally:
                # Work that failed half way has used the stream, too.
                end = self._record(stream)
                self._timed.append(_Timed(lane, work, start, end, self._first))
        return end

    def wait_event(self, event: Event) -> None:
        if isinstance(event, _StreamEvent):
            self._cuda.current_stream(self.device).wait_event(event.event)
        else:
            event.wait()

    def record_event(self) -> Event:
        return _StreamEvent(self._record(self._cuda.current_stream(self.device)))

    def _collect(self) -> list[Span]:
        # The lanes must also wait for compute that is issued from here on, before they
        # touch its memory. An event of hours ago is too far for a float's milliseconds.
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

    def _finish(self) -> list[Span]:
        error: BaseException | None = None
        while self._sources:
            error = error or self._sources[0][1].exception()  # waits
            self._sources.popleft()
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
        # The host has just seen the last of them end. It cannot tell when `first` was
        # reached, because the stream may have been far behind the host.
        first = timed[0].first
        longest = max(first.elapsed_time(entry.end) for entry in timed) / 1e3
        return self._spans_of(timed, first, time.perf_counter() - longest)

    @staticmethod
    def _spans_of(timed: Sequence[_Timed], first: Any, origin: float) -> list[Span]:
        """Return spans; `origin` is the time of `first` on the host's clock."""
        return [
            span_of(
                entry.lane,
                entry.work,
                origin + first.elapsed_time(entry.start) / 1e3,
                origin + first.elapsed_time(entry.end) / 1e3,
            )
            for entry in timed
        ]

    def close(self) -> None:
        super().close()
        for thread in self._threads.values():
            thread.shutdown()

    def _begin(self, compute: Any) -> None:
        """Let the lanes wait for compute issued so far, before they touch its memory."""
        self._first = self._record(compute)
        for stream in self._streams.values():
            stream.wait_event(self._first)

    def _record(self, stream: Any) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record(stream)
        return event
