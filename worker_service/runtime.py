"""Joins the engine's thread with the event loop: requests, store lookups, write-back, outputs.

All methods run on the event loop, except where they say otherwise. The engine's commands go through
`Engine.post`; its outputs come to `_on_output`. Calls of other threads run on the engine's thread,
between two of its steps.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from splitpoint.costs.profile import Profile
from splitpoint.errors import Internal, SplitpointError, Unavailable
from splitpoint.observe import tracing
from splitpoint.observe.logs import for_request
from splitpoint.planning.plan import Residency
from splitpoint.structured.grammar import unavailable
from worker_service.counters import Counters
from worker_service.engine.engine import Engine
from worker_service.engine.messages import (
    Call,
    Cancel,
    Command,
    FinishEvent,
    Lookup,
    Matched,
    SetPaused,
    StepOutput,
    Stop,
)
from worker_service.engine.sequence import Admission
from worker_service.lanes.spans import RequestSpans
from worker_service.prefixes import RequestPrefixes
from worker_service.store.client import StoreClient
from worker_service.store.write_back import SequenceKey
from worker_service.streams import Listener, RunStreams
from worker_service.structured.compiler import GrammarCompiler
from worker_service.structured.matcher import GrammarMatcher

Result = TypeVar("Result")

# Message to callers and requests after the engine's thread has failed.
ENGINE_FAILED = "the engine failed; the worker restarts"
# Time limit of one engine step: more than a long prefill on a slow device takes.
STEP_TIMEOUT_SECONDS = 120.0


class EngineCalls:
    """The calls that wait for the engine's thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._has_failed = False
        self._waiting: set[concurrent.futures.Future[Any]] = set()

    async def run(self, function: Callable[[], Result]) -> Result:
        """Run `function` on the engine's thread; called on the event loop.

        Raises Internal if the engine has failed, and what the function raises.
        """
        if self._has_failed:
            raise Internal(ENGINE_FAILED, reason="ENGINE_FAILED")
        done = self._post(function)
        self._waiting.add(done)
        try:
            return await asyncio.wrap_future(done)
        finally:
            self._waiting.discard(done)

    def without_copies(self, function: Callable[[], None]) -> None:
        """Run `function` on the engine's thread while nothing is copied, and wait for it.

        Call it from any thread except the engine's and the event loop's. Raises TimeoutError
        if the engine does not start `function` in time; `function` is then never run.
        """

        def call() -> None:
            with self._engine.lanes.without_copies():
                function()

        done = self._post(call)
        concurrent.futures.wait([done], STEP_TIMEOUT_SECONDS)
        if done.cancel():
            raise TimeoutError(f"the engine's step did not end within {STEP_TIMEOUT_SECONDS:g} s")
        done.result()

    def fail(self) -> None:
        """End all calls, those of later, too: the engine has failed. Called on the event loop."""
        self._has_failed = True
        for call in self._waiting:
            if not call.done():
                call.set_exception(Internal(ENGINE_FAILED, reason="ENGINE_FAILED"))

    def _post(self, function: Callable[[], Result]) -> concurrent.futures.Future[Result]:
        """Post a call; it does not run if its future is cancelled before it begins."""
        done: concurrent.futures.Future[Result] = concurrent.futures.Future()

        def begin() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(function())
            except Exception as error:
                done.set_exception(error)

        self._engine.post(Call(begin))
        return done


log = logging.getLogger(__name__)


class Runtime:
    """One engine, its thread, its store. `start` before use, `stop` at the end.

    Attributes:
        counters: totals of what was done, with or without a Run stream.
        observers: called with each output of the engine, after the counters.
        streams: the open Run streams.
        live: requests from `admit` until their finish.
        failed: set when the engine's thread has failed.
        calls: functions that run on the engine's thread, between two steps.
        prefixes: None without a store.
    """

    def __init__(
        self,
        engine: Engine,
        store: StoreClient | None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """`grammars`: compiles structured output; None: the worker cannot follow any."""
        self.grammars = grammars
        self.engine = engine
        self.store = store
        self.counters = Counters()
        self.observers: list[Callable[[StepOutput], None]] = []
        self.streams = RunStreams(self.idle_output)
        self.live: set[SequenceKey] = set()
        self.failed = asyncio.Event()
        self.calls = EngineCalls(engine)
        self.prefixes: RequestPrefixes | None = None
        self._lookups: dict[SequenceKey, asyncio.Task[None]] = {}
        # Traced requests, until their end.
        self._spans: dict[SequenceKey, RequestSpans] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        if store is not None:
            self.prefixes = RequestPrefixes(store, engine, self.counters, self._on_rates)
            if store.pinning is not None:
                store.pinning.between_steps = self.calls.without_copies

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        """Finish write-back, end the session, stop the thread.

        The caller must have cancelled all requests.
        """
        if self._lookups:
            await asyncio.wait(self._lookups.values())
        if self.prefixes is not None:
            await self.prefixes.close()
        if self.store is not None and self.store.pinning is not None:
            self.store.pinning.between_steps = None
        self.engine.post(Stop())
        await asyncio.to_thread(self._thread.join)
        if self.store is not None:
            await self.store.close()
        if self.grammars is not None:
            await asyncio.to_thread(self.grammars.close)

    # -- the Run streams ----------------------------------------------------------------

    def emit(self, output: StepOutput) -> None:
        """Give each Run stream its part of an output; what no stream takes is dropped."""
        for listener in self.streams.emit(output, {key[2] for key in self.live}):
            self.cancel_stream(listener.stream)

    def end_stream(self, listener: Listener) -> None:
        """Forget a Run stream and cancel its requests; those of others go on."""
        self.streams.close(listener)
        self.cancel_stream(listener.stream)

    def idle_output(self) -> StepOutput:
        """Return the present state as an output, without waking the engine."""
        return StepOutput(
            running_count=len(self.engine.queues.running),
            cache_used_bytes=self.engine.cache.used_bytes,
        )

    @property
    def profile(self) -> Profile:
        """The engine's costs, and the measured rates of tiers and other stores."""
        return self._with_rates(self.engine.profile)

    def _with_rates(self, profile: Profile) -> Profile:
        if self.prefixes is None:
            return profile
        rates = self.prefixes.fetcher.rates
        return replace(
            profile,
            remote_bytes_per_second=dict(rates.by_key),
            aged_sources=sorted(rates.aged),
        )

    def _on_rates(self) -> None:
        """Report how fast tiers and other stores are."""
        self.emit(StepOutput(profile=self.profile))

    # -- requests -----------------------------------------------------------------

    def admit(self, admission: Admission) -> None:
        """Look the prefix up, then hand the request to the engine."""
        key = admission.key
        if tracing.is_on():
            spans = RequestSpans.begin(
                admission.traceparent,
                admission.request_id,
                attempt=admission.attempt,
                prompt_tokens=len(admission.prompt),
                residency=admission.residency.value,
            )
            if spans is not None:
                self._spans[key] = spans
        self.live.add(key)
        self._idle.clear()
        self._track(key, self._look_up_and_admit(admission))

    def cancel(self, key: SequenceKey) -> None:
        """Stop a request; its FinishEvent follows. Unknown keys are ignored."""
        if self.prefixes is not None:
            self.prefixes.cancel(key)
        self._post_after_lookup(key, Cancel(key))

    def cancel_all(self) -> None:
        for key in list(self.live):
            self.cancel(key)

    def cancel_stream(self, stream: int) -> None:
        """Cancel the requests of one Run stream."""
        for key in list(self.live):
            if key[2] == stream:
                self.cancel(key)

    def set_paused(self, request_id: str, stream: int, paused: bool) -> None:
        """Leave a request out of the steps, its memory kept, or include it again."""
        for key in list(self.live):
            if key[0] == request_id and key[2] == stream:
                self._post_after_lookup(key, SetPaused(key, paused))

    def _post_after_lookup(self, key: SequenceKey, command: Command) -> None:
        """Post a command for a request after the request itself."""
        lookup = self._lookups.get(key)
        if lookup is not None:
            lookup.add_done_callback(lambda _: self.engine.post(command))
        else:
            self.engine.post(command)

    async def wait_idle(self, timeout: float) -> bool:
        """Return whether every request ended within `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        return self._idle.is_set()

    # -- the engine's outputs -----------------------------------------------------------

    def _run(self) -> None:
        """Run the engine; the body of its thread."""
        try:
            self.engine.run(self._deliver)
        except Exception:
            # Device memory may be in any state: the process must be replaced.
            log.exception("the engine failed")
            self._loop.call_soon_threadsafe(self._on_failure)

    def _deliver(self, output: StepOutput) -> None:
        self._loop.call_soon_threadsafe(self._on_output, output)

    def _on_failure(self) -> None:
        """Fail all pending calls and requests.

        `failed` is set before the output is emitted; this ends the Run stream.
        """
        error = Internal(ENGINE_FAILED, reason="ENGINE_FAILED")
        output = StepOutput(finishes=[FinishEvent(key, error=error) for key in self.live])
        self.calls.fail()
        for event in output.finishes:
            self._end_spans(event)
        self.live.clear()
        self._idle.set()
        self.failed.set()
        self.emit(output)

    def _on_output(self, output: StepOutput) -> None:
        """Count an output, pass its parts on, and report it."""
        self.counters.add(output)
        for observe in self.observers:
            observe(output)
        prefixes = self.prefixes
        if prefixes is not None:
            for key, jobs in output.writes:
                prefixes.write_back.submit(key, jobs)
            for key in output.flushes:
                prefixes.write_back.flush(key)
            output.restores = [prefixes.with_fetch(event) for event in output.restores]
        for lookup in output.lookups:
            self._track(lookup.key, self._look_up_again(lookup))
        for event in output.finishes:
            self.live.discard(event.key)
            if prefixes is not None:
                prefixes.ended(event.key)
            self._end_spans(event)
        if not self.live:
            self._idle.set()
        if output.profile is not None:
            output.profile = self._with_rates(output.profile)
        if output.has_news:
            self.emit(output)

    def _end_spans(self, event: FinishEvent) -> None:
        spans = self._spans.pop(event.key, None)
        if spans is not None:
            error = event.error.reason if event.error is not None else ""
            spans.end(error=error, reason=event.reason)

    # -- prefixes ----------------------------------------------------------------------

    def _track(self, key: SequenceKey, lookup: Coroutine[None, None, None]) -> None:
        with for_request(key[0]):
            task = asyncio.create_task(lookup, name=f"match {key[0]}")
        self._lookups[key] = task
        task.add_done_callback(lambda _: self._lookups.pop(key, None))

    async def _look_up_and_admit(self, admission: Admission) -> None:
        key = admission.key
        try:
            matcher = await self._matcher(admission)
        except SplitpointError as refused:
            self._on_output(StepOutput(finishes=[FinishEvent(key, error=refused)]))
            return
        if matcher is not None and matcher.is_complete:
            # Only the end of its answer was lost.
            self._on_output(StepOutput(finishes=[FinishEvent(key, "stop")]))
            return
        match = ends = None
        if self.prefixes is not None:
            match, ends = await self.prefixes.find(admission, self._span_of(key))
        if match is None and admission.residency is Residency.STREAMED:
            error = Unavailable(
                "streamed residency needs the KV store, which is not reachable",
                reason="STORE_LOST",
                retry_after_seconds=1.0,
            )
            self._on_output(StepOutput(finishes=[FinishEvent(key, error=error)]))
            return
        self.engine.admit(admission, match, self._spans.get(key), matcher, ends)

    async def _matcher(self, admission: Admission) -> GrammarMatcher | None:
        """Compile the grammar of a request, beside the engine's steps; None if it has none."""
        grammar, sampling = admission.grammar, admission.sampling
        if grammar is None:
            return None
        if self.grammars is None:
            raise unavailable("this worker cannot follow structured output")
        ends = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ends.update(self.engine.eos_token_ids)
        began = time.perf_counter()
        compiling = self.grammars.threads.submit(
            self.grammars.matcher,
            grammar,
            salt=admission.salt,
            delivered=admission.delivered,
            ends=frozenset(ends),
            min_tokens=sampling.min_tokens,
        )
        matcher = await asyncio.wrap_future(compiling)
        self.counters.grammar_ready(time.perf_counter() - began)
        if matcher.error is not None:
            raise matcher.error
        return matcher

    async def _look_up_again(self, lookup: Lookup) -> None:
        matched = Matched(lookup.key, None)
        if self.prefixes is not None:
            matched = await self.prefixes.find_again(lookup, self._span_of(lookup.key))
        self.engine.post(matched)

    def _span_of(self, key: SequenceKey) -> tracing.Span:
        spans = self._spans.get(key)
        return tracing.NO_SPAN if spans is None else spans.run
