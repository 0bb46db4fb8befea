"""A store with a tier in memory in this process, and a worker that uses it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from admitting import admitting
from local_stack import StackShape, serving_worker
from tier_double import MemoryTier

from kvstore_service.__main__ import layout_of, parse_arguments
from kvstore_service.server import KvStoreServicer
from kvstore_service.store import KvStore
from kvstore_service.tiers.manager import TierManager
from splitpoint.arena.owner import open_or_create_arena
from splitpoint.keys import chunk_keys, numerics_salt
from splitpoint.transport.channels import open_channel
from splitpoint.transport.servers import create_server, listen
from splitpoint.v1 import kvstore_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc
from worker_service.startup.worker import LoadedWorker

CHUNK = 16


@dataclass
class Answer:
    """What a worker said of one request."""

    tokens: list[int] = field(default_factory=list)
    restores: list[worker_pb2.RestoreReport] = field(default_factory=list)
    finish: worker_pb2.RequestFinish | None = None


@dataclass
class TierStack:
    """Attributes: `answers`: by request id, as far as they came."""

    store: KvStore
    tiers: TierManager
    tier: MemoryTier
    worker: LoadedWorker
    stream: Any
    answers: dict[str, Answer] = field(default_factory=dict)

    async def admit(self, name: str, prompt: Sequence[int], count: int, **fields: Any) -> None:
        self.answers[name] = Answer()
        await self.stream.write(admitting(name, prompt, count, **fields))

    async def meet(
        self, name: str, prompt: Sequence[int], count: int, *, cached: int, expected: int
    ) -> None:
        """Admit a request whose prefix the tier has: both ends, expected to meet there."""
        await self.admit(
            name,
            prompt,
            count,
            source_tier=types_pb2.TIER_DISK,
            source_cached_tokens=cached,
            meeting_tokens=expected,
        )

    async def answer(self, name: str, seconds: float = 30) -> Answer:
        """Read the stream until this request has ended."""
        async with asyncio.timeout(seconds):
            while self.answers[name].finish is None:
                response = await self.stream.read()
                for result in response.tokens:
                    tokens = self.answers[result.request_id].tokens
                    assert result.first_index == len(tokens), "token indices have a gap"
                    tokens += result.token_ids
                for report in response.restores:
                    self.answers[report.request_id].restores.append(report)
                for finish in response.finishes:
                    self.answers[finish.request_id].finish = finish
        return self.answers[name]

    async def ask(self, name: str, prompt: Sequence[int], count: int, **fields: Any) -> Answer:
        await self.admit(name, prompt, count, **fields)
        return await self.answer(name)

    @property
    def salt(self) -> bytes:
        return numerics_salt(b"", self.worker.numerics.digest)

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the keys of the full chunks of a sequence."""
        return list(chunk_keys(self.store.arena.layout.layout_hash, self.salt, tokens, CHUNK))

    def cached_tokens(self, tokens: Sequence[int]) -> int:
        """Return how many leading tokens the arena holds."""
        return self.store.peek(self.salt, tokens).cached_tokens

    async def evict(self) -> None:
        """Empty the arena; what was in it goes to the tier."""
        pool = self.store.pool
        async with asyncio.timeout(60):
            while pool.free_count < pool.slot_count:
                await self.tiers.make_room(pool.slot_count)

    async def assert_clean(self) -> None:
        """No page, slot or lease is held."""
        async with asyncio.timeout(60):
            while not self.worker.engine.is_idle or self.store.pool.leases.leased_slot_count:
                await asyncio.sleep(0.01)
            while any(session.granted for session in self.store.sessions):
                await asyncio.sleep(0.01)
        cache = self.worker.engine.cache
        assert cache.pages.used_count == cache.input_pages.used_count == 0
        assert cache.claims.promised_count == 0


@asynccontextmanager
async def tier_stack(
    folder: Path,
    tmp_path: Path,
    arena_folder: Path,
    *,
    shape: StackShape | None = None,
    slot_count: int = 80,
    rate: float | None = None,
) -> AsyncIterator[TierStack]:
    """Serve the checkpoint in `folder`; `rate`: of the tier, in bytes per second."""
    shape = shape or StackShape(workers=1, activations="never")
    arguments = parse_arguments(
        [
            *("--model", str(folder), "--dtype", shape.data_type.value),
            *("--listen", f"unix:{tmp_path}/kv", "--arena", str(arena_folder / "store" / "arena")),
            *("--host-memory", "1GiB"),
            *("--activations", shape.activations, "--chunk-tokens", str(CHUNK)),
        ]
    )
    opened = open_or_create_arena(
        arena_folder / "store" / "arena", layout_of(arguments), slot_count
    )
    store = KvStore(opened.arena, clock=time.monotonic, lease_seconds=60, is_present=lambda _: True)
    tier = MemoryTier(opened.arena)
    tiers = TierManager(store.pool, [tier], rate_limit=rate)
    servicer = KvStoreServicer(store, tiers=tiers)
    server = create_server(max_concurrent_rpcs=64)
    kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server(servicer, server)
    address = listen(server, f"unix:{tmp_path}/kv")
    await server.start()
    writing = asyncio.create_task(tiers.run())
    try:
        async with AsyncExitStack() as cleanup:
            worker_address = f"unix:{tmp_path}/w"
            worker, _ = await cleanup.enter_async_context(
                serving_worker(folder, "0", worker_address, address, shape)
            )
            channel = await cleanup.enter_async_context(open_channel(worker_address))
            stream = worker_pb2_grpc.WorkerServiceStub(channel).Run()
            cleanup.callback(stream.cancel)
            yield TierStack(store, tiers, tier, worker, stream)
            tier.gate.set()
    finally:
        servicer.stop()
        await server.stop(1)
        await servicer.close()
        writing.cancel()
        await asyncio.wait({writing})
        store.close()
        opened.arena.close()
        opened.owner.leave()
