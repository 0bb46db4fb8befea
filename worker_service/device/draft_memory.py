"""Divides the device memory of a draft model: pure arithmetic, which allocates nothing."""

from __future__ import annotations

from dataclasses import replace

from splitpoint.shapes import ArenaLayout, ModelShape, chunks_of
from worker_service.device.memory import MemoryPlan, divide

# The draft model's cache takes at most this share of the worker's memory.
CACHE_SHARE = 0.1


def draft_memory(
    shape: ModelShape,
    served: ModelShape,
    *,
    weight_bytes: int,
    chunk_tokens: int,
    budget_bytes: int,
    max_batch_size: int,
    max_batched_tokens: int,
) -> MemoryPlan:
    """Return the part of a worker's budget that a draft model of this shape takes.

    Its cache holds the longest sequences of a whole batch, or what CACHE_SHARE of the worker's
    `budget_bytes` allows. The answer's `budget_bytes` are the draft model's alone. Raises
    ResourceExhausted.
    """
    most = divide(
        shape,
        ArenaLayout.of(shape, chunk_tokens=chunk_tokens, has_activations=False),
        budget_bytes=budget_bytes,
        weight_bytes=weight_bytes,
        max_batch_size=max_batch_size,
        max_batched_tokens=max_batched_tokens,
        staging_pages=1,
        has_store=False,
    )
    longest = min(shape.context_length, served.context_length)
    wanted = max_batch_size * chunks_of(longest, chunk_tokens)
    allowed = max(1, int(CACHE_SHARE * budget_bytes) // most.page_bytes)
    pages = min(wanted, allowed, most.page_count)
    size = most.weight_bytes + most.workspace_bytes + pages * most.page_bytes
    return replace(most, budget_bytes=size, page_count=pages)
