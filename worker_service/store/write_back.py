"""Writes finished chunks back to the store in the background, in order.

Each sequence has a chain: its chunks are reserved, copied, checksummed and
sealed front to back, since a chunk's key contains its parent's. Copies run on
one thread off the event loop. A chain that fails stops storing and says why;
the request goes on without reuse. So does one past what the store wants to keep.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from splitpoint.errors import (
    FailedPrecondition,
    Internal,
    ResourceExhausted,
    SplitpointError,
)
from splitpoint.keys import chunk_key
from splitpoint.observe.logs import for_request, log_failure
from splitpoint.observe.tracing import NO_SPAN
from splitpoint.planning.schedule import Lane
from worker_service.device.cache import DeviceCache
from worker_service.device.memory import STAGING_PAGES
from worker_service.lanes.lanes import Lanes, Work, passed
from worker_service.lanes.spans import WriteBackSpans
from worker_service.lanes.timeline import Span, Trace
from worker_service.store.arena_tensors import ArenaTensors, StoredChunk
from worker_service.store.client import Connection, Match, StoreClient, WrittenChunk

log = logging.getLogger(__name__)

# Chunks per Reserve/Seal: enough to amortise the calls, few enough that a long
# prefill's first chunks are sealed while its last ones are computed.
BATCH_CHUNKS = 32
# How long a streamed request's chunks wait for slots in an arena full of leases.
RESERVE_SECONDS = 30.0
# For everything queued when the worker stops; what is not stored then is not reused.
CLOSE_SECONDS = 5.0

SequenceKey = tuple[str, int]


@dataclass(frozen=True, slots=True)
class WriteJob:
    """One chunk that is complete on the device, in a page nobody writes any more."""

    chunk_index: int
    page: int
    input_page: int | None
    token_ids: tuple[int, ...]


class WriteResult(enum.StrEnum):
    """How a chunk ended that was handed to write-back."""

    STORED = "stored"
    FAILED = "failed"
    UNWANTED = "unwanted"


@dataclass(slots=True)
class WriteTotals:
    """What write-back has done: chunks by how they ended; bytes copied, and the seconds of it."""

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
class WriteFailed:
    """Command to the engine: nothing more of this sequence will be stored."""

    key: SequenceKey
    error: SplitpointError


@dataclass(frozen=True, slots=True)
class WriteEnded:
    """Command to the engine: the store wants no more of this sequence; nothing failed."""

    key: SequenceKey


@dataclass(frozen=True, slots=True)
class Flushed:
    """Command to the engine: no copy touches this sequence's pages any more."""

    key: SequenceKey


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
    # A streamed request cannot go on without the store; any other only loses reuse.
    must_store: bool
    # Chunks from here on are not wanted by the store; None: all are.
    first_unwanted_chunk: int | None
    jobs: deque[WriteJob] = field(default_factory=deque)
    writer: asyncio.Task[None] | None = None
    # Failed, or past what the store wants: what becomes of all that comes yet.
    ended: WriteResult | None = None
    # None: nobody traces the request.
    spans: WriteBackSpans | None = None


class WriteBack:
    """All chains of one worker. Methods run on the event loop, except the copies.

    Attributes:
        copy: how chunks get into their slots, on the lane; replaced to inject
            slow or broken copies.
        totals: kept on the event loop.
    """

    def __init__(
        self,
        store: StoreClient,
        cache: DeviceCache,
        post: Callable[[ChunksStored | WriteFailed | WriteEnded | Flushed], None],
        lanes: Lanes,
        totals: WriteTotals | None = None,
    ) -> None:
        self.totals = WriteTotals() if totals is None else totals
        self._store = store
        self._cache = cache
        self._post = post
        self._lanes = lanes
        # Gets the spans of what leaves the device; None: nobody wants them.
        self.trace: Trace | None = None
        self.copy: CopyChunks = copy_chunks
        self._chains: dict[SequenceKey, _Chain] = {}
        self._closers: set[asyncio.Task[None]] = set()
        self._lane = ThreadPoolExecutor(1, thread_name_prefix="write-back")

    def open(
        self,
        key: SequenceKey,
        salt: bytes,
        match: Match,
        cached_tokens: int,
        *,
        must_store: bool,
        spans: WriteBackSpans | None = None,
    ) -> None:
        """Begin a chain after the first `cached_tokens`, which the match holds."""
        chunk_tokens = self._cache.layout.chunk_tokens
        full = cached_tokens // chunk_tokens
        # What the store keeps out costs others reuse; a streamed request needs it to run.
        limit = None if must_store else match.storable_tokens
        self._chains[key] = _Chain(
            key=key,
            salt=salt,
            connection=match.connection,
            parent_key=match.chunks[full - 1].key if full else b"",
            lease_ids=[match.lease_id],
            must_store=must_store,
            first_unwanted_chunk=None if limit is None else limit // chunk_tokens,
            spans=spans,
        )

    def submit(self, key: SequenceKey, jobs: Sequence[WriteJob]) -> None:
        """Queue chunks, in sequence order. A chain that ended drops them: it said so."""
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
        """Write what is queued, end the chain, release its leases, then say Flushed."""
        with for_request(key[0]):
            task = asyncio.create_task(self._close_chain(key), name=f"flush {key[0]}")
        self._closers.add(task)
        task.add_done_callback(self._closers.discard)
        task.add_done_callback(log_failure)

    async def close(self) -> None:
        """Write everything queued, within CLOSE_SECONDS; the session's end frees the rest.

        No copy is under way any more when this returns.
        """
        for key in list(self._chains):
            self.flush(key)
        if self._closers:
            _, late = await asyncio.wait(self._closers, timeout=CLOSE_SECONDS)
            if late:
                log.warning("%d sequences are not stored: the store takes too long", len(late))
            for task in late:
                task.cancel()
        await asyncio.to_thread(self._lane.shutdown)

    async def quiesce(self) -> None:
        """Return once no copy that was begun is under way any more.

        The lane is one thread, first come first served: behind them is after them.
        """
        await passed(self._lane)

    async def _close_chain(self, key: SequenceKey) -> None:
        chain = self._chains.pop(key, None)
        try:
            if chain is not None:
                if chain.writer is not None:
                    await chain.writer
                await self._store.release(chain.connection, lease_ids=chain.lease_ids)
        except SplitpointError as error:
            # The session is gone, and its leases with it.
            log.warning("releasing its leases failed: %s", error.message)
        finally:
            if chain is not None and chain.spans is not None:
                chain.spans.end()
            # Whatever happened, the engine waits for this to free the pages.
            self._post(Flushed(key))

    async def _write(self, chain: _Chain) -> None:
        while chain.jobs:
            wanted = self._wanted(chain)
            if not wanted:
                self._end(chain, WriteResult.UNWANTED, len(chain.jobs))
                self._post(WriteEnded(chain.key))
                return
            jobs = [chain.jobs.popleft() for _ in range(min(BATCH_CHUNKS, wanted))]
            try:
                span = NO_SPAN if chain.spans is None else chain.spans.batch(len(jobs))
                with span.current():
                    stored = await self._store_chunks(chain, jobs)
            except SplitpointError as error:
                log.warning(
                    "chunks from %d on are not stored: %s", jobs[0].chunk_index, error.message
                )
                self._fail(chain, jobs, error)
                return
            except Exception:
                # A bug or a broken device; the request must hear of it all the same.
                log.exception("write-back failed")
                failure = Internal("write-back failed", reason="WRITE_BACK_FAILED")
                self._fail(chain, jobs, failure)
                return
            self.totals.chunks[WriteResult.STORED] += len(jobs)
            self._post(ChunksStored(chain.key, jobs[0].chunk_index, stored))

    def _wanted(self, chain: _Chain) -> int:
        """How many of the queued chunks, which are consecutive, the store wants."""
        if chain.first_unwanted_chunk is None:
            return len(chain.jobs)
        wanted = chain.first_unwanted_chunk - chain.jobs[0].chunk_index
        return max(0, min(wanted, len(chain.jobs)))

    def _fail(self, chain: _Chain, jobs: Sequence[WriteJob], error: SplitpointError) -> None:
        self._end(chain, WriteResult.FAILED, len(jobs) + len(chain.jobs))
        self._post(WriteFailed(chain.key, error))

    def _end(self, chain: _Chain, result: WriteResult, chunk_count: int) -> None:
        chain.ended = result
        chain.jobs.clear()
        self.totals.chunks[result] += chunk_count

    async def _store_chunks(
        self, chain: _Chain, jobs: Sequence[WriteJob]
    ) -> tuple[StoredChunk, ...]:
        granted = await self._reserve(chain, len(jobs))
        try:
            # Between this check and the copy's turn on the lane nothing awaits:
            # a session that is given up waits for the lane before its slots go.
            self._check_session(chain)
            checksums, span = await asyncio.get_running_loop().run_in_executor(
                self._lane,
                self._send_out,
                chain.connection.tensors,
                jobs,
                [slot for slot, _ in granted],
            )
            self.totals.bytes += int(span.amount)
            self.totals.seconds += span.seconds
            if chain.spans is not None:
                chain.spans.copied(span)
            written = self._chain_keys(chain, jobs, granted, checksums)
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
        """Copy chunks into their slots; this thread is the lane out of the device."""
        checksums: list[int] = []

        def call() -> None:
            checksums.extend(self.copy(self._cache, tensors, jobs, slots))

        size = len(jobs) * tensors.layout.chunk_bytes
        tokens = sum(len(job.token_ids) for job in jobs)
        work = Work("store K,V,X", call, size, size, tokens=tokens)
        span = self._lanes.carry_out(Lane.LINK_OUT, work)
        if self.trace is not None:
            self.trace.extend([span])
        return checksums, span

    def _check_session(self, chain: _Chain) -> None:
        if self._store.connection is not chain.connection:
            raise FailedPrecondition("the KV store session changed", reason="STORE_LOST")

    async def _reserve(self, chain: _Chain, slot_count: int) -> list[tuple[int, int]]:
        """Granted slots; a full arena is asked again until its leases had time to go."""
        deadline = time.monotonic() + RESERVE_SECONDS
        while True:
            self._check_session(chain)
            try:
                return await self._store.reserve(chain.connection, chain.salt, slot_count)
            except ResourceExhausted as error:
                wait = error.retry_after_seconds
                if not chain.must_store or wait is None or time.monotonic() + wait > deadline:
                    raise
            await asyncio.sleep(wait)

    def _chain_keys(
        self,
        chain: _Chain,
        jobs: Sequence[WriteJob],
        granted: Sequence[tuple[int, int]],
        checksums: Sequence[int],
    ) -> list[WrittenChunk]:
        """Name each chunk's parent; the store works the keys out again and compares."""
        parent = chain.parent_key
        written = []
        for job, (slot, generation), checksum in zip(jobs, granted, checksums, strict=True):
            written.append(WrittenChunk(slot, generation, parent, job.token_ids, checksum))
            parent = chunk_key(self._cache.layout.layout_hash, chain.salt, parent, job.token_ids)
        return written


def copy_chunks(
    cache: DeviceCache, tensors: ArenaTensors, jobs: Sequence[WriteJob], slots: Sequence[int]
) -> list[int]:
    """Copy pages into granted slots, all planes; returns each slot's checksum.

    What an arena keeps encoded is encoded on the device, so that only its bytes
    cross the link. Rows past a chunk's tokens are written as zeros: a slot holds
    nothing of the chunk before. The pages are complete: a step hands chunks over
    only after it read its logits back, which waits for its kernels. So on a GPU the
    copies need wait for nothing, and run beside what is computed meanwhile.

    Raises Unencodable for what the arena's encoding has no bytes for.
    """
    is_native = tensors.codec.is_native
    store = _copy_pages if is_native else _encode_pages
    pages = [job.page for job in jobs]
    rows = [len(job.token_ids) for job in jobs]
    with _beside_compute(cache.device):
        for layer in range(tensors.layout.layer_count):
            store(tensors, "K", layer, cache.keys[layer], pages, slots, rows)
            store(tensors, "V", layer, cache.values[layer], pages, slots, rows)
            if tensors.inputs:
                input_pages = [_input_page(job) for job in jobs]
                store(tensors, "X", layer, cache.inputs[layer], input_pages, slots, rows)
    if is_native:
        # Only now that every row has come: a copy would bring back what is wiped.
        _wipe_spare_rows(tensors, slots, rows)
    return [tensors.arena.checksum(slot) for slot in slots]


@contextmanager
def _beside_compute(device: torch.device) -> Iterator[None]:
    """On a GPU a stream of its own; what was begun in it has ended when this does."""
    if device.type != "cuda":
        yield
        return
    stream = _out_stream(device)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        stream.synchronize()


@lru_cache(maxsize=1)
def _out_stream(device: torch.device) -> Any:
    """One for each device: memory that it frees is its own to use again."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _input_page(job: WriteJob) -> int:
    if job.input_page is None:
        raise RuntimeError(f"chunk {job.chunk_index} has no activations to store")
    return job.input_page


def _copy_pages(
    tensors: ArenaTensors,
    tensor: str,
    layer: int,
    source: torch.Tensor,
    pages: Sequence[int],
    slots: Sequence[int],
    rows: Sequence[int],
) -> None:
    """One tensor of one layer as it is, rows that are not in use included."""
    plane = tensors.plane(layer, tensor)
    for slot, page in zip(slots, pages, strict=True):
        plane[slot].copy_(source[page], non_blocking=True)


def _wipe_spare_rows(tensors: ArenaTensors, slots: Sequence[int], rows: Sequence[int]) -> None:
    """Zeros from row `rows[i]` of slot i on, in all planes."""
    for slot, count in zip(slots, rows, strict=True):
        if count < tensors.layout.chunk_tokens:
            for layer in range(tensors.layout.layer_count):
                for tensor in tensors.layout.tensors:
                    tensors.plane(layer, tensor)[slot, ..., count:, :].zero_()


def _encode_pages(
    tensors: ArenaTensors,
    tensor: str,
    layer: int,
    source: torch.Tensor,
    pages: Sequence[int],
    slots: Sequence[int],
    rows: Sequence[int],
) -> None:
    """The same, encoded: as many pages at once as the workspace was planned for."""
    plane = tensors.plane(layer, tensor)
    for first in range(0, len(pages), STAGING_PAGES):
        batch = slice(first, first + STAGING_PAGES)
        native = source[torch.as_tensor(pages[batch], device=source.device)]
        for index, count in enumerate(rows[batch]):
            # Zeros are encoded as zeros; what lies there may be anything.
            native[index, ..., count:, :] = 0
        stored = tensors.codec.encode(native)
        for slot, chunk in zip(slots[batch], stored, strict=True):
            plane[slot].copy_(chunk, non_blocking=True)
