"""Requests that come and go in every order, in little memory, while services stall and restart."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from local_stack import (
    LocalStack,
    StackShape,
    local_stack,
    make_scheduler,
    prompt_of,
    wait_for_workers,
)
from long_runs import scaled
from tiny_models import VOCABULARY, build_tiny, clear_prompt
from waiting import until

from splitpoint.client import AsyncClient
from splitpoint.client.answers import Completion
from splitpoint.planning.plan import Residency
from splitpoint.planning.schedule import Lane
from worker_service.startup.worker import LoadedWorker

NEW_TOKENS = 24
# Caches of a few pages, X pages for two prefill chunks, an arena that must evict.
TIGHT = StackShape(
    host_memory="4MiB",
    device_memory_bytes=2 << 20,
    max_batch_size=4,
    max_batched_tokens=32,
)


@dataclass(frozen=True)
class Case:
    prompt: list[int]
    wanted: list[int]


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    """Prompts that share beginnings, some of which end inside a chunk."""
    model = build_tiny("llama")
    found: list[Case] = []
    for seed, length in enumerate((5, 37, 90, 150)):
        prompt, wanted = clear_prompt(model, length, NEW_TOKENS, seed=seed)
        found.append(Case(prompt, wanted))
        for more in (3, 40):
            before = [*prompt, *wanted[:10]]
            longer, answer = clear_prompt(model, more, NEW_TOKENS, before=before, seed=seed)
            found.append(Case(longer, answer))
    return found


async def request_once(stack: LocalStack, case: Case, rng: random.Random) -> None:
    """One request, whole or left midway, resident or streamed, split anywhere."""
    generation = stack.client.generate(
        case.prompt,
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        residency=rng.choice([Residency.RESIDENT, Residency.STREAMED]),
        split=rng.choice([0, 1, 20, 1000]),
    )
    leave_after = rng.choice([0, 1, 7, None, None, None])
    answer: list[int] = []
    async for event in generation:
        if isinstance(event, Completion):
            break
        answer += event.token_ids
        if leave_after is not None and len(answer) > leave_after:
            break
    await generation.close()
    assert answer == case.wanted[: len(answer)]
    assert leave_after is not None or answer == case.wanted


async def storm(stack: LocalStack, cases: list[Case], rng: random.Random, count: int) -> None:
    """`count` requests with about a dozen at a time."""
    gate = asyncio.Semaphore(12)

    async def one(case: Case) -> None:
        async with gate:
            await asyncio.sleep(rng.random() * 0.02)
            await request_once(stack, case, rng)

    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(one(rng.choice(cases)))


@pytest.mark.scaled
@pytest.mark.parametrize("seed", range(scaled(1, chaos=3)))
async def test_any_order_in_little_memory(
    folder: Path, tmp_path: Path, cases: list[Case], seed: int
) -> None:
    async with local_stack(folder, tmp_path, TIGHT) as stack:
        await storm(stack, cases, random.Random(seed), scaled(24, chaos=60))
        await stack.assert_clean()
        workers = await stack.client.list_workers()
        assert [worker.cache_charged_bytes for worker in workers] == [0, 0]


@pytest.mark.scaled
async def test_the_store_stalls_beyond_its_leases(
    folder: Path, tmp_path: Path, cases: list[Case]
) -> None:
    """SIGSTOP for three leases under load: sessions end and begin anew, answers stay right."""
    shape = StackShape(
        host_memory="6MiB", device_memory_bytes=8 << 20, max_batch_size=8, lease_seconds=0.6
    )
    async with local_stack(folder, tmp_path, shape) as stack:
        rng = random.Random(0)

        async def resident(case: Case) -> None:
            answer = await stack.client.generate(
                case.prompt, max_tokens=NEW_TOKENS, ignore_eos=True, residency=Residency.RESIDENT
            ).complete()
            assert list(answer.token_ids) == case.wanted

        for _ in range(scaled(1, chaos=2)):
            async with asyncio.TaskGroup() as group:
                for _ in range(12):
                    group.create_task(resident(rng.choice(cases)))
                await asyncio.sleep(0.05)
                stack.store_process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(2.0)
                stack.store_process.send_signal(signal.SIGCONT)
        await stack.wait_attached()
        await storm(stack, cases, rng, scaled(8, chaos=20))
        await stack.assert_clean()


async def test_streamed_requests_wait_for_the_stores_slots(folder: Path, tmp_path: Path) -> None:
    """Each fits the arena alone, together they do not: all are served, one after the other."""
    model = build_tiny("llama")
    prompts, wanted = zip(
        *(clear_prompt(model, 200, 24, seed=seed) for seed in range(5)), strict=True
    )
    shape = StackShape(host_memory="4MiB", device_memory_bytes=2 << 20, max_batched_tokens=32)
    async with local_stack(folder, tmp_path, shape) as stack:
        slots = (await stack.store_stats()).slot_count
        assert 224 / shape.chunk_tokens < slots < 5 * 224 / shape.chunk_tokens
        answers = await asyncio.gather(
            *(
                stack.client.generate(
                    prompt, max_tokens=24, ignore_eos=True, residency=Residency.STREAMED
                ).complete()
                for prompt in prompts
            )
        )
        assert [list(answer.token_ids) for answer in answers] == list(wanted)
        await stack.assert_clean()


async def test_a_worker_whose_engine_fails_is_lost_and_its_request_goes_on(
    folder: Path, cases: list[Case], tmp_path: Path
) -> None:
    failed: list[LoadedWorker] = []

    def failing(worker: LoadedWorker) -> Callable[[Lane], None]:
        def before(lane: Lane) -> None:
            running = worker.engine.queues.running
            if not failed and any(sequence.generated_count >= 5 for sequence in running):
                failed.append(worker)
                raise RuntimeError("the device is broken")

        return before

    async with local_stack(folder, tmp_path) as stack:
        for worker in stack.workers:
            worker.engine.lanes.before = failing(worker)
        case = cases[-1]
        answer = await stack.client.generate(
            case.prompt, max_tokens=NEW_TOKENS, ignore_eos=True, residency=Residency.STREAMED
        ).complete()
        assert list(answer.token_ids) == case.wanted
        [lost] = failed
        status = await stack.client.scheduler_status()
        assert (status.completed_count, status.failed_count, status.failover_count) == (1, 0, 1)
        seen = {worker.id: worker for worker in await stack.client.list_workers()}
        # Each further attempt at a worker whose engine has failed is a loss again.
        assert seen[lost.worker_id].loss_count >= 1
        assert not seen[lost.worker_id].ready


def slow_copies(stack: LocalStack, worker: int, gate: threading.Event) -> None:
    """Hold every copy of a worker back until the gate opens."""
    prefixes = stack.workers[worker].runtime.prefixes
    assert prefixes is not None
    write_back = prefixes.write_back
    copy = write_back.copy

    def gated(*arguments: Any) -> list[int]:
        assert gate.wait(30)
        return copy(*arguments)

    write_back.copy = gated


async def test_a_tail_waits_for_an_input_page(
    folder: Path, tmp_path: Path, cases: list[Case]
) -> None:
    """Write-back lags until no X page is free; a prefix that ends inside a chunk then waits."""
    shape = StackShape(workers=1, max_batch_size=4, max_batched_tokens=32)
    async with local_stack(folder, tmp_path, shape) as stack:
        case = cases[1]
        await stack.client.generate(case.prompt, max_tokens=2, ignore_eos=True).complete()
        gate = threading.Event()
        slow_copies(stack, 0, gate)
        long = stack.client.generate(prompt_of(400, 7, VOCABULARY), max_tokens=2, ignore_eos=True)
        greedy = asyncio.create_task(long.complete())
        await until(lambda: not stack.workers[0].engine.cache.input_pages.free_count)
        waiting = asyncio.create_task(
            stack.client.generate(case.prompt, max_tokens=NEW_TOKENS, ignore_eos=True).complete()
        )
        await asyncio.sleep(0.3)
        assert not waiting.done()
        gate.set()
        assert list((await waiting).token_ids) == case.wanted
        await greedy
        await stack.assert_clean()


async def test_slots_of_a_lost_session_are_not_granted_under_a_copy(
    folder: Path, tmp_path: Path, cases: list[Case]
) -> None:
    """The store stalls beyond the lease while a worker copies: its slots wait for the copy."""
    async with local_stack(folder, tmp_path, StackShape(lease_seconds=0.6)) as stack:
        gate = threading.Event()
        slow_copies(stack, 0, gate)
        first = asyncio.create_task(
            stack.client.generate(
                cases[-1].prompt, max_tokens=NEW_TOKENS, ignore_eos=True, worker="0"
            ).complete()
        )
        async with asyncio.timeout(60):
            while not (await stack.store_stats()).writing_slot_count:
                await asyncio.sleep(0.01)
        held = (await stack.store_stats()).writing_slot_count
        stack.store_process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(1.5)
        stack.store_process.send_signal(signal.SIGCONT)
        async with asyncio.timeout(60):
            while (await stack.store_stats()).quarantined_slot_count != held:
                await asyncio.sleep(0.05)
        # Others go on meanwhile, in other slots.
        other = await stack.client.generate(
            cases[0].prompt, max_tokens=NEW_TOKENS, ignore_eos=True, worker="1"
        ).complete()
        assert list(other.token_ids) == cases[0].wanted
        assert (await stack.store_stats()).quarantined_slot_count == held
        gate.set()
        assert list((await first).token_ids) == cases[-1].wanted
        async with asyncio.timeout(60):
            while (await stack.store_stats()).quarantined_slot_count:
                await asyncio.sleep(0.05)
        await stack.assert_clean()


async def test_broken_copies_fail_nothing_but_reuse(
    folder: Path, tmp_path: Path, cases: list[Case]
) -> None:
    async with local_stack(folder, tmp_path) as stack:

        def broken(*_: Any) -> list[int]:
            raise RuntimeError("the device is gone")

        for worker in stack.workers:
            assert worker.runtime.prefixes is not None
            worker.runtime.prefixes.write_back.copy = broken
        for case in cases[:4]:
            answer = await stack.client.generate(
                case.prompt, max_tokens=NEW_TOKENS, ignore_eos=True, residency=Residency.RESIDENT
            ).complete()
            assert list(answer.token_ids) == case.wanted
            assert answer.usage.cached_tokens == 0
        await stack.assert_clean()


async def test_a_second_stream_gets_all_its_own_events(
    folder: Path, tmp_path: Path, cases: list[Case]
) -> None:
    """A Run stream ends with write-back under way; the next one misses nothing."""
    async with local_stack(folder, tmp_path, StackShape(workers=1)) as stack:
        gate = threading.Event()
        slow_copies(stack, 0, gate)
        abandoned = stack.client.generate(cases[-1].prompt, max_tokens=200, ignore_eos=True)
        async for _ in abandoned:
            break
        await stack.scheduler.stop(0)
        heir = make_scheduler(folder, tmp_path, StackShape(workers=1))
        address = await heir.start("127.0.0.1:0")
        try:
            async with AsyncClient(address) as client:
                await asyncio.sleep(0.3)
                gate.set()
                await wait_for_workers(client, 1)
                answers = await asyncio.gather(
                    *(
                        client.generate(
                            case.prompt, max_tokens=NEW_TOKENS, ignore_eos=True
                        ).complete()
                        for case in cases[::3]
                    )
                )
                assert [list(a.token_ids) for a in answers] == [case.wanted for case in cases[::3]]
        finally:
            await heir.stop(1.0)
