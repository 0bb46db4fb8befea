"""Divides a worker's device-memory budget, once, at start, and that of a draft model.

    budget = weights + workspace + input pages + room + cache pages

Weights that do not fit stay on the host (`place`); `weights` then counts those on the
device and the slots for the others. The room is pages that streamed sequences share; the
other cache pages are charged to requests. This is pure arithmetic and allocates nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from splitpoint.config import counted, format_size
from splitpoint.errors import ResourceExhausted
from splitpoint.planning.weight_placement import (
    LINK_ONLY,
    NOTHING_ON_HOST,
    OnHost,
    StepRates,
    StreamedCache,
    WeightObjective,
    WeightPlacement,
    WeightSizes,
    place_weights,
)
from splitpoint.shapes import ArenaLayout, ModelShape, chunks_of
from splitpoint.speculation import MOST_SPECULATIVE_TOKENS

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


# Staging memory, in chunks of one layer. More of it makes larger tiles, and copies that go
# further ahead.
STAGING_PAGES = 16
# K and V of a tile on a GPU: its copies must take longer on the link than the host takes
# to launch them and the attention over the tile.
GPU_TILE_BYTES = 64 << 20
# Share of the budget that larger tiles may take.
STAGING_SHARE = 0.03
# Peak of encoding (four float32 copies and two of bytes) and decoding (one of bytes), for
# each element; write-back encodes while a restore decodes.
CODEC_BYTES_PER_ELEMENT = 20
# Share of the cache that larger pieces of prompts may take while weights cross the link.
PREFILL_SHARE = 0.125
# Parts of a CPU's attention that are kept at once, each of one query and one unit of pages
# (kernels/units.py): what is more is merged meanwhile.
ATTENTION_PARTS = 512
# Share of what the weights leave that parts may take.
PARTS_SHARE = 0.0625
# Share of the cache that K of the longest context in one layer may take, from which screens of
# selections are built, besides what decode steps leave of the workspace.
SCREENS_SHARE = 1 / 64
# Rows of a unit: those of a page between two multiples of this (ROWS of paged_attention.cpp).
UNIT_ROWS = 128
# Elements between the sums of two heads of a part are a multiple of this.
_PART_LANES = 16
# The largest tile of a streamed prefill, whose scores grow with the new tokens, too.
PREFILL_TILE_PAGES = 16
# Pages that a streamed sequence needs at all times: the one that holds its tail.
STREAMED_PAGES = 1
# Share of the context that stays on the device for self drafts: the newest chunks, and the
# first one, without which a window alone predicts badly.
WINDOW_SHARE = 0.05
SINK_PAGES = 1
# The smallest room: a chunk is computed while the tail before it is written back.
LEAST_ROOM_PAGES = 1


def largest_tile(staging_pages: int) -> int:
    """Return the pages of the largest tile of which the staging memory holds three.

    Two come over the link while one is read, or one while the third is rebuilt.
    """
    return max(1, staging_pages // 3)


def draft_window_pages(shape: ModelShape, chunk_tokens: int) -> int:
    """Return the pages of the newest chunks that self drafts attend to: WINDOW_SHARE."""
    return max(1, math.ceil(WINDOW_SHARE * shape.context_length / chunk_tokens))


def staging_pages_on_gpu(shape: ModelShape, layout: ArenaLayout, budget_bytes: int) -> int:
    """Return staging pages for tiles that suit a GPU's link, within STAGING_SHARE."""
    page_bytes = layout.chunk_tokens * shape.kv_bytes_per_token_layer
    wanted = 3 * -(-GPU_TILE_BYTES // page_bytes)
    room = int(STAGING_SHARE * budget_bytes) // staging_bytes(shape, layout, 1)
    return max(STAGING_PAGES, min(wanted, room))


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes and pages of one worker, all charged against the budget.

    Attributes:
        workspace_bytes: input pages and the room included.
        page_count: cache pages that requests are charged for.
        input_page_count: pages of X.
        streamed_page_count: pages that a streamed request is charged for, besides the front
            that was granted to it: its tail's, its window and its sinks.
        window_page_count: newest sealed chunks that a streamed sequence keeps; 0 without
            self drafts.
        sink_page_count: first chunks that it keeps; 0 without self drafts.
        room_page_count: cache pages for the chunks of streamed sequences that are computed
            or written back; all streamed sequences share them. 0 without a store.
        draft_tokens: guessed tokens that one step verifies at most; 0 if nothing guesses.
        graph_bytes: for CUDA graphs, in the workspace, as is one more page of K, V and X that
            their padding rows write. 0: there are none.
        attention_parts: see ATTENTION_PARTS.
        collected_bytes: K that one step may collect at once, to build screens of selections: what
            the attention of decode steps leaves of a prefill's workspace, and perhaps more.
    """

    budget_bytes: int
    weight_bytes: int
    workspace_bytes: int
    page_bytes: int
    page_count: int
    input_page_count: int
    streamed_page_count: int = STREAMED_PAGES
    room_page_count: int = 0
    staging_pages: int = STAGING_PAGES
    draft_tokens: int = 0
    window_page_count: int = 0
    sink_page_count: int = 0
    graph_bytes: int = 0
    attention_parts: int = ATTENTION_PARTS
    collected_bytes: int = 0

    @property
    def device_page_count(self) -> int:
        """Cache pages on the device, the room included."""
        return self.page_count + self.room_page_count

    @property
    def cache_capacity_bytes(self) -> int:
        """Capacity of the scheduler's ledger for this worker."""
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
    has_store: bool = True,
    rates: StepRates = LINK_ONLY,
    objective: WeightObjective = WeightObjective.BALANCED,
    draft_tokens: int = 0,
) -> WeightPlacement:
    """Place the weights so that a cache fits beside them.

    `divide` receives the placement's `device_bytes`, and raises if even they are too many.
    """
    needs = _needs(
        shape,
        layout,
        max_batch_size,
        max_batched_tokens,
        staging_pages,
        has_store=has_store,
        draft_tokens=draft_tokens,
    )
    longest = chunks_of(shape.context_length, layout.chunk_tokens)
    # The scheduler streams no request from a store that is not exact unless asked.
    can_stream = has_store and not layout.encoding.is_lossy
    return place_weights(
        sizes,
        free_bytes=budget_bytes - needs.workspace_bytes,
        least_cache_bytes=needs.least_pages * needs.page_bytes,
        most_cache_bytes=max_batch_size * longest * needs.page_bytes,
        most_sequences=max_batch_size,
        streamed=_streamed_cache(shape, layout, needs, rates) if can_stream else None,
        rates=rates,
        objective=objective,
    )


def _streamed_cache(
    shape: ModelShape, layout: ArenaLayout, needs: _Needs, rates: StepRates
) -> StreamedCache:
    """Return what a streamed sequence of full length needs of a worker with a store."""
    tokens = shape.context_length
    loaded = sent = tokens * layout.layer_count * layout.stored_kv_bytes_per_token_layer
    rebuild_seconds = 0.0
    if layout.has_activations and shape.activations_can_pay:
        sent = tokens * layout.layer_count * layout.stored_activation_bytes_per_token_layer
        rebuild_seconds = tokens * rates.rebuild
    return StreamedCache(
        kept_bytes=STREAMED_PAGES * needs.page_bytes,
        room_bytes=needs.room_pages * needs.page_bytes,
        loaded_bytes=loaded,
        sent_bytes=min(loaded, sent),
        rebuild_seconds=rebuild_seconds,
    )


def grown_prefill(
    shape: ModelShape,
    layout: ArenaLayout,
    placement: WeightPlacement,
    rates: StepRates,
    *,
    budget_bytes: int,
    max_batched_tokens: int,
    **limits: Any,
) -> int:
    """Return the prompt tokens of a step while weights cross the link.

    As many as compute meanwhile (`StepRates.prefill_budget`), if their workspace takes at
    most PREFILL_SHARE of the cache.
    """
    if not placement.streamed_bytes:
        return max_batched_tokens

    def cache_bytes(tokens: int) -> int:
        needs = _needs(shape, layout, max_batched_tokens=tokens, **limits)
        room_bytes = needs.room_pages * needs.page_bytes
        return budget_bytes - placement.device_bytes - needs.workspace_bytes - room_bytes

    tokens = rates.prefill_budget(placement.streamed_bytes, max_batched_tokens)
    least = (1 - PREFILL_SHARE) * cache_bytes(max_batched_tokens)
    while tokens > max_batched_tokens and cache_bytes(tokens) < least:
        tokens = max(max_batched_tokens, tokens // 2)
    return tokens


def divide(
    shape: ModelShape,
    layout: ArenaLayout,
    *,
    budget_bytes: int,
    weight_bytes: int,
    max_batch_size: int,
    max_batched_tokens: int,
    staging_pages: int = STAGING_PAGES,
    has_store: bool = True,
    draft_tokens: int = 0,
    window_pages: int = 0,
    graph_bytes: int = 0,
    weights_note: str = "",
) -> MemoryPlan:
    """Divide the budget. Raises ResourceExhausted with the numbers if it is too small.

    Args:
        has_store: False for a worker without a store, which streams nothing and has no room.
        window_pages: newest chunks that a streamed sequence keeps on the device for self
            drafts; 0: it keeps none. In little memory it keeps fewer.
        graph_bytes: for CUDA graphs, which give way to the fewest pages of a cache.
        weights_note: what an error adds to the bytes of the weights.
    """
    queries = max_batch_size + draft_tokens
    parts = _attention_parts(shape, layout, queries, budget_bytes - weight_bytes)
    needs = _needs(
        shape,
        layout,
        max_batch_size,
        max_batched_tokens,
        staging_pages,
        has_store=has_store,
        draft_tokens=draft_tokens,
        attention_parts=parts,
    )
    page_bytes, least_pages = needs.page_bytes, needs.least_pages
    workspace = needs.workspace_bytes
    graphs = graph_bytes + _padding_bytes(shape, layout) if graph_bytes else 0
    if (budget_bytes - weight_bytes - workspace - graphs) // page_bytes < least_pages:
        graphs = graph_bytes = 0
    workspace += graphs
    collected = _more_collected(
        collected_bytes(shape, shape.context_length) - needs.spare_bytes if has_store else 0,
        budget_bytes - weight_bytes - workspace,
    )
    workspace += collected
    pages = (budget_bytes - weight_bytes - workspace) // page_bytes
    if pages < least_pages:
        needed = weight_bytes + workspace + least_pages * page_bytes
        raise ResourceExhausted(
            f"device memory {format_size(budget_bytes)} is too small: weights take "
            f"{format_size(weight_bytes)}{weights_note}, workspace {format_size(workspace)}, and "
            f"at least {counted(least_pages, 'page')} of {format_size(page_bytes)} must be left "
            f"for the cache (in all {format_size(needed)})",
            reason="DEVICE_MEMORY",
            needed_bytes=needed,
            budget_bytes=budget_bytes,
        )
    # In little memory the room gives way: prompts of streamed requests then take more steps.
    room = min(needs.room_pages, max(LEAST_ROOM_PAGES, pages - least_pages - 1))
    window = _window(window_pages if has_store else 0, pages - room)
    sinks = SINK_PAGES if window else 0
    return MemoryPlan(
        budget_bytes=budget_bytes,
        weight_bytes=weight_bytes,
        workspace_bytes=workspace + room * page_bytes,
        page_bytes=page_bytes,
        page_count=pages - room,
        input_page_count=needs.input_pages,
        streamed_page_count=STREAMED_PAGES + window + sinks,
        room_page_count=room,
        staging_pages=staging_pages,
        draft_tokens=draft_tokens,
        window_page_count=window,
        sink_page_count=sinks,
        graph_bytes=graph_bytes,
        attention_parts=parts,
        collected_bytes=needs.spare_bytes + collected,
    )


@dataclass(frozen=True, slots=True)
class DividedDevice:
    """A worker's device memory, divided, and the place of its weights.

    Attributes:
        memory: with the batch that it was divided for.
        with_batch: returns it with so many sequences in a step. Raises ResourceExhausted.
        max_batched_tokens: prompt tokens of a step, which grow while weights cross the link.
    """

    placement: WeightPlacement
    memory: MemoryPlan
    with_batch: Callable[[int], MemoryPlan]
    max_batched_tokens: int


def divide_device(
    shape: ModelShape,
    layout: ArenaLayout,
    sizes: WeightSizes,
    *,
    budget_bytes: int,
    max_batch_size: int,
    max_batched_tokens: int,
    is_gpu: bool,
    rates: Callable[[], StepRates],
    objective: WeightObjective = WeightObjective.BALANCED,
    has_store: bool = True,
    draft_tokens: int = 0,
    window_pages: int = 0,
    graph_bytes: Callable[[OnHost], int] = lambda _: 0,
) -> DividedDevice:
    """Place the weights and divide what they leave, as a worker does at its start.

    Workers and the commands that plan without one share this. Raises ResourceExhausted.

    Args:
        budget_bytes: without what a draft model takes.
        rates: of the device, which a worker measures; called only if weights cross the link.
        graph_bytes: returns what CUDA graphs may take beside these weights.
    """
    staging_pages = staging_pages_on_gpu(shape, layout, budget_bytes) if is_gpu else STAGING_PAGES
    limits: dict[str, Any] = {
        "budget_bytes": budget_bytes,
        "max_batch_size": max_batch_size,
        "max_batched_tokens": max_batched_tokens,
        "staging_pages": staging_pages,
        "has_store": has_store,
        "draft_tokens": draft_tokens,
    }
    placement = place(shape, layout, sizes, **limits)
    if placement.streamed_bytes:
        found = rates()
        placement = place(shape, layout, sizes, **limits, rates=found, objective=objective)
        limits["max_batched_tokens"] = grown_prefill(shape, layout, placement, found, **limits)
    graphs = graph_bytes(placement.on_host)

    def with_batch(size: int) -> MemoryPlan:
        return divide(
            shape,
            layout,
            weight_bytes=placement.device_bytes,
            window_pages=window_pages,
            graph_bytes=graphs,
            weights_note=_weights_note(sizes, placement),
            **limits | {"max_batch_size": size},
        )

    return DividedDevice(
        placement, with_batch(max_batch_size), with_batch, limits["max_batched_tokens"]
    )


def _weights_note(sizes: WeightSizes, placement: WeightPlacement) -> str:
    if not sizes.can_stream:
        return ", none of which can stay on the host (docs/models.md)"
    if placement.on_host == NOTHING_ON_HOST:
        return ""
    return f" (others of the {format_size(sizes.total)} on the host)"


def collected_bytes(shape: ModelShape, tokens: int) -> int:
    """Return the bytes of K of this many tokens in one layer, from which their screen is built."""
    return tokens * shape.kv_width * shape.data_type.size


def _more_collected(missing_bytes: int, cache_bytes: int) -> int:
    """Return what is charged for collecting K: what is missing, or nothing in little memory."""
    return max(0, missing_bytes) if missing_bytes <= SCREENS_SHARE * cache_bytes else 0


def _window(wanted: int, page_count: int) -> int:
    """Return the pages of the window with which two streamed requests still fit."""
    return max(0, min(wanted, page_count // 2 - STREAMED_PAGES - SINK_PAGES))


@dataclass(frozen=True, slots=True)
class _Needs:
    """The needs of a worker that do not depend on its budget.

    Attributes:
        workspace_bytes: input pages included, the room not.
        spare_bytes: of it, that are planned for the attention of prompts, and free while that of
            decoding sequences runs.
        input_pages: X of chunks that are not sealed yet: one tail for each request of a
            batch, and two steps' tokens (one computed while the other is written back).
        room_pages: two steps' tokens likewise. Their tails are charged to the requests.
        least_pages: pages, those of the room included, without which the worker is of no use.
    """

    workspace_bytes: int
    spare_bytes: int
    page_bytes: int
    input_pages: int
    room_pages: int
    least_pages: int


def _needs(
    shape: ModelShape,
    layout: ArenaLayout,
    max_batch_size: int,
    max_batched_tokens: int,
    staging_pages: int,
    *,
    has_store: bool,
    draft_tokens: int = 0,
    attention_parts: int = ATTENTION_PARTS,
) -> _Needs:
    chunk, page_bytes = layout.chunk_tokens, shape.page_bytes(layout.chunk_tokens)
    prefill_pages = chunks_of(max_batched_tokens, chunk) + 1
    input_pages = max_batch_size + 2 * prefill_pages if layout.has_activations else 0
    room_pages = 2 * prefill_pages if has_store else 0
    input_bytes = input_pages * chunk * shape.activation_bytes_per_token
    prefill = _prefill_bytes(shape, layout, max_batched_tokens)
    tile = _tile_bytes(shape, layout, max_batch_size, staging_pages, draft_tokens, attention_parts)
    workspace = (
        staging_bytes(shape, layout, staging_pages)
        + _decoding_bytes(shape, layout, staging_pages)
        + _step_bytes(shape, max_batch_size, max_batched_tokens, draft_tokens)
        + max(tile, prefill)
        + input_bytes
    )
    return _Needs(
        workspace_bytes=workspace,
        spare_bytes=max(0, prefill - tile),
        page_bytes=page_bytes,
        input_pages=input_pages,
        room_pages=room_pages,
        least_pages=2 * prefill_pages + STREAMED_PAGES,
    )


def staging_bytes(shape: ModelShape, layout: ArenaLayout, pages: int) -> int:
    """Return the bytes of K and V of `pages` chunks in one layer, and of X, if the arena has it.

    X is there twice: for streamed steps, and for the restores beside them.
    """
    per_token = shape.kv_bytes_per_token_layer
    if layout.has_activations:
        per_token += 2 * shape.activation_bytes_per_token_layer
    return pages * layout.chunk_tokens * per_token


def _padding_bytes(shape: ModelShape, layout: ArenaLayout) -> int:
    """Return the bytes of a page of K, V and, if it is kept, X that only padding rows write."""
    chunk = layout.chunk_tokens
    inputs = chunk * shape.activation_bytes_per_token if layout.has_activations else 0
    return shape.page_bytes(chunk) + inputs


def parts_bytes(shape: ModelShape, chunk_tokens: int, query_count: int, most: int) -> int:
    """Return the bytes of at most `most` parts of a CPU's attention, for this many queries.

    At least one part of each query is kept, and at most one of each unit of its context.
    """
    units = chunks_of(shape.context_length, chunk_tokens) * chunks_of(chunk_tokens, UNIT_ROWS)
    count = min(max(most, query_count), query_count * units)
    return count * part_bytes(shape)


def _attention_parts(
    shape: ModelShape, layout: ArenaLayout, query_count: int, free_bytes: int
) -> int:
    """Return how many parts may wait: ATTENTION_PARTS, or fewer in little memory."""
    parts = ATTENTION_PARTS
    while parts > 1 and (
        parts_bytes(shape, layout.chunk_tokens, query_count, parts) > PARTS_SHARE * free_bytes
    ):
        parts //= 2
    return parts


def part_bytes(shape: ModelShape) -> int:
    """Return the bytes of a part: fp32 sums, a peak and a total for each head."""
    width = -(-shape.head_dim // _PART_LANES) * _PART_LANES
    return shape.query_head_count * 4 * (width + 2)


def _decoding_bytes(shape: ModelShape, layout: ArenaLayout, pages: int) -> int:
    """Return the bytes of the buffers for encoded chunks, and of decoding them."""
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


def _step_bytes(
    shape: ModelShape, max_batch_size: int, max_batched_tokens: int, draft_tokens: int
) -> int:
    """Return the bytes of the largest step's tensors, without attention.

    Drafts count as batched tokens, but each has its own logits.
    """
    rows = max_batch_size + max_batched_tokens
    widest = max(shape.intermediate_size * 2, shape.query_width + 2 * shape.kv_width)
    step = rows * (4 * shape.hidden_size + widest + shape.intermediate_size) * shape.data_type.size
    logits = (max_batch_size + draft_tokens) * shape.vocabulary_size * 4
    return step + 2 * logits


def _tile_bytes(
    shape: ModelShape,
    layout: ArenaLayout,
    max_batch_size: int,
    staging_pages: int,
    draft_tokens: int,
    attention_parts: int,
) -> int:
    """Return the peak bytes of rebuilding the largest tile, or of decoding sequences' attention."""
    size, width, chunk = shape.data_type.size, shape.query_width, layout.chunk_tokens
    tile_pages = largest_tile(staging_pages)
    rows = tile_pages * chunk
    # Scores as computed, in fp32 and as weights; each page's queries and results.
    scores = rows * shape.query_head_count * (4 + 2 * size)
    decode = scores + tile_pages * width * (4 + 2 * size)
    # All rows of a sequence attend a page at once.
    decode *= 1 + min(draft_tokens, MOST_SPECULATIVE_TOKENS)
    queries = max_batch_size + draft_tokens
    # Or their parts, where a kernel attends pages unit by unit.
    decode = max(decode, parts_bytes(shape, chunk, queries, attention_parts))
    # The merged state, the tile's and their sum, in fp32, with peaks and totals.
    partials = 3 * (max_batch_size + draft_tokens + 1) * 4 * (width + 2 * shape.query_head_count)
    # The product, normed and rotated keys, angles, X that was kept; or X from token ids,
    # half of it in fp32.
    rebuild = rows * size * (6 * shape.kv_width + 4 * shape.head_dim + shape.hidden_size)
    embed = rows * shape.hidden_size * (3 * size + 8)
    return max(decode + partials, rebuild, embed)


def _prefill_bytes(shape: ModelShape, layout: ArenaLayout, max_batched_tokens: int) -> int:
    """Return the peak bytes of prompts' attention to the largest tile."""
    # Scores twice, queries, results and partials; K and V as gathered and in order.
    keys = PREFILL_TILE_PAGES * layout.chunk_tokens
    return (
        max_batched_tokens * (2 * 4 * shape.query_head_count * keys + 4 * 5 * shape.query_width)
        + 2 * keys * shape.kv_bytes_per_token_layer
    )
