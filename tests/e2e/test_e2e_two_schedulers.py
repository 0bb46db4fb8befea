"""Two schedulers on the same worker: equal texts, and shared memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from local_stack import (
    StackShape,
    make_scheduler,
    serving_worker,
    start_store,
    stop_process,
    wait_for_workers,
)
from own_names import shared_memory_folder
from tiny_models import build_tiny, clear_prompt
from waiting import until

from splitpoint.client import AsyncClient

NEW_TOKENS = 40
MODEL = build_tiny("llama")


async def test_two_schedulers_share_a_small_worker_fairly(folder: Path, tmp_path: Path) -> None:
    """One fills the worker and its own queue first; the other still starts before it is done."""
    shape = StackShape(workers=1, max_batch_size=4)
    wanted = [clear_prompt(MODEL, 20 + n, NEW_TOKENS, seed=n) for n in range(16)]
    arena = shared_memory_folder() / "arena"
    async with AsyncExitStack() as cleanup:
        store = await start_store(folder, f"unix:{tmp_path}/kv", arena, shape)
        cleanup.push_async_callback(stop_process, store)
        worker, _ = await cleanup.enter_async_context(
            serving_worker(folder, "0", f"unix:{tmp_path}/w0", f"unix:{tmp_path}/kv", shape)
        )
        clients, schedulers = [], []
        for _ in range(2):
            scheduler = make_scheduler(folder, tmp_path, shape)
            address = await scheduler.start("127.0.0.1:0")
            cleanup.push_async_callback(scheduler.stop, 1.0)
            client = await cleanup.enter_async_context(AsyncClient(address))
            await wait_for_workers(client, 1)
            clients.append(client)
            schedulers.append(scheduler)
        order: list[int] = []
        most = 0

        async def run(number: int, prompt: Sequence[int], name: str) -> list[int]:
            stream = clients[number].generate(
                prompt, max_tokens=NEW_TOKENS, ignore_eos=True, request_id=name
            )
            done = await stream.complete()
            order.append(number)
            return list(done.token_ids)

        first = [asyncio.create_task(run(0, p, f"r{n}")) for n, (p, _) in enumerate(wanted[:12])]
        await until(lambda: len(worker.runtime.live) >= 4)
        second = [asyncio.create_task(run(1, p, f"r{n}")) for n, (p, _) in enumerate(wanted[12:])]
        while not all(task.done() for task in (*first, *second)):
            most = max(most, len(worker.runtime.live))
            await asyncio.sleep(0.002)
        answers = [task.result() for task in (*first, *second)]
        assert answers == [tokens for _, tokens in wanted]
        # Not only when the first scheduler has nothing left.
        assert order.index(1) < 10, order
        # A race of both may exceed the batch for a moment; the worker then queues.
        assert most <= 8
        for scheduler in schedulers:
            account = scheduler.manager.admission.account("0")
            assert account is not None
            async with asyncio.timeout(60):
                while account.others.request_count or account.charged_pages:
                    await asyncio.sleep(0.02)
            assert (account.others.pages, account.others.wanted_pages) == (0, 0)
