"""The batch of a worker: against its definition, by brute force, and each of its limits."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from splitpoint.costs.profile import BUILT_IN_PROFILES, Profile
from splitpoint.errors import ResourceExhausted
from splitpoint.options.worker import MAX_BATCH
from splitpoint.residency.batch_size import (
    FREE_GROWTH,
    LEAST,
    MOST_STEP_SECONDS,
    SIZES,
    TYPICAL_TOKENS,
    BatchLimit,
    BatchSize,
    choose_batch_size,
)
from splitpoint.shapes import BUILT_IN_SHAPES, ModelShape

LLAMA = BUILT_IN_SHAPES["llama-168m"]
CHUNK = 64
EACH = TYPICAL_TOKENS // CHUNK
ROW_FLOPS = LLAMA.prefill_flops_per_token + 2 * LLAMA.vocabulary_size * LLAMA.hidden_size
# Two cores: a step of one takes 20 ms, the products of a row 1 ms.
CPU = Profile(
    link_bytes_per_second=10e9,
    link_overhead_seconds=0.0,
    rebuild_flops_per_second=1e12,
    rebuild_overhead_seconds=0.0,
    prefill_flops_per_second=ROW_FLOPS / 1e-3,
    step_compute_seconds=20e-3,
)
# K and V of one sequence, read as fast as the weights in the step of one.
READ = 20e-3 / LLAMA.step_weight_bytes * LLAMA.kv_bytes_per_token * TYPICAL_TOKENS


def chosen(
    pages: Callable[[int], int] = lambda size: 10**6,
    profile: Profile = CPU,
    shape: ModelShape = LLAMA,
    **options: Any,
) -> BatchSize:
    return choose_batch_size(
        shape, profile, pages, chunk_tokens=CHUNK, prefill_tokens=512, **options
    )


def test_a_step_stays_within_the_bound() -> None:
    found = chosen()

    def step(count: int) -> float:
        return max(20e-3, count * 1e-3) + count * READ

    assert found.limit is BatchLimit.STEP
    assert step(found.size) <= MOST_STEP_SECONDS < step(found.more)
    assert found.size in SIZES
    assert found.size > LEAST
    assert found.step_seconds == pytest.approx(step(found.size))
    assert found.fewer == LEAST
    assert found.fewer_seconds == pytest.approx(step(LEAST))
    assert found.more_seconds == pytest.approx(step(found.more))


def test_a_small_model_reads_its_cache_as_fast_as_the_link_copies() -> None:
    """Of its step little is the reading of weights."""
    tiny = replace(LLAMA, layer_count=1, vocabulary_size=100)
    slow = chosen(shape=tiny, profile=replace(CPU, link_bytes_per_second=1.0))
    fast = chosen(shape=tiny)
    read = fast.size * TYPICAL_TOKENS * tiny.kv_bytes_per_token / CPU.link_bytes_per_second
    row = tiny.prefill_flops_per_token + 2 * tiny.vocabulary_size * tiny.hidden_size
    products = fast.size * row / CPU.prefill_flops_per_second
    assert fast.step_seconds == pytest.approx(max(20e-3, products) + read)
    assert slow.step_seconds > fast.step_seconds


def test_the_memory_holds_as_many_typical_sequences() -> None:
    """Each place takes two pages of workspace from the cache."""
    found = chosen(lambda size: 60 * (EACH + 2) - 2 * size)
    assert (found.size, found.limit, found.held) == (48, BatchLimit.MEMORY, 61)
    assert found.cost_bytes == 2 * 16 * LLAMA.page_bytes(CHUNK)
    # To the page.
    assert chosen(lambda size: 48 * EACH).size == 48
    assert chosen(lambda size: 48 * EACH - 1).size == LEAST


def test_a_short_context_needs_less() -> None:
    short = replace(LLAMA, context_length=100)
    found = chosen(lambda size: 64 * 2, shape=short)
    assert (found.size, found.tokens, found.held) == (64, 100, 64)


def test_never_fewer_than_the_least() -> None:
    """Short requests fit where long ones do not, and a longer step is better than a queue."""
    found = chosen(lambda size: EACH)
    assert (found.size, found.held, found.limit) == (LEAST, 1, BatchLimit.MEMORY)
    assert (found.fewer, found.cost_bytes) == (1, 0)
    slow = chosen(profile=replace(CPU, prefill_flops_per_second=ROW_FLOPS / 50e-3))
    assert (slow.size, slow.limit) == (LEAST, BatchLimit.STEP)
    assert slow.step_seconds > MOST_STEP_SECONDS


def test_rows_that_cost_nothing_are_taken() -> None:
    """Reading the weights takes a second, the work of 512 rows hardly more."""
    weights_bound = replace(
        CPU,
        step_compute_seconds=1.0,
        prefill_flops_per_second=512 * ROW_FLOPS,
        memory_seconds_per_byte=1e-15,
    )
    found = chosen(profile=weights_bound)
    assert (found.size, found.limit, found.more) == (512, BatchLimit.MOST, 512)
    assert MOST_STEP_SECONDS < found.step_seconds <= FREE_GROWTH
    # Weights on the host: the link takes the time.
    on_host = replace(CPU, host_weight_bytes=10**10, prefill_flops_per_second=ROW_FLOPS / 1e-4)
    found = chosen(profile=on_host)
    assert found.step_seconds == pytest.approx(1.0)
    assert found.size == 512


def test_what_is_given_stays_and_its_costs_are_told() -> None:
    for size in (1, 7, LEAST, 200, 512):
        found = chosen(lambda size: 10 * EACH, given=size)
        assert (found.size, found.limit, found.held) == (size, BatchLimit.GIVEN, 10)
        assert found.reason.startswith(f"batch {size} (--max-batch): memory for 10 sequences")
    assert chosen(given=1).fewer == 1


def test_a_draft_model_keeps_the_least() -> None:
    found = chosen(has_draft_model=True)
    assert (found.size, found.limit) == (LEAST, BatchLimit.DRAFTS)
    assert "beside a draft model" in found.reason
    assert chosen(has_draft_model=True, given=64).size == 64


def test_a_memory_that_is_too_small_is_an_error_for_the_least_only() -> None:
    def pages(size: int) -> int:
        if size > most:
            raise ResourceExhausted("too small", reason="DEVICE_MEMORY")
        return 10**6

    most = 64
    assert (chosen(pages).size, chosen(pages).limit) == (64, BatchLimit.MEMORY)
    with pytest.raises(ResourceExhausted):
        chosen(pages, given=65)
    most = LEAST - 1
    with pytest.raises(ResourceExhausted):
        chosen(pages)


def _pages(total: int, row: float, size: int) -> int:
    return int(total - row * size)


def test_the_largest_of_all_sizes_that_keep_both_bounds() -> None:
    """Random machines, models and memories, in which a larger batch leaves fewer pages."""
    rng, seen = random.Random(34), set()
    for _ in range(500):
        shape = rng.choice(list(BUILT_IN_SHAPES.values()))
        profile = rng.choice(list(BUILT_IN_PROFILES.values()))
        if rng.random() < 0.5:
            profile = replace(
                profile,
                step_compute_seconds=10 ** rng.uniform(-3, 0),
                prefill_flops_per_second=10 ** rng.uniform(10, 15),
                memory_seconds_per_byte=rng.choice((0.0, 1e-12, 1e-10)),
            )
        total, row = rng.randrange(1, 20_000), rng.random() * 8
        pages = partial(_pages, total, row)
        found = chosen(pages, profile, shape)
        alone = chosen(profile=profile, shape=shape, given=1).step_seconds
        most = max(MOST_STEP_SECONDS, FREE_GROWTH * alone)
        given = (chosen(pages, profile, shape, given=size) for size in SIZES[1:])
        kept = [each.size for each in given if each.held >= each.size and each.step_seconds <= most]
        assert found.size == max(kept, default=LEAST)
        seen.add((found.size, found.limit))
    assert {limit for _, limit in seen} == {BatchLimit.MEMORY, BatchLimit.STEP, BatchLimit.MOST}
    assert len({size for size, _ in seen}) >= 8


def test_the_reason_names_memory_steps_and_prompts() -> None:
    found = BatchSize(
        size=96,
        limit=BatchLimit.STEP,
        tokens=1024,
        held=131,
        cost_bytes=3 << 20,
        prefill_tokens=512,
        step_seconds=0.141,
        prefill_seconds=0.73,
        fewer=32,
        fewer_seconds=0.0666,
        more=128,
        more_seconds=0.2071,
    )
    assert found.reason == (
        "batch 96 (a step of 128 takes about 207 ms): memory for 131 sequences of 1,024 tokens "
        "(3 MiB less than with 32 places); a step of 96 takes about 141 ms, of 32 66.6 ms, and "
        "730 ms with 512 prompt tokens beside it"
    )
    small = replace(found, size=32, limit=BatchLimit.MEMORY, more=48, cost_bytes=0, held=1)
    small = replace(small, step_seconds=0.02, fewer=1, fewer_seconds=0.004, prefill_tokens=1)
    assert small.reason == (
        "batch 32 (too little memory for 48): memory for 1 sequence of 1,024 tokens; a step of 32 "
        "takes about 20 ms, of 1 4 ms, and 730 ms with 1 prompt token beside it"
    )
    assert replace(found, limit=BatchLimit.MOST).reason.startswith("batch 96 (the most): ")


def test_the_option_allows_every_size() -> None:
    assert (MAX_BATCH.default, MAX_BATCH.most) == (None, SIZES[-1])
    assert f"{LEAST} to {SIZES[-1]}" in MAX_BATCH.help
