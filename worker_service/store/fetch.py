"""Brings a prefix from another host's store into the worker's own, before it is matched there.

Whatever fails costs reuse, never a request: the chunks that were sealed until then
stay, the rest is computed. Runs on the event loop; copies have a lane.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from splitpoint.arena.payload import Payload
from splitpoint.errors import DataLoss, SplitpointError, Unavailable
from splitpoint.keys import chunk_key
from splitpoint.observe import tracing
from splitpoint.observe.tracing import NO_SPAN
from splitpoint.shapes import ArenaLayout
from splitpoint.v1 import kvstore_pb2 as pb
from worker_service.lanes.lanes import passed
from worker_service.lanes.spans import TRACED_BATCHES
from worker_service.store.arena_tensors import ArenaTensors
from worker_service.store.chunk_streams import BATCH_BYTES
from worker_service.store.client import Connection, Match, StoreClient, WrittenChunk
from worker_service.store.remote_session import RemoteSession, remote_session

log = logging.getLogger(__name__)

Result = TypeVar("Result")

# Below this a fetch measures round trips, not the link.
MEASURABLE_BYTES = 1 << 20
# Weight of a new rate in the average.
NEW_RATE_SHARE = 0.3
LONGEST_SECONDS = 30.0
# For releases when the worker stops; the session's end does what is left.
CLOSE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class FetchSource:
    """Where the scheduler thinks more of a prefix is. `predicted_seconds` 0: it cannot tell."""

    address: str
    cached_tokens: int
    predicted_seconds: float = 0.0

    @property
    def time_limit(self) -> float:
        if not self.predicted_seconds > 0:
            return LONGEST_SECONDS
        return min(LONGEST_SECONDS, 3 * self.predicted_seconds + 2.0)


@dataclass(slots=True)
class FetchResult:
    """What a fetch brought, also while it runs. Tokens are of the prefix."""

    tokens: int = 0
    seconds: float = 0.0
    bytes: int = 0
    streaming_seconds: float = 0.0


@dataclass(slots=True)
class FetchTotals:
    """Of all fetches, those included that failed or were cancelled."""

    tokens: int = 0
    seconds: float = 0.0


class PrefixFetcher:
    """All fetches of one worker.

    Attributes:
        rates: measured bytes per second by the source's address.
        totals: kept on the event loop.
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
        self._cleanups: set[asyncio.Task[None]] = set()
        self._lane = ThreadPoolExecutor(1, thread_name_prefix="fetch")
        # Fetches of sequences that begin alike take turns: the second one finds
        # in the own store what the first one brought.
        self._turns: dict[bytes, tuple[asyncio.Lock, list[None]]] = {}

    async def fetch(self, source: FetchSource, salt: bytes, tokens: Sequence[int]) -> FetchResult:
        """Bring what the source has more of. Never raises but when cancelled."""
        result = FetchResult()
        began = time.monotonic()
        try:
            async with asyncio.timeout(source.time_limit):
                await self._fetch(source, salt, tokens, result)
        except TimeoutError:
            log.warning("fetching from %s took too long", source.address)
        except SplitpointError as error:
            log.warning("not fetched from %s: %s", source.address, error.message)
        except Exception:
            # Without its prefix the request can still run; without an answer it hangs.
            log.exception("fetching from %s failed", source.address)
        finally:
            result.seconds = time.monotonic() - began
            self.totals.tokens += result.tokens
            self.totals.seconds += result.seconds
        self._measure(source.address, result)
        return result

    async def quiesce(self) -> None:
        """Return once no copy that was begun is under way any more."""
        await passed(self._lane)

    async def close(self) -> None:
        """No fetch may run any more."""
        if self._cleanups:
            await asyncio.wait(self._cleanups, timeout=CLOSE_SECONDS)
        self._lane.shutdown()

    # -- one fetch ----------------------------------------------------------------

    async def _fetch(
        self, source: FetchSource, salt: bytes, tokens: Sequence[int], result: FetchResult
    ) -> None:
        chunk_tokens = self._layout.chunk_tokens
        first = chunk_key(self._layout.layout_hash, salt, b"", tokens[:chunk_tokens])
        async with self._turn(first):
            own = await self._obtained(self._store.match(salt, tokens), self._give_back_match)
            lease_ids = [own.lease_id]
            try:
                if own.cached_tokens >= min(source.cached_tokens, len(tokens) - 1):
                    return
                name = self._store.client_name
                async with remote_session(
                    source.address, name, self._layout.layout_hash, self._store.identity
                ) as session:
                    found = await session.match(salt, tokens)
                    if found.cached_tokens > own.cached_tokens:
                        await self._bring(session, found, own, salt, tokens, lease_ids, result)
            finally:
                await self._undisturbed(self._store.release(own.connection, lease_ids=lease_ids))

    async def _bring(
        self,
        session: RemoteSession,
        found: pb.MatchResponse,
        own: Match,
        salt: bytes,
        tokens: Sequence[int],
        lease_ids: list[int],
        result: FetchResult,
    ) -> None:
        """The chunks behind the own full ones, batch by batch."""
        size = self._layout.chunk_tokens
        start = own.cached_tokens // size
        parent = own.chunks[start - 1].key if start else b""
        batch = max(1, BATCH_BYTES // self._layout.chunk_bytes)
        had = own.cached_tokens
        # The store's part in a long fetch is traced for its first batches only.
        spans = itertools.chain([tracing.current()] * TRACED_BATCHES, itertools.repeat(NO_SPAN))
        while start < len(found.chunks):
            end = min(start + batch, len(found.chunks))
            last = min(end * size, found.cached_tokens)
            pieces = [
                tuple(tokens[index * size : min((index + 1) * size, last)])
                for index in range(start, end)
            ]
            with next(spans).current():
                parent = await self._bring_batch(
                    session, found, own.connection, salt, start, pieces, parent, lease_ids, result
                )
            result.tokens = last - had
            start = end

    async def _bring_batch(
        self,
        session: RemoteSession,
        found: pb.MatchResponse,
        connection: Connection,
        salt: bytes,
        first: int,
        pieces: Sequence[tuple[int, ...]],
        parent: bytes,
        lease_ids: list[int],
        result: FetchResult,
    ) -> bytes:
        """Reserve, read, seal; returns the key of the last chunk."""
        handles = found.chunks[first : first + len(pieces)]
        self._check_session(connection)
        granted = await self._obtained(
            self._store.reserve(connection, salt, len(pieces)),
            lambda granted: self._store.release(connection, slots=granted),
        )
        slots = [slot for slot, _ in granted]
        try:
            began = time.monotonic()
            payload = Payload(connection.tensors.arena)
            await session.read(
                handles, payload, slots, self._lane, lambda: self._check_session(connection)
            )
            result.streaming_seconds += time.monotonic() - began
            result.bytes += len(slots) * payload.size_bytes
            checksums = [handle.checksum for handle in handles]
            if len(pieces[-1]) < handles[-1].token_count:
                # Only its beginning is ours: the rest belongs to another sequence.
                self._check_session(connection)
                checksums[-1] = await asyncio.get_running_loop().run_in_executor(
                    self._lane, cut_tail, connection.tensors, slots[-1], len(pieces[-1])
                )
            written = []
            for (slot, generation), piece, checksum in zip(granted, pieces, checksums, strict=True):
                written.append(WrittenChunk(slot, generation, parent, piece, checksum))
                parent = chunk_key(self._layout.layout_hash, salt, parent, piece)
            sealed = await self._obtained(
                self._store.seal(connection, salt, written, lease_ids[-1]),
                lambda sealed: self._store.release(connection, lease_ids=[sealed.lease_id]),
            )
        except BaseException:
            await self._undisturbed(self._give_up(connection, granted))
            raise
        if sealed.lease_id not in lease_ids:
            lease_ids.append(sealed.lease_id)
        if sealed.chunks[-1].key != parent:
            raise DataLoss("the own store names a fetched chunk by another key")
        return parent

    async def _obtained(
        self,
        call: Coroutine[Any, Any, Result],
        give_back: Callable[[Result], Coroutine[Any, Any, None]],
    ) -> Result:
        """What a call grants; if nobody waits for it any more, it is given back when it comes.

        A call that is cancelled may have been carried out all the same.
        """
        task = asyncio.create_task(call)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:

            async def afterwards() -> None:
                with contextlib.suppress(SplitpointError):
                    await give_back(await task)

            cleanup = asyncio.create_task(afterwards())
            self._cleanups.add(cleanup)
            cleanup.add_done_callback(self._cleanups.discard)
            raise

    async def _give_back_match(self, match: Match) -> None:
        await self._store.release(match.connection, lease_ids=[match.lease_id])

    async def _give_up(self, connection: Connection, slots: Sequence[tuple[int, int]]) -> None:
        await self.quiesce()  # a copy may still be writing
        # Sealed slots among them are no longer granted: releasing is idempotent.
        await self._store.release(connection, slots=slots)

    async def _undisturbed(self, cleanup: Coroutine[Any, Any, None]) -> None:
        """To its end, even if the fetch is cancelled once more."""
        task = asyncio.create_task(cleanup)
        self._cleanups.add(task)
        task.add_done_callback(self._cleanups.discard)
        await asyncio.shield(task)

    def _check_session(self, connection: Connection) -> None:
        if self._store.connection is not connection:
            raise Unavailable("the own store's session changed", reason="STORE_LOST")

    @asynccontextmanager
    async def _turn(self, key: bytes) -> AsyncIterator[None]:
        lock, users = self._turns.setdefault(key, (asyncio.Lock(), []))
        users.append(None)
        try:
            async with lock:
                yield
        finally:
            users.pop()
            if not users:
                del self._turns[key]

    def _measure(self, address: str, result: FetchResult) -> None:
        if result.bytes < MEASURABLE_BYTES or result.streaming_seconds <= 0:
            return
        rate = result.bytes / result.streaming_seconds
        before = self.rates.get(address, rate)
        self.rates[address] = before + NEW_RATE_SHARE * (rate - before)
        self._rate_changed(self.rates)


def cut_tail(tensors: ArenaTensors, slot: int, token_count: int) -> int:
    """Zero the rows from `token_count` on; returns the slot's checksum then."""
    for plane in (*tensors.keys, *tensors.values):
        plane[slot, :, token_count:] = 0
    for plane in tensors.inputs:
        plane[slot, token_count:] = 0
    return tensors.arena.checksum(slot)
