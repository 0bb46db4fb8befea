"""Sessions of a KV store: short ones, and ones that are kept and begun again when they are lost.

A short session (`remote_session`) is attached, kept alive, and ended with its block; its leases end
with it. A kept one (`StoreSession`) is attached again until it is closed; while the store is away
`connection` is None, and callers go on without it: an absent store costs reuse, never a request.
All methods run on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import grpc

from splitpoint.arena.format import ArenaFormatError
from splitpoint.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    SplitpointError,
    Unavailable,
)
from splitpoint.observe import tracing
from splitpoint.shapes import ArenaLayout
from splitpoint.transport.channels import open_channel
from splitpoint.transport.convert import layout_from_proto
from splitpoint.transport.statuses import error_of
from splitpoint.transport.tls import PLAIN, Identity
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import kvstore_pb2_grpc

log = logging.getLogger(__name__)

Request = TypeVar("Request")
Response = TypeVar("Response")

CALL_SECONDS = 10.0
# How long a store may take to end a session.
GOODBYE_SECONDS = 2.0
# Mean pauses before the attempts to attach again. A request that comes meanwhile starts the
# next attempt at once, but not within the first of these.
REATTACH_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)
_JITTER = (0.75, 1.25)
# How long a request waits for that attempt. A store that is gone refuses at once.
ATTACH_NOW_SECONDS = 0.5


# -- short sessions --------------------------------------------------------------------


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
        interval = lease_seconds(attached) / 3
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


# -- kept sessions ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connection:
    """One session. Handles of chunks are valid within it only."""

    session_id: bytes
    epoch: int
    lease_seconds: float


Connected = TypeVar("Connected", bound=Connection)
Made = TypeVar("Made", bound=Connection, covariant=True)


class Attachment(Protocol[Made]):
    """How a client attaches, and what it makes of the store's answer."""

    def attach_request(
        self, client_name: str, layout_hash: bytes, previous_session_id: bytes
    ) -> pb.AttachRequest: ...

    def connection(self, answer: pb.AttachResponse) -> Made:
        """Raise what mapping an arena raises, if one is mapped."""


class StoreSession(Generic[Connected]):
    """Begin with `start` or `start_later`, end with `close`.

    Attributes:
        connection: the current session. None while there is none.
        quiesce: awaited before a lost session is acknowledged. No copy may be writing into
            the session's slots any more when the store frees them.
        reattached: called after a session began, except by `start`. Users of the arena of the
            session before should release it.
        not_attached: called with the cause when an attempt to attach again failed.
        outcomes: what the store is told of its use: counts by name, since the session before
            was lost. Any thread may count.
    """

    def __init__(
        self, address: str, client_name: str, attachment: Attachment[Connected], identity: Identity
    ) -> None:
        self.address = address
        self.connection: Connected | None = None
        self.quiesce: Callable[[], Awaitable[None]] | None = None
        self.reattached: Callable[[], None] | None = None
        self.not_attached: Callable[[SplitpointError], None] | None = None
        self.outcomes: Counter[str] = Counter()
        self._client_name = client_name
        self._attachment = attachment
        self._identity = identity
        self._layout_hash = b""
        self._connected = asyncio.Event()
        self._channel = open_channel(address, identity)
        self.stub = kvstore_pb2_grpc.KvStoreServiceStub(self._channel)
        self._keeper: asyncio.Task[None] | None = None
        # A request waits for a session.
        self._wanted = asyncio.Event()
        # Done when the attempt that is next to begin, or under way, has ended.
        self._attempt: asyncio.Future[None] | None = None
        # The latest attempt for which a request waited in vain.
        self._slow_attempt: asyncio.Future[None] | None = None
        self._closing = asyncio.Event()
        # Ends the KeepAlive stream of the current session.
        self._letting_go = asyncio.Event()

    async def layout(self, timeout: float) -> ArenaLayout:
        """Return the store's layout without attaching. Waits for the store to be there."""
        try:
            stats = await self.stub.GetStats(
                pb.GetStatsRequest(), timeout=timeout, wait_for_ready=True
            )
        except grpc.RpcError as error:
            raise error_of(error) from error
        return layout_from_proto(stats.layout)

    async def start(self, layout: ArenaLayout) -> None:
        """Attach and keep the session alive.

        Raises what Attach raises, and FailedPrecondition if the store's arena is not on this
        host.
        """
        self._layout_hash = layout.layout_hash
        try:
            self.connection = await self._attach(previous=b"")
        except (NotFound, ArenaFormatError) as error:
            raise FailedPrecondition(
                f"the arena of the KV store at {self.address} cannot be mapped here: "
                f"{error.message}. A worker needs a store on its own host",
                reason="ARENA_NOT_HERE",
            ) from error
        self._connected.set()
        self.start_later()

    def start_later(self) -> None:
        """Attach in the background, now or when the store is there, and keep the session alive."""
        self._keeper = asyncio.create_task(self._keep(), name="store-keep-alive")

    async def wait_connected(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for a session. Return True if there is one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._connected.wait()
        return self._connected.is_set()

    async def attach_now(self) -> None:
        """Without a session, start an attempt to attach at once, and wait for it briefly.

        Returns at once while an attempt is under way for which a request has waited in vain.
        """
        attempt = self._attempt
        if self.connection is not None or attempt is None or attempt is self._slow_attempt:
            return
        self._wanted.set()
        await asyncio.wait({attempt}, timeout=ATTACH_NOW_SECONDS)
        if not attempt.done():
            self._slow_attempt = attempt

    async def close(self) -> None:
        """End the session. The store frees what it held."""
        self._closing.set()
        self._wanted.set()
        self._letting_go.set()
        if self._keeper is not None:
            await self._keeper
        await self._channel.close()

    def require(self) -> Connected:
        """Return the current session. Raises Unavailable if there is none."""
        if self.connection is None:
            raise Unavailable("the KV store is away", reason="STORE_LOST")
        return self.connection

    def _give_up(self, connection: Connected) -> None:
        """End a session whose grants are unknown. The next session frees them."""
        if self.connection is connection and not self._closing.is_set():
            log.warning("the KV store does not answer: its session is given up")
            self._letting_go.set()

    async def _attach(self, previous: bytes) -> Connected:
        request = self._attachment.attach_request(self._client_name, self._layout_hash, previous)
        answer = await call_once(self.stub.Attach, request)
        return self._attachment.connection(answer)

    async def _keep(self) -> None:
        """Keep a session until `close`: attach again whenever it is lost."""
        previous = b""
        while not self._closing.is_set():
            connection = self.connection
            if connection is None:
                connection = await self._reattach(previous)
                if connection is None:
                    return
                self._begin(connection, is_first=not previous)
            await self._keep_alive(connection)
            if self._closing.is_set():
                return
            previous = connection.session_id
            self.connection = None
            self._connected.clear()
            self.outcomes.clear()
            log.warning("the KV store session was lost: serving without cached prefixes")

    def _begin(self, connection: Connected, *, is_first: bool) -> None:
        self.connection = connection
        if not self._closing.is_set():
            self._letting_go.clear()
        self._connected.set()
        self._notify_reattached()
        if is_first:
            log.info("attached to the KV store, epoch %d", connection.epoch)
        else:
            log.warning("attached to the KV store again, epoch %d", connection.epoch)

    async def _keep_alive(self, connection: Connected) -> None:
        """Run one KeepAlive stream until it breaks, or until the session is let go."""
        listening = asyncio.create_task(self._listen(connection))
        letting_go = asyncio.create_task(self._letting_go.wait())
        try:
            await asyncio.wait({listening, letting_go}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({listening}, timeout=GOODBYE_SECONDS)
        finally:
            listening.cancel()
            letting_go.cancel()
            await asyncio.gather(listening, letting_go, return_exceptions=True)

    async def _listen(self, connection: Connected) -> None:
        interval = connection.lease_seconds / 3
        requests = heartbeats(connection.session_id, interval, self._letting_go, self.outcomes)
        try:
            async for _ in self.stub.KeepAlive(requests):
                pass
        except grpc.RpcError as error:
            log.warning("KeepAlive ended: %s", error_of(error).message)
        except Exception:
            log.exception("KeepAlive failed")

    async def _reattach(self, previous: bytes) -> Connected | None:
        """Retry until there is another session. None if `close` was called."""
        is_quiet = False
        is_first = not previous
        self._wanted.clear()
        for number in itertools.count():
            attempt = self._attempt = asyncio.get_running_loop().create_future()
            try:
                if not (is_first or await self._pause(number)):
                    return None
                is_first = False
                if not is_quiet and self.quiesce is not None:
                    await self.quiesce()
                is_quiet = True
                await self._renew_channel()
                return await self._attach(previous)
            except InvalidArgument as error:
                previous = b""
                self._tell(error)
            except SplitpointError as error:
                log.info("attaching again failed: %s", error.message)
                self._tell(error)
            except OSError as error:
                # Not enough memory or descriptors to map the arena, for now.
                log.warning("mapping the arena failed: %s", error)
            except Exception:
                # A bug must not cost the worker its store for ever.
                log.exception("attaching again failed")
            finally:
                attempt.set_result(None)
                self._attempt = None
        return None

    def _tell(self, error: SplitpointError) -> None:
        if self.not_attached is not None:
            self.not_attached(error)

    async def _pause(self, number: int) -> bool:
        """Wait before an attempt, or until a request wants one. False if `close` was called."""
        delay = REATTACH_SECONDS[min(number, len(REATTACH_SECONDS) - 1)]
        waits = (REATTACH_SECONDS[0], self._closing), (delay - REATTACH_SECONDS[0], self._wanted)
        for seconds, event in waits:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds * random.uniform(*_JITTER)):
                    await event.wait()
            if self._closing.is_set():
                return False
        self._wanted.clear()
        return True

    async def _renew_channel(self) -> None:
        """Open another channel: one that failed waits up to seconds before it connects again."""
        old = self._channel
        self._channel = open_channel(self.address, self._identity, is_fresh=True)
        self.stub = kvstore_pb2_grpc.KvStoreServiceStub(self._channel)
        await old.close()

    def _notify_reattached(self) -> None:
        try:
            if self.reattached is not None:
                self.reattached()
        except Exception:
            log.exception("the callback for a new session failed")

    async def call(
        self,
        connection: Connected,
        method: grpc.aio.UnaryUnaryMultiCallable[Request, Response],
        request: Request,
        seconds: float = CALL_SECONDS,
    ) -> Response:
        """Make a call, and repeat it once if no answer came within so many seconds.

        Every request has an id, so the store does nothing twice, and the answer tells what a
        call that timed out was granted. If there is no answer again the session ends, and
        what it holds is free when the next one begins.
        """
        try:
            return await call_once(method, request, seconds)
        except (DeadlineExceeded, Unavailable):
            try:
                return await call_once(method, request, seconds)
            except (DeadlineExceeded, Unavailable):
                self._give_up(connection)
                raise


# -- calls -----------------------------------------------------------------------------


async def call_once(
    method: grpc.aio.UnaryUnaryMultiCallable[Request, Response],
    request: Request,
    seconds: float = CALL_SECONDS,
) -> Response:
    """Call a store within `seconds`. Raises what it answers, as a SplitpointError."""
    try:
        return await method(request, timeout=seconds, metadata=tracing.metadata())
    except grpc.RpcError as error:
        raise error_of(error) from error


async def heartbeats(
    session_id: bytes,
    interval_seconds: float,
    ended: asyncio.Event,
    outcomes: Mapping[str, int] | None = None,
) -> AsyncIterator[pb.KeepAliveRequest]:
    """Yield a KeepAlive request every `interval_seconds` until `ended` is set.

    At least one: a stream without any belongs to no session, and ends none. Each tells the
    `outcomes` of its moment.
    """
    while True:
        yield pb.KeepAliveRequest(session_id=session_id, outcomes=dict(outcomes or {}))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(interval_seconds):
                await ended.wait()
                return


def granted_slots(answer: pb.ReserveResponse) -> list[tuple[int, int]]:
    """Return (slot, generation) of each slot that an answer to Reserve grants, in its order."""
    return [
        (run.first_slot + index, generation)
        for run in answer.runs
        for index, generation in enumerate(run.generations)
    ]


def lease_seconds(answer: pb.AttachResponse) -> float:
    """Return how long the session lasts without a KeepAlive request."""
    return answer.lease_duration.ToTimedelta().total_seconds()
