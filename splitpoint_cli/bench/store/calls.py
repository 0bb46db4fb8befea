"""Control calls on a running store, through the client that workers use.

Two readings: many callers with one chunk each, and a few with whole batches.
The payloads are all zeros, so that what is measured is metadata.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterator, Sequence
from typing import TypeVar

from splitpoint.keys import chunk_key
from splitpoint_cli.bench.shared.progress import Progress
from splitpoint_cli.bench.store.report import BatchResult, CallsResult
from splitpoint_cli.bench.store.workload import SALT
from worker_service.store.client import StoreClient, WrittenChunk
from worker_service.store.session import Connection

Answer = TypeVar("Answer")

# While one batch is on its way the next is being made.
_BATCHES_IN_FLIGHT = 3


class _Sequences:
    """Return token ids with which no other chunk of the run begins."""

    def __init__(self, chunk_tokens: int, seed: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._next = seed * 1_000_003 % (1 << 30)

    def next(self) -> tuple[int, ...]:
        self._next = (self._next + 1) % (1 << 31)
        return (self._next, *range(1, self._chunk_tokens))


async def measure_calls(client: StoreClient, in_flight: int, calls: int, seed: int) -> CallsResult:
    """Run `in_flight` callers: Reserve, Seal, Match, Release of one chunk at a time."""
    connection = _connection(client)
    layout = connection.tensors.layout
    checksum = connection.tensors.arena.checksum(0)  # of zeros
    sequences = _Sequences(layout.chunk_tokens, seed)
    kinds = ("Reserve", "Seal", "Match", "Release")
    latencies: dict[str, list[float]] = {kind: [] for kind in kinds}

    async def timed(kind: str, call: Awaitable[Answer]) -> Answer:
        began = time.perf_counter()
        answer = await call
        latencies[kind].append(time.perf_counter() - began)
        return answer

    async def caller(rounds: int) -> None:
        for _ in range(rounds):
            tokens = sequences.next()
            [(slot, generation)] = await timed("Reserve", client.reserve(connection, SALT, 1))
            chunk = WrittenChunk(slot, generation, b"", tokens, checksum)
            sealed = await timed("Seal", client.seal(connection, SALT, [chunk], 0))
            found = await timed("Match", client.match(SALT, tokens))
            leases = (sealed.lease_id, found.lease_id)
            await timed("Release", client.release(connection, lease_ids=leases))

    await asyncio.gather(*(caller(2) for _ in range(in_flight)))  # warm
    for each in latencies.values():
        each.clear()
    rounds = max(1, calls // len(kinds) // in_flight)
    began = time.perf_counter()
    await asyncio.gather(*(caller(rounds) for _ in range(in_flight)))
    seconds = time.perf_counter() - began
    return CallsResult(seconds, {kind: tuple(each) for kind, each in latencies.items()})


async def measure_batches(
    client: StoreClient, batch: int, chunks: int, repeats: int, seed: int, progress: Progress
) -> BatchResult:
    """Send chains of `batch` chunks through Reserve, Seal and Release, `chunks` in each repeat."""
    connection = _connection(client)
    layout = connection.tensors.layout
    checksum = connection.tensors.arena.checksum(0)  # of zeros
    sequences = _Sequences(layout.chunk_tokens, seed + 1)
    batch_count = max(1, chunks // batch)

    async def store(count: Iterator[int]) -> None:
        for _ in count:
            granted = await client.reserve(connection, SALT, batch)
            written = _chain(granted, sequences, layout.layout_hash, checksum)
            sealed = await client.seal(connection, SALT, written, 0)
            await client.release(connection, lease_ids=[sealed.lease_id])

    async def run() -> float:
        # One counter for all: a slow caller leaves the rest to the others.
        left = iter(range(batch_count))
        began = time.perf_counter()
        await asyncio.gather(*(store(left) for _ in range(_BATCHES_IN_FLIGHT)))
        return time.perf_counter() - began

    await run()  # warm; from here on the arena is full, and each grant evicts
    seconds = [await run() for _ in progress.track("batches", range(repeats))]
    return BatchResult(batch_count * batch, batch, layout.chunk_tokens, tuple(seconds))


def _chain(
    granted: Sequence[tuple[int, int]],
    sequences: _Sequences,
    layout_hash: bytes,
    checksum: int,
) -> list[WrittenChunk]:
    """Return one sequence of as many chunks as there are slots."""
    chunks = []
    parent = b""
    for slot, generation in granted:
        tokens = sequences.next()
        chunks.append(WrittenChunk(slot, generation, parent, tokens, checksum))
        parent = chunk_key(layout_hash, SALT, parent, tokens)
    return chunks


def _connection(client: StoreClient) -> Connection:
    if client.connection is None:
        raise RuntimeError("the benchmark's store client is not attached")
    return client.connection
