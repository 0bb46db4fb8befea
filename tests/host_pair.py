"""Two hosts in tests: for each a store process with an arena, and a worker that maps it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from admitting import admitting
from forked_service import ForkedService
from local_stack import StackShape, serving_worker, start_store, stop_process

from splitpoint.keys import numerics_salt
from splitpoint.transport.channels import open_channel
from splitpoint.v1 import kvstore_pb2, kvstore_pb2_grpc, types_pb2, worker_pb2_grpc
from worker_service.startup.worker import LoadedWorker

NEW_TOKENS = 12
SHAPE = StackShape(workers=1)


@dataclass
class Host:
    """A store process and a worker that maps its arena."""

    store_address: str
    arena: Path
    process: ForkedService
    worker: LoadedWorker
    store: Any
    run: Any
    names: int = 0

    async def stats(self) -> kvstore_pb2.GetStatsResponse:
        stats: kvstore_pb2.GetStatsResponse
        stats = await self.store.GetStats(kvstore_pb2.GetStatsRequest(check_integrity=True))
        assert list(stats.integrity_violations) == []
        return stats

    async def match(self, prompt: list[int]) -> kvstore_pb2.MatchResponse:
        """What the store has of a prompt for workers like this one."""
        salt = numerics_salt(b"", self.worker.numerics.digest)
        request = kvstore_pb2.MatchRequest(token_ids=prompt, tenant_salt=salt)
        found: kvstore_pb2.MatchResponse = await self.store.Match(request)
        return found

    async def assert_clean(self) -> None:
        stats = await self.stats()
        assert (stats.lease_count, stats.writing_slot_count) == (0, 0)
        assert stats.quarantined_slot_count == 0
        cache = self.worker.engine.cache
        assert cache.pages.used_count == cache.input_pages.used_count == 0

    async def admit(self, prompt: list[int], **changes: Any) -> str:
        self.names += 1
        name = f"request-{self.names}"
        await self.run.write(admitting(name, prompt, NEW_TOKENS, **changes))
        return name

    async def results(self, *names: str) -> Results:
        """Everything until all of these have ended."""
        results = Results({name: [] for name in names}, {}, {}, None)
        async with asyncio.timeout(60):
            while len(results.finishes) < len(names):
                response = await self.run.read()
                for token in response.tokens:
                    results.tokens[token.request_id] += token.token_ids
                for restore in response.restores:
                    results.restores.setdefault(restore.request_id, restore)
                for finish in response.finishes:
                    results.finishes[finish.request_id] = finish
                if response.HasField("profile"):
                    results.profile = response.profile
        return results

    async def generate(self, prompt: list[int], **changes: Any) -> tuple[list[int], Any]:
        name = await self.admit(prompt, **changes)
        results = await self.results(name)
        assert results.finishes[name].error_code == 0, results.finishes[name]
        return results.tokens[name], results.restores[name]


@dataclass
class Results:
    tokens: dict[str, list[int]]
    restores: dict[str, Any]
    finishes: dict[str, Any]
    profile: types_pb2.Profile | None


@asynccontextmanager
async def host(
    folder: Path, sockets: Path, shm: Path, name: str, shape: StackShape = SHAPE
) -> AsyncIterator[Host]:
    async with AsyncExitStack() as cleanup:
        arena = shm / name / "arena"
        cleanup.callback(shutil.rmtree, arena.parent, ignore_errors=True)
        address = f"unix:{sockets}/kv{name}"
        process = await start_store(folder, address, arena, shape)
        cleanup.push_async_callback(stop_process, process)
        yield await cleanup.enter_async_context(
            worker_on(folder, sockets, name, address, arena, process)
        )


@asynccontextmanager
async def worker_on(
    folder: Path,
    sockets: Path,
    name: str,
    address: str,
    arena: Path,
    process: ForkedService,
) -> AsyncIterator[Host]:
    """A worker of the store at `address`, which it maps."""
    async with AsyncExitStack() as cleanup:
        worker, _ = await cleanup.enter_async_context(
            serving_worker(folder, name, f"unix:{sockets}/w{name}", address, SHAPE)
        )
        store = await cleanup.enter_async_context(open_channel(address))
        channel = await cleanup.enter_async_context(open_channel(f"unix:{sockets}/w{name}"))
        run = worker_pb2_grpc.WorkerServiceStub(channel).Run()
        cleanup.callback(run.cancel)
        await run.initial_metadata()
        stub = kvstore_pb2_grpc.KvStoreServiceStub(store)
        yield Host(address, arena, process, worker, stub, run)
