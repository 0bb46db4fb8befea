"""Lanes of a CPU: a thread each, and the caller's own for compute."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from splitpoint.planning.schedule import Lane
from worker_service.lanes.groups import Group, LaneShare, Piece
from worker_service.lanes.lanes import (
    SIDE_LANES,
    DoneEvent,
    EmulatedLink,
    Event,
    FutureEvent,
    Lanes,
)
from worker_service.lanes.timeline import Span
from worker_service.lanes.work import Work

# Completed with the spans of a piece of work.
_Done = Future[list[Span]]


class ThreadLanes(Lanes):
    """Lanes of a CPU: one thread each, and the caller's for compute."""

    def __init__(self, device: torch.device, link: EmulatedLink | None = None) -> None:
        super().__init__(device, link)
        self._threads = {
            lane: ThreadPoolExecutor(1, thread_name_prefix=lane.value) for lane in SIDE_LANES
        }
        # Work of steps that the link's thread has not begun yet. `_drawing` guards what follows.
        self._queued: deque[Callable[[], None]] = deque()
        self._share = LaneShare()
        # True while the link's thread will look for pieces of groups.
        self._looks = False
        self._pending: deque[_Done] = deque()
        self._spans: list[Span] = []

    def run(self, lane: Lane, work: Work, after: Sequence[Event] = ()) -> Event:
        if lane is Lane.COMPUTE:
            for event in after:
                event.wait()
            self._spans.append(self._carry_out(lane, work, time.perf_counter()))
            return DoneEvent()
        futures = [event.future for event in after if isinstance(event, FutureEvent)]
        return FutureEvent(self._run_in(lane, work, futures))

    def _run_in(self, lane: Lane, work: Work, after: Sequence[_Done]) -> _Done:
        submitted = time.perf_counter()

        def carry_out() -> list[Span]:
            ends = [span.end for future in after for span in future.result()]
            with torch.inference_mode():
                return [self._carry_out(lane, work, max([submitted, *ends]))]

        return self._submit(lane, carry_out)

    def _submit(self, lane: Lane, carry_out: Callable[[], list[Span]]) -> _Done:
        done: _Done = Future()

        def complete() -> None:
            try:
                done.set_result(carry_out())
            except BaseException as error:
                done.set_exception(error)

        self._pending.append(done)
        if lane is Lane.LINK_IN:
            with self._drawing:
                self._queued.append(complete)
            self._threads[lane].submit(self._take_turn, time.perf_counter())
        else:
            self._threads[lane].submit(complete)
        return done

    # -- groups ---------------------------------------------------------------------------

    def poke(self) -> None:
        with self._drawing:
            if self._looks or not self._groups:
                return
            self._looks = True
        self._threads[Lane.LINK_IN].submit(self._take_turn, time.perf_counter())

    def _take_turn(self, ready: float) -> None:
        """Do the next work of a step or a group on the link's thread.

        Each queued work of a step has a turn, and groups have one more while they have pieces.
        A copy engine would have had a piece at `ready` that was drawn when the last one ended.
        """
        with self._drawing:
            drawn = None
            if not self._queued or not self._share.steps_are_next:
                drawn = self._draw()
                if drawn is None or not self._queued:
                    self._share.alone()
            queued = self._queued.popleft() if drawn is None and self._queued else None
            if drawn is None and queued is None:
                self._looks = False
                return
        began = time.perf_counter()
        if queued is not None:
            queued()
        elif drawn is not None:
            group, piece = drawn
            self._do_piece(Lane.LINK_IN, group, piece, max(ready, piece.ready))
        ended = time.perf_counter()
        with self._drawing:
            self._share.used(ended - began, by_step=queued is not None)
        if drawn is not None:
            self._threads[Lane.LINK_IN].submit(self._take_turn, ended)

    def run_piece(self, lane: Lane, group: Group, piece: Piece) -> None:
        group.begin()
        if lane is Lane.COMPUTE:
            self._do_piece(lane, group, piece, time.perf_counter())
        else:
            self._threads[lane].submit(self._do_piece, lane, group, piece, time.perf_counter())

    def _do_piece(self, lane: Lane, group: Group, piece: Piece, ready: float) -> None:
        def carry_out() -> Span:
            with torch.inference_mode():
                return self._carry_out(lane, piece.work, ready)

        if self._give_span(group, piece, carry_out) and lane is not Lane.LINK_IN:
            self.poke()

    # -- spans and errors of steps -----------------------------------------------------------

    def _collect(self) -> list[Span]:
        ended: list[Future[list[Span]]] = []
        going: deque[Future[list[Span]]] = deque()
        for future in self._pending:
            (ended if future.done() else going).append(future)
        self._pending = going
        spans, self._spans = self._spans, []
        for future in ended:
            spans += future.result()
        return spans

    def _finish(self) -> list[Span]:
        error: BaseException | None = None
        spans: list[Span] = []
        while self._pending:
            future = self._pending[0]
            failure = future.exception()  # waits
            # Only now: after an interrupted wait `finish_after_error` must wait for this one.
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


async def passed(lane: ThreadPoolExecutor) -> None:
    """Return once all work that the lane was given until now is done."""
    await asyncio.get_running_loop().run_in_executor(lane, lambda: None)
