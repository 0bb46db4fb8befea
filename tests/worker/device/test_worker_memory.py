"""How a worker divides its device memory: tiles that suit a GPU's link."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from splitpoint.planning.weight_placement import StepRates, WeightSizes
from splitpoint.shapes import BUILT_IN_SHAPES, ArenaLayout
from worker_service.device.memory import (
    GPU_TILE_BYTES,
    PREFILL_SHARE,
    STAGING_PAGES,
    STAGING_SHARE,
    collected_bytes,
    divide,
    grown_prefill,
    largest_tile,
    place,
    staging_bytes,
    staging_pages_on_gpu,
)

SHAPE = BUILT_IN_SHAPES["opt-6.7b"]
LAYOUT = ArenaLayout.of(SHAPE, chunk_tokens=64, has_activations=True)


def test_tiles_on_a_gpu_are_as_large_as_its_link_needs() -> None:
    """K and V of a chunk of OPT-6.7B take 1 MiB a layer: 64 chunks a tile, three of those."""
    budget = 80 << 30
    pages = staging_pages_on_gpu(SHAPE, LAYOUT, budget)
    assert pages == 192
    tile = largest_tile(pages) * LAYOUT.chunk_tokens * SHAPE.kv_bytes_per_token_layer
    assert tile == GPU_TILE_BYTES
    plan = divide(
        SHAPE,
        LAYOUT,
        budget_bytes=budget,
        weight_bytes=SHAPE.weight_bytes,
        max_batch_size=32,
        max_batched_tokens=512,
        staging_pages=pages,
    )
    assert plan.staging_pages == pages


def test_a_small_budget_keeps_its_pages_for_the_cache() -> None:
    budget = 4 << 30
    pages = staging_pages_on_gpu(SHAPE, LAYOUT, budget)
    assert STAGING_PAGES <= pages < 192
    assert staging_bytes(SHAPE, LAYOUT, pages) <= STAGING_SHARE * budget
    assert staging_pages_on_gpu(SHAPE, LAYOUT, 1 << 20) == STAGING_PAGES


def test_one_more_streamed_sequence_takes_its_tail_and_rows_of_its_own() -> None:
    """Whatever its length: its cache passes through staging memory that all sequences share.

    A page of K and V and one of X, for tokens that are not in the store yet; logits twice, a row
    of the widest tensors, and three partial results of attention.
    """
    plans = {
        batch: divide(
            SHAPE,
            LAYOUT,
            budget_bytes=40 << 30,
            weight_bytes=1 << 30,
            max_batch_size=batch,
            max_batched_tokens=512,
        )
        for batch in (8, 32)
    }
    few, many = plans[8], plans[32]
    assert few.staging_pages == many.staging_pages
    assert few.room_page_count == many.room_page_count
    assert few.streamed_page_count == many.streamed_page_count == 1
    inputs = LAYOUT.chunk_tokens * SHAPE.activation_bytes_per_token
    hidden, inner, size = SHAPE.hidden_size, SHAPE.intermediate_size, SHAPE.data_type.size
    row = (4 * hidden + max(2 * inner, 3 * hidden) + inner) * size
    partials = 3 * 4 * (hidden + 2 * SHAPE.query_head_count)
    more = inputs + 2 * 4 * SHAPE.vocabulary_size + row
    grown = many.workspace_bytes - few.workspace_bytes
    # Attention of prompts may be what the workspace is planned for.
    assert 24 * more <= grown <= 24 * (more + partials)
    tail = many.page_bytes + inputs
    assert 0.9 < 24 * tail / (grown + 24 * many.page_bytes) < 1


def test_pieces_of_prompts_grow_with_the_link_time_of_the_weights_and_stay_small_in_memory() -> (
    None
):
    """A token of OPT-6.7B takes 13 GFLOP: 0.13 ms at 100 TFLOPS."""
    sizes = WeightSizes.of(SHAPE)
    limits: dict[str, Any] = {
        "budget_bytes": 8 << 30,
        "max_batch_size": 32,
        "max_batched_tokens": 256,
        "staging_pages": STAGING_PAGES,
        "has_store": True,
    }
    grown = []
    for link in (1e12, 50e9, 25e9, 1e9):
        rates = StepRates(link, token=0.13e-3)
        placement = place(SHAPE, LAYOUT, sizes, rates=rates, **limits)
        grown.append(grown_prefill(SHAPE, LAYOUT, placement, rates, **limits))
        plans = [
            divide(
                SHAPE,
                LAYOUT,
                weight_bytes=placement.device_bytes,
                **limits | {"max_batched_tokens": tokens},
            )
            for tokens in (256, grown[-1])
        ]
        kept = plans[1].cache_capacity_bytes / plans[0].cache_capacity_bytes
        assert kept >= 1 - PREFILL_SHARE - 0.01
        computed = grown[-1] * rates.token
        assert grown[-1] == 256 or computed <= placement.streamed_bytes / link
    assert grown[0] == 256
    assert grown == sorted(grown)
    assert grown[-1] > 256
    # Weights that fit leave it as it is.
    roomy = place(SHAPE, LAYOUT, sizes, **limits | {"budget_bytes": 80 << 30})
    assert grown_prefill(SHAPE, LAYOUT, roomy, StepRates(1e9), **limits) == 256


def test_logits_and_attention_of_drafted_rows_are_charged() -> None:
    """Each draft has logits, twice in fp32; 32 of a sequence attend a stored tile at once."""
    # In small chunks the rows' attention takes more than what a tile is rebuilt with.
    layout = ArenaLayout.of(SHAPE, chunk_tokens=16, has_activations=True)

    def workspace(draft_tokens: int) -> int:
        return divide(
            SHAPE,
            layout,
            budget_bytes=80 << 30,
            weight_bytes=SHAPE.weight_bytes,
            max_batch_size=8,
            max_batched_tokens=16,
            staging_pages=96,
            draft_tokens=draft_tokens,
        ).workspace_bytes

    logits = SHAPE.vocabulary_size * 4 * 2
    assert workspace(64) - workspace(0) >= 64 * logits
    # One draft more is one query more for each page of a tile.
    queries = largest_tile(96) * SHAPE.query_width * SHAPE.data_type.size
    assert workspace(32) - workspace(31) >= logits + queries


def test_the_longest_contexts_keys_are_collected_where_memory_is_plenty() -> None:
    """In little memory only what the attention of prompts leaves; no page is taken for it."""
    shape = replace(SHAPE, context_length=131_072)
    needed = collected_bytes(shape, shape.context_length)
    sizes: dict[str, Any] = {
        "weight_bytes": shape.weight_bytes,
        "max_batch_size": 8,
        "max_batched_tokens": 512,
    }
    plenty, little, alone = (
        divide(shape, LAYOUT, budget_bytes=budget << 30, has_store=has_store, **sizes)
        for budget, has_store in ((200, True), (20, True), (200, False))
    )
    assert plenty.collected_bytes == needed
    assert 0 < little.collected_bytes < needed
    assert alone.collected_bytes == little.collected_bytes
    charged = plenty.workspace_bytes - plenty.room_page_count * plenty.page_bytes
    least = little.workspace_bytes - little.room_page_count * little.page_bytes
    assert charged - least == needed - little.collected_bytes
    many = divide(shape, LAYOUT, budget_bytes=40 << 30, **sizes | {"max_batched_tokens": 4096})
    assert many.collected_bytes > needed
