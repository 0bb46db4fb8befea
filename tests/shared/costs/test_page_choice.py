"""The choice of the page size from costs: policy only. Under a second."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial

import pytest

from splitpoint.costs.page_choice import (
    BucketCosts,
    PageCosts,
    Rows,
    best_rows,
    choose_page,
    nearest_power,
    typical_rows,
)
from splitpoint.shapes import BUILT_IN_SHAPES, DataType, chunks_of

SHAPE = replace(BUILT_IN_SHAPES["opt-125m"], data_type=DataType.FLOAT32)
GIB = 1 << 30


def costs(rows: float) -> PageCosts:
    """A page costs as much as a number of rows."""
    return PageCosts(step_seconds=1e-4, page_seconds=rows * 1e-6, row_seconds=1e-6)


def test_typical_requests_are_half_a_context_and_some_more() -> None:
    assert typical_rows(SHAPE).mean == 1024 + 256 / 2
    assert typical_rows(replace(SHAPE, context_length=1 << 17)) == typical_rows(SHAPE)
    assert typical_rows(replace(SHAPE, context_length=100)).mean == 50 + 12 / 2


@pytest.mark.parametrize(
    # sqrt(2 * ratio * 1152)
    ("ratio", "tokens"),
    [(1.0, 64), (0.8, 32), (2.0, 64), (4.0, 128), (15.0, 256)],
)
def test_the_nearest_power_of_two_is_chosen(ratio: float, tokens: int) -> None:
    choice = choose_page(SHAPE, costs(ratio), arena_bytes=8 * GIB, has_gpu=False)
    assert choice.tokens == tokens
    assert choice.reason.startswith(f"auto: a page costs attention as much as {ratio} rows")
    assert "1,152 tokens" in choice.reason
    assert "but" not in choice.reason


@pytest.mark.parametrize(
    ("ratio", "arena_bytes", "has_gpu", "tokens", "why"),
    [
        (0.0, 8 * GIB, False, 16, "pages of 0 are best, but chunks have at least 16"),
        (1e6, 8 * GIB, False, 256, "but chunks of an arena of 8 GiB have at most 256"),
        # 73,728 bytes a token: 64 chunks of 16 tokens take 72 MiB, of 32 144 MiB.
        (4.0, 100 << 20, False, 16, "but chunks of an arena of 100 MiB have at most 16"),
        # An arena too small for that still gets a size.
        (4.0, 10 << 20, False, 2, "at most 2"),
        # K of one layer: 3,072 bytes a token, so 64 KiB are 22 tokens.
        (0.0, 8 * GIB, True, 32, "but copies of 64 KiB each have at least 32"),
    ],
)
def test_arena_and_link_limit_the_choice(
    ratio: float, arena_bytes: int, has_gpu: bool, tokens: int, why: str
) -> None:
    choice = choose_page(SHAPE, costs(ratio), arena_bytes=arena_bytes, has_gpu=has_gpu)
    assert choice.tokens == tokens
    assert why in choice.reason


def test_no_page_is_longer_than_a_context() -> None:
    short = replace(SHAPE, context_length=48)
    assert choose_page(short, costs(1e6), arena_bytes=8 * GIB, has_gpu=False).tokens == 32


# -- bMC's model: its sums by hand and by brute force, and its best sizes. Under a second ---


def test_a_generation_by_hand() -> None:
    """4 tokens after 3 rows, by buckets of 2: copies of 3 and 5 rows, reads of 5, 5, 7, 7."""
    costs = BucketCosts(100, 1, 10_000, 1_000_000, 100_000_000)
    assert costs.seconds(Rows(3, 4), 2) == 400 + 24 + 20_000 + 8_000_000 + 400_000_000


def test_a_generation_with_drafts_by_hand() -> None:
    """5 tokens after 3 rows, 2 in a step of 3 drafts, by buckets of 2.

    The steps compute 4, 3 and 1 rows, from 3, 5 and 7 rows on: they grow to 7, to 9, and not.
    """
    costs = BucketCosts(100, 1, 10_000, 1_000_000, 100_000_000)
    rows = Rows(3, 5, drafts=3, step_tokens=2)
    assert [*rows.steps] == [(3, 4), (5, 3), (7, 1)]
    assert costs.seconds(rows, 2) == 300 + 25 + 20_000 + 8_000_000 + 600_000_000
    # One by one grows by what the step lacks.
    assert costs.seconds(rows, 1) == 300 + 23 + 20_000 + 8_000_000 + 500_000_000


@pytest.mark.parametrize("seed", range(40))
def test_the_closed_form_is_near_the_best_of_all_powers(seed: int) -> None:
    """Whole buckets move the best size by less than a power, and its time by little."""
    draw = random.Random(seed)
    rows = Rows(draw.randint(0, 500), draw.choice((256, 512, 1024)))
    if seed % 2:
        drafts = draw.randint(1, 15)
        rows = replace(rows, drafts=drafts, step_tokens=draw.randint(1, 1 + drafts))
    row = draw.uniform(0.5, 2)
    costs = BucketCosts(0.0, row, draw.uniform(0, 20) * row, draw.uniform(0.2, 8) * row, 0.0)
    seconds = partial(costs.seconds, rows)
    best = min(rows.bucket_sizes, key=seconds)
    chosen = nearest_power(costs.best_bucket(rows), most=rows.new)
    assert best / 2 <= chosen <= 2 * best
    assert seconds(chosen) <= 1.04 * seconds(best)


def pages_seconds(costs: PageCosts, rows: Rows, page: int) -> float:
    """The seconds of a generation over pages, step by step."""
    lengths = [length + 1 for length, _ in rows.steps]
    pages = sum(chunks_of(length, page) for length in lengths)
    return len(lengths) * costs.step_seconds + pages * (
        costs.page_seconds + page * costs.row_seconds
    )


@pytest.mark.parametrize("seed", range(40))
def test_the_chosen_page_is_near_the_best_whatever_a_step_yields(seed: int) -> None:
    """Eq. 9 for pages: both costs are paid a step, so the tokens of a step have no part in it."""
    draw = random.Random(seed)
    shape = replace(SHAPE, context_length=draw.choice((512, 1024, 2048)))
    measured = costs(draw.uniform(1, 12))
    chosen = choose_page(shape, measured, arena_bytes=8 * GIB, has_gpu=False).tokens
    rows = replace(typical_rows(shape), drafts=draw.randint(0, 8), step_tokens=draw.randint(1, 5))
    sizes = [1 << exponent for exponent in range(4, 9)]
    best = min(pages_seconds(measured, rows, page) for page in sizes)
    assert pages_seconds(measured, rows, chosen) <= 1.04 * best


def test_the_number_of_growths_is_proportional_to_the_root_of_the_tokens() -> None:
    costs = BucketCosts(0.0, 1.0, 0.0, 2.0, 0.0)
    assert costs.ratio == 2
    growths = [new / costs.best_bucket(Rows(0, new)) for new in (64, 256, 1024, 4096)]
    assert growths == pytest.approx([growths[0] * 2**n for n in range(4)])
    # r* = sqrt(2 cc (s + G/2)), as the design has it.
    assert costs.best_bucket(Rows(100, 200)) == math.sqrt(2 * 2 * 200) == best_rows(2, 200)


def test_the_number_of_growths_falls_with_the_root_of_the_tokens_of_a_step() -> None:
    """Eq. 9: T is proportional to sqrt(N / m)."""
    costs = BucketCosts(0.0, 1.0, 0.0, 2.0, 0.0)
    growths = [1024 / costs.best_bucket(Rows(0, 1024, 15, m)) for m in (16, 4, 1)]
    assert growths == pytest.approx([growths[0] * 2**n for n in range(3)])


def test_best_sizes_stay_within_the_generation() -> None:
    expensive, free = BucketCosts(0, 1, 1e9, 1e9, 0), BucketCosts(0, 1, 0, 0, 0)
    assert expensive.best_bucket(Rows(10, 100)) == 100
    assert free.best_bucket(Rows(10, 100)) == 1


def test_sizes_are_powers_of_two_and_everything() -> None:
    assert Rows(0, 1).bucket_sizes == (1,)
    assert Rows(0, 8).bucket_sizes == (1, 2, 4, 8)
    assert Rows(5, 12).bucket_sizes == (1, 2, 4, 8, 12)


@pytest.mark.parametrize(
    ("rows", "power"),
    [(0.1, 16), (16, 16), (22, 16), (23, 32), (90, 64), (91, 128), (1e6, 256), (float("inf"), 256)],
)
def test_the_nearest_power_is_nearest_by_quotient(rows: float, power: int) -> None:
    assert nearest_power(rows, least=16, most=300) == power
