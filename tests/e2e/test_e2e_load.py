"""Load, limits and the end of things, on the whole stack."""

from __future__ import annotations

import asyncio
import gc
import os
from pathlib import Path

import pytest
from local_stack import (
    LocalStack,
    StackShape,
    local_stack,
    prompt_of,
)
from long_runs import scaled
from tiny_models import VOCABULARY, build_tiny, clear_prompt

from splitpoint.planning.plan import ReasonKind, Residency
from splitpoint.planning.schedule import Schedule
from worker_service.device.memory import MemoryPlan


def fd_count(pid: int | str = "self") -> int:
    """Open descriptors; those that earlier tests left to the garbage collector are gone."""
    gc.collect()
    return len(os.listdir(f"/proc/{pid}/fd"))


async def plan_of(folder: Path, sockets: Path, shape: StackShape) -> MemoryPlan:
    sockets.mkdir()
    async with local_stack(folder, sockets, shape) as stack:
        return stack.workers[0].engine.memory_plan


@pytest.mark.scaled
async def test_many_requests_against_a_budget_for_8(folder: Path, tmp_path: Path) -> None:
    """Two workers with room for four each; everything finishes, rightly, and is given back."""
    model = build_tiny("llama")
    probe = await plan_of(folder, tmp_path / "p", StackShape(workers=1))
    pages_each = 4  # 40 prompt tokens and 20 new ones, in chunks of 16
    budget = probe.budget_bytes - (probe.page_count - 4 * pages_each) * probe.page_bytes
    shape = StackShape(device_memory_bytes=budget, shares_prefixes=True)
    async with local_stack(folder, tmp_path, shape) as stack:
        assert stack.workers[0].engine.memory_plan.page_count == 4 * pages_each
        prompts, wanted = zip(
            *(clear_prompt(model, 40, 20, seed=seed) for seed in range(scaled(20, chaos=50))),
            strict=True,
        )

        async def one(prompt: list[int]) -> list[int]:
            answer = await stack.client.generate(
                prompt, max_tokens=20, ignore_eos=True, residency=Residency.RESIDENT
            ).complete()
            return list(answer.token_ids)

        await one(prompts[0])
        await stack.assert_clean()
        before = fd_count(), fd_count(stack.store_process.pid)
        answers = await asyncio.gather(*(one(prompt) for prompt in prompts))
        assert answers == list(wanted)
        await stack.assert_clean()
        after = fd_count(), fd_count(stack.store_process.pid)
        assert all(a <= b + 2 for a, b in zip(after, before, strict=True)), (before, after)
        workers = await stack.client.list_workers()
        assert [worker.cache_charged_bytes for worker in workers] == [0, 0]


async def test_a_front_of_what_must_stream_stays_where_memory_is_free(
    folder: Path, tmp_path: Path
) -> None:
    """Half of what is free beside the charge: planned, charged, kept, and never pulled."""
    model = build_tiny("llama")
    prompt, wanted = clear_prompt(model, 210, 40)
    probe = await plan_of(folder, tmp_path / "p", StackShape(workers=1))
    least, spare = probe.streamed_page_count, 6
    pages = least + 2 * spare
    budget = probe.budget_bytes - (probe.page_count - pages) * probe.page_bytes
    shape = StackShape(workers=1, device_memory_bytes=budget)
    async with local_stack(folder, tmp_path, shape) as stack:
        engine = stack.workers[0].engine
        assert (engine.memory_plan.page_count, least) == (pages, 1)
        for attempt in range(2):
            # Cold, its front stays as it is sealed; then it comes back from the store.
            answer = await stack.client.generate(prompt, max_tokens=40, ignore_eos=True).complete()
            assert list(answer.token_ids) == wanted
            plan = answer.plan
            assert plan is not None
            assert plan.residency is Residency.STREAMED
            assert ReasonKind.SPARE in dict(plan.reasons)
            assert plan.footprint_bytes == (least + spare) * probe.page_bytes
            # K and V of a chunk in each page, or X of two.
            assert plan.resident_tokens == spare * shape.chunk_tokens * (
                2 if plan.schedule is Schedule.ROW else 1
            )
            times = engine.last_step
            assert times is not None
            layers, page = engine.model.shape.layer_count, shape.chunk_tokens
            stored = (len(prompt) + 39) // page
            pulled = (times.loaded_tokens + times.rebuilt_tokens) // layers
            kept = 0 if plan.schedule is Schedule.ROW else spare
            # The last chunk may not be sealed yet.
            assert stored - 1 - kept <= pulled / page <= stored - kept, attempt
            assert engine.cache.claims.promised_count == 0
        await stack.assert_clean()


async def test_an_arena_full_of_other_prefixes_only_costs_reuse(
    folder: Path, tmp_path: Path
) -> None:
    """Far more tokens than the arena holds: evictions, and right answers all the same."""
    model = build_tiny("llama")
    shape = StackShape(host_memory="4MiB", shares_prefixes=True)
    async with local_stack(folder, tmp_path, shape) as stack:
        prompts, wanted = zip(
            *(clear_prompt(model, 100, 16, seed=seed) for seed in range(12)), strict=True
        )
        answers = await asyncio.gather(
            *(
                stack.client.generate(prompt, max_tokens=16, ignore_eos=True).complete()
                for prompt in prompts
            )
        )
        assert [list(answer.token_ids) for answer in answers] == list(wanted)
        await stack.assert_clean()
        assert (await stack.store_stats()).evicted_chunk_count > 0


async def disconnect_midway(stack: LocalStack) -> None:
    generation = stack.client.generate([5, 6, 7, 8], max_tokens=400, ignore_eos=True)
    async for _ in generation:
        break
    await generation.close()


async def test_disconnects_leave_nothing_running(folder: Path, tmp_path: Path) -> None:
    async with local_stack(folder, tmp_path) as stack:
        await disconnect_midway(stack)
        await stack.assert_clean()
        before = fd_count()
        await asyncio.gather(*(disconnect_midway(stack) for _ in range(20)))
        await stack.assert_clean()
        assert fd_count() <= before + 2


async def test_salts_keep_prefixes_apart(folder: Path, tmp_path: Path) -> None:
    async with local_stack(folder, tmp_path) as stack:
        prompt = prompt_of(64, 1, VOCABULARY)

        async def cached(salt: bytes) -> int:
            answer = await stack.client.generate(
                prompt, max_tokens=1, ignore_eos=True, cache_salt=salt
            ).complete()
            return answer.usage.cached_tokens

        assert [await cached(b""), await cached(b"a"), await cached(b"b")] == [0, 0, 0]
        assert [await cached(b""), await cached(b"a"), await cached(b"b")] == [63, 63, 63]
