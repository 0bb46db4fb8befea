"""KvStoreService over gRPC: decodes and checks requests, asks the store, encodes answers.

Everything runs on the event loop except the reading back of payloads at Seal,
which has threads of its own. Retried requests get their first answer again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from kvstore_service import validation
from kvstore_service.chunk_pool import GrantedRun
from kvstore_service.integrity import IntegrityChecker
from kvstore_service.prefix_index import Entry
from kvstore_service.sessions import AnswerBook
from kvstore_service.store import KvStore, Matched, SealOutcome, WrittenChunk
from splitpoint.arena_records import SlotState
from splitpoint.convert import layout_to_proto
from splitpoint.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    SplitpointError,
    Unavailable,
)
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import kvstore_pb2_grpc, types_pb2

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["KvStoreService"].full_name
_VERIFY_THREADS = 2

_log = logging.getLogger(__name__)

Answer = TypeVar("Answer", bound=Message)
_Context = Any  # grpc.aio.ServicerContext; the generated base class is untyped


class KvStoreServicer(kvstore_pb2_grpc.KvStoreServiceServicer):
    """Serves one store. `stop` before the server stops, `close` afterwards.

    `threads` read payloads back; they are shut down by `close`.
    """

    def __init__(self, store: KvStore, threads: ThreadPoolExecutor | None = None) -> None:
        self.store = store
        self._integrity = IntegrityChecker(store)
        self._threads = threads or ThreadPoolExecutor(_VERIFY_THREADS, thread_name_prefix="verify")
        # Seals that are being verified, by session and request id.
        self._seals: dict[tuple[bytes, bytes], tuple[bytes, asyncio.Task[pb.SealResponse]]] = {}
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End the KeepAlive streams: they would outlast any grace period."""
        self._stopping.set()

    async def close(self) -> None:
        """Wait for seals under way. No call may come any more."""
        await asyncio.gather(*(task for _, task in self._seals.values()), return_exceptions=True)
        self._threads.shutdown()

    async def sweep_forever(self) -> None:
        """Expire silent sessions and free what the dead held, several times a lease."""
        interval = min(1.0, self.store.sessions.lease_seconds / 4)
        while True:
            await asyncio.sleep(interval)
            self.store.sweep()

    # -- sessions ------------------------------------------------------------------------

    async def Attach(self, request: pb.AttachRequest, context: _Context) -> pb.AttachResponse:
        process = validation.check_attach(request)
        session = self.store.attach(
            request.client_name,
            process,
            layout_hash=request.layout_hash,
            previous_session_id=request.previous_session_id,
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
            arena_path=str(arena.path),
            arena_size_bytes=arena.size_bytes,
            instance_id=arena.superblock.instance_id,
            epoch=self.store.epoch,
            layout=layout_to_proto(arena.layout),
            slot_count=arena.slot_count,
            lease_duration=_duration(self.store.sessions.seconds_left(session)),
        )

    async def KeepAlive(
        self, requests: AsyncIterator[pb.KeepAliveRequest], context: _Context
    ) -> AsyncIterator[pb.KeepAliveResponse]:
        messages = _Messages(requests, self._stopping)
        session_id = b""
        try:
            first = await messages.next(self.store.sessions.lease_seconds)
            if first is None:
                return
            validation.check_session_id(first.session_id)
            session = self.store.sessions.live(first.session_id)
            if session.has_keep_alive:
                raise FailedPrecondition(
                    "another KeepAlive stream holds this session", reason="STREAM_EXISTS"
                )
            session.has_keep_alive = True
            session_id = session.session_id
            message: pb.KeepAliveRequest | None = first
            while message is not None:
                if message.session_id != session_id:
                    raise InvalidArgument("one stream holds one session", field="session_id")
                yield pb.KeepAliveResponse(
                    epoch=self.store.epoch,
                    lease_duration=_duration(self.store.keep_alive(session_id)),
                )
                message = await messages.next(self.store.sessions.seconds_left(session))
        finally:
            if session_id:
                self.store.end(session_id)
                _log.info("session %s ended", session_id.hex()[:8])
            await messages.close()

    # -- reading -------------------------------------------------------------------------

    async def Match(self, request: pb.MatchRequest, context: _Context) -> pb.MatchResponse:
        arena = self.store.arena
        tokens = validation.check_match(request, arena.slot_count * arena.layout.chunk_tokens)
        if not request.session_id:
            return self._matched(self.store.peek(request.tenant_salt, tokens))
        validation.check_session(request.session_id, request.request_id)
        answers = self.store.sessions.live(request.session_id).answers
        return _once(
            answers,
            request,
            pb.MatchResponse,
            lambda: self._matched(
                self.store.match(request.session_id, request.tenant_salt, tokens)
            ),
        )

    def _matched(self, found: Matched) -> pb.MatchResponse:
        return pb.MatchResponse(
            cached_tokens=found.cached_tokens,
            chunks=[_handle(entry) for entry in found.entries],
            chunk_keys=[entry.key for entry in found.entries],
            lease_id=found.lease_id,
            epoch=self.store.epoch,
        )

    # -- writing -------------------------------------------------------------------------

    async def Reserve(self, request: pb.ReserveRequest, context: _Context) -> pb.ReserveResponse:
        validation.check_session(request.session_id, request.request_id)
        validation.check_reserve(request)
        answers = self.store.sessions.live(request.session_id).answers
        return _once(
            answers,
            request,
            pb.ReserveResponse,
            lambda: self._reserved(self.store.reserve(request.session_id, request.slot_count)),
        )

    def _reserved(self, runs: Sequence[GrantedRun]) -> pb.ReserveResponse:
        return pb.ReserveResponse(
            runs=[
                pb.SlotRun(
                    first_slot=run.first,
                    slot_count=len(run.generations),
                    generations=run.generations,
                )
                for run in runs
            ],
            epoch=self.store.epoch,
        )

    async def Seal(self, request: pb.SealRequest, context: _Context) -> pb.SealResponse:
        validation.check_session(request.session_id, request.request_id)
        arena = self.store.arena
        chunks = validation.check_seal(request, arena.slot_count, arena.layout.chunk_tokens)
        answers = self.store.sessions.live(request.session_id).answers
        digest = _digest(request)
        remembered = answers.recall(request.request_id, digest)
        if remembered is not None:
            return _recalled(remembered, pb.SealResponse)
        name = (request.session_id, request.request_id)
        under_way = self._seals.get(name)
        if under_way is None:
            # A task of its own: a caller that goes away leaves no half-done seal.
            task = asyncio.create_task(self._seal(request, chunks, answers, digest))
            self._seals[name] = (digest, task)
            task.add_done_callback(lambda task: self._seal_done(name, task))
        elif under_way[0] != digest:
            raise AlreadyExists("this request_id was used for another request")
        else:
            task = under_way[1]
        return await asyncio.shield(task)

    async def _seal(
        self,
        request: pb.SealRequest,
        chunks: Sequence[WrittenChunk],
        answers: AnswerBook,
        digest: bytes,
    ) -> pb.SealResponse:
        loop = asyncio.get_running_loop()
        with self.store.sealing(chunks):
            damages = await loop.run_in_executor(self._threads, self.store.verify, chunks)
            try:
                outcome = self.store.seal(
                    request.session_id,
                    request.tenant_salt,
                    chunks,
                    damages,
                    lease_id=request.lease_id,
                    keep_leased=request.keep_leased,
                )
            except SplitpointError as error:
                # It may have sealed or freed slots: a retry must not try again.
                answers.remember(request.request_id, digest, error)
                raise
        response = self._sealed(outcome)
        answers.remember(request.request_id, digest, response.SerializeToString())
        return response

    def _seal_done(self, name: tuple[bytes, bytes], task: asyncio.Task[pb.SealResponse]) -> None:
        del self._seals[name]
        if not task.cancelled() and (error := task.exception()) is not None:
            # Whoever waits gets it too; here it is for callers that went away.
            _log.info("a seal was refused: %s", error)

    def _sealed(self, outcome: SealOutcome) -> pb.SealResponse:
        return pb.SealResponse(
            chunks=[
                pb.SealedChunk(
                    handle=_handle(chunk.entry),
                    key=chunk.entry.key,
                    duplicate=chunk.is_duplicate,
                )
                for chunk in outcome.chunks
            ],
            lease_id=outcome.lease_id,
            epoch=self.store.epoch,
        )

    async def Release(self, request: pb.ReleaseRequest, context: _Context) -> pb.ReleaseResponse:
        validation.check_session(request.session_id, request.request_id)
        slots = validation.check_release(request, self.store.arena.slot_count)
        answers = self.store.sessions.known(request.session_id).answers

        def release() -> pb.ReleaseResponse:
            released = self.store.release(request.session_id, request.lease_ids, slots)
            return pb.ReleaseResponse(
                released_lease_count=released.lease_count,
                released_slot_count=released.slot_count,
            )

        return _once(answers, request, pb.ReleaseResponse, release)

    # -- people and tests ------------------------------------------------------------------

    async def GetStats(self, request: pb.GetStatsRequest, context: _Context) -> pb.GetStatsResponse:
        store, pool, counters = self.store, self.store.pool, self.store.counters
        return pb.GetStatsResponse(
            slot_count=store.arena.slot_count,
            free_slot_count=pool.slots.count(SlotState.FREE),
            writing_slot_count=pool.slots.count(SlotState.WRITING),
            sealed_slot_count=pool.slots.count(SlotState.SEALED),
            quarantined_slot_count=pool.slots.count(SlotState.QUARANTINED),
            session_count=len(store.sessions),
            lease_count=len(pool.leases),
            leased_slot_count=pool.leases.leased_slot_count,
            match_count=counters.matches,
            match_hit_count=counters.match_hits,
            query_token_count=counters.query_tokens,
            hit_token_count=counters.hit_tokens,
            sealed_chunk_count=pool.sealed_total,
            duplicate_chunk_count=counters.duplicates,
            evicted_chunk_count=pool.evicted_total,
            checksum_failure_count=counters.checksum_failures,
            epoch=store.epoch,
            instance_id=store.arena.superblock.instance_id,
            layout=layout_to_proto(store.arena.layout),
            arena_path=str(store.arena.path),
            arena_size_bytes=store.arena.size_bytes,
            integrity_violations=(
                self._integrity.check_integrity() if request.check_integrity else []
            ),
        )


class _Messages:
    """The client's side of a stream, waited for with a time limit and until the store stops."""

    def __init__(
        self, requests: AsyncIterator[pb.KeepAliveRequest], stopping: asyncio.Event
    ) -> None:
        self._requests = aiter(requests)
        self._stopped = asyncio.ensure_future(stopping.wait())
        self._next: asyncio.Future[pb.KeepAliveRequest | None] | None = None

    async def next(self, timeout: float) -> pb.KeepAliveRequest | None:
        """The next message, None at the end. Raises FailedPrecondition and Unavailable."""
        self._next = asyncio.ensure_future(anext(self._requests, None))
        await asyncio.wait(
            {self._next, self._stopped}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
        )
        if self._next.done():
            return self._next.result()
        if self._stopped.done():
            raise Unavailable("the store is stopping", reason="STOPPING")
        raise FailedPrecondition(
            "the session expired: no KeepAlive message came in time", reason="SESSION_EXPIRED"
        )

    async def close(self) -> None:
        tasks = [task for task in (self._next, self._stopped) if task is not None]
        for task in tasks:
            task.cancel()
        # All of them: one may have failed since, and nobody else would look.
        await asyncio.gather(*tasks, return_exceptions=True)


def _once(
    answers: AnswerBook,
    request: Any,
    response_type: type[Answer],
    run: Callable[[], Answer],
) -> Answer:
    """The remembered answer to this request, or the one `run` gives now.

    Errors are not remembered: what fails here has had no effect.
    """
    digest = _digest(request)
    remembered = answers.recall(request.request_id, digest)
    if remembered is not None:
        return _recalled(remembered, response_type)
    response = run()
    answers.remember(request.request_id, digest, response.SerializeToString())
    return response


def _recalled(remembered: bytes | SplitpointError, response_type: type[Answer]) -> Answer:
    if isinstance(remembered, SplitpointError):
        raise remembered.with_traceback(None)
    return response_type.FromString(remembered)


def _digest(request: Message) -> bytes:
    """Stands for the request's whole content, its kind included."""
    content = request.SerializeToString(deterministic=True)
    name = request.DESCRIPTOR.full_name.encode()
    return hashlib.blake2b(name + b"\0" + content, digest_size=16).digest()


def _handle(entry: Entry) -> types_pb2.SlotHandle:
    return types_pb2.SlotHandle(
        slot=entry.slot,
        generation=entry.generation,
        token_count=entry.token_count,
        checksum=entry.checksum,
    )


def _duration(seconds: float) -> Duration:
    result = Duration()
    result.FromNanoseconds(int(seconds * 1e9))
    return result
