"""A short session of another host's store: attached, kept alive, and ended with its block.

Its leases end with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from splitpoint.transport.channels import open_channel
from splitpoint.transport.tls import PLAIN, Identity
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import kvstore_pb2_grpc
from worker_service.store.session import call_once, heartbeats


class RemoteSession:
    """Made by `remote_session`."""

    def __init__(self, stub: Any, session_id: bytes) -> None:
        self.stub = stub
        self.session_id = session_id

    async def match(self, salt: bytes, token_ids: Sequence[int]) -> pb.MatchResponse:
        """Match the longest prefix there. It stays leased until the session ends."""
        request = pb.MatchRequest(
            session_id=self.session_id, request_id=b"match", tenant_salt=salt, token_ids=token_ids
        )
        return await call_once(self.stub.Match, request)


@asynccontextmanager
async def remote_session(
    address: str, client_name: str, layout_hash: bytes, identity: Identity = PLAIN
) -> AsyncIterator[RemoteSession]:
    """Open a session of the store at `address`.

    Raises FailedPrecondition if that store has another layout: equal tokens would have other
    keys and other bytes there.
    """
    async with open_channel(address, identity) as channel:
        stub: Any = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        request = pb.AttachRequest(client_name=client_name, layout_hash=layout_hash, is_remote=True)
        attached = await call_once(stub.Attach, request)
        interval = attached.lease_duration.ToTimedelta().total_seconds() / 3
        keeper = asyncio.create_task(_keep_alive(stub, attached.session_id, interval))
        try:
            yield RemoteSession(stub, attached.session_id)
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)


async def _keep_alive(stub: Any, session_id: bytes, interval: float) -> None:
    """Run until cancelled, or until the store ends the session. Its calls fail then."""
    async for _ in stub.KeepAlive(heartbeats(session_id, interval, asyncio.Event())):
        pass
