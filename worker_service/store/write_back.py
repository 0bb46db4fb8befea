"""Write-back: stores finished chunks in the background, in the order of their sequence.

Each sequence has a chain. Its chunks are reserved, copied, checksummed and sealed front to back,
since a chunk's key contains its parent's. Copies run on one thread off the event loop. A chain
that fails, or that reaches the limit of what the store accepts, stores nothing more. A resident
request goes on, and later requests reuse less. A streamed one starts over, or ends if the
store is full.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from splitpoint.errors import (
    FailedPrecondition,
    Internal,
    ResourceExhausted,
    SplitpointError,
    Unavailable,
)
from splitpoint.keys import private_salt
from splitpoint.observe.logs import for_request, log_failure
from splitpoint.observe.tracing import NO_SPAN
from splitpoint.planning.schedule import Lane
from worker_service.device.cache import DeviceCache
from worker_service.device.copies import copy_runs, is_one_copy_a_run, sent
from worker_service.device.memory import STAGING_PAGES
from worker_service.device.pinning import piece_slots
from worker_service.hardware.streams import StreamUse, device_thread, stream_for
from worker_service.lanes.cpu import passed
from worker_service.lanes.lanes import Lanes
from worker_service.lanes.spans import WriteBackSpans
from worker_service.lanes.timeline import Span, Trace
from worker_service.lanes.work import Work
from worker_service.store.arena_tensors import ArenaTensors, StoredChunk
from worker_service.store.client import Match, StoreClient, written_chunks
from worker_service.store.pool_rows import RowNumbers, move_rows, rows_of_slot, write_rows
from worker_service.store.quantization import ChunkCodec
from worker_service.store.session import Connection

log = logging.getLogger(__name__)

T = TypeVar("T")

# Chunks per Reserve and Seal: enough to amortise the calls, few enough that the first chunks of
# a long prefill are sealed while its last ones are computed.
BATCH_CHUNKS = 32
# How long chunks of a streamed request wait for slots while leases fill the arena.
RESERVE_SECONDS = 30.0
# How long a chain waits for slots that were given up for it: a tier may still write into them.
GIVEN_UP_SECONDS = 2.0
# Time to store what is queued when the worker stops.
CLOSE_SECONDS = 5.0

# Request id, attempt, and the number of the Run stream.
SequenceKey = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class WriteJob:
    """One chunk that is complete on the device. Its pages do not change any more.

    `is_exact`: False if K and V follow from a selection of the tokens before them. Then only
    this sequence reads the chunk, and so are all that follow it.
    """

    chunk_index: int
    page: int
    input_page: int | None
    token_ids: tuple[int, ...]
    is_exact: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class PoolStart:
    """What stays of a sequence whose pool starts: it moves into slots that are never sealed.

    Attributes:
        sources: rows of each layer `[n_kv, slot_count * C]`, in the order of their new places.
        chunks: that they are read from.
    """

    sources: RowNumbers
    chunks: tuple[StoredChunk, ...]
    slot_count: int


@dataclass(frozen=True, slots=True, eq=False)
class PoolWrite:
    """One chunk that is complete on the device, and joins a pool.

    `targets`: the rows `[n_kv, C]` of each layer that it is written over; None: it gets a slot.
    """

    page: int
    targets: RowNumbers | None


@dataclass(frozen=True, slots=True)
class PoolRelease:
    """Nothing reads the chunks behind the first ones any more, since the pool has started.

    `shared_tokens`: those of the first chunks, which stay leased; `salt`: of their keys. `used`:
    chunks of which more stays than of others.
    """

    salt: bytes
    shared: tuple[StoredChunk, ...]
    shared_tokens: tuple[int, ...]
    used: tuple[StoredChunk, ...]


class WriteResult(enum.StrEnum):
    """What became of a chunk that was submitted to write-back."""

    STORED = "stored"
    FAILED = "failed"
    UNWANTED = "unwanted"


@dataclass(slots=True)
class WriteTotals:
    """Chunks by result, bytes copied, and seconds spent copying."""

    chunks: dict[WriteResult, int] = field(default_factory=lambda: dict.fromkeys(WriteResult, 0))
    bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ChunksStored:
    """Command to the engine: chunks from `first_chunk` on are sealed and leased."""

    key: SequenceKey
    first_chunk: int
    chunks: tuple[StoredChunk, ...]


@dataclass(frozen=True, slots=True)
class PoolStarted:
    """Command to the engine: what stays is in these slots; None: the store has no room for it."""

    key: SequenceKey
    chunks: tuple[StoredChunk, ...] | None


@dataclass(frozen=True, slots=True)
class PoolWritten:
    """Command to the engine: the next chunk is in its pool.

    `chunk`: its slot if it got one. `is_refused`: the store has no slot more, so it is not there.
    """

    key: SequenceKey
    chunk: StoredChunk | None
    is_refused: bool = False


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """Command to the engine: nothing more of this sequence will be stored."""

    key: SequenceKey
    error: SplitpointError


@dataclass(frozen=True, slots=True)
class StoreLimitReached:
    """Command to the engine: the store accepts no more of this sequence. Nothing failed."""

    key: SequenceKey


@dataclass(frozen=True, slots=True)
class Flushed:
    """Command to the engine: no copy touches this sequence's pages any more."""

    key: SequenceKey


Job = WriteJob | PoolStart | PoolWrite | PoolRelease
Result = ChunksStored | PoolStarted | PoolWritten | WriteFailed | StoreLimitReached | Flushed

CopyChunks = Callable[
    [DeviceCache, ArenaTensors, Sequence[WriteJob], Sequence[int]],
    list[int],
]


@dataclass(slots=True, eq=False)
class _Chain:
    key: SequenceKey
    salt: bytes
    connection: Connection
    parent_key: bytes
    lease_ids: list[int]
    # A streamed request cannot go on without the store. Any other only loses reuse.
    must_store: bool
    # The store does not accept chunks from here on. None if it accepts all.
    first_unwanted_chunk: int | None
    # See `WriteBack.open`; None, too, once it was called.
    make_way: Callable[[], Awaitable[bool]] | None = None
    jobs: deque[Job] = field(default_factory=deque)
    writer: asyncio.Task[None] | None = None
    # The result of all further chunks, if the chain failed or reached the store's limit.
    ended: WriteResult | None = None
    # None if the request is not traced.
    spans: WriteBackSpans | None = None
    # Its chunks from here on are its own: no other sequence finds them.
    is_private: bool = False
    # Slots of its pool, with their generations: granted, and never sealed.
    pool_slots: list[tuple[int, int]] = field(default_factory=list)

    def pop_jobs(self, first: WriteJob, most: int) -> list[WriteJob]:
        """Return the next jobs, at most this many: all are exact, or none is."""
        if not first.is_exact and not self.is_private:
            self.salt = private_salt(self.salt, *self.key, self.parent_key)
            self.parent_key, self.is_private = b"", True
        jobs: list[WriteJob] = []
        while self.jobs and len(jobs) < most:
            job = self.jobs[0]
            if not isinstance(job, WriteJob) or job.is_exact == self.is_private:
                break
            jobs.append(job)
            self.jobs.popleft()
        return jobs


class WriteBack:
    """All chains of one worker. Methods run on the event loop, except the copies.

    Attributes:
        copy: copies chunks into their slots, on the lane. Tests replace it with slow or
            failing copies.
        totals: updated on the event loop.
        trace: gets the spans of copies from the device. None if copies are not traced.
    """

    def __init__(
        self,
        store: StoreClient,
        cache: DeviceCache,
        post: Callable[[Result], None],
        lanes: Lanes,
        totals: WriteTotals | None = None,
    ) -> None:
        self.totals = WriteTotals() if totals is None else totals
        self._store = store
        self._cache = cache
        self._post = post
        self._lanes = lanes
        self.trace: Trace | None = None
        self.copy: CopyChunks = copy_chunks
        self._chains: dict[SequenceKey, _Chain] = {}
        self._closers: set[asyncio.Task[None]] = set()
        self._copier = device_thread(cache.device, "write-back")

    def open(
        self,
        key: SequenceKey,
        salt: bytes,
        match: Match,
        cached_tokens: int,
        *,
        must_store: bool,
        make_way: Callable[[], Awaitable[bool]] | None = None,
        spans: WriteBackSpans | None = None,
    ) -> None:
        """Begin a chain after the first `cached_tokens`, which the match has leased.

        `make_way` gives up slots with what would follow the chain's chunks, which are all stored
        for that. It is called once, if the store is full, and returns False if there are none.
        """
        chunk_tokens = self._cache.layout.chunk_tokens
        full = cached_tokens // chunk_tokens
        # Streamed requests, and what follows, need all chunks stored, also those past the limit.
        limit = None if must_store or make_way is not None else match.storable_tokens
        self._chains[key] = _Chain(
            key=key,
            salt=salt,
            connection=match.connection,
            parent_key=match.chunks[full - 1].key if full else b"",
            lease_ids=[match.lease_id],
            must_store=must_store,
            first_unwanted_chunk=None if limit is None else limit // chunk_tokens,
            make_way=make_way,
            spans=spans,
        )

    def submit(self, key: SequenceKey, jobs: Sequence[Job]) -> None:
        """Queue chunks, in sequence order. A chain that ended only counts them."""
        chain = self._chains[key]
        if chain.ended is not None:
            self.totals.chunks[chain.ended] += len(jobs)
            return
        chain.jobs.extend(jobs)
        if chain.writer is None or chain.writer.done():
            with for_request(key[0]):
                writing = self._write(chain)
                chain.writer = asyncio.create_task(writing, name=f"write-back {key[0]}")

    def flush(self, key: SequenceKey) -> None:
        """Write what is queued, end the chain, release its leases, then post Flushed."""
        with for_request(key[0]):
            task = asyncio.create_task(self._close_chain(key), name=f"flush {key[0]}")
        self._closers.add(task)
        task.add_done_callback(self._closers.discard)
        task.add_done_callback(log_failure)

    async def close(self) -> None:
        """Write everything queued within CLOSE_SECONDS. The session's end frees the rest.

        All copies are done when this returns.
        """
        for key in list(self._chains):
            self.flush(key)
        if self._closers:
            _, late = await asyncio.wait(self._closers, timeout=CLOSE_SECONDS)
            if late:
                log.warning("%d sequences are not stored: the store takes too long", len(late))
            for task in late:
                task.cancel()
        await asyncio.to_thread(self._copier.shutdown)

    async def quiesce(self) -> None:
        """Return when all copies that had begun are done."""
        await passed(self._copier)

    async def _close_chain(self, key: SequenceKey) -> None:
        chain = self._chains.pop(key, None)
        try:
            if chain is not None:
                if chain.writer is not None:
                    await chain.writer
                await self._store.release(
                    chain.connection, lease_ids=chain.lease_ids, slots=chain.pool_slots
                )
        except SplitpointError as error:
            # The session is gone, and its leases with it.
            log.warning("releasing its leases failed: %s", error.message)
        finally:
            if chain is not None and chain.spans is not None:
                chain.spans.end()
            # The engine waits for this before it frees the pages.
            self._post(Flushed(key))

    async def _write(self, chain: _Chain) -> None:
        while chain.jobs:
            first = chain.jobs[0]
            if not isinstance(first, WriteJob):
                if not await self._serve_pool(chain, first):
                    return
                continue
            wanted = self._wanted(chain, first)
            if not wanted:
                self._end(chain, WriteResult.UNWANTED, len(chain.jobs))
                self._post(StoreLimitReached(chain.key))
                return
            jobs = chain.pop_jobs(first, min(BATCH_CHUNKS, wanted))
            try:
                span = NO_SPAN if chain.spans is None else chain.spans.batch(len(jobs))
                with span.current():
                    stored = await self._store_chunks(chain, jobs)
            except Exception as error:
                self._fail(chain, len(jobs), f"chunks from {jobs[0].chunk_index} on", error)
                return
            self.totals.chunks[WriteResult.STORED] += len(jobs)
            self._post(ChunksStored(chain.key, jobs[0].chunk_index, stored))

    def _wanted(self, chain: _Chain, first: WriteJob) -> int:
        """Count the queued chunks that the store accepts; they are consecutive."""
        if chain.first_unwanted_chunk is None:
            return len(chain.jobs)
        wanted = chain.first_unwanted_chunk - first.chunk_index
        return max(0, min(wanted, len(chain.jobs)))

    def _fail(self, chain: _Chain, chunk_count: int, what: str, error: Exception) -> None:
        """End a chain of which `what` is not stored, `chunk_count` chunks and all that follow."""
        if isinstance(error, SplitpointError):
            log.warning("%s are not stored: %s", what, error.message)
        else:
            # A bug or a broken device: the request must still be told.
            log.exception("write-back failed")
            error = Internal("write-back failed", reason="WRITE_BACK_FAILED")
        self._end(chain, WriteResult.FAILED, chunk_count + len(chain.jobs))
        self._post(WriteFailed(chain.key, error))

    def _end(self, chain: _Chain, result: WriteResult, chunk_count: int) -> None:
        chain.ended = result
        chain.jobs.clear()
        self.totals.chunks[result] += chunk_count

    # -- pools ------------------------------------------------------------------------------

    async def _serve_pool(self, chain: _Chain, job: PoolStart | PoolWrite | PoolRelease) -> bool:
        """Do what a pool wants of the store; return False if that ended the chain."""
        chain.jobs.popleft()
        try:
            match job:
                case PoolStart():
                    self._post(PoolStarted(chain.key, await self._start_pool(chain, job)))
                case PoolWrite():
                    await self._write_or_refuse(chain, job)
                case PoolRelease():
                    await self._release_chunks(chain, job)
        except Exception as error:
            self._fail(chain, isinstance(job, PoolWrite), "tokens of a bounded pool", error)
            return False
        return True

    async def _start_pool(self, chain: _Chain, job: PoolStart) -> tuple[StoredChunk, ...] | None:
        """Move what stays into slots of its own; return them, None if there are too few."""
        try:
            granted = await self._store.reserve(chain.connection, chain.salt, job.slot_count)
        except ResourceExhausted as error:
            log.info("a bounded pool does not start: %s", error.message)
            return None
        chain.pool_slots += granted
        self._check_session(chain)
        tensors = chain.connection.tensors
        slots = [slot for slot, _ in granted]
        tensors.note_use(slots)
        await self._copied(lambda: move_rows(tensors, job.sources, slots))
        tensors.check_current(job.chunks)
        return self._granted_chunks(granted)

    async def _write_or_refuse(self, chain: _Chain, job: PoolWrite) -> None:
        try:
            chunk = await self._write_pool(chain, job)
        except ResourceExhausted as error:
            log.info("a bounded pool does not grow: %s", error.message)
            self._post(PoolWritten(chain.key, None, is_refused=True))
        else:
            self.totals.chunks[WriteResult.STORED] += 1
            self._post(PoolWritten(chain.key, chunk))

    async def _write_pool(self, chain: _Chain, job: PoolWrite) -> StoredChunk | None:
        """Write a chunk over rows that have left the pool, or into a slot more.

        Raises ResourceExhausted if there is no such slot; the chunk can be written over others.
        """
        granted: list[tuple[int, int]] = []
        targets, layout = job.targets, self._cache.layout
        if targets is None:
            granted = await self._store.reserve(chain.connection, chain.salt, 1)
            chain.pool_slots += granted
            rows = rows_of_slot(granted[0][0], layout.kv_head_count, layout.chunk_tokens)
            targets = [rows] * layout.layer_count
        self._check_session(chain)
        tensors = chain.connection.tensors
        tensors.note_use(slot for slot, _ in granted)

        def call() -> None:
            with _copy_stream(self._cache.device):
                write_rows(self._cache, tensors, job.page, targets)

        size = sum(plane[0].nbytes for plane in (*tensors.keys, *tensors.values))
        work = Work("store K,V", call, size, size, tokens=layout.chunk_tokens)
        span = await self._copied(lambda: self._lanes.run_in_this_thread(Lane.LINK_OUT, work))
        self.totals.bytes += int(span.amount)
        self.totals.seconds += span.seconds
        if self.trace is not None:
            self.trace.extend([span])
        return next(iter(self._granted_chunks(granted)), None)

    async def _release_chunks(self, chain: _Chain, job: PoolRelease) -> None:
        """End the leases on what a pool has left, so that the store can evict it."""
        left = list(chain.lease_ids)
        if job.shared:
            # A lease ends as a whole: the chunks that stay get one of their own before.
            match = await self._store.match(job.salt, job.shared_tokens)
            if match.connection is not chain.connection:
                await self._release(match.connection, [match.lease_id])
                raise FailedPrecondition("the KV store session changed", reason="STORE_LOST")
            chain.lease_ids.append(match.lease_id)
            chain.connection.tensors.check_current(job.shared)
        await self._release(chain.connection, left, job.used)
        del chain.lease_ids[: len(left)]

    async def _release(
        self, connection: Connection, lease_ids: Sequence[int], used: Sequence[StoredChunk] = ()
    ) -> None:
        """End leases; a late answer changes nothing, since the store is told all the same."""
        try:
            await self._store.release(connection, lease_ids=lease_ids, used=used)
        except Unavailable as error:
            if error.reason != "STORE_SILENT":
                raise
            log.warning("the answer to the release of leases is late: %s", error.message)

    def _granted_chunks(self, granted: Sequence[tuple[int, int]]) -> tuple[StoredChunk, ...]:
        chunk = self._cache.layout.chunk_tokens
        return tuple(StoredChunk.granted(slot, generation, chunk) for slot, generation in granted)

    async def _copied(self, call: Callable[[], T]) -> T:
        """Return what a copy returns, which runs on the copier's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._copier, call)

    # -- chunks -----------------------------------------------------------------------------

    async def _store_chunks(
        self, chain: _Chain, jobs: Sequence[WriteJob]
    ) -> tuple[StoredChunk, ...]:
        granted = await self._reserve(chain, len(jobs))
        try:
            # Nothing awaits between this check and the copy's place in the lane: a session
            # that is given up waits for the lane before its slots are freed.
            self._check_session(chain)
            checksums, span = await asyncio.get_running_loop().run_in_executor(
                self._copier,
                self._send_out,
                chain.connection.tensors,
                jobs,
                [slot for slot, _ in granted],
            )
            self.totals.bytes += int(span.amount)
            self.totals.seconds += span.seconds
            if chain.spans is not None:
                chain.spans.copied(span)
            layout_hash = self._cache.layout.layout_hash
            tokens = [job.token_ids for job in jobs]
            written, _ = written_chunks(
                layout_hash, chain.salt, chain.parent_key, granted, tokens, checksums
            )
            answer = await self._store.seal(
                chain.connection, chain.salt, written, chain.lease_ids[-1]
            )
        except BaseException:
            # Sealed slots among them are no longer granted: releasing is idempotent.
            await self._store.release(chain.connection, slots=granted)
            raise
        if answer.lease_id not in chain.lease_ids:
            chain.lease_ids.append(answer.lease_id)
        if len(jobs[-1].token_ids) == self._cache.layout.chunk_tokens:
            chain.parent_key = answer.chunks[-1].key
        return answer.chunks

    def _send_out(
        self, tensors: ArenaTensors, jobs: Sequence[WriteJob], slots: Sequence[int]
    ) -> tuple[list[int], Span]:
        """Copy chunks into their slots, on the lane's thread. Return checksums and the span."""
        checksums: list[int] = []

        def call() -> None:
            checksums.extend(self.copy(self._cache, tensors, jobs, slots))

        size = len(jobs) * tensors.layout.chunk_bytes
        tokens = sum(len(job.token_ids) for job in jobs)
        work = Work("store K,V,X", call, size, size, tokens=tokens)
        span = self._lanes.run_in_this_thread(Lane.LINK_OUT, work)
        if self.trace is not None:
            self.trace.extend([span])
        return checksums, span

    def _check_session(self, chain: _Chain) -> None:
        if self._store.connection is not chain.connection:
            raise FailedPrecondition("the KV store session changed", reason="STORE_LOST")

    async def _reserve(self, chain: _Chain, slot_count: int) -> list[tuple[int, int]]:
        """Reserve slots.

        Raises ResourceExhausted if the arena is full, and Unavailable if the store is silent and
        the chain need not store.

        A chain that must store retries for RESERVE_SECONDS, one for which slots were given up for
        GIVEN_UP_SECONDS.
        """
        deadline = time.monotonic() + (RESERVE_SECONDS if chain.must_store else 0.0)
        while True:
            self._check_session(chain)
            try:
                return await self._store.reserve(
                    chain.connection, chain.salt, slot_count, is_patient=chain.must_store
                )
            except ResourceExhausted as error:
                wait = error.retry_after_seconds
                make_way, chain.make_way = chain.make_way, None
                if make_way is not None and await make_way():
                    deadline = max(deadline, time.monotonic() + GIVEN_UP_SECONDS)
                    wait = 0.0
                if wait is None or time.monotonic() + wait > deadline:
                    raise
            await asyncio.sleep(wait)


def copy_chunks(
    cache: DeviceCache, tensors: ArenaTensors, jobs: Sequence[WriteJob], slots: Sequence[int]
) -> list[int]:
    """Copy pages into granted slots, all planes. Return each slot's checksum.

    Encoded chunks are encoded on the device, so that fewer bytes cross the link. Rows past a
    chunk's tokens are written as zeros, since a slot may hold another chunk's bytes. The pages
    are complete: a step submits chunks only after it read its logits back, which waits for its
    kernels. So on a GPU the copies wait for nothing and overlap with compute.

    Raises Unencodable for values that the arena's encoding cannot represent.
    """
    is_native = tensors.codec.is_native
    store = _copy_pages if is_native else _encode_pages
    slots, rows = list(slots), [len(job.token_ids) for job in jobs]
    with _copy_stream(cache.device):
        pages = _Pages.of([job.page for job in jobs], cache.device)
        inputs = pages
        if tensors.inputs:
            inputs = _Pages.of([_input_page(job) for job in jobs], cache.device)
        for layer in range(tensors.layout.layer_count):
            store(tensors.plane(layer, "K"), cache.keys[layer], pages, slots, rows, tensors.codec)
            store(tensors.plane(layer, "V"), cache.values[layer], pages, slots, rows, tensors.codec)
            if tensors.inputs:
                plane = tensors.plane(layer, "X")
                store(plane, cache.inputs[layer], inputs, slots, rows, tensors.codec)
    if is_native:
        # After the copies are complete, since these would overwrite the zeros.
        for slot, row_count in zip(slots, rows, strict=True):
            tensors.zero_rows(slot, row_count)
    return [tensors.arena.checksum(slot) for slot in slots]


@contextmanager
def _copy_stream(device: torch.device) -> Iterator[None]:
    """Use a CUDA stream of its own on a GPU, and wait for it at the end of the block."""
    if device.type != "cuda":
        yield
        return
    stream = stream_for(StreamUse.LINK_OUT, device)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        stream.synchronize()


def _input_page(job: WriteJob) -> int:
    if job.input_page is None:
        raise RuntimeError(f"chunk {job.chunk_index} has no activations to store")
    return job.input_page


@dataclass(frozen=True, slots=True)
class _Pages:
    """Pages of the device: their numbers on the host, and as int64 `[n]` on the device."""

    numbers: list[int]
    index: torch.Tensor

    @classmethod
    def of(cls, numbers: list[int], device: torch.device) -> _Pages:
        return cls(numbers, sent(numbers, device))


def _copy_pages(
    plane: torch.Tensor,
    source: torch.Tensor,
    pages: _Pages,
    slots: list[int],
    rows: Sequence[int],
    codec: ChunkCodec,
) -> None:
    """Copy one tensor of one layer as it is, unused rows included.

    A GPU first brings spread pages together, STAGING_PAGES at a time, so that neighbours in
    the arena are one copy over the link: its own memory is far faster.
    """
    cut = piece_slots(plane[0].nbytes)
    if source.is_cuda and not is_one_copy_a_run(pages.numbers, slots):
        for first in range(0, len(slots), STAGING_PAGES):
            batch = slice(first, first + STAGING_PAGES)
            together = source.index_select(0, pages.index[batch])
            copy_runs(together, plane, range(len(together)), slots[batch], target_cut=cut)
    else:
        copy_runs(source, plane, pages.numbers, slots, target_cut=cut)


def _encode_pages(
    plane: torch.Tensor,
    source: torch.Tensor,
    pages: _Pages,
    slots: list[int],
    rows: Sequence[int],
    codec: ChunkCodec,
) -> None:
    """Encode and copy one tensor of one layer, STAGING_PAGES pages at a time."""
    cut = piece_slots(plane[0].nbytes)
    for first in range(0, len(slots), STAGING_PAGES):
        batch = slice(first, first + STAGING_PAGES)
        native = source.index_select(0, pages.index[batch])
        for index, count in enumerate(rows[batch]):
            # Unused rows may hold anything. Zeros are encoded as zeros.
            native[index, ..., count:, :] = 0
        encoded = codec.encode(native)
        copy_runs(encoded, plane, range(len(encoded)), slots[batch], target_cut=cut)
