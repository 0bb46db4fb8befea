"""A short session of another host's store: attached, kept alive, and ended with its block.

What it leased is free again when it ends, however it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import grpc

from splitpoint.arena.payload import Payload
from splitpoint.observe import tracing
from splitpoint.transport.channels import open_channel
from splitpoint.transport.statuses import error_of
from splitpoint.transport.tls import PLAIN, Identity
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import kvstore_pb2_grpc, types_pb2
from worker_service.store.chunk_streams import read_chunks
from worker_service.store.client import CALL_SECONDS


class RemoteSession:
    """Made by `remote_session`."""

    def __init__(self, stub: Any, session_id: bytes) -> None:
        self._stub = stub
        self._session_id = session_id

    async def match(self, salt: bytes, token_ids: Sequence[int]) -> pb.MatchResponse:
        """The longest prefix there, leased until the session ends."""
        request = pb.MatchRequest(
            session_id=self._session_id, request_id=b"match", tenant_salt=salt, token_ids=token_ids
        )
        try:
            answer: pb.MatchResponse = await self._stub.Match(
                request, timeout=CALL_SECONDS, metadata=tracing.metadata()
            )
        except grpc.RpcError as error:
            raise error_of(error) from error
        return answer

    async def read(
        self,
        handles: Sequence[types_pb2.SlotHandle],
        payload: Payload,
        slots: Sequence[int],
        lane: ThreadPoolExecutor,
        check: Any,
    ) -> None:
        """See `chunk_streams.read_chunks`."""
        await read_chunks(self._stub, self._session_id, handles, payload, slots, lane, check)


@asynccontextmanager
async def remote_session(
    address: str, client_name: str, layout_hash: bytes, identity: Identity = PLAIN
) -> AsyncIterator[RemoteSession]:
    """A session of the store at `address`.

    Raises FailedPrecondition when that store's layout is another one: equal tokens
    would have other keys and other bytes there.
    """
    async with open_channel(address, identity) as channel:
        stub: Any = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        request = pb.AttachRequest(client_name=client_name, layout_hash=layout_hash, is_remote=True)
        try:
            attached = await stub.Attach(request, timeout=CALL_SECONDS)
        except grpc.RpcError as error:
            raise error_of(error) from error
        interval = attached.lease_duration.ToTimedelta().total_seconds() / 3
        keeper = asyncio.create_task(_keep_alive(stub, attached.session_id, interval))
        try:
            yield RemoteSession(stub, attached.session_id)
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)


async def _keep_alive(stub: Any, session_id: bytes, interval: float) -> None:
    """Until cancelled or until the store ends it, which the session's calls then say."""

    async def beats() -> AsyncIterator[pb.KeepAliveRequest]:
        while True:
            yield pb.KeepAliveRequest(session_id=session_id)
            await asyncio.sleep(interval)

    async for _ in stub.KeepAlive(beats()):
        pass
