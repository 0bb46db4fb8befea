"""A short session of another host's store: attached, kept alive, and ended with its block.

Its leases end with it. Stores and workers use it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import grpc

from splitpoint.observe import tracing
from splitpoint.transport.channels import open_channel
from splitpoint.transport.statuses import error_of
from splitpoint.transport.tls import PLAIN, Identity
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import kvstore_pb2_grpc

Request = TypeVar("Request")
Response = TypeVar("Response")

CALL_SECONDS = 10.0
# How long a store may take to end a session.
GOODBYE_SECONDS = 2.0


class RemoteSession:
    """Made by `remote_session`. `attached` is the store's answer to Attach."""

    def __init__(self, stub: Any, attached: pb.AttachResponse) -> None:
        self.stub = stub
        self.attached = attached

    @property
    def session_id(self) -> bytes:
        return self.attached.session_id

    async def match(self, salt: bytes, token_ids: Sequence[int]) -> pb.MatchResponse:
        """Match the longest prefix there. It stays leased until the session ends."""
        request = pb.MatchRequest(
            session_id=self.session_id, request_id=b"match", tenant_salt=salt, token_ids=token_ids
        )
        return await call_once(self.stub.Match, request)

    async def peek(self, salt: bytes, token_ids: Sequence[int]) -> pb.MatchResponse:
        """Match the longest prefix there without a lease."""
        return await call_once(
            self.stub.Match, pb.MatchRequest(tenant_salt=salt, token_ids=token_ids)
        )


@asynccontextmanager
async def remote_session(
    address: str, client_name: str, layout_hash: bytes, identity: Identity = PLAIN
) -> AsyncIterator[RemoteSession]:
    """Open a session of the store at `address`.

    When the block ends, that store has freed what the session held, unless it does not answer:
    the session expires there then.

    Raises FailedPrecondition if that store has another layout: equal tokens would have other
    keys and other bytes there.
    """
    async with open_channel(address, identity) as channel:
        stub: Any = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        request = pb.AttachRequest(client_name=client_name, layout_hash=layout_hash, is_remote=True)
        attached = await call_once(stub.Attach, request)
        interval = attached.lease_duration.ToTimedelta().total_seconds() / 3
        ended = asyncio.Event()
        keeper = asyncio.create_task(_keep_alive(stub, attached.session_id, interval, ended))
        try:
            yield RemoteSession(stub, attached)
        finally:
            # A stream that is cancelled may never reach the store, which ends the session with it.
            ended.set()
            try:
                await asyncio.wait({keeper}, timeout=GOODBYE_SECONDS)
            finally:
                keeper.cancel()
                await asyncio.gather(keeper, return_exceptions=True)


async def _keep_alive(stub: Any, session_id: bytes, interval: float, ended: asyncio.Event) -> None:
    """Run until `ended`, or until the store ends the session. Its calls fail then."""
    async for _ in stub.KeepAlive(heartbeats(session_id, interval, ended)):
        pass


async def call_once(
    method: grpc.aio.UnaryUnaryMultiCallable[Request, Response], request: Request
) -> Response:
    """Call a store within CALL_SECONDS. Raises what it answers, as a SplitpointError."""
    try:
        return await method(request, timeout=CALL_SECONDS, metadata=tracing.metadata())
    except grpc.RpcError as error:
        raise error_of(error) from error


async def heartbeats(
    session_id: bytes, interval_seconds: float, ended: asyncio.Event
) -> AsyncIterator[pb.KeepAliveRequest]:
    """Yield a KeepAlive request every `interval_seconds` until `ended` is set.

    At least one: a stream without any belongs to no session, and ends none.
    """
    while True:
        yield pb.KeepAliveRequest(session_id=session_id)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(interval_seconds):
                await ended.wait()
                return
