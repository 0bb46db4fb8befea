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
from torch.nn import functional

from splitpoint.host.processor import AMX_BF16, instruction_sets
from worker_service.model.attention_plan import (
    LEAST,
    DecodePlan,
    PrefillPlan,
    PrefillView,
    masked_keys,
)

# Query rows of one block of a half-precision prefill on a CPU. With 512 tokens and 12 heads
# of 64 (32 on 8 of 128) a layer takes 3.1 (11) ms; with blocks of 128 4.5 (15), of 256 5.7
# (21), with SDPA 5.7 (28). fp32 gains nothing.
_BLOCK = 64
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

    def attended(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the normalised result `[N, n_q * d]`, the input of `DecoderLayer.finish`.

        Each query must have seen at least one key.
        """
        return (self.weighted / self.total.unsqueeze(-1)).flatten(1).to(dtype)


def decode_partial(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: DecodePlan,
    *,
    window: int | None,
    scale: float,
    cap: float | None = None,
) -> PartialAttention:
    """Attend one layer's pages with one query token of each of B sequences.

    Args:
        queries: `[B, n_q, d]`, after RoPE.
        keys, values: the pool or staging tile that the plan's page numbers refer to,
            `[pages, n_kv, C, d]`. Masked rows may have any finite values.
        window: the layer's sliding window; one of the plan's windows.
        cap: in all functions here a score s becomes `cap * tanh(s / cap)`; None: no cap.

    Query heads that share a KV head are folded into the rows of one product,
    `[n_kv, g, d] x [n_kv, d, C]`, so keys are never repeated.
    """
    view = plan.views[window]
    count, query_heads, head_dim = queries.shape
    page_keys, page_values = view.of(keys), view.of(values)
    pages, kv_heads, rows, _ = page_keys.shape
    owner = view.owner
    group = query_heads // kv_heads
    by_page = (queries * scale).index_select(0, view.reader)
    scores = _scores(
        by_page.view(pages * kv_heads, group, head_dim),
        page_keys.view(pages * kv_heads, rows, head_dim),
    )
    if cap is not None:
        scores = _capped(scores.to(torch.float32), cap)
    # Cast to fp32 and mask in one pass, which also removes overflows of masked rows.
    scores = torch.minimum(scores.view(pages, query_heads, rows), view.limit)
    # One row more than queries, for the foreign pages of the range. Every other page has a
    # row that its reader sees (plans drop the rest), so each peak is a real score and
    # masked rows weigh exp(least - peak) = 0.
    peak = queries.new_full((count + 1, query_heads), _LEAST, dtype=torch.float32)
    peak.scatter_reduce_(0, owner.unsqueeze(1).expand(pages, query_heads), scores.amax(-1), "amax")
    scores.sub_(peak.index_select(0, owner).unsqueeze(-1)).exp_()
    total = torch.zeros_like(peak).index_add_(0, owner, scores.sum(-1))
    by_page = torch.bmm(
        scores.to(values.dtype).view(pages * kv_heads, group, rows),
        page_values.view(pages * kv_heads, rows, head_dim),
    )
    weighted = queries.new_zeros((count + 1, query_heads, head_dim), dtype=torch.float32)
    weighted.index_add_(0, owner, by_page.view(pages, query_heads, head_dim).to(torch.float32))
    return PartialAttention(weighted[:count], peak[:count], total[:count])


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
    flags: Collection[str] | None = None,
) -> torch.Tensor:
    """Attend the prefix's pages and the new tokens with T new tokens of one request.

    Args:
        queries: `[T, n_q, d]`; new_keys, new_values: `[T, n_kv, d]`.
        keys, values: the pool, `[pages, n_kv, C, d]`.
        flags: the instruction sets that decide the kernel; None: this processor's.

    Returns `[T, n_q * d]`.
    """
    view = plan.views[window]
    all_keys, all_values = new_keys.transpose(0, 1), new_values.transpose(0, 1)
    if view.pages is not None:
        all_keys = torch.cat((_prefix(keys, view.pages, view.row_count), all_keys), dim=1)
        all_values = torch.cat((_prefix(values, view.pages, view.row_count), all_values), dim=1)
    flags = instruction_sets() if flags is None else flags
    if prefills_in_blocks(queries.device, queries.dtype, cap, flags):
        return _prefill_in_blocks(queries, all_keys, all_values, view, scale, cap)
    attended = functional.scaled_dot_product_attention(
        queries.transpose(0, 1).unsqueeze(0),
        all_keys.unsqueeze(0),
        all_values.unsqueeze(0),
        attn_mask=view.mask,
        is_causal=view.mask is None,
        scale=scale,
        enable_gqa=queries.shape[1] != new_keys.shape[1],
    )
    return attended.squeeze(0).transpose(0, 1).reshape(queries.shape[0], -1)


def prefills_in_blocks(
    device: torch.device, dtype: torch.dtype, cap: float | None, flags: Collection[str]
) -> bool:
    """Return True if plain products prefill faster than SDPA, or if scores are capped.

    SDPA cannot cap scores. `flags` are instruction sets of the host's processor. A layer of
    8 sequences x 12 heads x 512 x 64 in bfloat16 takes, by products / SDPA, 3.1 / 5.7 ms on
    an EPYC, and 56 / 10.7 ms (all eight) on a Xeon with AMX. fp32 gains nothing from blocks.
    """
    if cap is not None:
        return True
    if device.type != "cpu" or dtype == torch.float32:
        return False
    return not (dtype == torch.bfloat16 and AMX_BF16 in flags)


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


def tile_rows(pages: torch.Tensor, row_count: int) -> torch.Tensor:
    """Return the first `row_count` rows of pages `[P, n_kv, C, d]` as `[n_kv, rows, d]`."""
    count, kv_heads, rows, head_dim = pages.shape
    return pages.transpose(0, 1).reshape(kv_heads, count * rows, head_dim)[:, :row_count]


def _prefill_in_blocks(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    view: PrefillView,
    scale: float,
    cap: float | None,
) -> torch.Tensor:
    """Prefill by plain products, where keys and values `[n_kv, rows + T, d]` have the prefix."""
    count, query_heads, head_dim = queries.shape
    kv_heads = keys.shape[0]
    group = query_heads // kv_heads
    transposed, values = keys.transpose(1, 2).contiguous(), values.contiguous()
    folded = (queries * scale).view(count, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    later = torch.ones((_BLOCK, _BLOCK), dtype=torch.bool, device=queries.device).triu_(1)
    attended = queries.new_empty((count, kv_heads, group, head_dim))
    for first in range(0, count, _BLOCK):
        last = min(first + _BLOCK, count)
        size, seen = last - first, view.row_count + last
        block = folded[:, :, first:last].reshape(kv_heads, group * size, head_dim)
        scores = torch.bmm(block, transposed[:, :, :seen]).view(kv_heads, group, size, seen)
        if cap is not None:
            scores = _capped(scores, cap)
        least = torch.finfo(scores.dtype).min
        if view.is_windowed and view.mask is not None:
            scores.masked_fill_(~view.mask[first:last, :seen], least)
        else:
            scores[..., seen - size :].masked_fill_(later[:size, :size], least)
        weights = torch.softmax(scores, dim=-1).view(kv_heads, group * size, seen)
        product = torch.bmm(weights, values[:, :seen])
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
