"""The worker's end of the KV store: one session, kept alive, attached again when lost.

Control calls only; bytes go through `ArenaTensors`. All methods run on the
event loop. A store that is away costs reuse, never a request: `connection` is
None then, and callers go on without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
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
from splitpoint.observe import tracing
from splitpoint.shapes import ArenaLayout
from splitpoint.transport.channels import open_channel
from splitpoint.transport.convert import layout_from_proto
from splitpoint.transport.statuses import error_of
from splitpoint.transport.tls import PLAIN, Identity
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import kvstore_pb2_grpc, types_pb2
from worker_service.device.pinning import Pinning
from worker_service.store.arena_tensors import ArenaTensors, StoredChunk

log = logging.getLogger(__name__)

Request = TypeVar("Request")
Response = TypeVar("Response")

CALL_SECONDS = 10.0
# Between attempts to attach again, each drawn from about this much; a request that comes
# meanwhile has the next one made at once, but not within the first of these.
REATTACH_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0)
_JITTER = (0.75, 1.25)
# How long a request waits for that attempt: a store that is gone refuses at once.
ATTACH_NOW_SECONDS = 0.5
# Of one call: some GiB at most, which a store reads back within a second.
REPORT_CHUNKS = 256
# For the store to end a session that is given up; one that hangs is not waited for.
GOODBYE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Connection:
    """One session and the arena mapped for it. Handles are valid within it only."""

    session_id: bytes
    epoch: int
    lease_seconds: float
    tensors: ArenaTensors


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix, leased. `cached_tokens` may end inside the last chunk.

    `storable_tokens`: how far the store wants the sequence stored; None: all of it.
    """

    connection: Connection
    cached_tokens: int
    chunks: tuple[StoredChunk, ...]
    lease_id: int
    storable_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class WrittenChunk:
    """A slot whose payload is in place, ready to be sealed."""

    slot: int
    generation: int
    parent_key: bytes
    token_ids: tuple[int, ...]
    checksum: int


@dataclass(frozen=True, slots=True)
class Sealed:
    chunks: tuple[StoredChunk, ...]
    lease_id: int


class StoreClient:
    """Attach with `start`, which also learns the layout; end with `close`."""

    def __init__(
        self,
        address: str,
        client_name: str,
        *,
        layout_hash: bytes = b"",
        identity: Identity = PLAIN,
    ) -> None:
        self.address = address
        self.client_name = client_name
        self.connection: Connection | None = None
        self._connected = asyncio.Event()
        self._layout_hash = layout_hash
        self.identity = identity
        self._channel = open_channel(address, identity)
        self._stub = kvstore_pb2_grpc.KvStoreServiceStub(self._channel)
        self._request_numbers = itertools.count(1)
        self._keeper: asyncio.Task[None] | None = None
        # Awaited before a lost session is acknowledged: nothing may be writing
        # into its slots any more when the store frees them.
        self.quiesce: Callable[[], Awaitable[None]] | None = None
        # Called once there is another session: whoever still holds the arena of the
        # one before should let go of it.
        self.reattached: Callable[[], None] | None = None
        # Page-locks every arena that is attached; None: nothing is locked.
        self.pinning: Pinning | None = None
        # A request would like to be attached now.
        self._wanted = asyncio.Event()
        # Done when the attempt that is next to begin, or under way, has ended.
        self._attempt: asyncio.Future[None] | None = None
        self._closing = asyncio.Event()
        # Ends the KeepAlive stream of the current session.
        self._letting_go = asyncio.Event()

    async def layout(self, timeout: float = 30.0) -> ArenaLayout:
        """The store's layout, without attaching; waits for the store to be there."""
        try:
            stats = await self._stub.GetStats(
                pb.GetStatsRequest(), timeout=timeout, wait_for_ready=True
            )
        except grpc.RpcError as error:
            raise error_of(error) from error
        return layout_from_proto(stats.layout)

    async def start(self, layout: ArenaLayout) -> None:
        """Attach and keep the session alive.

        Raises what Attach raises, and FailedPrecondition when the arena that the
        store tells of is not on this host.
        """
        self._layout_hash = layout.layout_hash
        try:
            self.connection = await self._attach(previous=b"")
        except (NotFound, ArenaFormatError) as error:
            raise FailedPrecondition(
                f"the arena of the KV store at {self.address} cannot be mapped here: "
                f"{error.message}. If the store runs on another host, start the worker with "
                "--kvstore-remote",
                reason="ARENA_NOT_HERE",
            ) from error
        self._connected.set()
        self._keeper = asyncio.create_task(self._keep(), name="store-keep-alive")

    async def wait_connected(self, timeout: float) -> bool:
        """Whether there is a session, now or within `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._connected.wait()
        return self._connected.is_set()

    async def attach_now(self) -> None:
        """Without a session, have another attempt made at once, and wait for it briefly."""
        attempt = self._attempt
        if self.connection is not None or attempt is None:
            return
        self._wanted.set()
        await asyncio.wait({attempt}, timeout=ATTACH_NOW_SECONDS)

    async def close(self) -> None:
        """End the session; the store frees what it held."""
        self._closing.set()
        self._wanted.set()
        self._letting_go.set()
        if self._keeper is not None:
            await self._keeper
        if self.pinning is not None:
            await self.pinning.close()
        await self._channel.close()

    # -- calls ------------------------------------------------------------------

    async def match(self, salt: bytes, token_ids: Sequence[int]) -> Match:
        """Lease the longest cached prefix of the tokens."""
        connection = self._require()
        answer = await self._match(connection, salt, token_ids)
        chunks = tuple(
            _stored(handle, key)
            for handle, key in zip(answer.chunks, answer.chunk_keys, strict=True)
        )
        return Match(
            connection, answer.cached_tokens, chunks, answer.lease_id, storable_tokens(answer)
        )

    async def _match(
        self, connection: Connection, salt: bytes, token_ids: Sequence[int]
    ) -> pb.MatchResponse:
        """What the store has of the tokens, leased there."""
        return await self._call(
            connection,
            self._stub.Match,
            pb.MatchRequest(
                session_id=connection.session_id,
                request_id=self._request_id(),
                tenant_salt=salt,
                token_ids=token_ids,
            ),
        )

    async def reserve(
        self, connection: Connection, salt: bytes, slot_count: int
    ) -> list[tuple[int, int]]:
        """Granted (slot, generation) pairs, in as few contiguous runs as there are."""
        answer = await self._call(
            connection,
            self._stub.Reserve,
            pb.ReserveRequest(
                session_id=connection.session_id,
                request_id=self._request_id(),
                slot_count=slot_count,
                tenant_salt=salt,
            ),
        )
        return [
            (run.first_slot + index, generation)
            for run in answer.runs
            for index, generation in enumerate(run.generations)
        ]

    async def seal(
        self, connection: Connection, salt: bytes, chunks: Sequence[WrittenChunk], lease_id: int
    ) -> Sealed:
        """Publish written slots; they stay leased until `release`."""
        answer = await self._call(
            connection,
            self._stub.Seal,
            pb.SealRequest(
                session_id=connection.session_id,
                request_id=self._request_id(),
                tenant_salt=salt,
                chunks=[
                    pb.SealChunk(
                        slot=chunk.slot,
                        generation=chunk.generation,
                        parent_key=chunk.parent_key,
                        token_ids=chunk.token_ids,
                        checksum=chunk.checksum,
                    )
                    for chunk in chunks
                ],
                lease_id=lease_id,
                keep_leased=True,
            ),
        )
        sealed = tuple(_stored(chunk.handle, chunk.key) for chunk in answer.chunks)
        return Sealed(sealed, answer.lease_id)

    async def release(
        self,
        connection: Connection,
        *,
        lease_ids: Sequence[int] = (),
        slots: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Give up leases and unwritten slots of this connection's session."""
        lease_ids = [lease_id for lease_id in lease_ids if lease_id]
        if not lease_ids and not slots:
            return
        await self._call(
            connection,
            self._stub.Release,
            pb.ReleaseRequest(
                session_id=connection.session_id,
                request_id=self._request_id(),
                lease_ids=lease_ids,
                slots=[
                    types_pb2.SlotHandle(slot=slot, generation=generation)
                    for slot, generation in slots
                ],
            ),
        )

    async def report(self, connection: Connection, chunks: Sequence[StoredChunk]) -> int:
        """Have the store read suspect chunks back; how many of them it has no more."""
        if self.connection is not connection:
            return len(chunks)
        lost = 0
        for start in range(0, len(chunks), REPORT_CHUNKS):
            answer = await self._call(
                connection,
                self._stub.ReportChunks,
                pb.ReportChunksRequest(
                    session_id=connection.session_id,
                    request_id=self._request_id(),
                    chunks=[
                        types_pb2.SlotHandle(slot=chunk.slot, generation=chunk.generation)
                        for chunk in chunks[start : start + REPORT_CHUNKS]
                    ],
                ),
            )
            lost += answer.lost_chunk_count
        return lost

    # -- the session --------------------------------------------------------------

    async def _attach(self, previous: bytes) -> Connection:
        answer = await self._once(self._stub.Attach, self._attach_request(previous))
        return Connection(
            session_id=answer.session_id,
            epoch=answer.epoch,
            lease_seconds=answer.lease_duration.ToTimedelta().total_seconds(),
            tensors=self._tensors_of(answer),
        )

    def _attach_request(self, previous: bytes) -> pb.AttachRequest:
        return pb.AttachRequest(
            client_name=self.client_name,
            process_id=os.getpid(),
            process_start_ticks=process_start_ticks(),
            layout_hash=self._layout_hash,
            previous_session_id=previous,
        )

    def _tensors_of(self, answer: pb.AttachResponse) -> ArenaTensors:
        """Where the session's chunks are read and written."""
        arena = Arena.attach(
            Path(answer.arena_path),
            layout=layout_from_proto(answer.layout),
            slot_count=answer.slot_count,
            instance_id=answer.instance_id,
            epoch=answer.epoch,
            session_id=answer.session_id,
        )
        if self.pinning is not None:
            self.pinning.attach(arena)
        return ArenaTensors(arena)

    async def _keep(self) -> None:
        """Hold the session until closing; when it is lost, attach again and say so."""
        while not self._closing.is_set():
            connection = self.connection
            if connection is None:
                raise RuntimeError("keep-alive without a session")
            await self._hold(connection)
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
                self._tell_reattached()
                log.warning("attached to the KV store again, epoch %d", self.connection.epoch)

    async def _hold(self, connection: Connection) -> None:
        """One KeepAlive stream, until it breaks, the client closes or gives the session up."""

        async def beats() -> AsyncIterator[pb.KeepAliveRequest]:
            while not self._letting_go.is_set():
                yield pb.KeepAliveRequest(session_id=connection.session_id)
                try:
                    async with asyncio.timeout(connection.lease_seconds / 3):
                        await self._letting_go.wait()
                except TimeoutError:
                    continue

        async def listen() -> None:
            try:
                async for _ in self._stub.KeepAlive(beats()):
                    pass
            except grpc.RpcError as error:
                log.warning("KeepAlive ended: %s", error_of(error).message)
            except Exception:
                log.exception("KeepAlive failed")

        listening = asyncio.create_task(listen())
        letting_go = asyncio.create_task(self._letting_go.wait())
        try:
            await asyncio.wait({listening, letting_go}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({listening}, timeout=GOODBYE_SECONDS)
        finally:
            listening.cancel()
            letting_go.cancel()
            await asyncio.gather(listening, letting_go, return_exceptions=True)

    async def _reattach(self, previous: bytes) -> Connection | None:
        """Another session; None: the client closes. Whatever goes wrong is tried again."""
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
                # No memory or descriptors to map it with, for now.
                log.warning("mapping the arena failed: %s", error)
            except Exception:
                # A bug must not cost the worker its store for ever.
                log.exception("attaching again failed")
            finally:
                attempt.set_result(None)
                self._attempt = None
        return None

    async def _pause(self, number: int) -> bool:
        """Wait before an attempt, until a request wants one; False: the client closes."""
        delay = REATTACH_SECONDS[min(number, len(REATTACH_SECONDS) - 1)]
        wishes = (REATTACH_SECONDS[0], self._closing), (delay - REATTACH_SECONDS[0], self._wanted)
        for seconds, event in wishes:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds * random.uniform(*_JITTER)):
                    await event.wait()
            if self._closing.is_set():
                return False
        self._wanted.clear()
        return True

    async def _renew_channel(self) -> None:
        """A channel that failed waits for up to seconds before it connects again."""
        old = self._channel
        self._channel = open_channel(self.address, self.identity, is_fresh=True)
        self._stub = kvstore_pb2_grpc.KvStoreServiceStub(self._channel)
        await old.close()

    def _tell_reattached(self) -> None:
        try:
            if self.reattached is not None:
                self.reattached()
        except Exception:
            log.exception("not everybody was told of the new session")

    def _give_up(self, connection: Connection) -> None:
        """End a session in which nobody knows what is granted: the next one frees it."""
        if self.connection is connection and not self._closing.is_set():
            log.warning("the KV store does not answer: its session is given up")
            self._letting_go.set()

    def _require(self) -> Connection:
        if self.connection is None:
            raise Unavailable("the KV store is away", reason="STORE_LOST")
        return self.connection

    def _request_id(self) -> bytes:
        return next(self._request_numbers).to_bytes(8, "little")

    async def _call(
        self,
        connection: Connection,
        method: grpc.aio.UnaryUnaryMultiCallable[Request, Response],
        request: Request,
    ) -> Response:
        """One call; an answer that did not come is asked for once more.

        Every request carries its id, so the store does nothing twice, and what a
        call that timed out did grant is learned instead of leaked. If it cannot be
        learned, the session ends: what it holds is free when the next one begins.
        """
        try:
            return await self._once(method, request)
        except (DeadlineExceeded, Unavailable):
            try:
                return await self._once(method, request)
            except (DeadlineExceeded, Unavailable):
                self._give_up(connection)
                raise

    async def _once(
        self, method: grpc.aio.UnaryUnaryMultiCallable[Request, Response], request: Request
    ) -> Response:
        try:
            return await method(request, timeout=CALL_SECONDS, metadata=tracing.metadata())
        except grpc.RpcError as error:
            raise error_of(error) from error


def storable_tokens(answer: pb.MatchResponse) -> int | None:
    """How far the store wants the sequence stored; None: all of it."""
    return answer.storable_tokens if answer.HasField("storable_tokens") else None


def process_start_ticks() -> int:
    """Start time of this process in clock ticks since boot (/proc/self/stat field 22)."""
    stat = Path("/proc/self/stat").read_text()
    # The command name, field 2, may hold spaces and parentheses.
    return int(stat.rpartition(")")[2].split()[19])


def _stored(handle: types_pb2.SlotHandle, key: bytes) -> StoredChunk:
    return StoredChunk(handle.slot, handle.generation, handle.token_count, key, handle.checksum)
