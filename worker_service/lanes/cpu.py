"""Lanes of a CPU: a thread each, and the caller's own for compute."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from splitpoint.planning.schedule import Lane
from worker_service.lanes.lanes import (
    SIDE_LANES,
    DoneEvent,
    EmulatedLink,
    Event,
    FutureEvent,
    Lanes,
    Source,
    Step,
    Work,
)
from worker_service.lanes.timeline import Span

# The side lanes know this many products of a list before the first of them is done: enough
# for copies to go ahead, few enough that compute does not wait for the end of the list.
PRODUCTS_AHEAD = 16

# Completed with the spans of a piece of work, or of all work of a source.
_Done = Future[list[Span]]


@dataclass(frozen=True, slots=True)
class _Promised:
    """Compute that lanes may already wait for, to be done in the caller's thread."""

    work: Work
    after: list[_Done]
    done: _Done


class ThreadLanes(Lanes):
    """Lanes of a CPU: one thread each, and the caller's for compute."""

    def __init__(self, device: torch.device, link: EmulatedLink | None = None) -> None:
        super().__init__(device, link)
        self._threads = {
            lane: ThreadPoolExecutor(1, thread_name_prefix=lane.value) for lane in SIDE_LANES
        }
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

    def run_all(self, steps: Iterable[Step]) -> None:
        # The futures of compute exist before it runs, so that copies can be queued behind it.
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
                    self._run_first(promised)
            while promised:
                self._run_first(promised)
        except BaseException as error:
            # The side lanes must not wait for compute that will not run.
            for each in promised:
                each.done.set_exception(error)
            raise

    def _run_first(self, promised: deque[_Promised]) -> None:
        first = promised[0]
        for future in first.after:
            future.result()
        span = self._carry_out(Lane.COMPUTE, first.work, time.perf_counter())
        self._spans.append(span)
        promised.popleft()
        first.done.set_result([span])

    def run_on_demand(self, lane: Lane, source: Source) -> Event:
        self._require_side(lane)
        submitted = time.perf_counter()

        def carry_out() -> list[Span]:
            spans: list[Span] = []
            with torch.inference_mode():
                while works := source():
                    for work in works:
                        # A copy engine would have had this work when the last one ended.
                        ready = spans[-1].end if spans else submitted
                        spans.append(self._carry_out(lane, work, ready))
            return spans

        return FutureEvent(self._submit(lane, carry_out))

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
