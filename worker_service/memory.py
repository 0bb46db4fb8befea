"""Divides a worker's device-memory budget, once, at start.

    budget = weights + workspace + input pages + cache pages

Pure arithmetic over `splitpoint.shapes`; allocates nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitpoint.config import format_size
from splitpoint.errors import ResourceExhausted
from splitpoint.shapes import ArenaLayout, ModelShape, chunks_of

STAGING_PAGES = 16
# What encoding (four float32 copies and two of bytes) and decoding (one and three)
# hold for each element at once; write-back encodes while a restore decodes.
CODEC_BYTES_PER_ELEMENT = 25


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes and pages of one worker; all of it is charged against the budget."""

    budget_bytes: int
    weight_bytes: int
    workspace_bytes: int
    page_bytes: int
    page_count: int
    input_page_count: int
    streamed_page_count: int

    @property
    def cache_capacity_bytes(self) -> int:
        """What admission may hand out: the ledger's capacity."""
        return self.page_count * self.page_bytes


def divide(
    shape: ModelShape,
    layout: ArenaLayout,
    *,
    budget_bytes: int,
    weight_bytes: int,
    max_batch_size: int,
    prefill_chunk_tokens: int,
) -> MemoryPlan:
    """Split the budget; raises ResourceExhausted with the numbers when it is too small.

    Input pages hold X of chunks that are not sealed yet: one tail for each
    request in a batch, and two prefill chunks (one being computed while the
    other is written back).
    """
    chunk = layout.chunk_tokens
    page_bytes = shape.page_bytes(chunk)
    prefill_pages = chunks_of(prefill_chunk_tokens, chunk) + 1
    input_pages = max_batch_size + 2 * prefill_pages if layout.has_activations else 0
    input_bytes = input_pages * chunk * shape.activation_bytes_per_token
    # A streamed request keeps what it computes until that is sealed: the
    # prefill chunk at hand, the one being written back, and its tail.
    streamed_pages = 2 * prefill_pages + 1
    workspace = _workspace_bytes(shape, layout, max_batch_size, prefill_chunk_tokens) + input_bytes
    left = budget_bytes - weight_bytes - workspace
    page_count = left // page_bytes
    if page_count < streamed_pages:
        raise ResourceExhausted(
            f"device memory {format_size(budget_bytes)} is too small: weights take "
            f"{format_size(weight_bytes)}, workspace {format_size(workspace)}, and at least "
            f"{streamed_pages} pages of {format_size(page_bytes)} are needed for the cache "
            f"(in all {format_size(weight_bytes + workspace + streamed_pages * page_bytes)})",
            reason="DEVICE_MEMORY",
            needed_bytes=weight_bytes + workspace + streamed_pages * page_bytes,
            budget_bytes=budget_bytes,
        )
    return MemoryPlan(
        budget_bytes=budget_bytes,
        weight_bytes=weight_bytes,
        workspace_bytes=workspace,
        page_bytes=page_bytes,
        page_count=page_count,
        input_page_count=input_pages,
        streamed_page_count=streamed_pages,
    )


def _workspace_bytes(
    shape: ModelShape, layout: ArenaLayout, max_batch_size: int, prefill_chunk_tokens: int
) -> int:
    """Staging tiles and the tensors of the largest step."""
    staged_tokens = STAGING_PAGES * layout.chunk_tokens
    staging = staged_tokens * (
        shape.kv_bytes_per_token_layer + shape.activation_bytes_per_token_layer
    )
    if layout.encoding.is_lossy:
        staging += staged_tokens * (
            layout.stored_kv_bytes_per_token_layer
            + layout.stored_activation_bytes_per_token_layer
            + CODEC_BYTES_PER_ELEMENT * max(shape.kv_width, shape.hidden_size)
        )
    rows = max_batch_size + prefill_chunk_tokens
    widest = max(shape.intermediate_size * 2, shape.query_width + 2 * shape.kv_width)
    step = rows * (4 * shape.hidden_size + widest + shape.intermediate_size) * shape.data_type.size
    logits = max_batch_size * shape.vocabulary_size * 4
    # Attention scores of one streamed prefill tile, in fp32.
    scores = 4 * shape.query_head_count * prefill_chunk_tokens * STAGING_PAGES * layout.chunk_tokens
    return staging + step + 2 * logits + 2 * scores
