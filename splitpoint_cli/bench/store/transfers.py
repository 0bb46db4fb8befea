"""Chunks out of one store's arena by Mooncake, beside this project's own stream.

Three readers get the same chunks of the same store over the loopback, in turns:

- a stream: ReadChunks, whose bytes are compared and thrown away, as `remote` measures it;
- a fetch by this stream: a worker's, into the arena of a second store;
- a load by Mooncake: LoadChunks of a third store, into its arena.

The last two end with the same chunks sealed and leased, and both lease them at the source first.
Processor time is that of all processes that take part.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import grpc

from splitpoint.errors import DeadlineExceeded, Internal
from splitpoint.shapes import ArenaLayout
from splitpoint.tiers import ChunkSource
from splitpoint.transport.channels import open_channel
from splitpoint.transport.statuses import error_of
from splitpoint.transport.store_session import remote_session
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import kvstore_pb2_grpc
from splitpoint_cli.bench.shared.processor_time import ProcessorTime
from splitpoint_cli.bench.shared.progress import Progress
from splitpoint_cli.bench.store.remote import read_chunks
from splitpoint_cli.bench.store.report import Passes, TransferResult
from worker_service.fetching.fetcher import PrefixFetcher
from worker_service.fetching.results import FetchSource
from worker_service.store.client import StoreClient
from worker_service.store.session import Connection

_SECONDS = 60.0
# An engine starts and registers its arena in seconds.
_READY_SECONDS = 60.0
_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class RunningStore:
    """A store process, and a client of it that is not attached yet."""

    client: StoreClient
    process_id: int


@dataclass(frozen=True, slots=True)
class TransferStores:
    """The stores of one run. `source` and `loading` have a transfer engine, `fetching` has none."""

    source: RunningStore
    fetching: RunningStore
    loading: RunningStore


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One sequence of full chunks in the source."""

    salt: bytes
    tokens: Sequence[int]
    payload_bytes: int


@dataclass(slots=True)
class _Reader:
    """One way to read, what it has taken so far, and how to forget what it read."""

    read: Callable[[], Awaitable[None]]
    processors: ProcessorTime
    clear: Callable[[], Awaitable[None]] | None
    seconds: list[float]
    processor_seconds: list[float]

    async def once(self) -> None:
        used, began = self.processors.seconds(), time.perf_counter()
        await self.read()
        self.seconds.append(time.perf_counter() - began)
        self.processor_seconds.append(self.processors.seconds() - used)
        if self.clear is not None:
            await self.clear()

    def passes(self) -> Passes:
        """Return all passes but the first, which warms."""
        return Passes(tuple(self.seconds[1:]), tuple(self.processor_seconds[1:]))


async def measure_transfers(
    stores: TransferStores,
    layout: ArenaLayout,
    salt: bytes,
    tokens: Sequence[int],
    run_slots: int,
    repeats: int,
    progress: Progress,
) -> TransferResult:
    """Read one sequence of full chunks in all ways. Only the source has any of it."""
    address = stores.source.client.address
    for store in (stores.source, stores.loading):
        await _await_engine(store.client.address)
    for store in (stores.fetching, stores.loading):
        await store.client.start(layout)
    fetcher = PrefixFetcher(stores.fetching.client, layout, lambda _: None)
    try:
        async with remote_session(address, "bench transfers", layout.layout_hash) as session:
            found = await session.match(salt, tokens)
            if found.cached_tokens != len(tokens):
                raise Internal("a chunk that was sealed for the benchmark is gone")
            request = pb.ReadChunksRequest(session_id=session.session_id, chunks=found.chunks)
            sequence = _Sequence(salt, tokens, len(found.chunks) * layout.chunk_bytes)

            async def stream() -> None:
                await read_chunks(session.stub, request)

            loads = _Loads(stores, sequence)
            readers = [
                _Reader(stream, ProcessorTime([stores.source.process_id]), None, [], []),
                _fetches(stores, fetcher, sequence),
                loads.reader(),
            ]
            for reader in readers:
                await reader.once()
            for reader in progress.rounds("stream, fetch and Mooncake", readers, repeats):
                await reader.once()
    except grpc.RpcError as error:
        raise error_of(error) from error
    finally:
        await fetcher.close()
    streamed, fetched, loaded = (reader.passes() for reader in readers)
    return TransferResult(
        payload_bytes=sequence.payload_bytes,
        run_slots=run_slots,
        stream=streamed,
        fetch=fetched,
        mooncake=loaded,
        transfer_seconds=tuple(loads.transfer_seconds[1:]),
    )


def _fetches(stores: TransferStores, fetcher: PrefixFetcher, sequence: _Sequence) -> _Reader:
    """Return the reader that fetches by the stream into the arena of `stores.fetching`."""
    store = stores.fetching
    source = FetchSource(ChunkSource(stores.source.client.address), len(sequence.tokens))

    async def fetch() -> None:
        result = await fetcher.fetch(source, sequence.salt, sequence.tokens)
        if result.bytes != sequence.payload_bytes:
            raise Internal("a chunk that was sealed for the benchmark was not fetched")

    async def clear() -> None:
        await fetcher.quiesce()
        await _evict(store.client.address)

    processors = ProcessorTime([stores.source.process_id, store.process_id])
    return _Reader(fetch, processors, clear, [], [])


class _Loads:
    """Loads by Mooncake into the arena of `stores.loading`.

    Attributes:
        transfer_seconds: of the reads alone, as the store counts them.
    """

    def __init__(self, stores: TransferStores, sequence: _Sequence) -> None:
        self.transfer_seconds: list[float] = []
        self._stores = stores
        self._sequence = sequence
        self._lease_id = 0

    def reader(self) -> _Reader:
        stores = (self._stores.source, self._stores.loading)
        processors = ProcessorTime([store.process_id for store in stores])
        return _Reader(self._load, processors, self._clear, [], [])

    def _connection(self) -> Connection:
        connection = self._stores.loading.client.connection
        if connection is None:
            raise RuntimeError("the benchmark's reader is not attached")
        return connection

    async def _load(self) -> None:
        sequence, source = self._sequence, ChunkSource(self._stores.source.client.address)
        answers = [
            answer
            async for answer in self._stores.loading.client.load_chunks(
                self._connection(), sequence.salt, sequence.tokens, source
            )
        ]
        last = answers[-1]
        if last.loaded_bytes != sequence.payload_bytes:
            raise Internal("a chunk that was sealed for the benchmark was not loaded")
        self.transfer_seconds.append(last.transfer_seconds)
        self._lease_id = last.lease_id

    async def _clear(self) -> None:
        client = self._stores.loading.client
        await client.release(self._connection(), lease_ids=[self._lease_id])
        await _evict(client.address)


async def _evict(address: str) -> None:
    """Empty an arena without leases."""
    async with open_channel(address) as channel:
        stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        await stub.Evict(pb.EvictRequest(), timeout=_SECONDS)


async def _await_engine(address: str) -> None:
    """Wait until other stores can read this one. Raises DeadlineExceeded."""
    deadline = time.monotonic() + _READY_SECONDS
    async with open_channel(address) as channel:
        stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        while True:
            told = await stub.Attach(
                pb.AttachRequest(client_name="bench", is_remote=True), timeout=_SECONDS
            )
            if told.HasField("transfer"):
                return
            if time.monotonic() > deadline:
                stats = await stub.GetStats(pb.GetStatsRequest(), timeout=_SECONDS)
                raise DeadlineExceeded(
                    f"Mooncake's engine was not ready after {_READY_SECONDS:g} s: "
                    f"{stats.transfer.message}"
                )
            await asyncio.sleep(_LOOK_SECONDS)
