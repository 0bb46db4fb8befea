"""Looks prefixes up in the worker's store, and reports chunks that may be damaged."""

from __future__ import annotations

import logging

from splitpoint.errors import SplitpointError
from splitpoint.observe import tracing
from worker_service.engine.sequence import Suspects
from worker_service.lanes.spans import WriteBackSpans
from worker_service.store.client import Match, StoreClient
from worker_service.store.write_back import SequenceKey, WriteBack

log = logging.getLogger(__name__)

# For a store to come back: a supervisor's first restarts, and the recovery.
STORE_WAIT_SECONDS = 30.0


class PrefixLookup:
    """Leases the prefixes of requests. A failed lookup never fails a request."""

    def __init__(self, store: StoreClient, write_back: WriteBack) -> None:
        self._store = store
        self._write_back = write_back

    async def match(
        self,
        key: SequenceKey,
        salt: bytes,
        tokens: list[int],
        *,
        streamed: bool,
        span: tracing.Span,
        meets: bool = False,
    ) -> Match | None:
        """Lease the prefix and open its write-back chain; None if the store is away.

        `span`: the request's span; the lookup is a part of it. `meets`: what a tier brings will
        follow what it stores.
        """
        if streamed:
            # The cache of a streamed request lives in the store: worth a wait.
            await self._store.wait_connected(STORE_WAIT_SECONDS)
        else:
            await self._store.attach_now()
        try:
            with span.part("look up") as part:
                match = await self._store.match(salt, tokens)
                part.set(cached_tokens=match.cached_tokens, chunks=len(match.chunks))
        except SplitpointError as error:
            log.warning("the prefix was not looked up: %s", error.message)
            return None
        except Exception:
            # The request can run without its prefix, but not without an answer.
            log.exception("looking the prefix up failed")
            return None
        # The last token is always computed, so it never counts as cached.
        cached = min(match.cached_tokens, len(tokens) - 1)
        self._write_back.open(
            key,
            salt,
            match,
            cached,
            must_store=streamed or meets,
            spans=WriteBackSpans.of(span),
        )
        return match

    async def are_intact(self, suspects: Suspects) -> bool:
        """Let the store inspect suspect chunks; return False if it cannot be asked."""
        try:
            return await self._store.report(suspects.connection, suspects.chunks) == 0
        except SplitpointError as error:
            log.warning("suspect chunks were not reported: %s", error.message)
        except Exception:
            # The request waits for the answer.
            log.exception("reporting suspect chunks failed")
        return False
