"""The sessions of one vLLM process with the KV store, on an event loop in a thread of its own.

The scheduler's session maps nothing: it looks pages up and leases them. A worker's session maps the
arena: it reserves slots and seals pages. vLLM's threads call the methods here; none of them waits
longer than it is told to, and without a store each returns at once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Generic, TypeVar

from splitpoint.arena.mapping import Arena, Bytes
from splitpoint.errors import SplitpointError, Unavailable
from splitpoint.transport import local_session
from splitpoint.transport.cleanups import Cleanups
from splitpoint.transport.store_session import (
    CALL_SECONDS,
    GOODBYE_SECONDS,
    Attachment,
    Connection,
    StoreSession,
    granted_slots,
    lease_seconds,
)
from splitpoint.transport.tls import PLAIN, Identity
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import types_pb2
from splitpoint_vllm.namespace import page_key
from splitpoint_vllm.plan import Reason

# Below vLLM's logger, which has the handlers.
log = logging.getLogger("vllm.splitpoint.store")

Result = TypeVar("Result")
Connected = TypeVar("Connected", bound=Connection)

# The event loop's thread begins within this time, also on a busy host.
_OPEN_SECONDS = 30.0
# What one MatchPages call may ask for.
MOST_KEYS = 65_536
# How long the store may load pages from its tiers for one look-up.
MATCH_SECONDS = 120.0
# How much later than its deadline the event loop may be with an answer.
_GRACE_SECONDS = 0.05
# After this many late answers in a row the store is silent: no request waits for the next one.
_SILENT_COUNT = 2


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """How a process reaches its store. `page_bytes`: of the largest page that it will store."""

    address: str
    client_name: str
    page_bytes: int
    identity: Identity = PLAIN


@dataclass(frozen=True, slots=True)
class Page:
    """The handle of a sealed page. `checksum`: XXH3-64 of its whole slot."""

    slot: int
    generation: int
    checksum: int


@dataclass(frozen=True, slots=True)
class ArenaName:
    """Which arena's slots a handle means, and in which of its epochs."""

    instance_id: bytes
    epoch: int


@dataclass(frozen=True, slots=True)
class RemoteConnection(Connection):
    """A session that maps nothing."""

    arena_name: ArenaName


@dataclass(frozen=True, slots=True)
class MappedConnection(Connection):
    """A session and the arena mapped for it."""

    arena_name: ArenaName
    arena: Arena


def free_thread(target: Any, name: str, *arguments: Any) -> threading.Thread:
    """Start a daemon thread that may run on every processor of the parent process.

    vLLM binds the thread that starts it to one processor, on which the model computes.
    """

    def run() -> None:
        with suppress(OSError):
            os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
        target(*arguments)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


@cache
def _event_loop(process_id: int) -> asyncio.AbstractEventLoop:
    """Return this process's loop, which runs until the process ends."""
    loop = asyncio.new_event_loop()
    free_thread(loop.run_forever, "splitpoint-store")
    return loop


class StoreClient(Generic[Connected]):
    """One session with the store, kept until `close`. Its methods are for vLLM's threads."""

    def __init__(self, settings: StoreSettings, attachment: Attachment[Connected]) -> None:
        """Begin to attach. Raises InvalidArgument for a token that may not be sent."""
        self.settings = settings
        self._loop = _event_loop(os.getpid())
        self._cleanups = Cleanups()
        self._request_numbers = itertools.count(1)
        self._count_lock = threading.Lock()
        self._names = settings.client_name, settings.address
        self._refusal = ""  # reason of the last attempt that failed, as it was logged
        self._session = self._submit(self._open(attachment)).result(_OPEN_SECONDS)

    async def _open(self, attachment: Attachment[Connected]) -> StoreSession[Connected]:
        settings = self.settings
        session = StoreSession(
            settings.address, settings.client_name, attachment, settings.identity
        )
        session.not_attached = self._say_refusal
        session.quiesce = self._quiesce
        session.reattached = self._attached
        session.start_later()
        return session

    def _say_refusal(self, error: SplitpointError) -> None:
        if error.reason != self._refusal:
            self._refusal = error.reason
            log.warning(
                "Splitpoint: serving without the KV store at %s (this engine's pages have up to "
                "%d bytes): %s",
                *(self.settings.address, self.settings.page_bytes, error.message),
            )

    def _attached(self) -> None:
        """Note that a session began."""
        self._refusal = ""
        log.info("Splitpoint: %s uses the KV store at %s", *self._names)

    async def _quiesce(self) -> None:
        """Return when nothing writes into slots of the lost session."""

    @property
    def connection(self) -> Connected | None:
        """The current session. None while the store is away."""
        return self._session.connection

    @property
    def refusal(self) -> Reason:
        """Why there is no connection."""
        return Reason.PAGES_DO_NOT_FIT if self._refusal == "PAGES_DO_NOT_FIT" else Reason.AWAY

    def wait_connected(self, seconds: float) -> bool:
        """Wait for a session. Return True if there is one."""
        wait = self._submit(self._session.wait_connected(seconds))
        with suppress(TimeoutError):
            return wait.result(seconds + _GRACE_SECONDS)
        return False

    def count(self, outcome: str, number: int = 1) -> None:
        """Count what the store is told with the next heartbeat."""
        with self._count_lock:
            self._session.outcomes[outcome] += number

    def report(self, connection: Connected, pages: Sequence[Page]) -> None:
        """Have the store read suspect pages back, soon; the caller does not wait."""
        request = pb.ReportChunksRequest(
            session_id=connection.session_id,
            request_id=self._request_id(),
            chunks=_handles(pages),
        )
        self._submit(
            self._cleanups.finish(self._call_and_forget(connection, "ReportChunks", request))
        )

    def close(self) -> None:
        """End the session, within GOODBYE_SECONDS. The store frees what it held."""
        with suppress(TimeoutError):
            self._submit(self._session.close()).result(GOODBYE_SECONDS)

    def _submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _call(
        self, connection: Connected, method: str, request: Any, seconds: float = CALL_SECONDS
    ) -> Any:
        stub = self._session.stub
        return await self._session.call(connection, getattr(stub, method), request, seconds)

    async def _call_and_forget(self, connection: Connected, method: str, request: Any) -> None:
        """Call, unless the session is over: what it held is free then."""
        if self.connection is not connection:
            return
        try:
            await self._call(connection, method, request)
        except SplitpointError as error:
            log.info("Splitpoint: %s failed: %s", method, error.message)
        except Exception:
            log.exception("Splitpoint: %s failed", method)

    def _request_id(self) -> bytes:
        return next(self._request_numbers).to_bytes(8, "little")


# -- the scheduler's session -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """What a look-up found.

    Attributes:
        pages: for each block that the store has on all ranks, the handles by rank.
        lease_id: of all pages found; 0: none is held.
        reason: why nothing can be loaded. None if the store answered.
    """

    pages: Mapping[bytes, tuple[Page, ...]] = field(default_factory=dict)
    connection: RemoteConnection | None = None
    lease_id: int = 0
    reason: Reason | None = None


class Lookup:
    """One question to the store: the loop's thread answers, the scheduler's thread looks."""

    def __init__(self, deadline: float) -> None:
        self.begun = time.monotonic()
        self._deadline = deadline
        self._answer: Answer | None = None
        self._lock = threading.Lock()
        self._settled = threading.Event()

    def settle(self, answer: Answer) -> bool:
        """Set the answer. Return False if another one stands."""
        with self._lock:
            if self._answer is not None:
                return False
            self._answer = answer
            self._settled.set()
            return True

    def wait(self, seconds: float) -> None:
        """Return when there is an answer, at most so much later."""
        self._settled.wait(seconds)

    def answer(self) -> Answer | None:
        """Return the answer. None until it is there or the deadline has passed."""
        if self._answer is None and time.monotonic() > self._deadline + _GRACE_SECONDS:
            self.settle(Answer(reason=Reason.LATE))
        return self._answer


class _Remote:
    """Attaches without mapping."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes

    def attach_request(
        self, client_name: str, layout_hash: bytes, previous_session_id: bytes
    ) -> pb.AttachRequest:
        return pb.AttachRequest(
            client_name=client_name,
            layout_hash=layout_hash,
            previous_session_id=previous_session_id,
            page_bytes=self._page_bytes,
            is_remote=True,
        )

    def connection(self, answer: pb.AttachResponse) -> RemoteConnection:
        name = ArenaName(answer.instance_id, answer.epoch)
        return RemoteConnection(answer.session_id, answer.epoch, lease_seconds(answer), name)


class PageFinder(StoreClient[RemoteConnection]):
    """The scheduler's side: which pages there are, and leases on them."""

    def __init__(self, settings: StoreSettings) -> None:
        super().__init__(settings, _Remote(settings.page_bytes))
        self._late_count = 0  # in a row

    def _attached(self) -> None:
        super()._attached()
        self._late_count = 0

    def look_up(
        self, namespace: bytes, block_keys: Sequence[bytes], ranks: int, seconds: float
    ) -> Lookup:
        """Ask for the pages of blocks on all ranks, in the order of the sequence.

        At most MOST_KEYS pages are asked for, of leading blocks. What is found is leased until
        `release`, or if the answer was late, released when it comes.
        """
        lookup = Lookup(time.monotonic() + seconds)
        connection = self.connection
        if connection is None:
            lookup.settle(Answer(reason=self.refusal))
        elif self._late_count >= _SILENT_COUNT:
            lookup.settle(Answer(reason=Reason.LATE))
        elif block_keys:
            work = self._look_up(lookup, connection, namespace, block_keys, ranks, seconds)
            self._submit(work)
        else:
            lookup.settle(Answer(reason=Reason.MISS))
        return lookup

    async def _look_up(
        self,
        lookup: Lookup,
        connection: RemoteConnection,
        namespace: bytes,
        block_keys: Sequence[bytes],
        ranks: int,
        seconds: float,
    ) -> None:
        block_keys = block_keys[: MOST_KEYS // ranks]
        request = pb.MatchPagesRequest(
            session_id=connection.session_id,
            request_id=self._request_id(),
            tenant_salt=namespace,
            page_keys=[page_key(key, rank) for key in block_keys for rank in range(ranks)],
        )

        async def ask() -> pb.MatchPagesResponse:
            try:
                found: pb.MatchPagesResponse = await self._call(
                    connection, "MatchPages", request, seconds=MATCH_SECONDS
                )
                return found
            finally:  # late or not, the store has answered
                self._late_count = 0

        async def give_back(answer: pb.MatchPagesResponse) -> None:
            await self._release(connection, answer.lease_id)

        try:
            found = await self._cleanups.obtain(ask(), give_back, within=seconds)
        except SplitpointError as error:
            is_late = error.reason == "STORE_SILENT"
            self._late_count += is_late
            if not is_late:
                log.info("Splitpoint: a look-up failed: %s", error.message)
            lookup.settle(Answer(reason=Reason.LATE if is_late else Reason.AWAY))
            return
        except Exception:
            log.exception("Splitpoint: a look-up failed")
            lookup.settle(Answer(reason=Reason.AWAY))
            return
        pages = _by_block(block_keys, found.pages, ranks)
        if not lookup.settle(Answer(pages, connection, found.lease_id)):
            await self._release(connection, found.lease_id)

    def release(self, answer: Answer) -> None:
        """Give the lease of an answer up, soon; the caller does not wait."""
        if answer.connection is not None and answer.lease_id:
            self._submit(self._release(answer.connection, answer.lease_id))

    async def _release(self, connection: RemoteConnection, lease_id: int) -> None:
        if lease_id:
            request = pb.ReleaseRequest(
                session_id=connection.session_id,
                request_id=self._request_id(),
                lease_ids=[lease_id],
            )
            await self._cleanups.finish(self._call_and_forget(connection, "Release", request))


def _by_block(
    block_keys: Sequence[bytes], handles: Sequence[types_pb2.SlotHandle], ranks: int
) -> dict[bytes, tuple[Page, ...]]:
    """Return the pages of the blocks that are there on all ranks."""
    found = {}
    for number, key in enumerate(block_keys):
        parts = handles[number * ranks : (number + 1) * ranks]
        if all(part.generation for part in parts):
            found[key] = tuple(Page(each.slot, each.generation, each.checksum) for each in parts)
    return found


def _handles(pages: Sequence[Page]) -> list[types_pb2.SlotHandle]:
    return [types_pb2.SlotHandle(slot=page.slot, generation=page.generation) for page in pages]


# -- a worker's session ------------------------------------------------------------------


class _Mapped:
    """Attaches and maps the arena, with this process's presence."""

    def __init__(self, page_bytes: int) -> None:
        self._page_bytes = page_bytes

    def attach_request(
        self, client_name: str, layout_hash: bytes, previous_session_id: bytes
    ) -> pb.AttachRequest:
        return local_session.attach_request(
            client_name,
            layout_hash=layout_hash,
            previous_session_id=previous_session_id,
            page_bytes=self._page_bytes,
        )

    def connection(self, answer: pb.AttachResponse) -> MappedConnection:
        arena = local_session.mapped_arena(answer)
        name = ArenaName(answer.instance_id, answer.epoch)
        return MappedConnection(answer.session_id, answer.epoch, lease_seconds(answer), name, arena)


@dataclass(frozen=True, slots=True)
class WrittenPage:
    """A slot whose payload is complete, ready to be sealed."""

    slot: int
    generation: int
    key: bytes
    checksum: int


class PageWriter(StoreClient[MappedConnection]):
    """A worker's side: slots to write, and their sealing.

    Attributes:
        writing: held while slots are written. A lost session is confirmed only when it is free.
    """

    def __init__(
        self, settings: StoreSettings, pin: Callable[[Bytes], None] = lambda _: None
    ) -> None:
        """`pin`: called with the payload of each arena that is mapped, in a thread of its own."""
        self.writing = threading.Lock()
        self._pin = pin
        super().__init__(settings, _Mapped(settings.page_bytes))

    def _attached(self) -> None:
        super()._attached()
        if self.connection is not None:
            free_thread(self._pin, "splitpoint-pin", self.connection.arena.payload)

    async def _quiesce(self) -> None:
        # A thread that takes the lock looks at the connection first, which is none by now.
        await asyncio.get_running_loop().run_in_executor(None, self._wait_unwritten)

    def _wait_unwritten(self) -> None:
        with self.writing:
            pass

    def reserve(
        self, connection: MappedConnection, namespace: bytes, count: int, seconds: float
    ) -> list[tuple[int, int]]:
        """Return (slot, generation) of granted slots, all or none.

        Raises Unavailable if there is no answer within `seconds`, or an earlier one is still
        missing, ResourceExhausted if the arena is full, and what else the store answers.
        """
        request = pb.ReserveRequest(
            session_id=connection.session_id,
            request_id=self._request_id(),
            slot_count=count,
            tenant_salt=namespace,
        )

        async def reserve() -> pb.ReserveResponse:
            self._check_answers()
            found: pb.ReserveResponse = await self._call(connection, "Reserve", request)
            return found

        async def give_back(answer: pb.ReserveResponse) -> None:
            await self._release(connection, granted_slots(answer))

        return granted_slots(self._obtain(reserve(), give_back, seconds))

    def seal(
        self,
        connection: MappedConnection,
        namespace: bytes,
        pages: Sequence[WrittenPage],
        seconds: float,
    ) -> None:
        """Publish written slots. Raises what `reserve` raises, and DataLoss for other bytes."""
        request = pb.SealRequest(
            session_id=connection.session_id,
            request_id=self._request_id(),
            tenant_salt=namespace,
            chunks=[
                pb.SealChunk(
                    slot=page.slot,
                    generation=page.generation,
                    page_key=page.key,
                    checksum=page.checksum,
                )
                for page in pages
            ],
        )

        slots = [(page.slot, page.generation) for page in pages]

        async def seal() -> None:
            try:
                self._check_answers()
                await self._call(connection, "Seal", request)
            except SplitpointError:
                # Of several pages a part may be sealed; the others would stay granted.
                self._cleanups.start(self._release(connection, slots))
                raise

        async def keep(_: None) -> None:
            """Keep what was sealed late."""

        self._obtain(seal(), keep, seconds)

    def release_slots(self, connection: MappedConnection, slots: list[tuple[int, int]]) -> None:
        """Give granted slots up that were not written, soon; the caller does not wait."""
        if slots:
            self._submit(self._release(connection, slots))

    def _check_answers(self) -> None:
        """Raise Unavailable while an answer is late: another one would be, too."""
        if self._cleanups.has_late:
            raise Unavailable("an answer of the KV store is late", reason="STORE_SILENT")

    def _obtain(
        self,
        call: Coroutine[Any, Any, Result],
        give_back: Callable[[Result], Coroutine[Any, Any, None]],
        seconds: float,
    ) -> Result:
        work = self._submit(self._cleanups.obtain(call, give_back, within=seconds))
        try:
            return work.result(seconds + GOODBYE_SECONDS)
        except TimeoutError:
            work.cancel()  # what is granted later is given back
            raise

    async def _release(
        self, connection: MappedConnection, slots: Sequence[tuple[int, int]]
    ) -> None:
        request = pb.ReleaseRequest(
            session_id=connection.session_id,
            request_id=self._request_id(),
            slots=[types_pb2.SlotHandle(slot=slot, generation=number) for slot, number in slots],
        )
        await self._cleanups.finish(self._call_and_forget(connection, "Release", request))
