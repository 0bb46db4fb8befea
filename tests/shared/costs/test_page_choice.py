"""The choice of the page size from costs: policy only. Under a second."""

from __future__ import annotations

from dataclasses import replace

import pytest

from splitpoint.costs.page_choice import PageCosts, choose_page, typical_rows
from splitpoint.shapes import BUILT_IN_SHAPES, DataType

SHAPE = replace(BUILT_IN_SHAPES["opt-125m"], data_type=DataType.FLOAT32)
GIB = 1 << 30


def costs(rows: float) -> PageCosts:
    """A page costs as much as so many rows."""
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
