"""KvStoreService over gRPC: decodes and checks requests, calls the store, encodes answers.

Everything runs on the event loop, except that threads read payloads back and zero them. A
repeated request gets its first answer again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

from kvstore_service.calls import validation
from kvstore_service.calls.slots import READ_AT_ONCE_BYTES, Reserver, Sealer
from kvstore_service.calls.validation import sealed_chunks
from kvstore_service.idempotency import Call, IdempotentCalls, Response
from kvstore_service.integrity.scrubber import Scrubbing
from kvstore_service.maintenance import Maintenance
from kvstore_service.matcher import Matcher
from kvstore_service.pool.chunk_pool import WrittenChunk
from kvstore_service.pool.slot_grants import GrantedRun, Preparation
from kvstore_service.reader import ChunkReader
from kvstore_service.session_calls import SessionCalls
from kvstore_service.stats import StoreInfo, stats_response
from kvstore_service.store import KvStore
from kvstore_service.tiers.loader import ChunkLoader, SlotFiller
from kvstore_service.tiers.manager import TierManager
from kvstore_service.tiers.tier import ChunkTransfer
from splitpoint.errors import FailedPrecondition
from splitpoint.observe import tracing
from splitpoint.transport.convert import to_message
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import kvstore_pb2_grpc

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["KvStoreService"].full_name
_THREADS = 2

_log = logging.getLogger(__name__)

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
        self._sessions = SessionCalls(store, self.tiers, transfer, self._stopping)
        self._matcher = Matcher(store, self.maintenance, self.tiers, self._calls)
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
        return self._sessions.attach(request)

    async def KeepAlive(
        self, requests: AsyncIterator[pb.KeepAliveRequest], context: _Context
    ) -> AsyncIterator[pb.KeepAliveResponse]:
        async with aclosing(self._sessions.keep_alive(requests)) as answers:
            async for answer in answers:
                yield answer

    # -- reading -------------------------------------------------------------------------

    async def Match(self, request: pb.MatchRequest, context: _Context) -> pb.MatchResponse:
        is_peek = not request.session_id
        with tracing.serving(
            "match", context, tokens=len(request.token_ids), is_peek=is_peek
        ) as span:
            answer = await self._matcher.match(request)
            span.set(cached_tokens=answer.cached_tokens, chunks=len(answer.chunks))
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
        known = await self._calls.known(call)
        if known is not None:
            return known
        return await self._calls.run(call, self._inspect(handles), keep_errors=False)

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
        call = self._call(request, pb.ReserveResponse)
        known = await self._calls.known(call)
        if known is not None:
            return known
        session_id, salt = request.session_id, request.tenant_salt
        if self._reserver.must_wait(request.slot_count):
            return await self._calls.run(call, self._reserve_slowly(request), keep_errors=False)
        prepared = self.store.prepare(session_id, request.slot_count, salt)
        if prepared.dirty_slots:
            work = self._grant(session_id, prepared)
            return await self._calls.run(call, work, keep_errors=False)
        return self._calls.answered(call, self._reserved(self.store.grant(session_id, prepared)))

    async def _reserve_slowly(self, request: pb.ReserveRequest) -> pb.ReserveResponse:
        return self._reserved(
            await self._reserver.reserve(
                request.session_id, request.slot_count, request.tenant_salt
            )
        )

    async def _grant(self, session_id: bytes, prepared: Preparation) -> pb.ReserveResponse:
        return self._reserved(await self._reserver.grant(session_id, prepared))

    def _reserved(self, runs: Sequence[GrantedRun]) -> pb.ReserveResponse:
        return pb.ReserveResponse(
            runs=[
                to_message(pb.SlotRun, run, first_slot=run.first, slot_count=len(run.generations))
                for run in runs
            ],
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
        chunks = validation.check_seal(request, arena.slot_count, arena.layout.chunk_tokens)
        self.maintenance.called()
        self._check_maps(request.session_id)
        call = self._call(request, pb.SealResponse)
        known = await self._calls.known(call)
        if known is not None:
            return known
        # A failed call may have sealed or freed slots, so a retry must not try again.
        work = self._read_back_and_seal(request, chunks)
        return await self._calls.run(call, work, keep_errors=True)

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
        self.maintenance.called()
        async with aclosing(self._loader.load(request)) as answers:
            async for answer in answers:
                await context.write(answer)

    async def FillSlots(
        self, request: pb.FillSlotsRequest, context: _Context
    ) -> pb.FillSlotsResponse:
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
        slots = validation.check_release(request, self.store.arena.slot_count)
        answers = self.store.sessions.known(request.session_id).answers
        call = Call.of(request, answers, pb.ReleaseResponse)
        known = await self._calls.known(call)
        if known is not None:
            return known
        released = self.store.sessions.release(request.session_id, request.lease_ids, slots)
        return self._calls.answered(
            call,
            pb.ReleaseResponse(
                released_lease_count=released.lease_count,
                released_slot_count=released.slot_count,
            ),
        )

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
