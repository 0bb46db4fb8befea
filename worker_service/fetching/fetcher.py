"""Fetches a prefix into the worker's own store, before its match.

It comes from a tier of the own store or, by its transfer engine, from another host's store: the own
store loads it then. Or it comes from another store's gRPC stream, through this process.

A failed fetch costs reuse, never a request: chunks that were sealed before it failed stay, and
the rest is computed. Fetches run on the event loop. Copies run on a lane.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from splitpoint.arena.payload import Payload
from splitpoint.costs.fetching import ASSUMED_BYTES_PER_SECOND, measured_rate
from splitpoint.errors import DataLoss, FailedPrecondition, SplitpointError, Unavailable
from splitpoint.keys import chunk_key
from splitpoint.observe import tracing
from splitpoint.observe.tracing import NO_SPAN
from splitpoint.shapes import ArenaLayout
from splitpoint.tasks import NamedTurns
from splitpoint.tiers import ChunkSource, Transfer
from splitpoint.transport.store_session import RemoteSession, remote_session
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import types_pb2
from worker_service.fetching.loads import load_chunks
from worker_service.lanes.cpu import passed
from worker_service.lanes.spans import TRACED_BATCHES
from worker_service.store.arena_tensors import ArenaTensors
from worker_service.store.chunk_streams import BATCH_BYTES, ReadTarget, read_chunks
from worker_service.store.cleanups import Cleanups
from worker_service.store.client import Match, StoreClient, written_chunks
from worker_service.store.session import Connection

log = logging.getLogger(__name__)

# Smaller fetches measure round trips, not the link.
MEASURABLE_BYTES = 1 << 20
# A rate below the assumed one that is not measured again for so long is doubled: a source that was
# slow while the machine was busy is tried again, the sooner the less slow it was.
AGING_SECONDS = 10.0
# Weight of a new rate in the moving average.
NEW_RATE_SHARE = 0.3
LONGEST_SECONDS = 30.0
# A store from which the own store could not load is streamed from for so long.
RETRY_TRANSFER_SECONDS = 30.0
# Time for releases when the worker stops. The end of its session releases the rest.
CLOSE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class FetchSource:
    """What holds more of a prefix.

    Attributes:
        predicted_seconds: 0 if unknown.
        meeting_tokens: of a tier: where its chunks, loaded from the last one on, are expected to
            meet what is computed meanwhile. 0: they are loaded before anything is computed.
    """

    place: ChunkSource
    cached_tokens: int
    predicted_seconds: float = 0.0
    meeting_tokens: int = 0

    @property
    def time_limit(self) -> float:
        if not self.predicted_seconds > 0:
            return LONGEST_SECONDS
        return min(LONGEST_SECONDS, 3 * self.predicted_seconds + 2.0)


@dataclass(slots=True)
class FetchResult:
    """What a fetch has brought so far.

    Attributes:
        rate: measured bytes per second; 0: too little came to measure one.
        transfer: how it came from another store.
        recomputed_tokens: computed meanwhile, up to where the fetched tokens begin.
        began, wanted_bytes: when it had its turn, and what was to come at most; 0: not yet.
        late_rate: it took too long: the bytes per second of its source are not more. 0: it did not.
    """

    tokens: int = 0
    seconds: float = 0.0
    bytes: int = 0
    rate: float = 0.0
    transfer: Transfer = Transfer.GRPC
    recomputed_tokens: int = 0
    began: float = 0.0
    wanted_bytes: int = 0
    late_rate: float = 0.0

    def is_late(self) -> None:
        """Note that it is given up now: at best the next batch was about to end."""
        most = min(self.wanted_bytes, self.bytes + BATCH_BYTES)
        if most:
            self.late_rate = most / (time.monotonic() - self.began)


@dataclass(slots=True)
class _Fetch:
    """One stream under way. `parent` is the key of the chunk before the next batch.

    `bytes` came in `seconds`, waits for slots and seals excluded.
    """

    session: RemoteSession
    found: pb.MatchResponse
    connection: Connection
    salt: bytes
    lease_ids: list[int]
    result: FetchResult
    parent: bytes = b""
    bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class FetchTotals:
    """Totals of all fetches, failed and cancelled ones included."""

    tokens: int = 0
    seconds: float = 0.0


class PrefixFetcher:
    """All fetches of one worker.

    Attributes:
        rates: measured bytes per second by source (`ChunkSource.rate_key`).
        totals: updated on the event loop.
    """

    def __init__(
        self,
        store: StoreClient,
        layout: ArenaLayout,
        rate_changed: Callable[[Mapping[str, float]], None],
        totals: FetchTotals | None = None,
    ) -> None:
        self.totals = FetchTotals() if totals is None else totals
        self._store = store
        self._layout = layout
        self._rate_changed = rate_changed
        self.rates: dict[str, float] = {}
        self._cleanups = Cleanups()
        self._lane = ThreadPoolExecutor(1, thread_name_prefix="fetch")
        # Fetches of sequences with the same first chunk take turns: the second one finds the
        # chunks of the first one in the own store.
        self._turns = NamedTurns()
        # Stores from which the own store could not load, until these times.
        self._not_loaded_from: dict[str, float] = {}
        # When rates age.
        self._aging: dict[str, asyncio.TimerHandle] = {}

    async def fetch(self, source: FetchSource, salt: bytes, tokens: Sequence[int]) -> FetchResult:
        """Fetch what the source has more of. Raises only CancelledError."""
        result = FetchResult()
        began = time.monotonic()
        try:
            async with asyncio.timeout(source.time_limit):
                await self._fetch(source, salt, tokens, result)
        except TimeoutError:
            log.warning("fetching from %s took too long", source.place)
            if result.transfer is Transfer.MOONCAKE:
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
            for key in list(self.rates):
                if ChunkSource.transfer_of(key) is not Transfer.GRPC:
                    self._forget(key)

    async def quiesce(self) -> None:
        """Return when all copies that had begun are done."""
        await passed(self._lane)

    async def close(self) -> None:
        """Release resources. No fetch may run any more."""
        for timer in self._aging.values():
            timer.cancel()
        await self._cleanups.wait(CLOSE_SECONDS)
        self._lane.shutdown()

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
                await self._stream(source, salt, tokens, result)

    async def _loaded_from_store(
        self, source: FetchSource, salt: bytes, tokens: Sequence[int], result: FetchResult
    ) -> bool:
        """Have the own store load from another one. Return False if it cannot for now."""
        address = source.place.address
        if not self._loads_from(address):
            return False
        result.transfer = Transfer.MOONCAKE
        try:
            await self._load(source, salt, tokens, result)
        except (FailedPrecondition, Unavailable) as error:
            log.warning("the own store did not load from %s: %s", address, error.message)
            self._stream_for_a_while(source.place)
            result.transfer, result.rate = Transfer.GRPC, 0.0
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
        self._forget(place.rate_key(Transfer.MOONCAKE))

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
            result.tokens = response.loaded_bytes // self._layout.chunk_bytes * size
            seconds = time.monotonic() - began
            result.rate = measured_rate(result.bytes, seconds, response.transfer_seconds)

        await load_chunks(self._store, self._cleanups, source.place, salt, tokens[:wanted], loaded)

    async def _stream(
        self, source: FetchSource, salt: bytes, tokens: Sequence[int], result: FetchResult
    ) -> None:
        """Copy what another store's gRPC stream brings into slots of the own store."""
        own = await self._cleanups.obtain(
            self._store.match(salt, tokens),
            lambda match: self._store.release(match.connection, lease_ids=[match.lease_id]),
        )
        lease_ids = [own.lease_id]
        try:
            if own.cached_tokens >= min(source.cached_tokens, len(tokens) - 1):
                return
            name = self._store.client_name
            async with remote_session(
                source.place.address, name, self._layout.layout_hash, self._store.identity
            ) as session:
                found = await session.match(salt, tokens)
                if found.cached_tokens > own.cached_tokens:
                    fetch = _Fetch(session, found, own.connection, salt, lease_ids, result)
                    await self._fetch_chunks(fetch, own, tokens)
        finally:
            await self._cleanups.finish(self._store.release(own.connection, lease_ids=lease_ids))

    async def _fetch_chunks(self, fetch: _Fetch, own: Match, tokens: Sequence[int]) -> None:
        """Fetch the chunks after the own full ones, batch by batch."""
        size = self._layout.chunk_tokens
        found = fetch.found
        before = fetch.result.tokens
        start = own.cached_tokens // size
        fetch.parent = own.chunks[start - 1].key if start else b""
        batch = max(1, BATCH_BYTES // self._layout.chunk_bytes)
        # Only the first batches of a long fetch are traced in the store.
        spans = itertools.chain([tracing.current()] * TRACED_BATCHES, itertools.repeat(NO_SPAN))
        while start < len(found.chunks):
            end = min(start + batch, len(found.chunks))
            last = min(end * size, found.cached_tokens)
            pieces = [
                tuple(tokens[index * size : min((index + 1) * size, last)])
                for index in range(start, end)
            ]
            with next(spans).current():
                await self._fetch_batch(fetch, found.chunks[start:end], pieces)
            fetch.result.tokens = before + last - own.cached_tokens
            start = end

    async def _fetch_batch(
        self,
        fetch: _Fetch,
        handles: Sequence[types_pb2.SlotHandle],
        pieces: Sequence[tuple[int, ...]],
    ) -> None:
        """Reserve slots, read the chunks of `handles` with the tokens `pieces`, and seal them."""
        connection = fetch.connection
        self._check_session(connection)
        granted = await self._cleanups.obtain(
            self._store.reserve(connection, fetch.salt, len(pieces)),
            lambda granted: self._store.release(connection, slots=granted),
        )
        try:
            checksums = await self._read(fetch, handles, [slot for slot, _ in granted], pieces)
            written, parent = written_chunks(
                self._layout.layout_hash, fetch.salt, fetch.parent, granted, pieces, checksums
            )
            sealed = await self._cleanups.obtain(
                self._store.seal(connection, fetch.salt, written, fetch.lease_ids[-1]),
                lambda sealed: self._store.release(connection, lease_ids=[sealed.lease_id]),
            )
        except BaseException:
            await self._cleanups.finish(self._give_up(connection, granted))
            raise
        if sealed.lease_id not in fetch.lease_ids:
            fetch.lease_ids.append(sealed.lease_id)
        if sealed.chunks[-1].key != parent:
            raise DataLoss("the own store names a fetched chunk by another key")
        fetch.parent = parent

    async def _read(
        self,
        fetch: _Fetch,
        handles: Sequence[types_pb2.SlotHandle],
        slots: Sequence[int],
        pieces: Sequence[tuple[int, ...]],
    ) -> list[int]:
        """Read chunks into own slots. Return their checksums."""
        connection, session = fetch.connection, fetch.session
        began = time.monotonic()
        payload = Payload(connection.tensors.arena)
        target = ReadTarget(payload, slots, self._lane, lambda: self._check_session(connection))
        await read_chunks(session.stub, session.session_id, handles, target)
        size = len(slots) * payload.size_bytes
        fetch.seconds += time.monotonic() - began
        fetch.bytes += size
        fetch.result.bytes += size
        fetch.result.rate = fetch.bytes / fetch.seconds
        checksums = [handle.checksum for handle in handles]
        if len(pieces[-1]) < handles[-1].token_count:
            # Keep only the beginning: the rest belongs to another sequence.
            self._check_session(connection)
            checksums[-1] = await asyncio.get_running_loop().run_in_executor(
                self._lane, cut_tail, connection.tensors, slots[-1], len(pieces[-1])
            )
        return checksums

    async def _give_up(self, connection: Connection, slots: Sequence[tuple[int, int]]) -> None:
        await self.quiesce()  # a copy may still be writing
        # Sealed slots among them are no longer granted: releasing is idempotent.
        await self._store.release(connection, slots=slots)

    def _check_session(self, connection: Connection) -> None:
        if self._store.connection is not connection:
            raise Unavailable("the own store's session changed", reason="STORE_LOST")

    def measured(self, place: ChunkSource, result: FetchResult) -> None:
        """Count what came from a place, and let its rate learn from it."""
        self.totals.tokens += result.tokens
        self.totals.seconds += result.seconds
        if result.transfer is not Transfer.GRPC and not self._loads_from(place.address):
            return  # the next fetch from there is a stream
        key = place.rate_key(result.transfer)
        if result.late_rate:
            # Else the next request would wait as long.
            self.rates[key] = min(self.rates.get(key, ASSUMED_BYTES_PER_SECOND), result.late_rate)
        elif result.bytes >= MEASURABLE_BYTES and result.rate > 0:
            before = self.rates.get(key, result.rate)
            if before == ASSUMED_BYTES_PER_SECOND:  # aged back: nothing is known any more
                before = result.rate
            self.rates[key] = before + NEW_RATE_SHARE * (result.rate - before)
        else:
            return
        self._set_timer(key)
        self._rate_changed(self.rates)

    def _set_timer(self, key: str) -> None:
        """Let a rate age if nothing is measured for a while."""
        if (timer := self._aging.pop(key, None)) is not None:
            timer.cancel()
        if self.rates.get(key, ASSUMED_BYTES_PER_SECOND) < ASSUMED_BYTES_PER_SECOND:
            loop = asyncio.get_running_loop()
            self._aging[key] = loop.call_later(AGING_SECONDS, self._age, key)

    def _age(self, key: str) -> None:
        self.rates[key] = min(2 * self.rates[key], ASSUMED_BYTES_PER_SECOND)
        self._set_timer(key)
        self._rate_changed(self.rates)

    def _forget(self, key: str) -> None:
        """Plan with the assumed rate again, or with that of another transfer."""
        if self.rates.pop(key, None) is not None:
            self._set_timer(key)
            self._rate_changed(self.rates)


def cut_tail(tensors: ArenaTensors, slot: int, token_count: int) -> int:
    """Zero the rows from `token_count` on. Return the slot's new checksum."""
    tensors.zero_rows(slot, token_count)
    return tensors.arena.checksum(slot)
