"""A whole stack for tests: the store as a process of its own, workers and scheduler in this one.

Everything speaks over real sockets and shares a real arena; only the torch
imports are paid once instead of once per worker.
"""

from __future__ import annotations

import asyncio
import functools
import random
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from forked_service import ForkedService, start_forked
from own_names import shared_memory_folder
from waiting import until

from scheduler_service.options import SchedulerOptions, load_served_model
from scheduler_service.service import Scheduler
from splitpoint.client import AsyncClient
from splitpoint.options.speculation import SpeculativeConfig
from splitpoint.options.worker import VERIFY_RATE
from splitpoint.planning.plan import Objective
from splitpoint.planning.weight_placement import WeightObjective
from splitpoint.shapes import DataType
from splitpoint.transport.channels import open_channel
from splitpoint.transport.servers import create_server
from splitpoint.v1 import kvstore_pb2, kvstore_pb2_grpc, worker_pb2_grpc
from worker_service.server import WorkerServicer
from worker_service.startup.options import WorkerOptions
from worker_service.startup.worker import LoadedWorker, load_worker

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class StackShape:
    """Sizes of a test stack."""

    workers: int = 2
    chunk_tokens: int = 16
    activations: str = "always"
    host_memory: str = "48MiB"
    device_memory_bytes: int = 96 << 20
    data_type: DataType = DataType.FLOAT32
    max_batch_size: int = 16
    max_batched_tokens: int = 64
    # A machine that is busy with other tests must not end sessions.
    lease_seconds: float = 60.0
    store_arguments: tuple[str, ...] = ()
    verify_rate: float = VERIFY_RATE.default
    # Most tests here are about what comes from the store.
    shares_prefixes: bool = False
    speculation: SpeculativeConfig | None = None
    # The workers copy and compute in turn.
    is_serial: bool = False
    # Of an emulated link; None: none.
    link_bytes_per_second: int | None = None
    objective: Objective = Objective.LATENCY
    weight_objective: WeightObjective = WeightObjective.BALANCED


@dataclass
class LocalStack:
    client: AsyncClient
    workers: list[LoadedWorker]
    worker_servers: list[grpc.aio.Server]
    scheduler: Scheduler
    store: kvstore_pb2_grpc.KvStoreServiceStub
    store_process: ForkedService
    arena: Path
    start_store: Callable[[], Awaitable[ForkedService]]

    async def kill_store(self) -> None:
        """kill -9: no component is told, and the arena stays."""
        self.store_process.kill()
        await self.store_process.wait()

    async def restart_store(self, after_seconds: float = 0.0) -> None:
        """kill -9, then the same command again, as a supervisor does."""
        await self.kill_store()
        await asyncio.sleep(after_seconds)
        self.store_process = await self.start_store()

    async def wait_attached(self) -> None:
        """Until every worker has a session of the store."""
        stores = [worker.store for worker in self.workers]
        await until(lambda: all(each is not None and each.connection for each in stores))

    async def store_stats(self) -> kvstore_pb2.GetStatsResponse:
        stats: kvstore_pb2.GetStatsResponse
        stats = await self.store.GetStats(
            # Its channel may not have noticed yet that the store is back.
            kvstore_pb2.GetStatsRequest(check_integrity=True),
            wait_for_ready=True,
        )
        return stats

    async def assert_clean(self) -> None:
        """Nothing runs, no page, lease or unsealed slot is held, the store agrees with itself."""
        deadline = time.monotonic() + 60
        while not all(worker.engine.is_idle for worker in self.workers):
            assert time.monotonic() < deadline, "a worker does not come to rest"
            await asyncio.sleep(0.02)
        for worker in self.workers:
            cache = worker.engine.cache
            assert cache.pages.used_count == cache.input_pages.used_count == 0
            assert cache.claims.promised_count == 0
        stats = await self.store_stats()
        assert list(stats.integrity_violations) == []
        assert (stats.lease_count, stats.writing_slot_count) == (0, 0)
        assert stats.quarantined_slot_count == 0


@asynccontextmanager
async def local_stack(
    folder: Path, sockets: Path, shape: StackShape | None = None
) -> AsyncIterator[LocalStack]:
    """Serve the checkpoint in `folder`; `sockets` is an empty folder with a short path."""
    shape = shape or StackShape()
    arena = shared_memory_folder() / "arena"
    async with AsyncExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, arena.parent, ignore_errors=True)
        address = f"unix:{sockets}/kv"
        start = functools.partial(start_store, folder, address, arena, shape)
        processes = [await start()]
        cleanup.push_async_callback(lambda: stop_process(processes[-1]))

        async def start_again() -> ForkedService:
            processes.append(await start())
            return processes[-1]

        serving = [
            await cleanup.enter_async_context(
                serving_worker(folder, str(index), f"unix:{sockets}/w{index}", address, shape)
            )
            for index in range(shape.workers)
        ]
        scheduler = make_scheduler(folder, sockets, shape)
        listening = await scheduler.start("127.0.0.1:0")
        cleanup.push_async_callback(scheduler.stop, 1.0)
        client = await cleanup.enter_async_context(AsyncClient(listening))
        channel = await cleanup.enter_async_context(open_channel(address))
        await wait_for_workers(client, shape.workers)
        yield LocalStack(
            client,
            [worker for worker, _ in serving],
            [server for _, server in serving],
            scheduler,
            kvstore_pb2_grpc.KvStoreServiceStub(channel),
            processes[0],
            arena,
            start_again,
        )


def make_scheduler(folder: Path, sockets: Path, shape: StackShape) -> Scheduler:
    """A scheduler for the workers of a stack; start it, and stop it."""
    return Scheduler(
        SchedulerOptions(
            model=load_served_model(folder, shape.data_type),
            worker_addresses=[f"unix:{sockets}/w{i}" for i in range(shape.workers)],
            server_key=b"k" * 32,
            objective=shape.objective,
        )
    )


async def start_store(folder: Path, address: str, arena: Path, shape: StackShape) -> ForkedService:
    """`python -m kvstore_service`, once it says it is ready."""
    return await start_service(
        "kvstore_service",
        *("--listen", address, "--model", str(folder), "--arena", str(arena)),
        *("--dtype", shape.data_type.value, "--activations", shape.activations),
        *("--chunk-tokens", str(shape.chunk_tokens), "--host-memory", shape.host_memory),
        *("--lease-seconds", str(shape.lease_seconds)),
        *shape.store_arguments,
    )


async def start_service(module: str, *arguments: str) -> ForkedService:
    """A service process that says it is ready."""
    service, _ = await start_forked(module, *arguments)
    return service


async def stop_process(process: ForkedService | asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    await asyncio.wait_for(process.wait(), 30)
    # Let the transports close before the loop does.
    await asyncio.sleep(0)


@asynccontextmanager
async def serving_worker(
    folder: Path,
    name: str,
    address: str,
    store_address: str,
    shape: StackShape,
) -> AsyncIterator[tuple[LoadedWorker, grpc.aio.Server]]:
    servicer = WorkerServicer()
    server = create_server()
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    server.add_insecure_port(address)
    await server.start()
    try:
        servicer.worker = await load_worker(
            WorkerOptions(
                worker_id=name,
                model_folder=folder,
                kvstore_address=store_address,
                device="cpu",
                data_type=shape.data_type,
                device_memory_bytes=shape.device_memory_bytes,
                max_batch_size=shape.max_batch_size,
                max_batched_tokens=shape.max_batched_tokens,
                verify_rate=shape.verify_rate,
                shares_prefixes=shape.shares_prefixes,
                is_serial=shape.is_serial,
                link_bytes_per_second=shape.link_bytes_per_second,
                speculation=shape.speculation,
                weight_objective=shape.weight_objective,
            )
        )
        try:
            yield servicer.worker, server
        finally:
            await servicer.drain(0)
            servicer.close()
            await servicer.worker.runtime.stop()
            servicer.worker.monitor.stop()
    finally:
        await server.stop(0.5)


async def wait_for_workers(client: AsyncClient, count: int, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while sum(worker.ready for worker in await client.list_workers()) < count:
        assert time.monotonic() < deadline, "the workers are not ready"
        await asyncio.sleep(0.02)


def prompt_of(length: int, seed: int, vocabulary: int) -> list[int]:
    """Random ids without the special first ones; equal seeds give equal beginnings."""
    rng = random.Random(seed)
    return [rng.randrange(3, vocabulary) for _ in range(length)]
