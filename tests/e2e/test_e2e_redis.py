"""Redis killed, frozen, flushed and reset under load: streams stay right and do not wait."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from local_stack import (
    StackShape,
    make_scheduler,
    serving_worker,
    start_service,
    stop_process,
    wait_for_workers,
)
from redis_server import RedisServer
from tiny_models import build_tiny, clear_prompt
from waiting import until

from scheduler_service.options import SchedulerOptions
from scheduler_service.service import Scheduler
from splitpoint.client import AsyncClient
from splitpoint.discovery.redis_link import RedisLink
from splitpoint.discovery.redis_options import parse_redis_url
from worker_service.registration import Registration

NEW_TOKENS = 16


@pytest.fixture(scope="module")
def cases() -> list[tuple[list[int], list[int]]]:
    model = build_tiny("llama")
    return [clear_prompt(model, 40 + 17 * seed, NEW_TOKENS, seed=seed) for seed in range(4)]


@dataclass
class RedisStack:
    client: AsyncClient
    scheduler: Scheduler


@asynccontextmanager
async def redis_stack(
    folder: Path, sockets: Path, shm: Path, server: RedisServer
) -> AsyncIterator[RedisStack]:
    """Two workers with a store each, all of which the scheduler only knows from Redis."""
    shape = StackShape(workers=2)
    async with AsyncExitStack() as cleanup:
        for name in ("0", "1"):
            address = f"unix:{sockets}/kv{name}"
            process = await start_service(
                "kvstore_service",
                *("--listen", address, "--model", str(folder), "--arena", f"{shm}/{name}/arena"),
                *("--dtype", shape.data_type.value, "--activations", shape.activations),
                *("--chunk-tokens", str(shape.chunk_tokens), "--host-memory", shape.host_memory),
                *("--redis", server.url),
            )
            cleanup.push_async_callback(stop_process, process)
            worker, _ = await cleanup.enter_async_context(
                serving_worker(folder, name, f"unix:{sockets}/w{name}", address, shape)
            )
            link = RedisLink(parse_redis_url(server.url))
            cleanup.push_async_callback(link.close)
            registration = Registration(link, worker, f"unix:{sockets}/w{name}")
            task = asyncio.create_task(registration.run())
            cleanup.callback(task.cancel)
        model = make_scheduler(folder, sockets, shape)._options
        scheduler = Scheduler(
            SchedulerOptions(
                model=model.model,
                worker_addresses=[],
                server_key=model.server_key,
                redis=parse_redis_url(server.url),
            )
        )
        listening = await scheduler.start("127.0.0.1:0")
        cleanup.push_async_callback(scheduler.stop, 1.0)
        client = await cleanup.enter_async_context(AsyncClient(listening))
        await wait_for_workers(client, 2)
        yield RedisStack(client, scheduler)


async def test_redis_fails_in_every_way_under_load(
    folder: Path,
    cases: list[tuple[list[int], list[int]]],
    tmp_path: Path,
    shm_folder: Path,
    redis_server: RedisServer,
) -> None:
    async with redis_stack(folder, tmp_path, shm_folder, redis_server) as stack:
        rng = random.Random(7)
        over = asyncio.Event()
        answered = 0

        async def load() -> None:
            nonlocal answered
            while not over.is_set():
                prompt, wanted = rng.choice(cases)
                async with asyncio.timeout(30):
                    answer = await stack.client.generate(
                        prompt,
                        max_tokens=NEW_TOKENS,
                        ignore_eos=True,
                        worker=rng.choice(["0", "1"]),
                    ).complete()
                assert list(answer.token_ids) == wanted
                answered += 1

        async def served(count: int) -> None:
            """Requests go on whatever Redis does."""
            target = answered + count
            async with asyncio.timeout(60):
                while answered < target:
                    await asyncio.sleep(0.02)
                    for task in tasks:
                        if task.done():
                            task.result()

        tasks = [asyncio.create_task(load()) for _ in range(3)]
        try:
            await served(4)
            snapshot = await asyncio.to_thread(redis_server.snapshot)
            redis_server.freeze()
            await served(4)
            redis_server.thaw()
            await asyncio.to_thread(redis_server.flush)
            await served(4)
            redis_server.kill()
            await served(4)
            await asyncio.to_thread(redis_server.start)
            await served(4)
            await asyncio.to_thread(redis_server.restore, snapshot)
            await served(4)
        finally:
            over.set()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert results == [None] * len(tasks)
        # All is known again: both stores, both workers, and whose prefix is where.
        directory = stack.scheduler._directory
        assert directory is not None
        await until(lambda: len(directory.stores) == len(directory.workers) == 2)
        prompt, wanted = cases[3]
        answer = await stack.client.generate(
            prompt, max_tokens=NEW_TOKENS, ignore_eos=True, worker="0"
        ).complete()
        assert list(answer.token_ids) == wanted
        assert answer.usage.cached_tokens > 0
