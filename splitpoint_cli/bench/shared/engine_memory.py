"""Device memory of a benchmark's engine: exactly what its sequences need."""

from __future__ import annotations

from splitpoint.shapes import ArenaLayout, ModelShape, chunks_of
from worker_service.device.memory import STAGING_PAGES, MemoryPlan, divide

CHUNK_TOKENS = 64
MAX_BATCHED_TOKENS = 512


def exact_memory(
    shape: ModelShape,
    layout: ArenaLayout,
    *,
    weight_bytes: int,
    batch: int,
    tokens: int,
    staging_pages: int = STAGING_PAGES,
    graph_bytes: int = 0,
    draft_tokens: int = 0,
    window_pages: int = 0,
) -> MemoryPlan:
    """Return a division with pages for `batch` resident sequences of `tokens` tokens."""

    def plan(budget: int) -> MemoryPlan:
        return divide(
            shape,
            layout,
            budget_bytes=budget,
            weight_bytes=weight_bytes,
            max_batch_size=batch,
            max_batched_tokens=MAX_BATCHED_TOKENS,
            staging_pages=staging_pages,
            graph_bytes=graph_bytes,
            draft_tokens=draft_tokens,
            window_pages=window_pages,
        )

    # Any large budget tells what is fixed.
    roomy = plan(1 << 60)
    pages = max(batch * chunks_of(tokens, layout.chunk_tokens), roomy.streamed_page_count)
    return plan(roomy.weight_bytes + roomy.workspace_bytes + pages * roomy.page_bytes)
