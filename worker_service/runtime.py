"""Joins the engine's thread with the event loop: requests, store lookups, write-back, outputs.

All methods run on the event loop, except where they say otherwise. The engine's commands go
through `Engine.post`; its outputs come to `_on_output`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

from splitpoint.costs.profile import Profile
from splitpoint.errors import Internal, SplitpointError, Unavailable
from splitpoint.observe import tracing
from splitpoint.observe.logs import for_request
from splitpoint.planning.plan import Residency, RestoreMethod
from splitpoint.structured.grammar import unavailable
from worker_service.account import Account
from worker_service.engine.engine import Engine
from worker_service.engine.messages import (
    Call,
    Cancel,
    Command,
    FinishEvent,
    Lookup,
    Matched,
    RestoreEvent,
    SetPaused,
    StepOutput,
    Stop,
    Wake,
)
from worker_service.engine.sequence import Admission
from worker_service.fetching.fetcher import CLOSE_SECONDS, PrefixFetcher
from worker_service.fetching.results import FetchResult
from worker_service.fetching.tier_loader import TierLoader
from worker_service.lanes.spans import RequestSpans
from worker_service.prefix_lookup import PrefixLookup
from worker_service.store.client import Match, StoreClient
from worker_service.store.remote_client import RemoteStoreClient
from worker_service.store.write_back import SequenceKey, WriteBack
from worker_service.streams import Listener, RunStreams
from worker_service.structured.compiler import GrammarCompiler
from worker_service.structured.matcher import GrammarMatcher

log = logging.getLogger(__name__)

Result = TypeVar("Result")

# Message to callers and requests after the engine's thread has failed.
ENGINE_FAILED = "the engine failed; the worker restarts"
# Time limit of one engine step: more than a long prefill on a slow device takes.
STEP_TIMEOUT_SECONDS = 120.0


class Runtime:
    """One engine, its thread, its store. `start` before use, `stop` at the end.

    Attributes:
        account: totals of what was done, with or without a Run stream.
        observers: called with each output of the engine, after the account.
        streams: the open Run streams.
        live: requests from `admit` until their finish.
        failed: set when the engine's thread has failed.
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
        self.account = Account()
        self.observers: list[Callable[[StepOutput], None]] = []
        self.streams = RunStreams(self.idle_output)
        self.live: set[SequenceKey] = set()
        self.failed = asyncio.Event()
        self.write_back: WriteBack | None = None
        self.fetcher: PrefixFetcher | None = None
        self._loader: TierLoader | None = None
        self._prefixes: PrefixLookup | None = None
        # Bytes per second from tiers and other stores, by `ChunkSource.rate_key`.
        self._remote_rates: Mapping[str, float] = {}
        self._lookups: dict[SequenceKey, asyncio.Task[None]] = {}
        # Fetches under way, and results that are not reported yet.
        self._fetches: dict[SequenceKey, asyncio.Task[Any]] = {}
        self._fetched: dict[SequenceKey, FetchResult] = {}
        # Traced requests, until their end.
        self._spans: dict[SequenceKey, RequestSpans] = {}
        self._calls: set[concurrent.futures.Future[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        if store is not None:
            self._use_store(store)

    def _use_store(self, store: StoreClient) -> None:
        engine, account = self.engine, self.account
        self.write_back = WriteBack(store, engine.cache, engine.post, engine.lanes, account.written)
        self.write_back.trace = engine.trace
        self.fetcher = PrefixFetcher(store, engine.cache.layout, self._on_rates, account.fetched)
        if not isinstance(store, RemoteStoreClient):  # else the slots are those of a mirror
            self._loader = TierLoader(
                store,
                engine.cache.layout,
                block_tokens=engine.max_batched_tokens,
                in_turn=not engine.lanes.overlapping,
                on_change=lambda: engine.post(Wake()),
                measured=self.fetcher.measured,
            )
        self._prefixes = PrefixLookup(store, self.write_back)
        store.on_reattach(
            quiesce=self._quiesce,
            reattached=self._reattached,
        )
        if store.pinning is not None:
            store.pinning.between_steps = self._between_steps

    def _reattached(self) -> None:
        """Forget what was true of the store's last session only; called on the event loop."""
        self.engine.post(Call(self.engine.restorer.forget_arena))
        if self.fetcher is not None:
            self.fetcher.reattached()

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        """Finish write-back, end the session, stop the thread.

        The caller must have cancelled all requests.
        """
        if self._lookups:
            await asyncio.wait(self._lookups.values())
        if self.write_back is not None:
            await self.write_back.close()
        if self._loader is not None:
            await self._loader.close(CLOSE_SECONDS)
        if self.fetcher is not None:
            await self.fetcher.close()
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
        aged = () if self.fetcher is None else sorted(self.fetcher.rates.aged)
        rates = dict(self._remote_rates)
        return replace(profile, remote_bytes_per_second=rates, aged_sources=aged)

    def _on_rates(self, rates: Mapping[str, float]) -> None:
        """Report how fast tiers and other stores are; called by the fetcher."""
        self._remote_rates = rates
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
        fetch = self._fetches.get(key)
        if fetch is not None:
            fetch.cancel()
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

    # -- calls on the engine's thread --------------------------------------------------

    async def call(self, function: Callable[[], Result]) -> Result:
        """Run `function` on the engine's thread, between two steps."""
        if self.failed.is_set():
            raise Internal(ENGINE_FAILED, reason="ENGINE_FAILED")
        done = self._post_call(function)
        self._calls.add(done)
        try:
            return await asyncio.wrap_future(done)
        finally:
            self._calls.discard(done)

    def _between_steps(self, function: Callable[[], None]) -> None:
        """Run `function` on the engine's thread while nothing is copied, and wait for it.

        Call it from any thread except the engine's and the event loop's. Raises TimeoutError
        if the engine does not start `function` in time; `function` is then never run.
        """

        def call() -> None:
            with self.engine.lanes.without_copies():
                function()

        done = self._post_call(call)
        concurrent.futures.wait([done], STEP_TIMEOUT_SECONDS)
        if done.cancel():
            raise TimeoutError(f"the engine's step did not end within {STEP_TIMEOUT_SECONDS:g} s")
        done.result()

    def _post_call(self, function: Callable[[], Result]) -> concurrent.futures.Future[Result]:
        """Post a call; it does not run if its future is cancelled before it begins."""
        done: concurrent.futures.Future[Result] = concurrent.futures.Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(function())
            except Exception as error:
                done.set_exception(error)

        self.engine.post(Call(run))
        return done

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
        for call in self._calls:
            if not call.done():
                call.set_exception(error)
        for event in output.finishes:
            self._end_spans(event)
        self.live.clear()
        self._idle.set()
        self.failed.set()
        self.emit(output)

    def _on_output(self, output: StepOutput) -> None:
        """Count an output, pass its parts on, and report it."""
        self.account.add(output)
        for observe in self.observers:
            observe(output)
        if self.write_back is not None:
            for key, jobs in output.writes:
                self.write_back.submit(key, jobs)
            for key in output.flushes:
                self.write_back.flush(key)
        for lookup in output.lookups:
            self._track(lookup.key, self._look_up_again(lookup))
        if self._fetched:
            output.restores = [self._with_fetch(event) for event in output.restores]
        for event in output.finishes:
            self.live.discard(event.key)
            self._fetched.pop(event.key, None)
            if self._loader is not None:
                self._loader.drop(event.key)
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
        key, tokens = admission.key, admission.tokens
        streamed = admission.residency is Residency.STREAMED
        try:
            matcher = await self._matcher(admission)
        except SplitpointError as refused:
            self._on_output(StepOutput(finishes=[FinishEvent(key, error=refused)]))
            return
        if matcher is not None and matcher.is_complete:
            # Only the end of its answer was lost.
            self._on_output(StepOutput(finishes=[FinishEvent(key, "stop")]))
            return
        source, loader = admission.source, self._loader
        if source is None or not source.meeting_tokens or streamed:
            loader = None
        if loader is None:
            await self._fetch(admission, tokens)
        else:
            await self._wait_turn(loader, admission, tokens)
        match = await self._match(
            key, admission.salt, tokens, streamed=streamed, meets=loader is not None
        )
        if match is None and streamed:
            error = Unavailable(
                "streamed residency needs the KV store, which is not reachable",
                reason="STORE_LOST",
                retry_after_seconds=1.0,
            )
            self._on_output(StepOutput(finishes=[FinishEvent(key, error=error)]))
            return
        meeting = None
        if loader is not None and source is not None and match is not None:
            meeting = loader.begin(key, source, admission.salt, tokens, match)
        if loader is not None and meeting is None:
            loader.end_turn(key)
        self.engine.admit(admission, match, self._spans.get(key), matcher, meeting)

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
        matcher = await asyncio.to_thread(
            self.grammars.matcher,
            grammar,
            salt=admission.salt,
            delivered=admission.delivered,
            ends=frozenset(ends),
            min_tokens=sampling.min_tokens,
        )
        self.account.grammar_ready(time.perf_counter() - began)
        return matcher

    async def _fetch(self, admission: Admission, tokens: list[int]) -> None:
        """Fetch the chunks that the arena of this worker's store lacks from the source."""
        source, key = admission.source, admission.key
        if source is None or self.fetcher is None or self.store is None:
            return
        if source.place.address == self.store.address:
            return
        span = self._span_of(key).begin("fetch", source=str(source.place))
        # A task of its own: a cancelled request need not wait for it.
        work = self.fetcher.fetch(source, admission.salt, tokens)
        with span.current():
            task = self._fetches[key] = asyncio.create_task(work, name=f"fetch {key[0]}")
        await asyncio.wait({task})
        del self._fetches[key]
        if not task.cancelled():
            fetched = self._fetched[key] = task.result()
            span.set(tokens=fetched.tokens, bytes=fetched.bytes)
        span.end()

    async def _wait_turn(self, loader: TierLoader, admission: Admission, tokens: list[int]) -> None:
        """Wait while a tier brings a prefix with the same first chunk to another request."""
        key = admission.key
        work = loader.wait_turn(key, admission.salt, tokens)
        task = self._fetches[key] = asyncio.create_task(work, name=f"turn {key[0]}")
        await asyncio.wait({task})
        del self._fetches[key]

    def _with_fetch(self, event: RestoreEvent) -> RestoreEvent:
        fetched = self._fetched.pop(event.key, None)
        if fetched is None:
            return event
        event = replace(
            event,
            fetched_tokens=fetched.tokens,
            fetch_seconds=fetched.seconds,
            fetch_transfer=fetched.came_by,
        )
        if not fetched.recomputed_tokens:
            return event
        # They were computed before the restore, which found them on the device.
        return replace(
            event,
            method=RestoreMethod.TOKENS,
            recomputed_tokens=min(
                fetched.recomputed_tokens + event.recomputed_tokens, event.cached_tokens
            ),
            device_tokens=max(0, event.device_tokens - fetched.recomputed_tokens),
        )

    async def _look_up_again(self, lookup: Lookup) -> None:
        suspects = lookup.suspects
        if suspects is not None and self._prefixes is not None:
            are_intact = await self._prefixes.are_intact(suspects)
            if are_intact and suspects.error is not None:
                self.engine.post(Matched(lookup.key, None, suspects.error))
                return
        async with self._brought(lookup.key):
            match = await self._match(
                lookup.key, lookup.salt, lookup.tokens, streamed=lookup.is_streamed
            )
        self.engine.post(Matched(lookup.key, match))

    @asynccontextmanager
    async def _brought(self, key: SequenceKey) -> AsyncIterator[None]:
        """Have what a tier brought for a request in the store, so that it is matched."""
        if self._loader is None:
            yield
            return
        async with self._loader.sealed(key) as fetched:
            if fetched is not None:
                self._fetched[key] = fetched
            yield

    async def _match(
        self,
        key: SequenceKey,
        salt: bytes,
        tokens: list[int],
        *,
        streamed: bool,
        meets: bool = False,
    ) -> Match | None:
        """Lease the cached prefix and prepare its write-back. Return None if the lookup fails."""
        if self._prefixes is None:
            return None
        return await self._prefixes.match(
            key, salt, tokens, streamed=streamed, span=self._span_of(key), meets=meets
        )

    def _span_of(self, key: SequenceKey) -> tracing.Span:
        spans = self._spans.get(key)
        return tracing.NO_SPAN if spans is None else spans.run

    async def _quiesce(self) -> None:
        """Return once no copy into the store's slots is under way."""
        if self.write_back is not None:
            await self.write_back.quiesce()
        if self.fetcher is not None:
            await self.fetcher.quiesce()
