"""The pool: a prefix outlives the host that computed it, and requests outlive the master."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from local_stack import LocalStack, StackShape, local_stack, prompt_of
from transfer_engine import (
    Master,
    child_of,
    master_process,
    needs_engine,
    pool_arguments,
    pool_memory,
)
from waiting import until

from splitpoint.client.answers import Completion
from splitpoint.v1 import kvstore_pb2, types_pb2

pytestmark = needs_engine

PROMPT = prompt_of(1500, seed=3, vocabulary=2000)
OTHER = prompt_of(1500, seed=4, vocabulary=2000)
FULL_TOKENS = len(PROMPT) // 16 * 16
SHAPE = StackShape(workers=1, activations="never", host_memory="64MiB")
SECONDS = 30.0


@pytest.fixture
def master() -> Iterator[Master]:
    with master_process() as master, pool_memory(master):
        yield master


@asynccontextmanager
async def host(folder: Path, name: str, model: Path, master: Master) -> AsyncIterator[LocalStack]:
    """A store, a worker and a scheduler that are started now; they stop cleanly."""
    sockets = folder / name
    sockets.mkdir()
    shape = replace(SHAPE, store_arguments=pool_arguments(master.address))
    async with local_stack(model, sockets, shape) as stack:
        await until_pool_is(stack, up=True)
        yield stack


async def pool_of(stack: LocalStack) -> kvstore_pb2.TierStats:
    [tier] = (await stack.store_stats()).tiers
    assert tier.tier == types_pb2.TIER_POOL
    return tier


async def until_pool_is(stack: LocalStack, *, up: bool) -> None:
    async with asyncio.timeout(SECONDS):
        while (await pool_of(stack)).is_up != up:
            await asyncio.sleep(0.02)


async def generate(stack: LocalStack, prompt: list[int], salt: bytes = b"") -> Completion:
    return await stack.client.generate(
        prompt, max_tokens=8, ignore_eos=True, cache_salt=salt
    ).complete()


async def test_a_host_finds_what_a_stopped_host_computed(
    tmp_path: Path, bundled_model: Path, master: Master
) -> None:
    async with host(tmp_path, "a", bundled_model, master) as first:
        right = await generate(first, PROMPT)
        assert right.usage.cached_tokens == 0
    async with host(tmp_path, "b", bundled_model, master) as second:
        found = await generate(second, PROMPT)
        assert found.token_ids == right.token_ids
        assert found.plan is not None
        assert found.plan.fetch_source == "pool", found.plan.reason_details
        assert found.plan.fetched_tokens >= FULL_TOKENS
        assert found.usage.cached_tokens >= FULL_TOKENS
        pool = await pool_of(second)
        assert (pool.read_chunk_count, pool.damaged_chunk_count) == (FULL_TOKENS // 16, 0)
        # Another tenant's salt names other chunks.
        apart = await generate(second, PROMPT, b"another")
        assert (apart.usage.cached_tokens, apart.token_ids) == (0, right.token_ids)
        await second.assert_clean()


async def test_a_killed_master_costs_the_tier_until_it_is_back(
    tmp_path: Path, bundled_model: Path, master: Master
) -> None:
    async with host(tmp_path, "a", bundled_model, master) as first:
        engine = child_of(first.store_process.pid)
        master.kill()
        right = await generate(first, PROMPT)  # while the store may not know it yet
        await until_pool_is(first, up=False)
        assert "does not answer" in (await pool_of(first)).message
        again = await generate(first, PROMPT)
        assert again.token_ids == right.token_ids
        assert again.usage.cached_tokens == len(PROMPT) - 1
        master.start()
        await until_pool_is(first, up=True)
        await until(lambda: master.has_memory())
        other = await generate(first, OTHER)
        assert child_of(first.store_process.pid) == engine  # one process through all of it
        await first.assert_clean()
    async with host(tmp_path, "b", bundled_model, master) as second:
        found = await generate(second, OTHER)
        assert found.token_ids == other.token_ids
        assert found.plan is not None
        assert found.plan.fetch_source == "pool", found.plan.reason_details
        await second.assert_clean()
