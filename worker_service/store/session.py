"""The worker's session of the KV store: attached, kept alive, and attached again when lost.

All methods run on the event loop. While the store is away `connection` is None, and callers
go on without it: an absent store costs reuse, never a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc

from splitpoint.arena.format import ArenaFormatError
from splitpoint.arena.mapping import Arena
from splitpoint.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    SplitpointError,
    Unavailable,
)
from splitpoint.shapes import ArenaLayout
from splitpoint.transport.channels import open_channel
from splitpoint.transport.convert import layout_from_proto
from splitpoint.transport.statuses import error_of
from splitpoint.transport.store_session import GOODBYE_SECONDS, call_once, heartbeats
from splitpoint.transport.tls import Identity
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import kvstore_pb2_grpc
from worker_service.device.pinning import Pinning
from worker_service.device.populating import Populator
from worker_service.store.arena_tensors import ArenaTensors

log = logging.getLogger(__name__)

Request = TypeVar("Request")
Response = TypeVar("Response")

# Mean pauses before the attempts to attach again. A request that comes meanwhile starts the
# next attempt at once, but not within the first of these.
REATTACH_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)
_JITTER = (0.75, 1.25)
# How long a request waits for that attempt. A store that is gone refuses at once.
ATTACH_NOW_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Connection:
    """One session and the arena mapped for it. Chunk handles are valid within it only.

    Attributes:
        loads_from_stores: the store itself can load chunks from other stores.
    """

    session_id: bytes
    epoch: int
    lease_seconds: float
    tensors: ArenaTensors
    loads_from_stores: bool = False


class MappedArena:
    """The store's arena on this host.

    `pinning` page-locks it, `populator` populates its mapping; each is None if that is not done.
    """

    def __init__(self, pinning: Pinning | None, populator: Populator | None = None) -> None:
        self._pinning = pinning
        self._populator = populator

    def attach_request(
        self, client_name: str, layout_hash: bytes, previous_session_id: bytes
    ) -> pb.AttachRequest:
        return pb.AttachRequest(
            client_name=client_name,
            process_id=os.getpid(),
            process_start_ticks=process_start_ticks(),
            layout_hash=layout_hash,
            previous_session_id=previous_session_id,
        )

    def tensors(self, answer: pb.AttachResponse) -> ArenaTensors:
        arena = Arena.attach(
            Path(answer.arena_path),
            layout=layout_from_proto(answer.layout),
            slot_count=answer.slot_count,
            instance_id=answer.instance_id,
            epoch=answer.epoch,
            session_id=answer.session_id,
        )
        if self._pinning is not None:
            self._pinning.attach(arena)
        tensors = ArenaTensors(arena)
        if self._populator is not None:
            self._populator.watch(tensors.memory)
        return tensors


class StoreSession:
    """Begin with `start`, end with `close`.

    Attributes:
        connection: the current session. None while there is none.
        quiesce: awaited before a lost session is acknowledged. No copy may be writing into
            the session's slots any more when the store frees them.
        reattached: called after a new session began. Users of the arena of the session
            before should release it.
    """

    def __init__(
        self, address: str, client_name: str, arena: MappedArena, identity: Identity
    ) -> None:
        self.address = address
        self.connection: Connection | None = None
        self.quiesce: Callable[[], Awaitable[None]] | None = None
        self.reattached: Callable[[], None] | None = None
        self._client_name = client_name
        self._arena = arena
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

    def require(self) -> Connection:
        """Return the current session. Raises Unavailable if there is none."""
        if self.connection is None:
            raise Unavailable("the KV store is away", reason="STORE_LOST")
        return self.connection

    def _give_up(self, connection: Connection) -> None:
        """End a session whose grants are unknown. The next session frees them."""
        if self.connection is connection and not self._closing.is_set():
            log.warning("the KV store does not answer: its session is given up")
            self._letting_go.set()

    async def _attach(self, previous: bytes) -> Connection:
        request = self._arena.attach_request(self._client_name, self._layout_hash, previous)
        answer = await call_once(self.stub.Attach, request)
        return Connection(
            session_id=answer.session_id,
            epoch=answer.epoch,
            lease_seconds=answer.lease_duration.ToTimedelta().total_seconds(),
            tensors=self._arena.tensors(answer),
            loads_from_stores=answer.loads_from_stores,
        )

    async def _keep(self) -> None:
        """Keep a session until `close`: attach again whenever it is lost."""
        while not self._closing.is_set():
            connection = self.require()
            await self._keep_alive(connection)
            if self._closing.is_set():
                return
            self.connection = None
            self._connected.clear()
            log.warning("the KV store session was lost: serving without cached prefixes")
            self.connection = await self._reattach(connection.session_id)
            if self.connection is not None:
                if not self._closing.is_set():
                    self._letting_go.clear()
                self._connected.set()
                self._notify_reattached()
                log.warning("attached to the KV store again, epoch %d", self.connection.epoch)

    async def _keep_alive(self, connection: Connection) -> None:
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

    async def _listen(self, connection: Connection) -> None:
        interval = connection.lease_seconds / 3
        requests = heartbeats(connection.session_id, interval, self._letting_go)
        try:
            async for _ in self.stub.KeepAlive(requests):
                pass
        except grpc.RpcError as error:
            log.warning("KeepAlive ended: %s", error_of(error).message)
        except Exception:
            log.exception("KeepAlive failed")

    async def _reattach(self, previous: bytes) -> Connection | None:
        """Retry until there is another session. None if `close` was called."""
        is_quiet = False
        self._wanted.clear()
        for number in itertools.count():
            attempt = self._attempt = asyncio.get_running_loop().create_future()
            try:
                if not await self._pause(number):
                    return None
                if not is_quiet and self.quiesce is not None:
                    await self.quiesce()
                is_quiet = True
                await self._renew_channel()
                return await self._attach(previous)
            except InvalidArgument:
                previous = b""
            except SplitpointError as error:
                log.info("attaching again failed: %s", error.message)
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
        connection: Connection,
        method: grpc.aio.UnaryUnaryMultiCallable[Request, Response],
        request: Request,
    ) -> Response:
        """Make a call, and repeat it once if no answer came.

        Every request has an id, so the store does nothing twice, and the answer tells what a
        call that timed out was granted. If there is no answer again the session ends, and
        what it holds is free when the next one begins.
        """
        try:
            return await call_once(method, request)
        except (DeadlineExceeded, Unavailable):
            try:
                return await call_once(method, request)
            except (DeadlineExceeded, Unavailable):
                self._give_up(connection)
                raise


def process_start_ticks() -> int:
    """Return this process's start time in clock ticks since boot (/proc/self/stat field 22)."""
    stat = Path("/proc/self/stat").read_text()
    # The command name, field 2, may contain spaces and parentheses.
    return int(stat.rpartition(")")[2].split()[19])
