"""The runs of `bench store`: real stores, each in its own process, one after the other."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from kvstore_service.mooncake.settings import how_to_install
from splitpoint.arena.format import Geometry
from splitpoint.config import format_size, remove_tree
from splitpoint.keys import chunk_key
from splitpoint.shapes import ArenaLayout
from splitpoint_cli.bench.shared.arena import bench_arena_path
from splitpoint_cli.bench.shared.progress import Progress
from splitpoint_cli.bench.store import redis as store_redis
from splitpoint_cli.bench.store.calls import measure_batches, measure_calls
from splitpoint_cli.bench.store.mapping import Bytes, measure_mapping, runs_of
from splitpoint_cli.bench.store.remote import measure_remote
from splitpoint_cli.bench.store.report import (
    BatchResult,
    CallsResult,
    MappingResult,
    StoreResults,
    StreamResult,
    TransferResult,
)
from splitpoint_cli.bench.store.transfers import RunningStore, TransferStores, measure_transfers
from splitpoint_cli.bench.store.workload import (
    DATA_LAYOUT,
    SALT,
    SMALL_LAYOUT,
    SMALL_MEMORY_BYTES,
    StoreWorkload,
)
from splitpoint_cli.stack.child import LogLine, ServiceCommand
from splitpoint_cli.stack.supervisor import Supervisor
from worker_service.store.client import StoreClient, WrittenChunk
from worker_service.store.session import Connection

_LEASE_SECONDS = 60.0
# What one pass of a remote reader reads.
_REMOTE_BYTES = 128 << 20
_REDIS_VALUES = 64


async def run_all(
    workload: StoreWorkload, redis_url: str | None, progress: Progress
) -> StoreResults:
    """Measure everything in turn, each with its peers beside it."""
    streams: list[StreamResult] = []
    skipped: list[str] = []
    # Over TCP: that is how another host would read it.
    async with _store(DATA_LAYOUT, workload.memory_bytes, "127.0.0.1:0", progress) as client:
        progress.say(f"mapping: filling {format_size(workload.memory_bytes)}, reading it back ...")
        sequences = await _fill(client.address, workload)
        mapping = await _measure_mapping(client, sequences, workload, progress)
        progress.say("remote: ReadChunks and a plain stream ...")
        streams.append(await _measure_remote(client.address, sequences, workload, progress))
    async with _store(SMALL_LAYOUT, SMALL_MEMORY_BYTES, "", progress) as client:
        calls, batches = await _measure_calls(client, workload, progress)
    progress.say("Redis: SET and GET ...")
    try:
        with store_redis.server(redis_url) as server:
            value = os.urandom(DATA_LAYOUT.chunk_bytes)
            streams += await asyncio.to_thread(
                store_redis.measure_redis,
                server,
                value,
                _REDIS_VALUES,
                workload.repeats,
                progress,
            )
    except store_redis.NoServer as error:
        skipped.append(str(error))
    transfer = None
    if missing := how_to_install():
        skipped.append(f"reads by Mooncake: {missing}")
    else:
        transfer = await _measure_transfer(workload, progress)
    return StoreResults(mapping, calls, batches, tuple(streams), tuple(skipped), transfer)


@asynccontextmanager
async def _store(
    layout: ArenaLayout, memory_bytes: int, listen: str, progress: Progress
) -> AsyncIterator[StoreClient]:
    """Run a store process, and give a client that is not attached yet.

    An empty `listen` stands for a new socket file.
    """
    async with _running_store(layout, memory_bytes, listen, progress) as store:
        yield store.client


@asynccontextmanager
async def _running_store(
    layout: ArenaLayout, memory_bytes: int, listen: str, progress: Progress, *further: str
) -> AsyncIterator[RunningStore]:
    """Run a store process with further arguments, as above."""
    folder = Path(tempfile.mkdtemp(prefix="splitpoint-bench-"))
    arena = bench_arena_path()
    command = ServiceCommand(
        "store",
        (
            *("-m", "kvstore_service", "--listen", listen or f"unix:{folder}/store.sock"),
            *("--layout", layout.to_json(), "--host-memory", str(memory_bytes)),
            *("--arena", str(arena), "--lease-seconds", str(_LEASE_SECONDS)),
            *further,
        ),
        ready_seconds=60.0 + memory_bytes / 1e9,
    )

    try:
        async with Supervisor(sys.executable, _shower(progress)) as supervisor:
            store = await supervisor.start(command)
            client = StoreClient(await store.ready(), "bench")
            try:
                yield RunningStore(client, store.process.pid)
            finally:
                await client.close()
    finally:
        remove_tree(arena.parent)
        shutil.rmtree(folder)


def _shower(progress: Progress) -> Callable[[LogLine], None]:
    """Return a function that prints a service's warnings."""

    def show(line: LogLine) -> None:
        if line.important:
            progress.say(f"{line.service}: {line.text}")

    return show


async def _measure_mapping(
    client: StoreClient,
    sequences: Sequence[Sequence[int]],
    workload: StoreWorkload,
    progress: Progress,
) -> MappingResult:
    """Read through a new mapping: a second session, after the writer's ended."""
    began = time.perf_counter()
    await client.start(DATA_LAYOUT)
    attach_seconds = time.perf_counter() - began
    if client.connection is None:
        raise RuntimeError("the benchmark's reader is not attached")
    found = [await client.match(SALT, tokens) for tokens in sequences]
    handles = [(chunk.slot, chunk.generation) for each in found for chunk in each.chunks]
    runs = runs_of(handles, workload.run_slots)
    return await asyncio.to_thread(
        measure_mapping,
        client.connection.tensors.arena,
        runs,
        attach_seconds,
        workload.repeats,
        progress,
    )


@dataclass(frozen=True, slots=True)
class _Writer:
    """A client of a store that writes. `noise`: the bytes of a plane of a slot."""

    client: StoreClient
    connection: Connection
    noise: Bytes

    @classmethod
    @asynccontextmanager
    async def to(cls, address: str, seed: int) -> AsyncIterator[Self]:
        client = StoreClient(address, "bench writer")
        await client.start(DATA_LAYOUT)
        try:
            if client.connection is None:
                raise RuntimeError("the benchmark's writer is not attached")
            noise = np.random.default_rng(seed).integers(
                0, 256, DATA_LAYOUT.kv_slot_bytes, np.uint8
            )
            yield cls(client, client.connection, noise)
        finally:
            await client.close()

    async def write(self, tokens: Sequence[int], parent: bytes = b"") -> bytes:
        """Write full chunks behind `parent`; each plane of each slot has the same bytes.

        Return the last chunk's key.
        """
        arena, layout = self.connection.tensors.arena, DATA_LAYOUT
        pieces = [
            tuple(tokens[start : start + layout.chunk_tokens])
            for start in range(0, len(tokens), layout.chunk_tokens)
        ]
        chunks = []
        granted = await self.client.reserve(self.connection, SALT, len(pieces))
        for (slot, generation), piece in zip(granted, pieces, strict=True):
            for layer in range(layout.layer_count):
                for tensor in layout.tensors:
                    arena.plane(layer, tensor)[slot] = self.noise
            chunks.append(WrittenChunk(slot, generation, parent, piece, arena.checksum(slot)))
            parent = chunk_key(layout.layout_hash, SALT, parent, piece)
        sealed = await self.client.seal(self.connection, SALT, chunks, 0)
        await self.client.release(self.connection, lease_ids=[sealed.lease_id])
        return parent


async def _fill(address: str, workload: StoreWorkload) -> list[list[int]]:
    """Seal chunks until the arena is full; returns the sequences, each of one run."""
    run_tokens = workload.run_slots * DATA_LAYOUT.chunk_tokens
    sequences = []
    async with _Writer.to(address, workload.seed) as writer:
        slots = writer.connection.tensors.arena.slot_count
        for number in range(slots // workload.run_slots):
            sequences.append([number + 1, *range(2, run_tokens + 1)])
            await writer.write(sequences[-1])
    return sequences


async def _measure_remote(
    address: str, sequences: Sequence[Sequence[int]], workload: StoreWorkload, progress: Progress
) -> StreamResult:
    peer = ServiceCommand(
        "peer", ("-m", "splitpoint_cli.bench.shared.raw_stream", "--listen", "127.0.0.1:0")
    )
    chunks = _REMOTE_BYTES // DATA_LAYOUT.chunk_bytes
    some = sequences[: max(1, chunks // workload.run_slots)]
    async with Supervisor(sys.executable, _shower(progress)) as supervisor:
        service = await supervisor.start(peer)
        return await measure_remote(
            address, await service.ready(), SALT, some, workload.repeats, progress
        )


async def _measure_transfer(workload: StoreWorkload, progress: Progress) -> TransferResult:
    """Read one sequence between stores of their own, whose engines listen on loopback."""
    chunk_bytes = DATA_LAYOUT.chunk_bytes
    count = max(1, min(_REMOTE_BYTES, workload.memory_bytes) // chunk_bytes // workload.run_slots)
    slots = count * (workload.run_slots + 1)
    memory = Geometry(DATA_LAYOUT, slots).size_bytes
    engine = ("--transfer", "mooncake", "--transfer-interface", "lo")
    listen = "127.0.0.1:0"
    progress.say(f"transfers: {format_size(count * workload.run_slots * chunk_bytes)} ...")
    async with (
        _running_store(DATA_LAYOUT, memory, listen, progress, *engine) as source,
        _running_store(DATA_LAYOUT, memory, listen, progress) as fetching,
        _running_store(DATA_LAYOUT, memory, listen, progress, *engine) as loading,
    ):
        tokens = await _fill_runs(source.client.address, count, workload)
        return await measure_transfers(
            TransferStores(source, fetching, loading),
            DATA_LAYOUT,
            SALT,
            tokens,
            workload.run_slots,
            workload.repeats,
            progress,
        )


async def _fill_runs(address: str, count: int, workload: StoreWorkload) -> list[int]:
    """Seal one sequence in runs of `workload.run_slots` slots, each followed by another chunk.

    Return its token ids.
    """
    size = DATA_LAYOUT.chunk_tokens
    run_tokens = workload.run_slots * size
    tokens = list(range(1, count * run_tokens + 1))
    parent = b""
    async with _Writer.to(address, workload.seed) as writer:
        for first in range(0, len(tokens), run_tokens):
            parent = await writer.write(tokens[first : first + run_tokens], parent)
            await writer.write([len(tokens) + first + 1] * size)
    return tokens


async def _measure_calls(
    client: StoreClient, workload: StoreWorkload, progress: Progress
) -> tuple[CallsResult, BatchResult]:
    await client.start(SMALL_LAYOUT)
    progress.say(f"control calls: {workload.calls:,} with {workload.in_flight} in flight ...")
    calls = await measure_calls(client, workload.in_flight, workload.calls, workload.seed)
    progress.say(f"batches: {workload.chunks:,} chunks, {workload.repeats} times ...")
    batches = await measure_batches(
        client, workload.batch, workload.chunks, workload.repeats, workload.seed, progress
    )
    return calls, batches
