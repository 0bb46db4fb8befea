"""Fetches a prefix into the worker's own store, before its match.

It comes from a tier of the own store or, by its transfer engine, from another host's store: the
own store loads it then, and the payload passes neither through these calls nor through the worker.
Or it comes from another store's gRPC stream, through this process. Each fetch measures the rate of
its source.

A failed fetch costs reuse, never a request: chunks that were sealed before it failed stay, and
the rest is computed. Fetches run on the event loop. Copies run on a lane.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc

from splitpoint.costs.fetching import ASSUMED_BYTES_PER_SECOND, measured_rate
from splitpoint.errors import FailedPrecondition, SplitpointError, Unavailable
from splitpoint.keys import chunk_key
from splitpoint.shapes import ArenaLayout
from splitpoint.tasks import NamedTurns
from splitpoint.tiers import ChunkSource, Transfer
from splitpoint.transport.cleanups import Cleanups
from splitpoint.transport.statuses import error_of
from splitpoint.v1 import kvstore_pb2 as pb
from worker_service.fetching.results import FetchResult, FetchSource, FetchTotals
from worker_service.fetching.stream import StreamFetcher
from worker_service.store.client import StoreClient

# Time limit between two messages: each batch is at most 64 MiB.
SILENCE_SECONDS = 30.0


async def load_chunks(
    store: StoreClient,
    cleanups: Cleanups,
    source: ChunkSource,
    salt: bytes,
    tokens: Sequence[int],
    loaded: Callable[[pb.LoadChunksResponse], None],
) -> None:
    """Load what the arena lacks of `tokens`. Calls `loaded` after each batch.

    The leases that protect the chunks meanwhile are released at the end, also if this is
    cancelled. Raises what the store answers, and Unavailable if it is away or silent.
    """
    connection = store.connection
    if connection is None:
        raise Unavailable("the KV store is away", reason="STORE_LOST")
    call = store.load_chunks(connection, salt, tokens, source)

    async def end(*responses: pb.LoadChunksResponse | None) -> None:
        call.cancel()
        leases = [response.lease_id for response in responses if response is not None]
        await store.release(connection, lease_ids=leases)

    # The first message names the lease: a call that is cancelled before it came waits for it.
    response = await cleanups.obtain(_next(call), end)
    leasing = response
    try:
        while response is not None:
            loaded(response)
            leasing = response
            response = await _next(call)
    finally:
        await cleanups.finish(end(leasing))


async def _next(call: Any) -> pb.LoadChunksResponse | None:
    """Return the next message; None at the end. Raises what the store answers."""
    try:
        async with asyncio.timeout(SILENCE_SECONDS):
            response = await call.read()
    except TimeoutError:
        raise Unavailable(
            f"the store loaded nothing for {SILENCE_SECONDS:g} s", reason="STALLED"
        ) from None
    except grpc.RpcError as error:
        raise error_of(error) from error
    return None if response is grpc.aio.EOF else response


# Smaller fetches measure round trips, not the link.
MEASURABLE_BYTES = 1 << 20
# A rate below the assumed one that is not measured again for so long is doubled: a source that was
# slow while the machine was busy is tried again, the sooner the less slow it was.
AGING_SECONDS = 10.0
# Weight of a new rate in the moving average.
NEW_RATE_SHARE = 0.3


class SourceRates:
    """Moving averages, which go back to the assumed rate if nothing is measured for a while.

    Attributes:
        by_key: bytes per second by `ChunkSource.rate_key`.
        aged: the keys among them whose rate was doubled since it was measured.
    """

    def __init__(self, on_change: Callable[[Mapping[str, float]], None]) -> None:
        """`on_change` is called with all rates when one has changed."""
        self.by_key: dict[str, float] = {}
        self.aged: set[str] = set()
        self._on_change = on_change
        self._aging: dict[str, asyncio.TimerHandle] = {}

    def learn(self, key: str, result: FetchResult) -> None:
        """Let a rate follow the result of a fetch, if it was large enough to measure one."""
        if result.late_rate:
            # Else the next request would wait as long.
            self.by_key[key] = min(self.by_key.get(key, ASSUMED_BYTES_PER_SECOND), result.late_rate)
        elif result.bytes >= MEASURABLE_BYTES and result.rate > 0:
            before = self.by_key.get(key, result.rate)
            if before == ASSUMED_BYTES_PER_SECOND:  # aged back: nothing is known any more
                before = result.rate
            self.by_key[key] = before + NEW_RATE_SHARE * (result.rate - before)
        else:
            return
        self.aged.discard(key)
        self._changed(key)

    def forget(self, key: str) -> None:
        """Plan with the assumed rate again, or with that of another transfer."""
        self.aged.discard(key)
        if self.by_key.pop(key, None) is not None:
            self._changed(key)

    def close(self) -> None:
        """Let no rate age any more."""
        for timer in self._aging.values():
            timer.cancel()

    def _changed(self, key: str) -> None:
        """Let the rate age if nothing is measured for a while, and report all rates."""
        if (timer := self._aging.pop(key, None)) is not None:
            timer.cancel()
        if self.by_key.get(key, ASSUMED_BYTES_PER_SECOND) < ASSUMED_BYTES_PER_SECOND:
            loop = asyncio.get_running_loop()
            self._aging[key] = loop.call_later(AGING_SECONDS, self._age, key)
        self._on_change(self.by_key)

    def _age(self, key: str) -> None:
        self.by_key[key] = min(2 * self.by_key[key], ASSUMED_BYTES_PER_SECOND)
        self.aged.add(key)
        self._changed(key)


log = logging.getLogger(__name__)

# A store from which the own store could not load is streamed from for so long.
RETRY_TRANSFER_SECONDS = 30.0
# Time for releases when the worker stops. The end of its session releases the rest.
CLOSE_SECONDS = 2.0


class PrefixFetcher:
    """All fetches of one worker.

    Attributes:
        rates: those of tiers and other stores.
        totals: updated on the event loop.
    """

    def __init__(
        self,
        store: StoreClient,
        layout: ArenaLayout,
        rates_changed: Callable[[Mapping[str, float]], None],
        totals: FetchTotals | None = None,
    ) -> None:
        self.totals = FetchTotals() if totals is None else totals
        self.rates = SourceRates(rates_changed)
        self._store = store
        self._layout = layout
        self._cleanups = Cleanups()
        self._streams = StreamFetcher(store, layout, self._cleanups)
        # Fetches of sequences with the same first chunk take turns: the second one finds the
        # chunks of the first one in the own store.
        self._turns = NamedTurns()
        # Stores from which the own store could not load, until these times.
        self._not_loaded_from: dict[str, float] = {}

    async def fetch(self, source: FetchSource, salt: bytes, tokens: Sequence[int]) -> FetchResult:
        """Fetch what the source has more of. Raises only CancelledError."""
        result = FetchResult()
        began = time.monotonic()
        try:
            async with asyncio.timeout(source.time_limit):
                await self._fetch(source, salt, tokens, result)
        except TimeoutError:
            log.warning("fetching from %s took too long", source.place)
            if result.transfer is Transfer.DIRECT:
                self._stream_for_a_while(source.place)
            else:
                result.is_late()
        except SplitpointError as error:
            log.warning("not fetched from %s: %s", source.place, error.message)
        except Exception:
            # The request can run without its prefix.
            log.exception("fetching from %s failed", source.place)
        finally:
            result.seconds = time.monotonic() - began
            self.measured(source.place, result)
        return result

    def reattached(self) -> None:
        """Forget the rates of transfers that the own store's new session does not have."""
        connection = self._store.connection
        if connection is None or not connection.loads_from_stores:
            for key in list(self.rates.by_key):
                if ChunkSource.transfer_of(key) is not Transfer.STREAM:
                    self.rates.forget(key)

    def measured(self, place: ChunkSource, result: FetchResult) -> None:
        """Count what came from a place, and let its rate learn from it."""
        self.totals.tokens += result.tokens
        self.totals.seconds += result.seconds
        if result.transfer is not Transfer.STREAM and not self._loads_from(place.address):
            return  # the next fetch from there is a stream
        self.rates.learn(place.rate_key(result.transfer), result)

    async def quiesce(self) -> None:
        """Return when all copies that had begun are done."""
        await self._streams.quiesce()

    async def close(self) -> None:
        """Release resources. No fetch may run any more."""
        self.rates.close()
        await self._cleanups.wait(CLOSE_SECONDS)
        self._streams.close()

    # -- one fetch ----------------------------------------------------------------

    async def _fetch(
        self, source: FetchSource, salt: bytes, tokens: Sequence[int], result: FetchResult
    ) -> None:
        chunk_tokens = self._layout.chunk_tokens
        first = chunk_key(self._layout.layout_hash, salt, b"", tokens[:chunk_tokens])
        async with self._turns.turn(first):
            wanted = min(source.cached_tokens, len(tokens)) // chunk_tokens
            result.wanted_bytes = wanted * self._layout.chunk_bytes
            result.began = time.monotonic()
            if not source.place.address:
                await self._load(source, salt, tokens, result)
            elif not await self._loaded_from_store(source, salt, tokens, result):
                await self._streams.fetch(source, salt, tokens, result)

    async def _loaded_from_store(
        self, source: FetchSource, salt: bytes, tokens: Sequence[int], result: FetchResult
    ) -> bool:
        """Have the own store load from another one. Return False if it cannot for now."""
        address = source.place.address
        if not self._loads_from(address):
            return False
        result.transfer = Transfer.DIRECT
        try:
            await self._load(source, salt, tokens, result)
        except (FailedPrecondition, Unavailable) as error:
            log.warning("the own store did not load from %s: %s", address, error.message)
            self._stream_for_a_while(source.place)
            result.transfer, result.rate = Transfer.STREAM, 0.0
            return False
        return True

    def _loads_from(self, address: str) -> bool:
        """Return True if the own store is asked to load from another one."""
        connection = self._store.connection
        if connection is None or not connection.loads_from_stores:
            return False
        return time.monotonic() >= self._not_loaded_from.get(address, 0.0)

    def _stream_for_a_while(self, place: ChunkSource) -> None:
        """Do not have the own store load from another one for now."""
        self._not_loaded_from[place.address] = time.monotonic() + RETRY_TRANSFER_SECONDS
        self.rates.forget(place.rate_key(Transfer.DIRECT))

    async def _load(
        self, source: FetchSource, salt: bytes, tokens: Sequence[int], result: FetchResult
    ) -> None:
        """Have the own store load full chunks."""
        size = self._layout.chunk_tokens
        wanted = min(source.cached_tokens, len(tokens)) // size * size
        if not wanted:
            return
        began = time.monotonic()

        def loaded(response: pb.LoadChunksResponse) -> None:
            result.bytes = response.loaded_bytes
            tokens = response.loaded_bytes // self._layout.chunk_bytes * size
            if source.place.address:
                result.came(tokens, Transfer.DIRECT)
            else:
                result.tokens = tokens
            seconds = time.monotonic() - began
            result.rate = measured_rate(result.bytes, seconds, response.transfer_seconds)

        await load_chunks(self._store, self._cleanups, source.place, salt, tokens[:wanted], loaded)
