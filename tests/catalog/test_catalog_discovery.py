"""A scheduler finds workers by Redis, keeps them through its outages, and lets the dead go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from catalog_helpers import linked
from redis_server import RedisServer
from scheduler_doubles import (
    LAYOUT,
    MODEL,
    SHAPE,
    Stack,
    StoreDouble,
    WorkerDouble,
    answer,
    ids_request,
    reasons_of,
    stack,
)
from waiting import until

from scheduler_service.limits import Limits
from scheduler_service.options import SchedulerOptions
from scheduler_service.service import Scheduler
from splitpoint.discovery.directory import add_announcement
from splitpoint.discovery.entries import WORKERS, ModelName, WorkerEntry
from splitpoint.discovery.redis_link import RedisLink
from splitpoint.discovery.redis_options import parse_redis_url
from splitpoint.errors import Unavailable
from splitpoint.planning.plan import ReasonKind
from splitpoint.v1 import scheduler_pb2

MODEL_NAME = ModelName(
    SHAPE.layer_count, SHAPE.hidden_size, SHAPE.vocabulary_size, SHAPE.context_length
)


def entry_of(worker: WorkerDouble, instance: bytes, address: str) -> WorkerEntry:
    return WorkerEntry(instance, worker.worker_id, address, MODEL_NAME, LAYOUT.layout_hash)


@asynccontextmanager
async def announced(link: RedisLink, *entries: WorkerEntry) -> AsyncIterator[None]:
    """Heartbeats as the workers would write them, Redis being there or not."""

    async def write(redis: Any) -> Any:
        async with redis.pipeline(transaction=True) as pipe:
            for entry in entries:
                add_announcement(pipe, WORKERS, entry)
            return await pipe.execute()

    async def beat() -> None:
        while True:
            try:
                await link.run(write, is_heartbeat=True)
            except Unavailable:
                pass
            await asyncio.sleep(0.3)

    task = asyncio.create_task(beat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def scheduler(
    server: RedisServer,
    *static: str,
    limits: Limits | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[Stack]:
    made = Scheduler(
        SchedulerOptions(
            model=MODEL,
            worker_addresses=static,
            server_key=b"k" * 32,
            limits=limits or Limits(),
            redis=parse_redis_url(server.url),
        ),
        clock=clock,
    )
    running = Stack(made, await made.start("127.0.0.1:0"), [])
    try:
        yield running
    finally:
        await running.channel.close()
        await made.stop(0)


async def test_workers_come_stay_and_go(redis_server: RedisServer) -> None:
    first, second = WorkerDouble("0"), WorkerDouble("1")
    entries = [
        entry_of(w, bytes([65 + n]) * 16, await w.start()) for n, w in enumerate((first, second))
    ]
    foreign = replace(
        entries[0],
        instance_id=b"f" * 16,
        address="unix:/nowhere",
        model=replace(MODEL_NAME, layer_count=99),
    )
    async with linked(redis_server) as link, scheduler(redis_server) as running:
        registry = running.scheduler.registry
        assert registry.connections == []
        async with announced(link, *entries, foreign):
            await until(lambda: len(registry.ready()) == 2)
            assert {c.address for c in registry.connections} == {e.address for e in entries}
            result = await running.generate(ids_request([5, 6], 4, worker_id="1"))
            assert result.token_ids == answer([5, 6], 4)
            # Everything is lost, also the entries; the streams are not.
            redis_server.kill()
            result = await running.generate(ids_request([5, 7], 4))
            assert result.token_ids == answer([5, 7], 4)
            assert len(registry.ready()) == 2
        await asyncio.to_thread(redis_server.start)
        directory = running.scheduler._directory
        assert directory is not None
        await until(lambda: directory.workers == ())
        assert len(registry.ready()) == 2
        # One dies: its entry expires and its stream is down. It is reported as lost, not removed.
        await second.kill()
        await until(lambda: [c.worker_id for c in registry.ready()] == ["0"])
        await until(lambda: directory.workers == ())
        listed = (await running.admin.ListWorkers(scheduler_pb2.ListWorkersRequest())).workers
        assert [(w.worker_id, w.ready, w.loss_count) for w in listed] == [
            ("0", True, 0),
            ("1", False, 1),
        ]
        result = await running.generate(ids_request([5, 8], 4))
        assert result.token_ids == answer([5, 8], 4)
        # It comes back somewhere else, under its old name.
        again = WorkerDouble("1")
        entry = entry_of(again, b"z" * 16, await again.start())
        async with announced(link, entry):
            await until(lambda: len(registry.ready()) == 2)
            assert {c.address for c in registry.connections} == {entries[0].address, entry.address}
        await again.kill()
    await first.kill()


async def test_a_worker_that_does_not_come_back_is_forgotten_in_the_end(
    redis_server: RedisServer,
) -> None:
    worker, ahead = WorkerDouble("0"), 0.0
    entry = entry_of(worker, b"a" * 16, await worker.start())
    async with (
        linked(redis_server) as link,
        scheduler(redis_server, clock=lambda: time.monotonic() + ahead) as running,
    ):
        registry = running.scheduler.registry
        async with announced(link, entry):
            await until(lambda: len(registry.ready()) == 1)
        await worker.kill()
        await until(lambda: registry.ready() == [])
        directory = running.scheduler._directory
        assert directory is not None
        await until(lambda: directory.workers == ())
        assert [c.was_lost for c in registry.connections] == [True]
        ahead = 601.0
        await until(lambda: registry.connections == [])


async def test_a_start_without_redis(redis_server: RedisServer) -> None:
    """Static workers serve at once, the others once Redis is there; no call waits for it."""
    named, found = WorkerDouble("0"), WorkerDouble("1")
    address = await named.start()
    entry = entry_of(found, b"f" * 16, await found.start())
    redis_server.kill()
    async with scheduler(redis_server) as running:
        error = await running.error(ids_request([5], 2))
        assert (type(error), error.reason) == (Unavailable, "NO_WORKER")
    async with (
        linked(redis_server) as link,
        scheduler(redis_server, address) as running,
        announced(link, entry),
    ):
        await until(lambda: len(running.scheduler.registry.ready()) == 1)
        result = await running.generate(ids_request([5, 6], 4))
        assert result.token_ids == answer([5, 6], 4)
        await asyncio.to_thread(redis_server.start)
        await until(lambda: len(running.scheduler.registry.ready()) == 2)
    await named.kill()
    await found.kill()


async def test_a_worker_that_is_named_is_not_found_a_second_time(
    redis_server: RedisServer,
) -> None:
    worker = WorkerDouble("0")
    address = await worker.start()
    other_way = address.replace("127.0.0.1", "localhost")
    async with linked(redis_server) as link, scheduler(redis_server, address) as running:
        registry = running.scheduler.registry
        await until(lambda: len(registry.ready()) == 1)
        # The double's GetInfo says this instance.
        async with announced(link, entry_of(worker, b"i" * 16, other_way)):
            directory = running.scheduler._directory
            assert directory is not None
            await until(lambda: len(directory.workers) == 1)
            assert [c.address for c in registry.connections] == [address]
    await worker.kill()


async def test_the_better_store_of_another_worker_is_named_as_a_source() -> None:
    """Without Redis: the stores that workers named are the catalog."""
    empty, full = StoreDouble(0), StoreDouble(64)
    here, there = await empty.start(), await full.start()
    poor = WorkerDouble("0", kvstore_address=here, capacity_pages=64)
    rich = WorkerDouble("1", kvstore_address=there, capacity_pages=64)
    prompt = list(range(5, 105))
    async with stack(poor, rich) as running:
        result = await running.generate(ids_request(prompt, 4))
        assert result.done.worker_id == "1"
        assert not rich.admits[0].source_store_address
        result = await running.generate(ids_request(prompt, 4, worker_id="0"))
        command = poor.admits[0]
        assert (command.source_store_address, command.source_cached_tokens) == (there, 64)
        assert (command.plan.fetched_tokens, command.plan.cached_tokens) == (64, 64)
        why = reasons_of(command.plan)
        assert why[ReasonKind.FETCH][:5] == (64, there, "stream", 1e9, "assumed")
        assert command.plan.predicted_ttft_seconds > command.plan.predicted_fetch_seconds > 0
        # The double fetched nothing, and says so.
        assert result.done.plan.fetched_tokens == 0
        assert reasons_of(result.done.plan)[ReasonKind.FETCHED][0] == 0
        assert result.token_ids == answer(prompt, 4)
    await empty.stop()
    await full.stop()
