"""Finds the cached prefix of each request: brings what the plan names, and leases it.

The prefix comes from where the plan says first, into the worker's own store. A fetch or a lookup
that fails costs reuse, never a request. All methods run on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from splitpoint.errors import SplitpointError
from splitpoint.observe import tracing
from splitpoint.planning.plan import Residency, RestoreMethod
from worker_service.counters import Counters
from worker_service.engine.engine import Engine
from worker_service.engine.messages import Call, Lookup, Matched, RestoreEvent, Wake
from worker_service.engine.sequence import Admission, Suspects
from worker_service.fetching.fetcher import CLOSE_SECONDS, PrefixFetcher
from worker_service.fetching.results import FetchResult
from worker_service.fetching.tier_loader import TierLoader
from worker_service.lanes.spans import WriteBackSpans
from worker_service.pipeline.two_ends import TwoEnds
from worker_service.store.client import Match, StoreClient
from worker_service.store.write_back import SequenceKey, WriteBack

log = logging.getLogger(__name__)

Result = TypeVar("Result")

# For a store to come back: a supervisor's first restarts, and the recovery.
STORE_WAIT_SECONDS = 30.0


class RequestPrefixes:
    """The prefixes of one worker's requests.

    Attributes:
        write_back: stores what requests compute.
        fetcher: fetches from tiers and other stores.
    """

    def __init__(
        self,
        store: StoreClient,
        engine: Engine,
        counters: Counters,
        on_rates: Callable[[], None],
    ) -> None:
        """`on_rates` is called when the rate of a tier or another store has changed."""
        self.write_back = WriteBack(
            store, engine.cache, engine.post, engine.lanes, counters.written
        )
        self.write_back.trace = engine.trace
        self.fetcher = PrefixFetcher(
            store, engine.cache.layout, lambda rates: on_rates(), counters.fetched
        )
        self._store = store
        self._engine = engine
        self._loader = TierLoader(
            store,
            engine.cache.layout,
            block_tokens=engine.max_batched_tokens,
            in_turn=not engine.lanes.overlapping,
            on_change=lambda: engine.post(Wake()),
            measured=self.fetcher.measured,
        )
        # Fetches under way, and results that are not reported yet.
        self._fetches: dict[SequenceKey, asyncio.Task[Any]] = {}
        self._fetched: dict[SequenceKey, FetchResult] = {}
        store.on_reattach(quiesce=self._quiesce, reattached=self._reattached)

    async def close(self) -> None:
        """Finish write-back, and release what fetches hold. No request may run any more."""
        await self.write_back.close()
        await self._loader.close(CLOSE_SECONDS)
        await self.fetcher.close()

    # -- one request --------------------------------------------------------------------

    async def find(
        self, admission: Admission, span: tracing.Span
    ) -> tuple[Match | None, TwoEnds | None]:
        """Bring the prefix of a request that arrived, and lease it.

        Returns None for the match if the store is away, and its two ends if a tier loads its
        back from now on. `span`: the request's; what is done is a part of it.
        """
        key, tokens, source = admission.key, admission.tokens, admission.source
        streamed = admission.residency is Residency.STREAMED
        meets = source is not None and source.meeting_tokens
        loader = self._loader if meets and not streamed and not admission.scores_prompt else None
        if loader is None and not admission.scores_prompt:
            await self._fetch(admission, tokens, span)
        elif loader is not None:
            # Wait while a tier brings a prefix with the same first chunk to another request.
            turn = loader.wait_turn(key, admission.salt, tokens)
            await self._finish(key, turn, f"turn {key[0]}")
        match = await self._match(
            key,
            admission.salt,
            tokens,
            streamed=streamed,
            computes_all=admission.scores_prompt,
            span=span,
            loader=loader,
        )
        ends = None
        if loader is not None and source is not None and match is not None:
            ends = loader.begin(key, source, admission.salt, tokens, match)
        if loader is not None and ends is None:
            loader.end_turn(key)
        return match, ends

    async def find_again(self, lookup: Lookup, span: tracing.Span) -> Matched:
        """Lease a prefix that is restored anew, or say that its damage is the request's end."""
        suspects = lookup.suspects
        if suspects is not None:
            are_intact = await self._are_intact(suspects)
            if are_intact and suspects.error is not None:
                return Matched(lookup.key, None, suspects.error)
        async with self._brought(lookup.key):
            match = await self._match(
                lookup.key,
                lookup.salt,
                lookup.tokens,
                streamed=lookup.is_streamed,
                computes_all=lookup.computes_all,
                span=span,
            )
        return Matched(lookup.key, match)

    def cancel(self, key: SequenceKey) -> None:
        """End the fetch of a request; unknown keys are ignored."""
        fetch = self._fetches.get(key)
        if fetch is not None:
            fetch.cancel()

    def ended(self, key: SequenceKey) -> None:
        """Forget a request that ended."""
        self._fetched.pop(key, None)
        self._loader.drop(key)

    def with_fetch(self, event: RestoreEvent) -> RestoreEvent:
        """Return the report of a restore, with what was fetched for it."""
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

    # -- what a prefix comes from -------------------------------------------------------

    async def _fetch(self, admission: Admission, tokens: list[int], span: tracing.Span) -> None:
        """Fetch the chunks that the arena of this worker's store lacks from the source."""
        source, key = admission.source, admission.key
        if source is None or source.place.address == self._store.address or self._store.is_silent:
            return
        part = span.begin("fetch", source=str(source.place))
        with part.current():
            work = self.fetcher.fetch(source, admission.salt, tokens)
            fetched = await self._finish(key, work, f"fetch {key[0]}")
        if fetched is not None:
            self._fetched[key] = fetched
            part.set(tokens=fetched.tokens, bytes=fetched.bytes)
        part.end()

    async def _finish(
        self, key: SequenceKey, work: Coroutine[Any, Any, Result], name: str
    ) -> Result | None:
        """Do it in a task of its own, so that `cancel` ends it; None if that happened."""
        task = self._fetches[key] = asyncio.create_task(work, name=name)
        await asyncio.wait({task})
        del self._fetches[key]
        return None if task.cancelled() else task.result()

    @asynccontextmanager
    async def _brought(self, key: SequenceKey) -> AsyncIterator[None]:
        """Have what a tier brought for a request in the store, so that it is matched."""
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
        computes_all: bool,
        span: tracing.Span,
        loader: TierLoader | None = None,
    ) -> Match | None:
        """Lease the prefix and open its write-back chain; None if the store is away.

        `computes_all`: nothing that is stored is used. `loader`: brings what will follow what
        the chain stores.
        """
        if streamed:
            # The cache of a streamed request lives in the store: worth a wait.
            await self._store.wait_connected(STORE_WAIT_SECONDS)
        else:
            await self._store.attach_now()
        try:
            with span.part("look up") as part:
                match = await self._store.match(salt, tokens, is_patient=streamed)
                part.set(cached_tokens=match.cached_tokens, chunks=len(match.chunks))
        except SplitpointError as error:
            log.warning("the prefix was not looked up: %s", error.message)
            return None
        except Exception:
            # The request can run without its prefix, but not without an answer.
            log.exception("looking the prefix up failed")
            return None
        if computes_all:
            match = replace(match, cached_tokens=0, chunks=())
        # The last token is always computed, so it never counts as cached.
        cached = min(match.cached_tokens, len(tokens) - 1)
        self.write_back.open(
            key,
            salt,
            match,
            cached,
            must_store=streamed,
            make_way=partial(loader.give_way, key) if loader is not None else None,
            spans=WriteBackSpans.of(span),
        )
        return match

    async def _are_intact(self, suspects: Suspects) -> bool:
        """Let the store inspect suspect chunks; return False if it cannot be asked."""
        try:
            return await self._store.report(suspects.connection, suspects.chunks) == 0
        except SplitpointError as error:
            log.warning("suspect chunks were not reported: %s", error.message)
        except Exception:
            # The request waits for the answer.
            log.exception("reporting suspect chunks failed")
        return False

    # -- the store's session ------------------------------------------------------------

    def _reattached(self) -> None:
        """Forget what was true of the store's last session only."""
        self._engine.post(Call(self._engine.restorer.forget_arena))
        self.fetcher.reattached()

    async def _quiesce(self) -> None:
        """Return once no copy into the store's slots is under way."""
        await self.write_back.quiesce()
        await self.fetcher.quiesce()
