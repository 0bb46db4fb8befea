"""KvStoreService over gRPC: decodes and checks requests, calls the store, encodes answers.

Everything runs on the event loop, except that threads read payloads back and zero them. A
repeated request gets its first answer again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration

from kvstore_service import validation
from kvstore_service.idempotency import Call, IdempotentCalls, Response
from kvstore_service.integrity.scrubber import Scrubbing
from kvstore_service.maintenance import Maintenance
from kvstore_service.pool.chunk_pool import WrittenChunk
from kvstore_service.pool.prefix_index import Entry, PageNames
from kvstore_service.pool.slot_grants import GrantedRun
from kvstore_service.reader import ChunkReader
from kvstore_service.slots import READ_AT_ONCE_BYTES, Reserver, Sealer
from kvstore_service.stats import StoreInfo, endpoint_message, stats_response
from kvstore_service.store import KvStore, Matched, MatchedPages
from kvstore_service.tiers.loader import ChunkLoader, SlotFiller
from kvstore_service.tiers.manager import TierManager
from kvstore_service.tiers.tier import ChunkTransfer
from kvstore_service.validation import handle_of, sealed_chunks
from splitpoint.errors import FailedPrecondition, InvalidArgument, Unavailable
from splitpoint.keys import chunk_keys
from splitpoint.observe import tracing
from splitpoint.transport.convert import layout_to_proto, tier_to_proto, to_message
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import kvstore_pb2_grpc, types_pb2

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["KvStoreService"].full_name
_THREADS = 2
# Pages that are named or answered for without a pause for other calls: a few milliseconds.
_PORTION = 1024

_log = logging.getLogger(__name__)

Item = TypeVar("Item")
_Context = Any  # grpc.aio.ServicerContext; the generated base class is untyped


class KvStoreServicer(kvstore_pb2_grpc.KvStoreServiceServicer):
    """Serves one store. Call `stop` before the server stops, `close` afterwards.

    Args:
        threads: zero slots and read payloads back. `close` shuts them down.
        read_at_once_bytes: see `Sealer`.
        scrubbing: how often sealed chunks are read back. None: never.
        tiers: keep chunks that leave the arena. None: there are none.
        transfer: reads other stores' arenas. None: without a transfer engine.
    """

    def __init__(
        self,
        store: KvStore,
        threads: ThreadPoolExecutor | None = None,
        *,
        info: StoreInfo | None = None,
        read_at_once_bytes: int = READ_AT_ONCE_BYTES,
        scrubbing: Scrubbing | None = None,
        tiers: TierManager | None = None,
        transfer: ChunkTransfer | None = None,
    ) -> None:
        self.store = store
        self.tiers = TierManager(store.pool) if tiers is None else tiers
        self.transfer = transfer
        self.info = StoreInfo() if info is None else info
        self._threads = threads or ThreadPoolExecutor(_THREADS, thread_name_prefix="payload")
        self.maintenance = Maintenance(store, self._threads, scrubbing=scrubbing)
        self._calls = IdempotentCalls()
        self._stopping = asyncio.Event()
        self._started = time.monotonic()
        self._sealer = Sealer(store, self.maintenance, self._threads, read_at_once_bytes)
        self._reserver = Reserver(store, self._threads, self.tiers if self.tiers.tiers else None)
        self._loader = ChunkLoader(
            store, self.maintenance, self._reserver, self._sealer, self.tiers, transfer
        )
        self._filler = SlotFiller(store, self.tiers, self._threads)
        self._reader = ChunkReader(store, self._stopping)

    def stop(self) -> None:
        """End the KeepAlive streams, which would not end within the grace period."""
        self._stopping.set()

    async def close(self) -> None:
        """Wait for running calls. No new call may come."""
        await self._calls.close()
        self._threads.shutdown()

    # -- sessions ------------------------------------------------------------------------

    async def Attach(self, request: pb.AttachRequest, context: _Context) -> pb.AttachResponse:
        process = validation.check_attach(request)
        if request.page_bytes:
            validation.check_kind(self.store.arena.layout, of_pages=True)
        session = self.store.sessions.attach(
            request.client_name,
            process,
            layout_hash=request.layout_hash,
            previous_session_id=request.previous_session_id,
            page_bytes=request.page_bytes,
        )
        _log.info(
            "session %s: %r, process %d",
            session.session_id.hex()[:8],
            request.client_name,
            process.process_id,
        )
        arena = self.store.arena
        return pb.AttachResponse(
            session_id=session.session_id,
            arena_path="" if session.is_remote else str(arena.path),
            arena_size_bytes=arena.size_bytes,
            instance_id=arena.superblock.instance_id,
            epoch=self.store.epoch,
            layout=layout_to_proto(arena.layout),
            slot_count=arena.slot_count,
            lease_duration=_duration(self.store.sessions.seconds_left(session)),
            transfer=endpoint_message(self.transfer),
            tiers=[tier_to_proto(tier) for tier in self.tiers.tiers],
            loads_from_stores=self.transfer is not None,
        )

    async def KeepAlive(
        self, requests: AsyncIterator[pb.KeepAliveRequest], context: _Context
    ) -> AsyncIterator[pb.KeepAliveResponse]:
        sessions = self.store.sessions
        messages = aiter(requests)
        session_id = b""
        try:
            message = await self._next_beat(messages, sessions.lease_seconds)
            if message is None:
                return
            validation.check_session_id(message.session_id)
            session = sessions.live(message.session_id)
            if session.has_keep_alive:
                raise FailedPrecondition(
                    "another KeepAlive stream holds this session", reason="STREAM_EXISTS"
                )
            session.has_keep_alive = True
            session_id = session.session_id
            while message is not None:
                if message.session_id != session_id:
                    raise InvalidArgument("one stream holds one session", field="session_id")
                sessions.note_outcomes(session, validation.check_outcomes(message.outcomes))
                yield pb.KeepAliveResponse(
                    epoch=self.store.epoch,
                    lease_duration=_duration(sessions.keep_alive(session_id)),
                )
                message = await self._next_beat(messages, sessions.seconds_left(session))
        finally:
            if session_id:
                sessions.end(session_id)
                _log.info("session %s ended", session_id.hex()[:8])

    async def _next_beat(
        self, messages: AsyncIterator[pb.KeepAliveRequest], timeout: float
    ) -> pb.KeepAliveRequest | None:
        """Return the next message of a stream. None at the end of the stream.

        Raises Unavailable if the store stops meanwhile, FailedPrecondition after `timeout` seconds.
        """
        message = asyncio.ensure_future(_anext(messages))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait(
                {message, stopping}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if message.done():
                return message.result()
        finally:
            message.cancel()
            stopping.cancel()
            # Retrieve its error, too: no other task does.
            await asyncio.gather(message, return_exceptions=True)
        if self._stopping.is_set():
            raise Unavailable("the store is stopping", reason="STOPPING")
        raise FailedPrecondition(
            "the session expired: no KeepAlive message came in time", reason="SESSION_EXPIRED"
        )

    # -- reading -------------------------------------------------------------------------

    async def Match(self, request: pb.MatchRequest, context: _Context) -> pb.MatchResponse:
        is_peek = not request.session_id
        with tracing.serving(
            "match", context, tokens=len(request.token_ids), is_peek=is_peek
        ) as span:
            answer = await self._match(request)
            span.set(cached_tokens=answer.cached_tokens, chunks=len(answer.chunks))
            return answer

    async def _match(self, request: pb.MatchRequest) -> pb.MatchResponse:
        """Look a prefix up: under a lease for a session, else as a peek."""
        validation.check_kind(self.store.arena.layout, of_pages=False)
        arena, salt = self.store.arena, request.tenant_salt
        tokens = validation.check_match(request, arena.slot_count * arena.layout.chunk_tokens)
        if not request.session_id:
            found = self.store.peek(salt, tokens)
            held = await self._held(salt, found, tokens) if request.asks_tiers else ()
            return self._matched(found, held)
        validation.check_session(request.session_id, request.request_id)
        self.maintenance.called()

        def leased_match() -> pb.MatchResponse:
            found = self.store.match(request.session_id, salt, tokens)
            self.tiers.used(found.entries)
            return self._matched(found)

        async def verified_match() -> pb.MatchResponse:
            await self.maintenance.verify(lambda: self.store.recovered.in_match(salt, tokens))
            return leased_match()

        def work() -> pb.MatchResponse | Coroutine[Any, Any, pb.MatchResponse]:
            is_unverified = self.store.recovered.in_match(salt, tokens)
            return verified_match() if is_unverified else leased_match()

        return await self._calls.answer(self._call(request, pb.MatchResponse), work)

    async def _held(
        self, salt: bytes, found: Matched, tokens: Sequence[int]
    ) -> list[pb.TierPrefix]:
        """Return the tiers that continue the arena's full chunks of a sequence."""
        layout = self.store.arena.layout
        size = layout.chunk_tokens
        keys = list(chunk_keys(layout.layout_hash, salt, tokens, size))
        cached = sum(entry.key == key for entry, key in zip(found.entries, keys, strict=False))
        held = await self.tiers.held(keys[cached:])
        return [
            pb.TierPrefix(tier=tier_to_proto(tier), cached_tokens=(cached + count) * size)
            for tier, count in held.items()
            if count
        ]

    def _matched(self, found: Matched, tiers: Sequence[pb.TierPrefix] = ()) -> pb.MatchResponse:
        return to_message(
            pb.MatchResponse,
            found,
            chunks=map(handle_of, found.entries),
            chunk_keys=[entry.key for entry in found.entries],
            epoch=self.store.epoch,
            tiers=tiers,
        )

    async def MatchPages(
        self, request: pb.MatchPagesRequest, context: _Context
    ) -> pb.MatchPagesResponse:
        with tracing.serving("match pages", context, pages=len(request.page_keys)) as span:
            answer = await self._match_pages(request)
            span.set(found=sum(page.generation > 0 for page in answer.pages))
            return answer

    async def _match_pages(self, request: pb.MatchPagesRequest) -> pb.MatchPagesResponse:
        """Look pages up under a lease. Those that only a tier holds are loaded first."""
        validation.check_match_pages(request)
        validation.check_kind(self.store.arena.layout, of_pages=True)
        self.maintenance.called()
        call = self._call(request, pb.MatchPagesResponse)
        session_id = request.session_id
        names = await self._named(request)

        def lease() -> MatchedPages:
            found = self.store.match_pages(session_id, names)
            self.tiers.used([entry for entry in found.entries if entry is not None])
            return found

        async def work() -> pb.MatchPagesResponse:
            self.store.sessions.arena_user(session_id)
            must_load = self.tiers.tiers and None in self.store.pool.index.pages(names)
            if not must_load and not self.store.recovered.in_pages(names):
                return await self._pages(request, names, lease())
            await self.maintenance.verify(lambda: self.store.recovered.in_pages(names))
            async with self._loader.pages(session_id, names):
                found = lease()
            return await self._pages(request, names, found)

        return await self._calls.answer(call, work)

    async def _named(self, request: pb.MatchPagesRequest) -> PageNames:
        """Return the names of the distinct pages that are asked for."""
        names = PageNames(request.tenant_salt, (), ())
        async for keys in _in_portions(list(dict.fromkeys(request.page_keys))):
            names += self.store.pool.name_pages(request.tenant_salt, keys)
        return names

    async def _pages(
        self, request: pb.MatchPagesRequest, names: PageNames, found: MatchedPages
    ) -> pb.MatchPagesResponse:
        handles: dict[bytes, types_pb2.SlotHandle] = {}
        async for part in _in_portions(list(zip(names.page_keys, found.entries, strict=True))):
            handles.update((key, _page_handle(entry)) for key, entry in part)
        answer = pb.MatchPagesResponse(lease_id=found.lease_id, epoch=self.store.epoch)
        async for keys in _in_portions(request.page_keys):
            answer.pages.extend(handles[key] for key in keys)
        return answer

    async def ReadChunks(self, request: pb.ReadChunksRequest, context: _Context) -> None:
        self.maintenance.called()
        await self._reader.read(request, context)

    async def ReportChunks(
        self, request: pb.ReportChunksRequest, context: _Context
    ) -> pb.ReportChunksResponse:
        validation.check_session(request.session_id, request.request_id)
        handles = validation.check_handles(request.chunks, self.store.arena.slot_count)
        self.maintenance.called()
        call = self._call(request, pb.ReportChunksResponse)
        return await self._calls.answer(call, lambda: self._inspect(handles))

    async def _inspect(self, handles: Sequence[tuple[int, int]]) -> pb.ReportChunksResponse:
        lost = await self.maintenance.inspect_reported(handles)
        return pb.ReportChunksResponse(lost_chunk_count=lost, epoch=self.store.epoch)

    # -- writing -------------------------------------------------------------------------

    async def Reserve(self, request: pb.ReserveRequest, context: _Context) -> pb.ReserveResponse:
        with tracing.serving("reserve", context, slots=request.slot_count) as span:
            answer = await self._reserve(request)
            span.set(runs=len(answer.runs))
            return answer

    async def _reserve(self, request: pb.ReserveRequest) -> pb.ReserveResponse:
        validation.check_session(request.session_id, request.request_id)
        validation.check_reserve(request)
        self.maintenance.called()
        self._check_maps(request.session_id)
        session_id, salt = request.session_id, request.tenant_salt

        async def reserved(granting: Awaitable[list[GrantedRun]]) -> pb.ReserveResponse:
            return self._reserved(await granting)

        def work() -> pb.ReserveResponse | Coroutine[Any, Any, pb.ReserveResponse]:
            if self._reserver.must_wait(request.slot_count):
                return reserved(self._reserver.reserve(session_id, request.slot_count, salt))
            prepared = self.store.prepare(session_id, request.slot_count, salt)
            if prepared.dirty_slots:
                return reserved(self._reserver.grant(session_id, prepared))
            return self._reserved(self.store.grant(session_id, prepared))

        return await self._calls.answer(self._call(request, pb.ReserveResponse), work)

    def _reserved(self, runs: Sequence[GrantedRun]) -> pb.ReserveResponse:
        return pb.ReserveResponse(
            runs=[to_message(pb.SlotRun, run, slot_count=len(run.generations)) for run in runs],
            epoch=self.store.epoch,
        )

    async def Seal(self, request: pb.SealRequest, context: _Context) -> pb.SealResponse:
        with tracing.serving("seal", context, chunks=len(request.chunks)) as span:
            answer = await self._seal(request)
            span.set(duplicates=sum(chunk.duplicate for chunk in answer.chunks))
            return answer

    async def _seal(self, request: pb.SealRequest) -> pb.SealResponse:
        validation.check_session(request.session_id, request.request_id)
        arena = self.store.arena
        chunks = validation.check_seal(request, arena.slot_count, arena.layout)
        self.maintenance.called()
        self._check_maps(request.session_id)
        # A failed call may have sealed or freed slots, so a retry must not try again.
        return await self._calls.answer(
            self._call(request, pb.SealResponse),
            lambda: self._read_back_and_seal(request, chunks),
            keep_errors=True,
        )

    async def _read_back_and_seal(
        self, request: pb.SealRequest, chunks: Sequence[WrittenChunk]
    ) -> pb.SealResponse:
        outcome = await self._sealer.seal(
            request.session_id,
            request.tenant_salt,
            chunks,
            lease_id=request.lease_id,
            keep_leased=request.keep_leased,
        )
        return pb.SealResponse(
            chunks=sealed_chunks(outcome), lease_id=outcome.lease_id, epoch=self.store.epoch
        )

    async def LoadChunks(self, request: pb.LoadChunksRequest, context: _Context) -> None:
        validation.check_kind(self.store.arena.layout, of_pages=False)
        self.maintenance.called()
        async with aclosing(self._loader.load(request)) as answers:
            async for answer in answers:
                await context.write(answer)

    async def FillSlots(
        self, request: pb.FillSlotsRequest, context: _Context
    ) -> pb.FillSlotsResponse:
        validation.check_kind(self.store.arena.layout, of_pages=False)
        with tracing.serving("fill slots", context, slots=len(request.slots)):
            self.maintenance.called()
            return await self._filler.fill(request)

    def _check_maps(self, session_id: bytes) -> None:
        """Raise FailedPrecondition for a remote session: Reserve and Seal need a mapped arena."""
        if self.store.sessions.live(session_id).is_remote:
            raise FailedPrecondition(
                "a remote session has no arena to write to", reason="REMOTE_SESSION"
            )

    async def Release(self, request: pb.ReleaseRequest, context: _Context) -> pb.ReleaseResponse:
        validation.check_session(request.session_id, request.request_id)
        slots, used = validation.check_release(request, self.store.arena.slot_count)
        answers = self.store.sessions.known(request.session_id).answers

        def work() -> pb.ReleaseResponse:
            sessions = self.store.sessions
            released = sessions.release(request.session_id, request.lease_ids, slots, used)
            return pb.ReleaseResponse(
                released_lease_count=released.lease_count,
                released_slot_count=released.slot_count,
            )

        return await self._calls.answer(Call.of(request, answers, pb.ReleaseResponse), work)

    def _call(self, request: Any, response_type: type[Response]) -> Call[Response]:
        """Return a call of an open session."""
        answers = self.store.sessions.live(request.session_id).answers
        return Call.of(request, answers, response_type)

    # -- operators and tests ------------------------------------------------------------------

    async def Evict(self, request: pb.EvictRequest, context: _Context) -> pb.EvictResponse:
        return pb.EvictResponse(evicted_chunk_count=self.store.evict_all())

    async def GetStats(self, request: pb.GetStatsRequest, context: _Context) -> pb.GetStatsResponse:
        if request.check_integrity:
            self.maintenance.check_integrity()
        uptime = time.monotonic() - self._started
        return stats_response(
            self.store, self.maintenance, self.info, uptime, self.tiers, self.transfer
        )


async def _in_portions(items: Sequence[Item]) -> AsyncIterator[Sequence[Item]]:
    """Yield a portion of the items at a time. Other calls run in between."""
    for first in range(0, len(items), _PORTION):
        if first:
            await asyncio.sleep(0)
        yield items[first : first + _PORTION]


def _page_handle(entry: Entry | None) -> types_pb2.SlotHandle:
    """Return the handle of a page; one of generation 0 if there is none."""
    return types_pb2.SlotHandle() if entry is None else handle_of(entry)


async def _anext(messages: AsyncIterator[pb.KeepAliveRequest]) -> pb.KeepAliveRequest | None:
    return await anext(messages, None)


def _duration(seconds: float) -> Duration:
    result = Duration()
    result.FromNanoseconds(int(seconds * 1e9))
    return result
