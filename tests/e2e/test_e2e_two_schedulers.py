"""Two schedulers on the same workers: equal texts, shared memory, and the loss of one of them.

About 25 s.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
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
from own_names import instance_name, shared_memory_folder
from test_e2e_cli import assert_nothing_left, scheduler_of
from tiny_models import build_tiny, clear_prompt
from up_process import up_process, wait_until_up
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


def test_the_loss_of_one_scheduler_leaves_the_streams_of_the_other_alone(folder: Path) -> None:
    instance = instance_name("two")
    command = [
        *(sys.executable, "-m", "splitpoint_cli", "up", "--model", str(folder)),
        *("--device", "cpu", "--dtype", "float32", "--threads", "1", "--workers", "2"),
        *("--host-memory", "48MiB", "--device-memory", "64MiB", "--schedulers", "2"),
        *("--listen", "127.0.0.1:0", "--instance", instance),
    ]
    wanted = [clear_prompt(MODEL, 20 + n, 160, seed=n) for n in range(3)]
    with up_process(command) as process:
        summary = wait_until_up(process)
        addresses = re.findall(r"scheduler  (\S+)", summary)
        assert len(addresses) == 2
        assert f"--address {addresses[0]},{addresses[1]}" in summary

        async def play() -> None:
            async with AsyncClient(addresses[0]) as one, AsyncClient(addresses[1]) as two:
                # The same ids at both: each scheduler has requests of its own.
                lost = [
                    asyncio.create_task(ask(one, prompt, f"r{n}"))
                    for n, (prompt, _) in enumerate(wanted)
                ]
                kept = [
                    asyncio.create_task(ask(two, prompt, f"r{n}"))
                    for n, (prompt, _) in enumerate(wanted)
                ]
                async with asyncio.timeout(60):
                    while (await one.scheduler_status()).generated_token_count < 50:
                        await asyncio.sleep(0)
                os.kill(scheduler_of(instance, addresses[0]), signal.SIGKILL)
                assert await asyncio.gather(*kept) == [tokens for _, tokens in wanted]
                for task in lost:
                    task.cancel()
                await asyncio.gather(*lost, return_exceptions=True)

        asyncio.run(play())
        assert process.stderr is not None
        for line in process.stderr:
            if "scheduler 0" in line and "ready again" in line:
                break
        answers = asyncio.run(ask_at(addresses[0], wanted[0][0]))
        assert answers == wanted[0][1]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    assert_nothing_left(instance)


async def ask(client: AsyncClient, prompt: Sequence[int], name: str) -> list[int]:
    stream = client.generate(prompt, max_tokens=160, ignore_eos=True, request_id=name)
    return list((await stream.complete()).token_ids)


async def ask_at(address: str, prompt: Sequence[int]) -> list[int]:
    async with AsyncClient(address) as client:
        await client.wait_ready(30)
        return await ask(client, prompt, "again")
