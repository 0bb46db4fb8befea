"""How a worker divides its device memory: tiles that suit a GPU's link."""

from __future__ import annotations

from splitpoint.shapes import BUILT_IN_SHAPES, ArenaLayout
from worker_service.device.memory import (
    GPU_TILE_BYTES,
    STAGING_PAGES,
    STAGING_SHARE,
    divide,
    largest_tile,
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
