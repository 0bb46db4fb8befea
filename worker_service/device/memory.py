"""Divides a worker's device-memory budget, once, at start.

    budget = weights + workspace + input pages + cache pages

Weights that do not fit stay on the host (`place`), and what is then counted as weights
are those on the device and the slots for the others. Pure arithmetic over
`splitpoint.shapes`; allocates nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitpoint.config import format_size
from splitpoint.errors import ResourceExhausted
from splitpoint.planning.weight_placement import WeightPlacement, WeightSizes, place_weights
from splitpoint.shapes import ArenaLayout, ModelShape, chunks_of

# Chunks of one layer that tiles land in. More of them make larger tiles, and copies
# that go further ahead.
STAGING_PAGES = 16
# K and V of a tile on a GPU: what its copies take on the link must outlast what
# launching them, and the attention over it, takes on the host.
GPU_TILE_BYTES = 64 << 20
# Of the budget, what larger tiles may take.
STAGING_SHARE = 0.03
# What encoding (four float32 copies and two of bytes) and decoding (one of bytes) hold
# for each element at once, at most; write-back encodes while a restore decodes.
CODEC_BYTES_PER_ELEMENT = 20
# The largest tile of a streamed prefill: its scores grow with the new tokens, too.
PREFILL_TILE_PAGES = 16


def largest_tile(staging_pages: int) -> int:
    """Pages of the largest tile that leaves room for three in the staging memory.

    Two come over the link while one is read, or one while the third holds what is rebuilt.
    """
    return max(1, staging_pages // 3)


def staging_pages_on_gpu(shape: ModelShape, layout: ArenaLayout, budget_bytes: int) -> int:
    """Staging pages whose tiles are large enough for a GPU's link, within a share of the budget."""
    page_bytes = layout.chunk_tokens * shape.kv_bytes_per_token_layer
    wanted = 3 * -(-GPU_TILE_BYTES // page_bytes)
    room = int(STAGING_SHARE * budget_bytes) // staging_bytes(shape, layout, 1)
    return max(STAGING_PAGES, min(wanted, room))


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
    staging_pages: int = STAGING_PAGES

    @property
    def cache_capacity_bytes(self) -> int:
        """What admission may hand out: the ledger's capacity."""
        return self.page_count * self.page_bytes


def place(
    shape: ModelShape,
    layout: ArenaLayout,
    sizes: WeightSizes,
    *,
    budget_bytes: int,
    max_batch_size: int,
    max_batched_tokens: int,
    staging_pages: int = STAGING_PAGES,
) -> WeightPlacement:
    """Where the weights go so that a cache fits beside them; its `device_bytes` are what
    `divide` is then given, which raises if even that is too much."""
    needs = _needs(shape, layout, max_batch_size, max_batched_tokens, staging_pages)
    longest = chunks_of(shape.context_length, layout.chunk_tokens)
    return place_weights(
        sizes,
        free_bytes=budget_bytes - needs.workspace_bytes,
        least_cache_bytes=needs.streamed_pages * needs.page_bytes,
        most_cache_bytes=max_batch_size * longest * needs.page_bytes,
    )


def divide(
    shape: ModelShape,
    layout: ArenaLayout,
    *,
    budget_bytes: int,
    weight_bytes: int,
    max_batch_size: int,
    max_batched_tokens: int,
    staging_pages: int = STAGING_PAGES,
) -> MemoryPlan:
    """Split the budget; raises ResourceExhausted with the numbers when it is too small."""
    needs = _needs(shape, layout, max_batch_size, max_batched_tokens, staging_pages)
    page_bytes, streamed_pages = needs.page_bytes, needs.streamed_pages
    workspace = needs.workspace_bytes
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
        input_page_count=needs.input_pages,
        streamed_page_count=streamed_pages,
        staging_pages=staging_pages,
    )


@dataclass(frozen=True, slots=True)
class _Needs:
    """What a worker needs whatever its budget is.

    Attributes:
        workspace_bytes: input pages included.
        input_pages: hold X of chunks that are not sealed yet: one tail for each request
            in a batch, and two prefill chunks (one being computed while the other is
            written back).
        streamed_pages: what a streamed request keeps until it is sealed: the prefill
            chunk at hand, the one being written back, and its tail.
    """

    workspace_bytes: int
    page_bytes: int
    input_pages: int
    streamed_pages: int


def _needs(
    shape: ModelShape,
    layout: ArenaLayout,
    max_batch_size: int,
    max_batched_tokens: int,
    staging_pages: int,
) -> _Needs:
    chunk = layout.chunk_tokens
    prefill_pages = chunks_of(max_batched_tokens, chunk) + 1
    input_pages = max_batch_size + 2 * prefill_pages if layout.has_activations else 0
    input_bytes = input_pages * chunk * shape.activation_bytes_per_token
    workspace = (
        staging_bytes(shape, layout, staging_pages)
        + _decoding_bytes(shape, layout, staging_pages)
        + _step_bytes(shape, max_batch_size, max_batched_tokens)
        + _streamed_bytes(shape, layout, max_batch_size, max_batched_tokens, staging_pages)
        + input_bytes
    )
    return _Needs(
        workspace_bytes=workspace,
        page_bytes=shape.page_bytes(chunk),
        input_pages=input_pages,
        streamed_pages=2 * prefill_pages + 1,
    )


def staging_bytes(shape: ModelShape, layout: ArenaLayout, pages: int) -> int:
    """K, V and, where the arena has it, X of so many chunks in one layer."""
    per_token = shape.kv_bytes_per_token_layer
    if layout.has_activations:
        per_token += shape.activation_bytes_per_token_layer
    return pages * layout.chunk_tokens * per_token


def _decoding_bytes(shape: ModelShape, layout: ArenaLayout, pages: int) -> int:
    """Where encoded chunks land, and what making elements of them takes."""
    if not layout.encoding.is_lossy:
        return 0
    return (
        pages
        * layout.chunk_tokens
        * (
            layout.stored_kv_bytes_per_token_layer
            + layout.stored_activation_bytes_per_token_layer
            + CODEC_BYTES_PER_ELEMENT * max(shape.kv_width, shape.hidden_size)
        )
    )


def _step_bytes(shape: ModelShape, max_batch_size: int, max_batched_tokens: int) -> int:
    """The tensors of the largest step, attention left out."""
    rows = max_batch_size + max_batched_tokens
    widest = max(shape.intermediate_size * 2, shape.query_width + 2 * shape.kv_width)
    step = rows * (4 * shape.hidden_size + widest + shape.intermediate_size) * shape.data_type.size
    logits = max_batch_size * shape.vocabulary_size * 4
    return step + 2 * logits


def _streamed_bytes(
    shape: ModelShape,
    layout: ArenaLayout,
    max_batch_size: int,
    max_batched_tokens: int,
    staging_pages: int,
) -> int:
    """What rebuilding and attending the largest tile of a streamed step takes at once."""
    size, width, chunk = shape.data_type.size, shape.query_width, layout.chunk_tokens
    tile_pages = largest_tile(staging_pages)
    rows = tile_pages * chunk
    # Scores as computed, in fp32 and as weights; each page's queries and results.
    scores = rows * shape.query_head_count * (4 + 2 * size)
    decode = scores + tile_pages * width * (4 + 2 * size)
    # What was merged so far, the tile's share and their sum: fp32, with peaks and totals.
    partials = 3 * (max_batch_size + 1) * 4 * (width + 2 * shape.query_head_count)
    # The product, keys being normed and rotated, angles, X where it was kept; X from
    # token ids, half in fp32.
    rebuild = rows * size * (6 * shape.kv_width + 4 * shape.head_dim + shape.hidden_size)
    embed = rows * shape.hidden_size * (3 * size + 8)
    # Scores twice, queries, results and partials; K and V as taken and in order.
    keys = PREFILL_TILE_PAGES * chunk
    prefill = (
        max_batched_tokens * (2 * 4 * shape.query_head_count * keys + 4 * 5 * width)
        + 2 * keys * shape.kv_bytes_per_token_layer
    )
    return max(decode + partials, rebuild, embed, prefill)
