"""Attention over pages in the arena's own layout, `[pages, n_kv, chunk_tokens, d]`.

Every page is attended by itself, all pages of all requests at once, and the
pages' results are merged with the rule of online softmax. Requests of any
lengths are one handful of operations per layer, and what streamed residency
attends tile by tile merges with what is on the device. Which pages belong to
whom comes in plans (attention_plan.py). It knows nothing of requests or stores.

Softmax and every sum over pages are fp32, whatever the pages hold.
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
    PageView,
    PrefillPlan,
    PrefillView,
    hidden_rows,
)

__all__ = [
    "DecodePlan",
    "PageView",
    "Partial",
    "PrefillPlan",
    "PrefillView",
    "decode",
    "decode_partial",
    "prefill",
    "prefill_partial",
    "prefills_in_blocks",
    "tile_rows",
]

# Rows of queries that half-precision prefill on a CPU attends with at once: with
# 512 tokens, 12 heads of 64 (32 on 8 of 128) a layer takes 3.1 (11) ms, with
# blocks of 128 4.5 (15), of 256 5.7 (21), with SDPA 5.7 (28). fp32 gains nothing.
_BLOCK = 64
_LEAST = float(LEAST)


@dataclass(frozen=True, slots=True)
class Partial:
    """Attention of N query tokens over some of their keys, not yet normalised.

    Attributes:
        weighted: fp32 `[N, n_q, d]`, sum of `exp(score - peak) * value`.
        peak: fp32 `[N, n_q]`, largest score; the least finite number where no key was seen.
        total: fp32 `[N, n_q]`, sum of `exp(score - peak)`.
    """

    weighted: torch.Tensor
    peak: torch.Tensor
    total: torch.Tensor

    def merge(self, other: Partial) -> Partial:
        """Attention over the keys of both (online softmax)."""
        peak = torch.maximum(self.peak, other.peak)
        mine, theirs = (self.peak - peak).exp_(), (other.peak - peak).exp_()
        return Partial(
            weighted=torch.addcmul(
                self.weighted * mine.unsqueeze(-1), other.weighted, theirs.unsqueeze(-1)
            ),
            peak=peak,
            total=torch.addcmul(self.total * mine, other.total, theirs),
        )

    def attended(self, dtype: torch.dtype) -> torch.Tensor:
        """The normalised result `[N, n_q * d]`, as `DecoderLayer.finish` takes it.

        Every query must have seen at least one key by now.
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
) -> Partial:
    """One query token each of B sequences, over one layer's pages.

    Args:
        queries: `[B, n_q, d]`, after RoPE.
        keys, values: the pool (or staging tile) the plan's page numbers mean,
            `[pages, n_kv, C, d]`. Hidden rows may hold anything finite.
        window: the layer's; one of the plan's windows.
        cap: a score s becomes `cap * tanh(s / cap)`, as in all functions here; None: it stays.

    The group of query heads that shares a KV head is folded into the rows of
    one product, `[n_kv, g, d] x [n_kv, d, C]`: keys are never repeated.
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
    # To fp32 and hidden in one pass; an overflow in a hidden row goes as well.
    scores = torch.minimum(scores.view(pages, query_heads, rows), view.limit)
    # One row more than queries: what foreign pages of the range add up to. Every
    # other page has a row its reader sees (plans drop the rest), so each peak is
    # a real score and hidden rows weigh exp(least - peak) = 0.
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
    return Partial(weighted[:count], peak[:count], total[:count])


def decode(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: DecodePlan,
    *,
    window: int | None,
    scale: float,
    cap: float | None = None,
) -> torch.Tensor:
    """`decode_partial` when the plan covers everything: `[B, n_q * d]`."""
    partial = decode_partial(queries, keys, values, plan, window=window, scale=scale, cap=cap)
    return partial.attended(queries.dtype)


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
    """T new tokens of one request over its prefix's pages and themselves.

    Args:
        queries: `[T, n_q, d]`; new_keys, new_values: `[T, n_kv, d]`.
        keys, values: the pool, `[pages, n_kv, C, d]`.
        flags: instruction sets to choose the kernel by; None: this processor's.

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
    """True if plain products prefill faster than SDPA, or SDPA cannot: it cannot cap scores.

    `flags`: instruction sets of the host's processor. 8 sequences x 12 heads x 512 x 64 in
    bfloat16, a layer, products / SDPA: 3.1 / 5.7 ms on an EPYC, 56 / 10.7 ms (all eight) on a
    Xeon with AMX. fp32 gains nothing from blocks on either.
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
) -> Partial:
    """T consecutive queries over S consecutive keys: one tile of a streamed prefill.

    Args:
        queries: `[T, n_q, d]`, the first one at `query_position`.
        keys, values: `[n_kv, S, d]` (see `tile_rows`; transposed new K and V for
            the tokens' own part), the first one at `key_position`.
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
    hidden = hidden_rows(query_position, count, key_position, rows, window, queries.device)
    if hidden is not None:
        by_query.masked_fill_(hidden, _LEAST)
    peak = by_query.amax(-1)
    by_query.sub_(peak.unsqueeze(-1)).exp_()
    if hidden is not None:
        by_query.masked_fill_(hidden, 0.0)
    total = by_query.sum(-1)
    weighted = torch.bmm(scores.to(values.dtype), values).to(torch.float32)
    weighted = weighted.view(kv_heads, group, count, head_dim)
    return Partial(
        weighted.permute(2, 0, 1, 3).reshape(count, query_heads, head_dim),
        peak.permute(2, 0, 1).reshape(count, query_heads),
        total.permute(2, 0, 1).reshape(count, query_heads),
    )


def tile_rows(pages: torch.Tensor, row_count: int) -> torch.Tensor:
    """The first `row_count` rows of consecutive pages `[P, n_kv, C, d]` as `[n_kv, rows, d]`."""
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
    """`prefill` by plain products; keys and values `[n_kv, rows + T, d]` with their prefix."""
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
    """Softly capped, in place."""
    return scores.div_(cap).tanh_().mul_(cap)


def _scores(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """`[n, g, d]` and `[n, C, d]` to `[n, g, C]`.

    For groups in fp32 on a CPU, `K Q^T` runs at twice the speed of `Q K^T`.
    """
    if queries.dtype == torch.float32 and queries.shape[1] > 1:
        return torch.bmm(keys, queries.transpose(1, 2)).transpose(1, 2).contiguous()
    return torch.bmm(queries, keys.transpose(1, 2))


def _prefix(pool: torch.Tensor, pages: slice | torch.Tensor, row_count: int) -> torch.Tensor:
    """The visible prefix of one plane as `[n_kv, rows, d]`."""
    chosen = pool[pages] if isinstance(pages, slice) else pool.index_select(0, pages)
    return tile_rows(chosen, row_count)
