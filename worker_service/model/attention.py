"""Paged attention in the arena's own layout, `[pages, n_kv, chunk_tokens, d]`.

Each page is attended separately, all pages of all requests at once, and the results of
pages are merged by online softmax. Requests of any lengths thus take a handful of
operations per layer, and tiles that stream from the host merge with the pages on the
device. Plans (attention_plan.py) say which query reads which pages. This module knows no
requests and no stores.

Softmax and all sums over pages are fp32, whatever the type of the pages.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.nn import functional

from splitpoint.host.processor import instruction_sets
from worker_service.kernels import paged_attention
from worker_service.kernels.choice import Prefill, by_flags, in_use
from worker_service.kernels.paged_attention import PromptPages, PromptParts
from worker_service.kernels.units import UnitView
from worker_service.model.attention_plan import (
    LEAST,
    DecodePlan,
    PageView,
    PrefillPlan,
    PrefillView,
    masked_keys,
)
from worker_service.model.library_attention import library_of
from worker_service.model.model import Layer
from worker_service.model.span_attention import SpanPrompt, SpanView, kernels_of

# Query rows of one block of a half-precision prefill on a CPU. With 512 tokens and 12 heads
# of 64 (32 on 8 of 128) a layer takes 3.1 (11) ms; with blocks of 128 4.5 (15), of 256 5.7
# (21), with SDPA 5.7 (28). fp32 gains nothing.
_BLOCK = 64
# Elements of the largest mask for SDPA on a CPU, which also makes a float of each.
_MASK_ELEMENTS = 8 << 20
# Scores of one block of a prefill on a GPU, unless they are those of the fewest queries.
SCORE_ELEMENTS = 16 << 20
_LEAST_BLOCK = 16
_LEAST = float(LEAST)


@dataclass(frozen=True, slots=True)
class PartialAttention:
    """Attention of N query tokens over some of their keys, not normalised yet.

    Attributes:
        weighted: fp32 `[N, n_q, d]`, the sum of `exp(score - peak) * value`.
        peak: fp32 `[N, n_q]`, the largest score; the least finite number without keys.
        total: fp32 `[N, n_q]`, the sum of `exp(score - peak)`.
    """

    weighted: torch.Tensor
    peak: torch.Tensor
    total: torch.Tensor

    def merge(self, other: PartialAttention) -> PartialAttention:
        """Return the attention over the keys of both (online softmax)."""
        peak = torch.maximum(self.peak, other.peak)
        mine, theirs = (self.peak - peak).exp_(), (other.peak - peak).exp_()
        return PartialAttention(
            weighted=torch.addcmul(
                self.weighted * mine.unsqueeze(-1), other.weighted, theirs.unsqueeze(-1)
            ),
            peak=peak,
            total=torch.addcmul(self.total * mine, other.total, theirs),
        )

    def attended(self, dtype: torch.dtype, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Return the normalised result `[N, n_q * d]`, the input of `DecoderLayer.finish`.

        Each query must have seen at least one key. `sinks`: see `Layer`.
        """
        total = self.total
        if sinks is not None:
            total = total + (sinks - self.peak).exp_()
        return (self.weighted / total.unsqueeze(-1)).flatten(1).to(dtype)


def decode_partial(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: DecodePlan,
    *,
    window: int | None,
    scale: float,
    cap: float | None = None,
    seen: torch.Tensor | None = None,
) -> PartialAttention:
    """Attend one layer's pages with one query token of each of B sequences.

    Args:
        queries: `[B, n_q, d]`, after RoPE.
        keys, values: the pool or staging tile that the plan's page numbers refer to,
            `[pages, n_kv, C, d]`. Masked rows may have any finite values.
        window: the layer's sliding window; one of the plan's windows.
        cap: in all functions here a score s becomes `cap * tanh(s / cap)`; None: no cap.
        seen: uint8 `[P, n_kv, C]`, 0 where a row is not attended, for the P pages of a plan that
            `is_masked`; a query may see no row of some. None: what the plan says is all.

    A GPU reads pages by number, through FlashInfer or Triton; so does a CPU with a kernel of its
    own (kernels/), and one without multiplies them.
    """
    library = library_of(queries.device) if plan.whole else None
    if library is not None and library.takes(queries, keys):
        whole = plan.whole[window]
        done = library.attend(whole, queries, keys, values, scale=scale, cap=cap)
        if done is not None:
            return PartialAttention(*done)
    view = plan.views[window]
    if isinstance(view, UnitView):
        done = paged_attention.attend_units(
            view, queries, keys, values, scale=scale, cap=cap, seen=seen
        )
        return PartialAttention(*done)
    if isinstance(view, SpanView):
        kernels = kernels_of(queries.device)
        return PartialAttention(
            *view.attend(queries, keys, values, scale=scale, cap=cap, kernels=kernels, seen=seen)
        )
    attended = _decode_pages(queries, keys, values, view, scale, cap, seen)
    for shared in plan.shared.get(window, ()):
        attended = attended.merge(_decode_pages(queries, keys, values, shared, scale, cap, None))
    return attended


def decode(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: DecodePlan,
    layer: Layer,
) -> torch.Tensor:
    """Attend all that the queries see, as `decode_partial`; return `[B, n_q * d]`."""
    view = plan.views.get(layer.window)
    if isinstance(view, UnitView) and layer.sinks is None:
        return paged_attention.attend_all(
            view, queries, keys, values, scale=layer.scale, cap=layer.cap
        )
    part = decode_partial(
        queries, keys, values, plan, window=layer.window, scale=layer.scale, cap=layer.cap
    )
    return part.attended(queries.dtype, layer.sinks)


def _decode_pages(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    view: PageView,
    scale: float,
    cap: float | None,
    seen: torch.Tensor | None,
) -> PartialAttention:
    """Attend each page by plain products, all pages of all requests at once.

    The heads of all readers that share a KV head are folded into the rows of one product,
    `[n_kv, k * g, d] x [n_kv, d, C]`, so keys are never repeated, and read once.
    """
    count, query_heads, head_dim = queries.shape
    page_keys, page_values = view.of(keys), view.of(values)
    pages, kv_heads, rows, _ = page_keys.shape
    owner, readers = view.owner, view.readers
    by_page = (queries * scale).index_select(0, view.reader)
    scores = _scores(
        _folded(by_page, pages, readers, kv_heads),
        page_keys.view(pages * kv_heads, rows, head_dim),
    )
    if cap is not None:
        scores = _capped(scores.to(torch.float32), cap)
    limit = view.limit
    if seen is not None:
        by_head = seen.repeat_interleave(query_heads // kv_heads, 1)
        limit = torch.where(by_head != 0, limit, _LEAST)
    # Cast to fp32 and mask in one pass, which also removes overflows of masked rows.
    scores = torch.minimum(_unfolded(scores, pages, readers, query_heads), limit)
    # One row more than queries, for the foreign pages of the range. Masked rows weigh
    # exp(least - peak) = 0; where `seen` leaves none, what is merged with the part has a peak.
    peak = queries.new_full((count + 1, query_heads), _LEAST, dtype=torch.float32)
    peak.scatter_reduce_(0, owner.unsqueeze(1).expand(-1, query_heads), scores.amax(-1), "amax")
    scores.sub_(peak.index_select(0, owner).unsqueeze(-1)).exp_()
    total = torch.zeros_like(peak).index_add_(0, owner, scores.sum(-1))
    by_page = torch.bmm(
        _folded(scores.to(values.dtype), pages, readers, kv_heads),
        page_values.view(pages * kv_heads, rows, head_dim),
    )
    weighted = queries.new_zeros((count + 1, query_heads, head_dim), dtype=torch.float32)
    by_page = _unfolded(by_page, pages, readers, query_heads)
    weighted.index_add_(0, owner, by_page.to(torch.float32))
    return PartialAttention(weighted[:count], peak[:count], total[:count])


def _folded(rows: torch.Tensor, pages: int, readers: int, kv_heads: int) -> torch.Tensor:
    """Return `[P * k, n_q, x]` as `[P * n_kv, k * g, x]`: a view if one query reads a page."""
    _, query_heads, width = rows.shape
    group = query_heads // kv_heads
    if readers == 1:
        return rows.view(pages * kv_heads, group, width)
    by_head = rows.view(pages, readers, kv_heads, group, width).transpose(1, 2)
    return by_head.reshape(pages * kv_heads, readers * group, width)


def _unfolded(rows: torch.Tensor, pages: int, readers: int, query_heads: int) -> torch.Tensor:
    """Return `[P * n_kv, k * g, x]` as `[P * k, n_q, x]`: the reverse of `_folded`."""
    _, folded, width = rows.shape
    if readers == 1:
        return rows.view(pages, query_heads, width)
    group = folded // readers
    by_reader = rows.view(pages, query_heads // group, readers, group, width).transpose(1, 2)
    return by_reader.reshape(pages * readers, query_heads, width)


def prefill(
    queries: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: PrefillPlan,
    *,
    window: int | None,
    scale: float,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
    flags: Collection[str] | None = None,
) -> torch.Tensor:
    """Attend the prefix's pages and the new tokens with T new tokens of one request.

    Args:
        queries: `[T, n_q, d]`; new_keys, new_values: `[T, n_kv, d]`.
        keys, values: the pool, `[pages, n_kv, C, d]`; with a kernel that reads pages the new
            tokens' own are written.
        sinks: see `Layer`.
        flags: the instruction sets that decide the kernel; None: the choice of this process,
            or without one this processor's.

    Returns `[T, n_q * d]`.
    """
    view = plan.views[window]
    if isinstance(view, PromptPages):
        kernels = kernels_of(queries.device)
        if kernels is None and sinks is None:
            return paged_attention.attend_prompt(view, queries, keys, values, scale=scale, cap=cap)
        parts = PromptParts(queries) if kernels is None else SpanPrompt(queries, kernels)
        parts.add(view, keys, values, scale=scale, cap=cap)
        return PartialAttention(*parts.state).attended(queries.dtype, sinks)
    all_keys, all_values = new_keys.transpose(0, 1), new_values.transpose(0, 1)
    if view.pages is not None:
        all_keys = torch.cat((_prefix(keys, view.pages, view.row_count), all_keys), dim=1)
        all_values = torch.cat((_prefix(values, view.pages, view.row_count), all_values), dim=1)
    if sinks is not None or prefills_in_blocks(queries.device, queries.dtype, cap, flags):
        most_scores = SCORE_ELEMENTS if queries.is_cuda else None
        return prefill_in_blocks(
            queries, all_keys, all_values, view, scale, cap, most_scores, sinks
        )
    if queries.is_cuda:
        if view.window is not None or not has_fused_kernel(queries, all_keys, all_values):
            return prefill_in_blocks(
                queries, all_keys, all_values, view, scale, None, SCORE_ELEMENTS
            )
        return prefill_fused(queries, all_keys, all_values, scale)
    rows = _block_rows(view.query_count, all_keys.shape[1], _MASK_ELEMENTS)
    attended = [
        _prefill_by_sdpa(queries, all_keys, all_values, view, scale, range(first, last))
        for first, last in _blocks(view.query_count, rows)
    ]
    return attended[0] if len(attended) == 1 else torch.cat(attended)


def has_fused_kernel(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Return True if SDPA has a kernel for these that makes neither mask nor scores.

    On CUDA its memory-efficient kernel does not know grouped queries, and its flash kernel no
    fp32, odd head sizes and old GPUs. SDPA would otherwise repeat keys and values, and write
    scores of all queries.
    """
    grouped = queries.shape[1] != keys.shape[0]
    parameters = SDPAParams(*_heads_first(queries, keys, values), None, 0.0, False, grouped)
    if can_use_flash_attention(parameters):
        return True
    return not grouped and can_use_efficient_attention(parameters)


def prefill_fused(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend all keys up to each query's own, `[n_kv, rows + T, d]`, without a mask.

    The last query sees the last key: the triangle is aligned to the lower right.
    """
    # Brings torch's compiler with it, which takes seconds and a CPU never needs.
    from torch.nn.attention.bias import causal_lower_right

    attended = functional.scaled_dot_product_attention(
        *_heads_first(queries, keys, values),
        attn_mask=causal_lower_right(len(queries), keys.shape[1]),
        scale=scale,
        enable_gqa=queries.shape[1] != keys.shape[0],
    )
    return _rows_first(attended)


def _prefill_by_sdpa(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    view: PrefillView,
    scale: float,
    block: range,
) -> torch.Tensor:
    """Attend with a block of the queries by SDPA, with a mask for these."""
    seen = view.seen(block.start, block.stop)
    last = view.row_count + block.stop
    attended = functional.scaled_dot_product_attention(
        *_heads_first(queries[block.start : block.stop], keys[:, :last], values[:, :last]),
        attn_mask=seen,
        is_causal=seen is None,
        scale=scale,
        enable_gqa=queries.shape[1] != keys.shape[0],
    )
    return _rows_first(attended)


def _heads_first(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return views `[1, heads, rows, d]`."""
    return queries.transpose(0, 1).unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0)


def _rows_first(attended: torch.Tensor) -> torch.Tensor:
    """Return `[T, n_q * d]` of `[1, n_q, T, d]`."""
    return attended.squeeze(0).transpose(0, 1).reshape(attended.shape[2], -1)


def _block_rows(count: int, columns: int, most_elements: int, least: int = _BLOCK) -> int:
    """Return how many of `count` rows of this many columns are at most `most_elements`."""
    return min(count, max(least, most_elements // max(1, columns)))


def _blocks(count: int, rows: int) -> list[tuple[int, int]]:
    """Return the first and last + 1 row of each block of `rows`."""
    return [(first, min(first + rows, count)) for first in range(0, count, rows)]


def prefills_in_blocks(
    device: torch.device,
    dtype: torch.dtype,
    cap: float | None,
    flags: Collection[str] | None = None,
) -> bool:
    """Return True if plain products prefill faster than SDPA, or if scores are capped.

    SDPA cannot cap scores. `flags`: see `prefill`.
    """
    if cap is not None:
        return True
    if device.type != "cpu":
        return False
    chosen = in_use() if flags is None else None
    if chosen is None:
        chosen = by_flags(dtype, instruction_sets() if flags is None else flags)
    return chosen.prefill is Prefill.PRODUCTS


def prefill_partial(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    query_position: int,
    key_position: int,
    window: int | None,
    scale: float,
    cap: float | None = None,
) -> PartialAttention:
    """Attend S consecutive keys, one tile of a streamed prefill, with T consecutive queries.

    Args:
        queries: `[T, n_q, d]`, the first one at `query_position`.
        keys, values: `[n_kv, S, d]`, the first one at `key_position`: the result of
            `tile_rows`, or the transposed K and V of the new tokens themselves.
    """
    count, query_heads, head_dim = queries.shape
    kv_heads, rows, _ = keys.shape
    group = query_heads // kv_heads
    # [T, n_kv * g, d] -> [n_kv, g * T, d]: one product per KV head.
    folded = (queries * scale).view(count, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    scores = torch.bmm(folded.reshape(kv_heads, group * count, head_dim), keys.transpose(1, 2)).to(
        torch.float32
    )
    if cap is not None:
        scores = _capped(scores, cap)
    by_query = scores.view(kv_heads, group, count, rows)
    masked = masked_keys(query_position, count, key_position, rows, window, queries.device)
    if masked is not None:
        by_query.masked_fill_(masked, _LEAST)
    peak = by_query.amax(-1)
    by_query.sub_(peak.unsqueeze(-1)).exp_()
    if masked is not None:
        by_query.masked_fill_(masked, 0.0)
    total = by_query.sum(-1)
    weighted = torch.bmm(scores.to(values.dtype), values).to(torch.float32)
    weighted = weighted.view(kv_heads, group, count, head_dim)
    return PartialAttention(
        weighted.permute(2, 0, 1, 3).reshape(count, query_heads, head_dim),
        peak.permute(2, 0, 1).reshape(count, query_heads),
        total.permute(2, 0, 1).reshape(count, query_heads),
    )


def prefill_alone(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    window: int | None,
    scale: float,
    cap: float | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend a whole sequence with itself, without a cache: return `[T, n_q * d]`.

    Args:
        queries: `[T, n_q, d]`; keys, values: `[T, n_kv, d]`.
        sinks: see `Layer`.
    """
    part = prefill_partial(
        queries,
        keys.transpose(0, 1),
        values.transpose(0, 1),
        query_position=0,
        key_position=0,
        window=window,
        scale=scale,
        cap=cap,
    )
    return part.attended(queries.dtype, sinks)


def tile_rows(pages: torch.Tensor, row_count: int) -> torch.Tensor:
    """Return the first `row_count` rows of pages `[P, n_kv, C, d]` as `[n_kv, rows, d]`."""
    count, kv_heads, rows, head_dim = pages.shape
    return pages.transpose(0, 1).reshape(kv_heads, count * rows, head_dim)[:, :row_count]


def prefill_in_blocks(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    view: PrefillView,
    scale: float,
    cap: float | None,
    most_scores: int | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Prefill by plain products, where keys and values `[n_kv, rows + T, d]` have the prefix.

    Args:
        most_scores: scores of a block at once, or those of _LEAST_BLOCK queries; a block then
            reads no keys that a sliding window hides from all of it. None: blocks of _BLOCK
            queries, which are faster on a CPU.
        sinks: see `Layer`.
    """
    count, query_heads, head_dim = queries.shape
    kv_heads, rows, _ = keys.shape
    group = query_heads // kv_heads
    if most_scores is None:
        block_rows = _BLOCK
        transposed, values = keys.transpose(1, 2).contiguous(), values.contiguous()
    else:
        block_rows = _block_rows(count, query_heads * rows, most_scores, _LEAST_BLOCK)
        transposed = keys.transpose(1, 2)
    folded = (queries * scale).view(count, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    later = torch.ones((block_rows, block_rows), dtype=torch.bool, device=queries.device).triu_(1)
    attended = queries.new_empty((count, kv_heads, group, head_dim))
    for first, last in _blocks(count, block_rows):
        size, seen, start = last - first, view.row_count + last, 0
        if most_scores is not None and view.window is not None:
            start = max(0, view.row_count + first - view.window + 1)
        block = folded[:, :, first:last].reshape(kv_heads, group * size, head_dim)
        scores = torch.bmm(block, transposed[:, :, start:seen])
        scores = scores.view(kv_heads, group, size, seen - start)
        if cap is not None:
            scores = _capped(scores, cap)
        least = torch.finfo(scores.dtype).min
        masked = None if view.window is None else view.masked(first, last, start)
        if masked is not None:
            scores.masked_fill_(masked, least)
        else:
            scores[..., seen - start - size :].masked_fill_(later[:size, :size], least)
        if sinks is not None:
            # One score more of each query, whose weight is dropped: it has no value.
            column = sinks.to(scores.dtype).view(kv_heads, group, 1, 1)
            scores = torch.cat((scores, column.expand(-1, -1, size, 1)), dim=-1)
        weights = torch.softmax(scores, dim=-1).view(kv_heads, group * size, scores.shape[-1])
        weights = weights[..., : seen - start]
        product = torch.bmm(weights, values[:, start:seen])
        attended[first:last] = product.view(kv_heads, group, size, head_dim).permute(2, 0, 1, 3)
    return attended.view(count, query_heads * head_dim)


def _capped(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """Cap scores softly, in place."""
    return scores.div_(cap).tanh_().mul_(cap)


def _scores(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Multiply `[n, g, d]` by `[n, C, d]` to `[n, g, C]`.

    For fp32 groups on a CPU `K Q^T` is twice as fast as `Q K^T`.
    """
    if queries.dtype == torch.float32 and queries.shape[1] > 1:
        return torch.bmm(keys, queries.transpose(1, 2)).transpose(1, 2).contiguous()
    return torch.bmm(queries, keys.transpose(1, 2))


def _prefix(pool: torch.Tensor, pages: slice | torch.Tensor, row_count: int) -> torch.Tensor:
    """Return the visible prefix of one plane as `[n_kv, rows, d]`."""
    chosen = pool[pages] if isinstance(pages, slice) else pool.index_select(0, pages)
    return tile_rows(chosen, row_count)
