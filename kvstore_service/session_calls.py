"""The calls that open a session and keep it alive."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator

from google.protobuf.duration_pb2 import Duration

from kvstore_service.calls import validation
from kvstore_service.calls.validation import next_message
from kvstore_service.stats import endpoint_message
from kvstore_service.store import KvStore
from kvstore_service.tiers.manager import TierManager
from kvstore_service.tiers.tier import ChunkTransfer
from splitpoint.errors import FailedPrecondition, InvalidArgument, Unavailable
from splitpoint.transport.convert import layout_to_proto, tier_to_proto
from splitpoint.v1 import kvstore_pb2 as pb

_log = logging.getLogger(__name__)


class SessionCalls:
    """Attach and KeepAlive of one store. `stopping`: set when the streams shall end."""

    def __init__(
        self,
        store: KvStore,
        tiers: TierManager,
        transfer: ChunkTransfer | None,
        stopping: asyncio.Event,
    ) -> None:
        self._store = store
        self._tiers = tiers
        self._transfer = transfer
        self._stopping = stopping

    def attach(self, request: pb.AttachRequest) -> pb.AttachResponse:
        """Open a session. Raises InvalidArgument and what `sessions.attach` raises."""
        process = validation.check_attach(request)
        session = self._store.sessions.attach(
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
        arena = self._store.arena
        return pb.AttachResponse(
            session_id=session.session_id,
            arena_path="" if session.is_remote else str(arena.path),
            arena_size_bytes=arena.size_bytes,
            instance_id=arena.superblock.instance_id,
            epoch=self._store.epoch,
            layout=layout_to_proto(arena.layout),
            slot_count=arena.slot_count,
            lease_duration=_duration(self._store.sessions.seconds_left(session)),
            transfer=endpoint_message(self._transfer),
            tiers=[tier_to_proto(tier) for tier in self._tiers.tiers],
            loads_from_stores=self._transfer is not None,
        )

    async def keep_alive(
        self, requests: AsyncIterator[pb.KeepAliveRequest]
    ) -> AsyncGenerator[pb.KeepAliveResponse]:
        """Keep a session for as long as its messages come; it ends with the stream."""
        sessions = self._store.sessions
        messages = aiter(requests)
        session_id = b""
        try:
            first = await self._next_beat(messages, sessions.lease_seconds)
            if first is None:
                return
            validation.check_session_id(first.session_id)
            session = sessions.live(first.session_id)
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
                    epoch=self._store.epoch,
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
        try:
            return await next_message(messages, timeout, self._stopping)
        except TimeoutError:
            if self._stopping.is_set():
                raise Unavailable("the store is stopping", reason="STOPPING") from None
            raise FailedPrecondition(
                "the session expired: no KeepAlive message came in time", reason="SESSION_EXPIRED"
            ) from None


def _duration(seconds: float) -> Duration:
    result = Duration()
    result.FromNanoseconds(int(seconds * 1e9))
    return result
