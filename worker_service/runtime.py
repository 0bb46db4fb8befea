"""Joins the engine's thread with the event loop: store lookups, write-back, streams.

All methods run on the event loop. The engine is reached through `Engine.post`
only, and answers through `_on_output`, called in the loop's own turn.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from splitpoint.costs.profile import Profile
from splitpoint.errors import Internal, SplitpointError, Unavailable
from splitpoint.observe import tracing
from splitpoint.observe.logs import for_request
from splitpoint.planning.plan import Residency
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
)
from worker_service.engine.sequence import Admission, Suspects
from worker_service.lanes.spans import RequestSpans, WriteBackSpans
from worker_service.store.client import Match, StoreClient
from worker_service.store.fetch import FetchResult, PrefixFetcher
from worker_service.store.write_back import SequenceKey, WriteBack

log = logging.getLogger(__name__)

Result = TypeVar("Result")


# Step outputs that nobody takes; a scheduler that lags so far behind is not there.
OUTPUT_LIMIT = 10_000
# For a store to come back: a supervisor's first restarts, and the recovery.
STORE_WAIT_SECONDS = 30.0
# What callers and requests are told then.
ENGINE_FAILED = "the engine failed; the worker restarts"
# The longest step, a long prefill on a slow device, with much to spare.
STEP_SECONDS = 120.0


@dataclass(slots=True)
class Listener:
    """A Run stream's end: outputs in order, until it was given up for not taking them."""

    outputs: asyncio.Queue[StepOutput] = field(default_factory=asyncio.Queue)
    given_up: asyncio.Event = field(default_factory=asyncio.Event)


class Runtime:
    """One engine, its thread, its store. `start` before use, `stop` at the end.

    Attributes:
        account: what was done so far, whether or not anybody listened.
        observed: told of each output of the engine, after the account.
    """

    def __init__(self, engine: Engine, store: StoreClient | None) -> None:
        self.engine = engine
        self.store = store
        self.account = Account()
        self.observed: Callable[[StepOutput], None] | None = None
        # Who hears of step outputs; None while no Run stream is open.
        self._listener: Listener | None = None
        # Requests from admit until their finish, and those still looking up.
        self.live: set[SequenceKey] = set()
        self._lookups: dict[SequenceKey, asyncio.Task[None]] = {}
        self._calls: set[asyncio.Future[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop = asyncio.get_running_loop()
        self.write_back: WriteBack | None = None
        if store is not None:
            written = self.account.written
            self.write_back = WriteBack(store, engine.cache, engine.post, engine.lanes, written)
            self.write_back.trace = engine.trace
        self.fetcher: PrefixFetcher | None = None
        # Told when the rate of fetching from some store was measured.
        self.rates_changed: Callable[[Mapping[str, float]], None] | None = None
        # Told when the engine's own costs changed; makes the profile that is reported.
        self.costs_changed: Callable[[Profile], Profile] | None = None
        # Fetches under way, and what the finished ones brought until it is reported.
        self._fetches: dict[SequenceKey, asyncio.Task[FetchResult]] = {}
        self._fetched: dict[SequenceKey, FetchResult] = {}
        # Of the requests that somebody traces, until their end.
        self._spans: dict[SequenceKey, RequestSpans] = {}
        if store is not None:
            layout, fetched = engine.cache.layout, self.account.fetched
            self.fetcher = PrefixFetcher(store, layout, self._on_rates, fetched)
            store.on_reattach(
                quiesce=self._quiesce,
                reattached=lambda: engine.post(Call(engine.restorer.forget_arena)),
            )
            if store.pinning is not None:
                store.pinning.between_steps = self._between_steps
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.failed = asyncio.Event()

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        """Finish write-back, end the session, stop the thread. Cancel requests first."""
        if self._lookups:
            await asyncio.wait(self._lookups.values())
        if self.write_back is not None:
            await self.write_back.close()
        if self.fetcher is not None:
            await self.fetcher.close()
        if self.store is not None and self.store.pinning is not None:
            self.store.pinning.between_steps = None
        self.engine.post(Stop())
        await asyncio.to_thread(self._thread.join)
        if self.store is not None:
            await self.store.close()

    # -- who listens --------------------------------------------------------------

    def listen(self) -> Listener:
        """A fresh listener, which replaces the one before."""
        self._listener = Listener()
        return self._listener

    def unlisten(self, listener: Listener) -> None:
        if self._listener is listener:
            self._listener = None

    def emit(self, output: StepOutput) -> None:
        """Tell the listener; what nobody hears is dropped, as its requests are cancelled."""
        listener = self._listener
        if listener is None:
            return
        if listener.outputs.qsize() >= OUTPUT_LIMIT:
            log.error("step outputs are not taken: giving the Run stream up")
            listener.given_up.set()
            self._listener = None
            self.cancel_all()
            return
        listener.outputs.put_nowait(output)

    def standstill(self) -> StepOutput:
        """How things are between two outputs, for who listens. Does not wake the engine."""
        return StepOutput(
            running_count=len(self.engine.queues.running),
            cache_used_bytes=self.engine.cache.used_bytes,
        )

    # -- requests -----------------------------------------------------------------

    def admit(self, admission: Admission) -> None:
        """Look the prefix up, then hand the request to the engine."""
        key = admission.key
        if tracing.is_on():
            self._begin_spans(admission)
        self.live.add(key)
        self._idle.clear()
        self._track(key, self._look_up_and_admit(admission))

    def _begin_spans(self, admission: Admission) -> None:
        spans = RequestSpans.begin(
            admission.traceparent,
            admission.request_id,
            attempt=admission.attempt,
            prompt_tokens=len(admission.prompt),
            residency=admission.residency.value,
        )
        if spans is not None:
            self._spans[admission.key] = spans

    def _span_of(self, key: SequenceKey) -> tracing.Span:
        spans = self._spans.get(key)
        return tracing.NO_SPAN if spans is None else spans.run

    def cancel(self, key: SequenceKey) -> None:
        """Stop a request; its FinishEvent follows. Unknown keys are ignored."""
        fetch = self._fetches.get(key)
        if fetch is not None:
            fetch.cancel()
        self._post_after_lookup(key, Cancel(key))

    def cancel_all(self) -> None:
        for key in list(self.live):
            self.cancel(key)

    def set_paused(self, request_id: str, paused: bool) -> None:
        """Leave a request out of the steps, its memory kept, or take it in again."""
        for key in list(self.live):
            if key[0] == request_id:
                self._post_after_lookup(key, SetPaused(request_id, paused))

    def _post_after_lookup(self, key: SequenceKey, command: Command) -> None:
        """The engine must hear of a request before it hears anything about it."""
        lookup = self._lookups.get(key)
        if lookup is not None:
            lookup.add_done_callback(lambda _: self.engine.post(command))
        else:
            self.engine.post(command)

    async def wait_idle(self, timeout: float) -> bool:
        """Whether every request ended within `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        return self._idle.is_set()

    async def call(self, function: Callable[[], Result]) -> Result:
        """Run `function` on the engine's thread, between two steps."""
        if self.failed.is_set():
            raise Internal(ENGINE_FAILED, reason="ENGINE_FAILED")
        future: asyncio.Future[Result] = self._loop.create_future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)

        def settle(setter: Callable[[], None]) -> None:
            if not future.done():
                setter()

        def run() -> None:
            try:
                result = function()
            except Exception as error:
                failure = error
                self._loop.call_soon_threadsafe(settle, lambda: future.set_exception(failure))
            else:
                self._loop.call_soon_threadsafe(settle, lambda: future.set_result(result))

        self.engine.post(Call(run))
        return await future

    def _between_steps(self, function: Callable[[], None]) -> None:
        """From another thread: run `function` on the engine's, and return after it.

        Raises TimeoutError when the engine does not come to it; it never runs then.
        """
        done: concurrent.futures.Future[None] = concurrent.futures.Future()

        def run() -> None:
            # Under the future's lock: it is given up before this, or waited for.
            if not done.set_running_or_notify_cancel():
                return
            try:
                function()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self.engine.post(Call(run))
        concurrent.futures.wait([done], STEP_SECONDS)
        if done.cancel():
            raise TimeoutError(f"the engine's step did not end within {STEP_SECONDS:g} s")
        done.result()

    # -- the engine's side -----------------------------------------------------------

    def _run(self) -> None:
        """Body of the engine's thread."""
        try:
            self.engine.run(self._deliver)
        except Exception:
            # Device memory may be in any state: the process must be replaced.
            log.exception("the engine failed")
            self._loop.call_soon_threadsafe(self._on_failure)

    def _deliver(self, output: StepOutput) -> None:
        self._loop.call_soon_threadsafe(self._on_output, output)

    def _on_failure(self) -> None:
        """Everything that waits hears of it; `failed` first, for a Run stream to break instead."""
        error = Internal(ENGINE_FAILED, reason="ENGINE_FAILED")
        output = StepOutput(finishes=[FinishEvent(key, error=error) for key in self.live])
        for call in self._calls:
            call.set_exception(error)
        for event in output.finishes:
            self._end_spans(event)
        self.live.clear()
        self._idle.set()
        self.failed.set()
        self.emit(output)

    def _on_output(self, output: StepOutput) -> None:
        self.account.take(output)
        if self.observed is not None:
            self.observed(output)
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
            if self._spans:
                self._end_spans(event)
        if not self.live:
            self._idle.set()
        if output.profile is not None and self.costs_changed is not None:
            output.profile = self.costs_changed(output.profile)
        if output.has_news:
            self.emit(output)

    def _end_spans(self, event: FinishEvent) -> None:
        spans = self._spans.pop(event.key, None)
        if spans is not None:
            error = event.error.reason if event.error is not None else ""
            spans.end(error=error, reason=event.reason)

    # -- the store's side --------------------------------------------------------------

    def _track(self, key: SequenceKey, lookup: Coroutine[None, None, None]) -> None:
        with for_request(key[0]):
            task = asyncio.create_task(lookup, name=f"match {key[0]}")
        self._lookups[key] = task
        task.add_done_callback(lambda _: self._lookups.pop(key, None))

    async def _look_up_and_admit(self, admission: Admission) -> None:
        tokens = admission.tokens
        streamed = admission.residency is Residency.STREAMED
        await self._fetch(admission, tokens)
        match = await self._match(admission.key, admission.salt, tokens, streamed=streamed)
        if match is None and streamed:
            error = Unavailable(
                "streamed residency needs the KV store, which is away",
                reason="STORE_LOST",
                retry_after_seconds=1.0,
            )
            self._on_output(StepOutput(finishes=[FinishEvent(admission.key, error=error)]))
            return
        self.engine.admit(admission, match, self._spans.get(admission.key))

    async def _fetch(self, admission: Admission, tokens: list[int]) -> None:
        """Bring what another host's store has more of into the own one."""
        source, key = admission.source, admission.key
        if source is None or self.fetcher is None or self.store is None:
            return
        if source.address == self.store.address:
            return
        span = self._span_of(key).begin("fetch", source=source.address)
        # A task of its own, so that a request that is cancelled need not wait for it.
        work = self.fetcher.fetch(source, admission.salt, tokens)
        with span.current():
            task = self._fetches[key] = asyncio.create_task(work, name=f"fetch {key[0]}")
        await asyncio.wait({task})
        del self._fetches[key]
        if not task.cancelled():
            fetched = self._fetched[key] = task.result()
            span.set(tokens=fetched.tokens, bytes=fetched.bytes)
        span.end()

    def _with_fetch(self, event: RestoreEvent) -> RestoreEvent:
        fetched = self._fetched.pop(event.key, None)
        if fetched is None:
            return event
        return replace(event, fetched_tokens=fetched.tokens, fetch_seconds=fetched.seconds)

    def _on_rates(self, rates: Mapping[str, float]) -> None:
        if self.rates_changed is not None:
            self.rates_changed(rates)

    async def _quiesce(self) -> None:
        """Return once nothing writes into the store's slots any more."""
        if self.write_back is not None:
            await self.write_back.quiesce()
        if self.fetcher is not None:
            await self.fetcher.quiesce()

    async def _look_up_again(self, lookup: Lookup) -> None:
        suspects = lookup.suspects
        if suspects is not None:
            are_intact = await self._are_intact(suspects)
            if are_intact and suspects.error is not None:
                self.engine.post(Matched(lookup.key, None, suspects.error))
                return
        match = await self._match(
            lookup.key, lookup.salt, lookup.tokens, streamed=lookup.is_streamed
        )
        self.engine.post(Matched(lookup.key, match))

    async def _are_intact(self, suspects: Suspects) -> bool:
        """By the store; what cannot be asked for is not relied on."""
        if self.store is None:
            return False
        try:
            return await self.store.report(suspects.connection, suspects.chunks) == 0
        except SplitpointError as error:
            log.warning("suspect chunks were not reported: %s", error.message)
        except Exception:
            # The request waits for the answer.
            log.exception("reporting suspect chunks failed")
        return False

    async def _match(
        self, key: SequenceKey, salt: bytes, tokens: list[int], *, streamed: bool
    ) -> Match | None:
        """The leased prefix, with its chain open; None when the store is away."""
        if self.store is None or self.write_back is None:
            return None
        if streamed:
            # Its cache lives in the store: worth a wait, where others go on without.
            await self.store.wait_connected(STORE_WAIT_SECONDS)
        else:
            await self.store.attach_now()
        try:
            with self._span_of(key).part("look up") as span:
                match = await self.store.match(salt, tokens)
                span.set(cached_tokens=match.cached_tokens, chunks=len(match.chunks))
        except SplitpointError as error:
            log.warning("the prefix was not looked up: %s", error.message)
            return None
        except Exception:
            # Without its prefix the request can still run; without an answer it hangs.
            log.exception("looking the prefix up failed")
            return None
        # The last token is always computed, so it never counts as cached.
        cached = min(match.cached_tokens, len(tokens) - 1)
        spans = WriteBackSpans.of(self._span_of(key))
        self.write_back.open(key, salt, match, cached, must_store=streamed, spans=spans)
        return match
