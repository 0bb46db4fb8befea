"""What `splitpoint bench store` runs: real stores, each in its own process, one after the other."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from splitpoint.config import arena_path, format_size, remove_tree
from splitpoint.shapes import ArenaLayout
from splitpoint_cli import store_redis
from splitpoint_cli.child import LogLine, ServiceCommand
from splitpoint_cli.store_calls import measure_batches, measure_calls
from splitpoint_cli.store_mapping import measure_mapping, runs_of
from splitpoint_cli.store_report import (
    BatchResult,
    CallsResult,
    MappingResult,
    StoreResults,
    StreamResult,
)
from splitpoint_cli.store_workload import (
    DATA_LAYOUT,
    SMALL_LAYOUT,
    SMALL_MEMORY_BYTES,
    StoreWorkload,
)
from splitpoint_cli.supervisor import Supervisor
from worker_service.store_client import Connection, StoreClient, WrittenChunk

_LEASE_SECONDS = 60.0
_SALT = b"bench"
_REDIS_VALUES = 64

Say = Callable[[str], None]


async def run_all(workload: StoreWorkload, redis_url: str | None, say: Say) -> StoreResults:
    """Every reading in turn, each with its peers beside it."""
    streams: list[StreamResult] = []
    skipped: list[str] = []
    async with _store(DATA_LAYOUT, workload.memory_bytes, say) as client:
        say(f"mapping: filling {format_size(workload.memory_bytes)}, reading it back ...")
        mapping = await _measure_mapping(client, workload)
    async with _store(SMALL_LAYOUT, SMALL_MEMORY_BYTES, say) as client:
        calls, batches = await _measure_calls(client, workload, say)
    say("Redis: SET and GET ...")
    try:
        with store_redis.server(redis_url) as server:
            value = os.urandom(DATA_LAYOUT.chunk_bytes)
            streams += await asyncio.to_thread(
                store_redis.measure_redis, server, value, _REDIS_VALUES, workload.repeats
            )
    except store_redis.NoServer as error:
        skipped.append(str(error))
    return StoreResults(mapping, calls, batches, tuple(streams), tuple(skipped))


@asynccontextmanager
async def _store(layout: ArenaLayout, memory_bytes: int, say: Say) -> AsyncIterator[StoreClient]:
    """A store process of its own, and a client that is not attached yet."""
    folder = Path(tempfile.mkdtemp(prefix="splitpoint-bench-"))
    arena = arena_path(f"bench-{os.getpid()}")
    command = ServiceCommand(
        "store",
        (
            *("-m", "kvstore_service", "--listen", f"unix:{folder}/store.sock"),
            *("--layout", layout.to_json(), "--host-memory", str(memory_bytes)),
            *("--arena", str(arena), "--lease-seconds", str(_LEASE_SECONDS)),
        ),
        ready_seconds=60.0 + memory_bytes / 1e9,
    )

    def show(line: LogLine) -> None:
        if line.important:
            say(f"{line.service}: {line.text}")

    try:
        async with Supervisor(sys.executable, show) as supervisor:
            store = await supervisor.start(command)
            client = StoreClient(await store.ready(), "bench")
            try:
                yield client
            finally:
                await client.close()
    finally:
        remove_tree(arena.parent)
        shutil.rmtree(folder)


async def _measure_mapping(client: StoreClient, workload: StoreWorkload) -> MappingResult:
    """Fill the arena in one session, then read it in another through a new mapping."""
    writer = StoreClient(client.address, "bench writer")
    await writer.start(DATA_LAYOUT)
    try:
        if writer.connection is None:
            raise RuntimeError("the benchmark's writer is not attached")
        sequences = await _fill(writer, writer.connection, workload)
    finally:
        await writer.close()
    began = time.perf_counter()
    await client.start(DATA_LAYOUT)
    attach_seconds = time.perf_counter() - began
    if client.connection is None:
        raise RuntimeError("the benchmark's reader is not attached")
    found = [await client.match(_SALT, tokens) for tokens in sequences]
    handles = [(chunk.slot, chunk.generation) for each in found for chunk in each.chunks]
    runs = runs_of(handles, workload.run_slots)
    return await asyncio.to_thread(
        measure_mapping, client.connection.tensors.arena, runs, attach_seconds, workload.repeats
    )


async def _fill(
    writer: StoreClient, connection: Connection, workload: StoreWorkload
) -> list[list[int]]:
    """Seal chunks until the arena is full; returns the sequences, each of one run."""
    arena, layout = connection.tensors.arena, connection.tensors.layout
    per_sequence = workload.run_slots
    random = np.random.default_rng(workload.seed)
    noise = random.integers(0, 256, layout.kv_slot_bytes, np.uint8)
    sequences = []
    for number in range(arena.slot_count // per_sequence):
        tokens = [number + 1, *range(2, per_sequence * layout.chunk_tokens + 1)]
        parent = b""
        granted = await writer.reserve(connection, _SALT, per_sequence)
        lease_id = 0
        for index, (slot, generation) in enumerate(granted):
            for layer in range(layout.layer_count):
                for tensor in layout.tensors:
                    arena.plane(layer, tensor)[slot] = noise
            piece = tuple(tokens[index * layout.chunk_tokens :][: layout.chunk_tokens])
            chunk = WrittenChunk(slot, generation, parent, piece, arena.checksum(slot))
            sealed = await writer.seal(connection, _SALT, [chunk], lease_id)
            parent, lease_id = sealed.chunks[0].key, sealed.lease_id
        await writer.release(connection, lease_ids=[lease_id])
        sequences.append(tokens)
    return sequences


async def _measure_calls(
    client: StoreClient, workload: StoreWorkload, say: Say
) -> tuple[CallsResult, BatchResult]:
    await client.start(SMALL_LAYOUT)
    say(f"control calls: {workload.calls:,} with {workload.in_flight} in flight ...")
    calls = await measure_calls(client, workload.in_flight, workload.calls, workload.seed)
    say(f"batches: {workload.chunks:,} chunks, {workload.repeats} times ...")
    batches = await measure_batches(
        client, workload.batch, workload.chunks, workload.repeats, workload.seed
    )
    return calls, batches
