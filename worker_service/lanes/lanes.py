"""Lanes: ordered queues of work that run side by side on one device.

Lanes are CUDA streams on a GPU and threads on a CPU. Compute runs in the caller's own
stream or thread. Events order the work of different lanes; nothing stops the whole
device. `SerialLanes` is the serial twin: the same calls, each done before the next.

Steps give their work to lanes and collect it. A restore's work is a group (`groups.py`), whose
copies the link draws beside those of steps, neither waiting for the other.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from splitpoint.errors import InvalidArgument
from splitpoint.planning.schedule import Lane, Schedule
from worker_service.lanes.groups import Group, Piece, draw_first
from worker_service.lanes.timeline import LaneTotals, Span
from worker_service.lanes.work import Work, span_of

# Write-back uses the lane LINK_OUT from a thread of its own: see `run_in_this_thread`.
SIDE_LANES = (Lane.LINK_IN, Lane.WEIGHTS_IN)


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


class Lanes(ABC):
    """The lanes of one device, given work by one thread.

    Attributes:
        before: called in the lane before each piece of work; tests delay lanes with it.
        overlapping: lanes run side by side; False for the serial twin.
        schedule: the order of a streamed step, and the schedule whose costs describe restores.
            COLUMN is KVPR's order, which `splitpoint bench offload` measures beside ours.
    """

    overlapping = True

    def __init__(self, device: torch.device, link: EmulatedLink | None = None) -> None:
        if link is not None and device.type != "cpu":
            raise InvalidArgument("a link rate can only be emulated on a CPU", field="link_rate")
        self.device = device
        self.link = link
        self.before: Callable[[Lane], None] | None = None
        self.schedule = Schedule.PIPELINED if self.overlapping else Schedule.SERIAL
        self._totals: LaneTotals | None = None
        # Guards the groups, and is held while a piece is drawn.
        self._drawing = threading.Lock()
        self._groups: list[Group] = []
        self._is_held = False

    @abstractmethod
    def run(self, lane: Lane, work: Work, after: Sequence[Event] = ()) -> Event:
        """Put work into a lane, to begin once all of `after` are reached.

        Work of the compute lane belongs to the caller: on a CPU it is done in this call,
        which raises the errors of the work and of the events in `after`.
        """

    # -- groups: work beside that of steps ----------------------------------------------

    def attach(self, group: Group) -> None:
        """Let the link draw the group's pieces from now on."""
        with self._drawing:
            self._groups.append(group)
        self.poke()

    def detach(self, group: Group) -> None:
        """Forget a group that is closed; pieces of it may still be under way."""
        with self._drawing:
            if group in self._groups:
                self._groups.remove(group)

    @property
    def group_count(self) -> int:
        """How many groups are attached."""
        return len(self._groups)

    @abstractmethod
    def poke(self) -> None:
        """Let the link look for pieces again: some of them may have become ready.

        The serial twin carries out all pieces that are ready before it returns.
        """

    @abstractmethod
    def run_piece(self, lane: Lane, group: Group, piece: Piece) -> None:
        """Put a piece of a group into a lane: to compute, or to bring weights.

        Work of the compute lane belongs to the caller: on a CPU it is done in this call. Its
        error becomes the group's. Once it is done, the link looks for pieces again.
        """

    @contextlib.contextmanager
    def without_copies(self) -> Iterator[None]:
        """Keep groups from copying while the caller changes the memory that they read.

        Waits for the pieces under way. Steps are the caller's own.
        """
        with self._drawing:
            self._is_held = True
            groups = list(self._groups)
        try:
            for group in groups:
                group.wait_quiet()
            yield
        finally:
            with self._drawing:
                self._is_held = False
            self.poke()

    def _draw(self) -> tuple[Group, Piece] | None:
        """Return the next piece for the link; `_drawing` is held."""
        return None if self._is_held else draw_first(self._groups)

    def _give_span(self, group: Group, piece: Piece, carry_out: Callable[[], Span]) -> bool:
        """Carry out a piece for its group, which gets the span; return False on an error.

        The error becomes the group's, and is raised only if it is to end the thread.
        """
        try:
            span = carry_out()
        except BaseException as error:
            group.fail(error)
            if not isinstance(error, Exception):
                raise
            return False
        group.end(piece, span)
        return True

    # -- events, spans and errors of steps -----------------------------------------------

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
        """Wait for all work, draw no more of groups, and end the lanes' threads."""
        with self._drawing:
            groups, self._groups = self._groups, []
        for group in groups:
            group.close()
            group.wait_quiet()
        self.finish_after_error()

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
        self._spans.append(self._timed(lane, work))
        return DoneEvent()

    def poke(self) -> None:
        while True:
            with self._drawing:
                drawn = self._draw()
            if drawn is None:
                return
            self._do_piece(Lane.LINK_IN, *drawn)

    def run_piece(self, lane: Lane, group: Group, piece: Piece) -> None:
        group.begin()
        self._do_piece(lane, group, piece)
        self.poke()

    def _do_piece(self, lane: Lane, group: Group, piece: Piece) -> None:
        self._give_span(group, piece, lambda: self._timed(lane, piece.work))

    def _timed(self, lane: Lane, work: Work) -> Span:
        span = self._carry_out(lane, work, time.perf_counter())
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
            span = span_of(lane, work, span.start, time.perf_counter())
        return span

    def _collect(self) -> list[Span]:
        return self._finish()

    def _finish(self) -> list[Span]:
        spans, self._spans = self._spans, []
        return spans
