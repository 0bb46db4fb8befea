"""Lanes of a GPU: CUDA streams, and events between them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from splitpoint.planning.schedule import Lane
from worker_service.hardware.streams import StreamUse, device_thread, stream_for
from worker_service.lanes.groups import Group, Piece
from worker_service.lanes.lanes import SIDE_LANES, Event, Lanes
from worker_service.lanes.timeline import Span
from worker_service.lanes.work import Work, span_of

# Pieces of groups on the link's stream at once: one is copied while the next is given to it. A
# step's copy waits for no more of them.
PIECES_AHEAD = 2

# Events that a pool keeps; a step of 32 layers and 30 tiles records some 4,000.
POOLED_EVENTS = 8192


class _StreamEvent(Event):
    """An event of the driver, which returns to its pool when nothing refers to it any more.

    Recording it again then disturbs nothing: waits that were issued before keep the record
    that they saw, and nothing asks for its time.
    """

    __slots__ = ("_pool", "event")

    def __init__(self, event: Any, pool: deque[Any]) -> None:
        self.event = event
        self._pool = pool

    def __del__(self) -> None:
        self._pool.append(self.event)

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
    start: _StreamEvent
    end: _StreamEvent
    first: _StreamEvent


@dataclass(frozen=True, slots=True)
class _Started:
    """A piece of a group between two events of its stream."""

    lane: Lane
    group: Group
    piece: Piece
    start: _StreamEvent
    end_event: _StreamEvent

    def end(self) -> None:
        """Wait until the piece is done, and tell its group; an error becomes the group's."""
        try:
            self.end_event.wait()
            now = time.perf_counter()
            seconds = _seconds(self.start, self.end_event)
        except Exception as error:
            # The device is lost; what waits for the group must not wait for ever.
            self.group.fail(error)
            return
        self.group.end(self.piece, span_of(self.lane, self.piece.work, now - seconds, now))


class StreamLanes(Lanes):
    """Lanes of a GPU: a CUDA stream each, and the caller's current stream for compute.

    `cuda` is torch.cuda, or in tests a double of its streams and events.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        super().__init__(device)
        self._cuda = cuda
        self._streams = {
            lane: stream_for(StreamUse[lane.name], device, cuda) for lane in SIDE_LANES
        }
        # Making an event is a call of the driver; the threads of the lanes share them.
        self._pool: deque[Any] = deque(maxlen=POOLED_EVENTS)
        # In order; read once the host has waited.
        self._timed: list[_Timed] = []
        # The lanes wait for it; None if no work began since the last `finish` or `collect`.
        self._first: _StreamEvent | None = None
        # Gives pieces of groups to the link's stream; `_looks` while it has any, or looks.
        self._feeder = device_thread(device, Lane.LINK_IN.value, cuda)
        self._looks = False
        # Threads that wait for the end of other pieces of groups, lane by lane.
        self._waiters = {
            lane: device_thread(device, f"{lane.value} done", cuda)
            for lane in (Lane.COMPUTE, Lane.WEIGHTS_IN)
        }
        # One thread at a time puts a piece between its two events.
        self._giving = {lane: threading.Lock() for lane in Lane}

    def run(self, lane: Lane, work: Work, after: Sequence[Event] = ()) -> Event:
        compute = self._cuda.current_stream(self.device)
        stream = compute if lane is Lane.COMPUTE else self._streams[lane]
        first = self._first or self._begin(compute)
        for event in after:
            if isinstance(event, _StreamEvent):
                stream.wait_event(event.event)
            else:
                event.wait()
        return self._enqueue(lane, stream, work, first)

    # -- groups ---------------------------------------------------------------------------

    def attach(self, group: Group) -> None:
        # The link may write into the group's pages after compute issued so far has read them.
        begun = self._record(self._cuda.current_stream(self.device))
        self._streams[Lane.LINK_IN].wait_event(begun.event)
        super().attach(group)

    def poke(self) -> None:
        with self._drawing:
            if self._looks or not self._groups:
                return
            self._looks = True
        self._feeder.submit(self._feed)

    def _feed(self) -> None:
        """Give the link's stream pieces of groups, and keep PIECES_AHEAD of them under way."""
        under_way: deque[_Started] = deque()
        while True:
            with self._drawing:
                drawn = self._draw()
                if drawn is None and not under_way:
                    self._looks = False
                    return
            if drawn is not None:
                started = self._start_piece(Lane.LINK_IN, *drawn)
                if started is not None:
                    under_way.append(started)
            if under_way and (drawn is None or len(under_way) >= PIECES_AHEAD):
                under_way.popleft().end()

    def run_piece(self, lane: Lane, group: Group, piece: Piece) -> None:
        group.begin()
        started = self._start_piece(lane, group, piece)
        if started is not None:
            self._waiters[lane].submit(self._end, started)

    def _end(self, started: _Started) -> None:
        started.end()
        self.poke()

    def _start_piece(self, lane: Lane, group: Group, piece: Piece) -> _Started | None:
        """Give a piece to its stream; None if that failed, which ends the group's work."""
        compute = self._cuda.current_stream(self.device)
        stream = compute if lane is Lane.COMPUTE else self._streams[lane]
        try:
            with torch.inference_mode(), self._giving[lane], self._cuda.stream(stream):
                self._enter(lane)
                start = self._record(stream)
                piece.work.call()
                end = self._record(stream)
        except BaseException as error:
            # Work that failed half way has used the stream, too. A device that is lost raises
            # again; the first error says more.
            with contextlib.suppress(Exception):
                self._record(stream).wait()
            group.fail(error)
            if not isinstance(error, Exception):
                raise
            return None
        return _Started(lane, group, piece, start, end)

    # -- steps ----------------------------------------------------------------------------

    def _enqueue(self, lane: Lane, stream: Any, work: Work, first: _StreamEvent) -> _StreamEvent:
        """Put work into its stream; return the event at its end."""
        with self._giving[lane], self._cuda.stream(stream):
            self._enter(lane)
            start = self._record(stream)
            try:
                work.call()
            finally:
                # Work that failed half way has used the stream, too.
                end = self._record(stream)
                self._timed.append(_Timed(lane, work, start, end, first))
        return end

    def wait_event(self, event: Event) -> None:
        if isinstance(event, _StreamEvent):
            self._cuda.current_stream(self.device).wait_event(event.event)
        else:
            event.wait()

    def record_event(self) -> Event:
        return self._record(self._cuda.current_stream(self.device))

    def _collect(self) -> list[Span]:
        # The lanes must also wait for compute that is issued from here on, before they
        # touch its memory. An event of hours ago is too far for a float's milliseconds.
        self._first = None
        if not self._timed:
            return []
        now = self._record(self._cuda.current_stream(self.device))
        now.wait()
        first = self._timed[0].first
        origin = time.perf_counter() - _seconds(first, now)
        ended: list[_Timed] = []
        going: list[_Timed] = []
        for entry in self._timed:
            (ended if entry.end.is_done else going).append(entry)
        spans = self._spans_of(ended, first, origin)
        self._timed = going
        return spans

    def _finish(self) -> list[Span]:
        timed, self._timed = self._timed, []
        self._first = None
        for lane in Lane:
            last = [entry for entry in timed if entry.lane is lane][-1:]
            for entry in last:
                entry.end.wait()
        if not timed:
            return []
        # The host has just seen the last of them end. It cannot tell when `first` was
        # reached, because the stream may have been far behind the host.
        first = timed[0].first
        longest = max(_seconds(first, entry.end) for entry in timed)
        return self._spans_of(timed, first, time.perf_counter() - longest)

    @staticmethod
    def _spans_of(timed: Sequence[_Timed], first: _StreamEvent, origin: float) -> list[Span]:
        """Return spans; `origin` is the time of `first` on the host's clock."""
        return [
            span_of(
                entry.lane,
                entry.work,
                origin + _seconds(first, entry.start),
                origin + _seconds(first, entry.end),
            )
            for entry in timed
        ]

    def close(self) -> None:
        super().close()
        for thread in (self._feeder, *self._waiters.values()):
            thread.shutdown()

    def _begin(self, compute: Any) -> _StreamEvent:
        """Let the lanes wait for compute issued so far, before they touch its memory."""
        self._first = first = self._record(compute)
        for stream in self._streams.values():
            stream.wait_event(first.event)
        return first

    def _record(self, stream: Any) -> _StreamEvent:
        try:
            event = self._pool.pop()
        except IndexError:
            event = self._cuda.Event(enable_timing=True)
        event.record(stream)
        return _StreamEvent(event, self._pool)


def _seconds(start: _StreamEvent, end: _StreamEvent) -> float:
    """Return the time between two events that were reached."""
    milliseconds: float = start.event.elapsed_time(end.event)
    return milliseconds / 1e3
