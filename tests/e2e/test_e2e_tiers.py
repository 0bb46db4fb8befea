"""A prefix that only the disk tier holds: the plan names it, and the text is the same.

The store is a process with a small arena; the worker says that it computes slowly, so that loading
pays.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
from local_stack import LocalStack, StackShape, local_stack
from tiny_models import build_tiny, clear_prompt, write_tiny
from waiting import until

from splitpoint.client.answers import Completion
from splitpoint.planning.plan import ReasonKind
from splitpoint.tiers import Tier

NEW_TOKENS = 8
CHUNK_TOKENS = 16
# The arena holds 85 chunks, three of these conversations.
TOKENS = 400
COUNT = 4


@functools.cache
def reference(number: int) -> tuple[list[int], list[int]]:
    """Return a prompt and its greedy tokens."""
    return clear_prompt(build_tiny("llama"), TOKENS + number, NEW_TOKENS)


def tiered(folder: Path, *more: str) -> StackShape:
    options = ("--tier-disk", str(folder / "tier"), "--tier-disk-size", "64MiB", *more)
    return StackShape(workers=1, host_memory="5MiB", activations="never", store_arguments=options)


async def pretend(stack: LocalStack, disk_bytes_per_second: float) -> None:
    """Let the worker report a slow device, and this rate of its disk tier."""
    [worker] = stack.workers
    runtime = worker.runtime
    assert runtime.prefixes is not None
    slow = replace(runtime.profile, prefill_flops_per_second=1e7)
    await runtime.calls.run(lambda: worker.engine.watch_costs(slow))
    runtime.prefixes.fetcher.rates.by_key[Tier.DISK.value] = disk_bytes_per_second
    runtime._on_rates()
    scheduler = stack.scheduler.registry.find("0")
    assert scheduler is not None

    def reported() -> bool:
        assert scheduler.ready is not None
        rates = scheduler.ready.facts.profile.remote_bytes_per_second
        return rates.get(Tier.DISK.value) == disk_bytes_per_second

    await until(reported)


async def ask(stack: LocalStack, number: int) -> Completion:
    prompt, wanted = reference(number)
    answer = await stack.client.generate(prompt, max_tokens=NEW_TOKENS, ignore_eos=True).complete()
    assert list(answer.token_ids) == wanted
    return answer


async def fill(stack: LocalStack) -> None:
    """Ask all: the first prompt leaves the arena, at least its end, and goes to the disk."""
    for number in range(COUNT):
        answer = await ask(stack, number)
        assert answer.plan is not None
        assert (answer.plan.fetched_tokens, answer.plan.fetch_source) == (0, "")


async def test_a_prefix_comes_back_from_disk_and_the_plan_says_so(
    tmp_path: Path, tiny: Path
) -> None:
    async with local_stack(tiny, tmp_path, tiered(tmp_path)) as stack:
        await fill(stack)
        await pretend(stack, 2e9)
        answer = await ask(stack, 0)
        plan = answer.plan
        assert plan is not None
        assert plan.fetch_source == "disk"
        assert plan.fetched_tokens >= CHUNK_TOKENS
        # The arena still had the beginning. The last token is computed in any case.
        assert plan.cached_tokens == TOKENS - 1
        assert plan.cached_tokens - plan.fetched_tokens >= CHUNK_TOKENS - 1
        why = dict(plan.reasons)
        assert why[ReasonKind.FETCH][:4] == (plan.fetched_tokens - 1, "disk", "", 2e9)
        assert why[ReasonKind.FETCHED][0] == plan.fetched_tokens
        assert stack.workers[0].runtime.counters.fetched.tokens == plan.fetched_tokens
        stats = (await stack.store_stats()).tiers[0]
        assert stats.read_chunk_count * CHUNK_TOKENS == plan.fetched_tokens
        await stack.assert_clean()
        # It is in the arena now.
        again = await ask(stack, 0)
        assert again.plan is not None
        assert again.plan.fetched_tokens == 0


async def test_a_tier_that_is_too_slow_is_not_read(tmp_path: Path, tiny: Path) -> None:
    async with local_stack(tiny, tmp_path, tiered(tmp_path)) as stack:
        await fill(stack)
        await pretend(stack, 10.0)
        answer = await ask(stack, 0)
        assert answer.plan is not None
        assert answer.plan.fetch_source == ""
        assert ReasonKind.NO_FETCH in dict(answer.plan.reasons)
        assert (await stack.store_stats()).tiers[0].read_chunk_count == 0
        await stack.assert_clean()


async def test_a_damaged_tier_costs_reuse_only(tmp_path: Path, tiny: Path) -> None:
    async with local_stack(tiny, tmp_path, tiered(tmp_path)) as stack:
        await fill(stack)
        await pretend(stack, 1e9)
        for file in (tmp_path / "tier").rglob("*"):
            if file.is_file() and file.stat().st_size > 4096:
                content = bytearray(file.read_bytes())
                content[4096:] = bytes(each ^ 0xFF for each in content[4096:])
                with file.open("r+b") as stream:
                    stream.write(content)
        answer = await ask(stack, 0)
        assert answer.plan is not None
        assert (answer.plan.fetched_tokens, answer.plan.fetch_source) == (0, "")
        assert dict(answer.plan.reasons)[ReasonKind.FETCHED][0] == 0
        await stack.assert_clean()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("llama", tmp_path_factory.mktemp("llama"))
