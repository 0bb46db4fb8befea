"""The store is killed under running requests and started again: no answer changes."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from local_stack import LocalStack, StackShape, local_stack
from tiny_models import build_tiny, clear_prompt

from splitpoint.client.answers import Completion
from splitpoint.planning.plan import Residency

NEW_TOKENS = 160
SHAPE = StackShape(
    host_memory="16MiB", device_memory_bytes=6 << 20, max_batch_size=8, shares_prefixes=True
)


@dataclass(frozen=True)
class Case:
    prompt: list[int]
    wanted: list[int]


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    model = build_tiny("llama")
    return [
        Case(*clear_prompt(model, length, NEW_TOKENS, seed=seed))
        for seed, length in enumerate((40, 70))
    ]


async def generate(
    stack: LocalStack, case: Case, residency: Residency, started: asyncio.Event | None = None
) -> list[int]:
    answer: list[int] = []
    generation = stack.client.generate(
        case.prompt, max_tokens=NEW_TOKENS, ignore_eos=True, residency=residency
    )
    async for event in generation:
        if isinstance(event, Completion):
            break
        answer += event.token_ids
        if started is not None and len(answer) > 20:
            started.set()
    return answer


@pytest.mark.parametrize("residency", [Residency.RESIDENT, Residency.STREAMED])
async def test_a_request_outlives_its_store(
    folder: Path, tmp_path: Path, cases: list[Case], residency: Residency
) -> None:
    async with local_stack(folder, tmp_path, SHAPE) as stack:
        started = [asyncio.Event() for _ in cases]
        running = [
            asyncio.create_task(generate(stack, case, residency, event))
            for case, event in zip(cases, started, strict=True)
        ]
        for event in started:
            await asyncio.wait_for(event.wait(), 60)
        assert not any(task.done() for task in running)
        await stack.restart_store(after_seconds=0.5)
        for case, task in zip(cases, running, strict=True):
            assert await asyncio.wait_for(task, 120) == case.wanted
        await stack.wait_attached()
        stats = await stack.store_stats()
        assert stats.epoch == 2
        assert stats.adopted_chunk_count > 0
        assert stats.checksum_failure_count == 0
        # What was sealed before the kill is there, and right: the prompts hit.
        for case in cases:
            completion = await stack.client.generate(
                case.prompt, max_tokens=4, ignore_eos=True, residency=Residency.RESIDENT
            ).complete()
            assert list(completion.token_ids) == case.wanted[:4]
            assert completion.usage.cached_tokens >= len(case.prompt) // 16 * 16 - 16
        await stack.assert_clean()


@pytest.mark.parametrize(
    "kills",
    [2, pytest.param(60, marks=[pytest.mark.chaos, pytest.mark.timeout(900)])],
)
async def test_kills_under_load(
    folder: Path, tmp_path: Path, cases: list[Case], kills: int
) -> None:
    """Restarts in a row while requests of both kinds come and go."""
    seed = random.randrange(1 << 30) if kills > 2 else 4
    print(f"seed {seed}")
    rng = random.Random(seed)
    async with local_stack(folder, tmp_path, SHAPE) as stack:
        over = asyncio.Event()
        count = 0

        async def client() -> None:
            nonlocal count
            while not over.is_set():
                case = rng.choice(cases)
                residency = rng.choice([Residency.RESIDENT, Residency.STREAMED])
                assert await generate(stack, case, residency) == case.wanted
                count += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(client())
            for _ in range(kills):
                await asyncio.sleep(0.5 + rng.random())
                await stack.restart_store(after_seconds=rng.choice([0.0, 0.4]))
            await stack.wait_attached()
            over.set()
        assert count >= kills
        assert (await stack.store_stats()).epoch == kills + 1
        await stack.assert_clean()
