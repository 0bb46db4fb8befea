"""From guessed scores to the tokens that are read. Pure: no model, no cache.

Query heads that share a KV head read the same rows: their scores are normalised by softmax and
added up. Tokens that every query reads (first ones, newest ones) come first in the budget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from splitpoint.selection import Selection


def visible_tokens(
    first_position: int, count: int, tokens: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """Return which of `tokens` cached tokens each of `count` consecutive queries sees.

    Bool `[T, S]`: those up to its own position, and within `window`.
    """
    queries = torch.arange(first_position, first_position + count, device=device).unsqueeze(1)
    keys = torch.arange(tokens, device=device)
    visible = keys <= queries
    return visible if window is None else visible & (keys > queries - window)


def choose(
    scores: torch.Tensor,
    selection: Selection,
    *,
    first_position: int,
    tokens: int,
    kv_heads: int,
    window: int | None = None,
) -> torch.Tensor:
    """Return which tokens each KV head reads, bool `[T, n_kv, S]`; never one that is not visible.

    A query's own token is always read, and its score changes nothing: a choice that is made one
    layer ahead cannot know it.

    Args:
        scores: fp32 `[T, n_q, S]`: guessed scaled logits of queries at consecutive positions;
            -inf: never read, not even as a first or newest token. Where a query does not see a
            token, any value.
        first_position: of the first query.
        tokens: S, the cached tokens that may be read.
        window: the layer's sliding window; None: all tokens are visible.
    """
    visible = visible_tokens(first_position, len(scores), tokens, window, scores.device)
    positions = torch.arange(first_position, first_position + len(scores), device=scores.device)
    own = (torch.arange(tokens, device=scores.device) == positions.unsqueeze(1)).unsqueeze(1)
    masked = scores.masked_fill(~visible.unsqueeze(1) | own, -math.inf)
    # A query that sees its own token alone has no weights.
    weights = _joined(masked, kv_heads).nan_to_num(-math.inf, neginf=-math.inf)
    weights.masked_fill_(own, math.inf)
    forced = _always_read(visible, selection).unsqueeze(1) & (weights > -math.inf)
    seen = visible.sum(-1)
    counts = _counts(masked, seen, selection, kv_heads)
    if selection.alpha is not None:
        # A few best ones would all be among the tokens that are always read.
        either = _largest(weights, counts, int(counts.max())) | forced
        counts = torch.minimum(either.sum(-1), _share(seen, selection.cap).long().unsqueeze(1))
    counts = counts.maximum(forced.sum(-1))
    weights = weights.masked_fill(forced, math.inf)
    return _largest(weights, counts, int(counts.max())) & (weights > -math.inf)


@dataclass(frozen=True, slots=True)
class ChosenRows:
    """The tokens that each KV head reads for one query.

    Attributes:
        tokens: int64 `[n_kv, n]`, the best first.
        is_wanted: bool `[n_kv, n]`, which of them are read, all distinct; None: all are.
    """

    tokens: torch.Tensor
    is_wanted: torch.Tensor | None = None


def choose_rows(
    scores: torch.Tensor,
    most: int,
    kv_heads: int,
    *,
    first: int = 0,
    newest: int = 0,
    forced: torch.Tensor | None = None,
) -> ChosenRows:
    """Return the `most` tokens that each KV head reads for one query that sees all of them.

    The choice is that of `choose`, with shapes that the host knows: it never waits for a device.

    Args:
        scores: fp32 `[1, n_q, S]`, as for `choose`; S is at least `most`.
        first, newest: this many tokens at either end come before all others; may be negative.
        forced: which do instead, bool `[n_kv, S]`, where tokens are not in order.
    """
    weights = _joined(scores, kv_heads)[0]
    if forced is None:
        forced = _ends(weights, first, newest)
    return ChosenRows(weights.masked_fill(forced, math.inf).topk(most, dim=-1).indices)


def choose_near(
    scores: torch.Tensor,
    selection: Selection,
    kv_heads: int,
    stored: range,
    most: int,
    *,
    forced: torch.Tensor | None = None,
) -> ChosenRows:
    """Return the stored tokens that each KV head reads for one query by alpha (InfiniGen).

    The choice is that of `choose` for the query behind all tokens that have a score; those that
    are not stored are on the device. Numbers count from the first stored token. Never waits for a
    device, either.

    Args:
        scores: fp32 `[1, n_q, S]` of the query's earlier tokens, in their order.
        selection: has an alpha.
        stored: which of them are in the store.
        most: stored tokens that each KV head reads at most.
        forced: which tokens come before all others, bool `[n_kv, S]`; None: the first and the
            newest, since tokens are in order.
    """
    if selection.alpha is None:
        raise ValueError(f"{selection} has no alpha")
    earlier = scores.shape[-1]
    first, newest = min(selection.sinks, earlier), min(selection.recent - 1, earlier)
    weights = _joined(scores, kv_heads)[0]
    if forced is None:
        forced = _ends(weights, first, newest)
    # Behind the query's own token, which `choose` counts.
    least = min(first + newest, earlier)
    cap = max(least, math.ceil((earlier + 1) * selection.cap - 1e-6) - 1)
    near = scores[0] > scores[0].amax(-1, keepdim=True) - selection.alpha
    mean = (near.sum(-1) + 1).to(torch.float64).mean().round().to(torch.int64)
    either = _largest(weights, (mean - 1).expand(kv_heads), cap) & (weights > -math.inf) | forced
    best = weights.masked_fill(forced, math.inf).topk(min(cap, earlier), dim=-1).indices
    rank = torch.arange(best.shape[1], device=best.device)
    is_wanted = rank < either.sum(-1, keepdim=True).clamp(least, cap)
    is_wanted &= (best >= stored.start) & (best < stored.stop)
    is_wanted &= is_wanted.cumsum(-1) <= most
    return ChosenRows((best - stored.start).clamp(0, len(stored) - 1), is_wanted)


def _ends(weights: torch.Tensor, first: int, newest: int) -> torch.Tensor:
    """Return which of S tokens are the first and the newest ones, bool `[S]`."""
    tokens = weights.shape[1]
    order = torch.arange(tokens, device=weights.device)
    return (order < first) | (order >= tokens - newest)


def _always_read(visible: torch.Tensor, selection: Selection) -> torch.Tensor:
    """Return the first and the newest visible tokens, bool `[T, S]`."""
    order = visible.cumsum(-1)
    newest = visible & (order > order[:, -1:] - selection.recent)
    newest[:, : selection.sinks] |= visible[:, : selection.sinks]
    return newest


def _counts(
    masked: torch.Tensor, seen: torch.Tensor, selection: Selection, kv_heads: int
) -> torch.Tensor:
    """Return how many tokens each KV head of each query reads, int64 `[T, n_kv]`.

    By alpha it is of the best ones, of which `choose` reads at most the cap.
    """
    if selection.alpha is not None:
        # InfiniGen: the mean over all heads of the tokens near the largest score, and its own.
        near = masked > masked.amax(-1, keepdim=True) - selection.alpha
        near &= masked > -math.inf
        counts = (near.sum(-1) + 1).to(torch.float64).mean(-1).round()
    elif selection.budget_tokens is not None:
        counts = seen.clamp_max(selection.budget_tokens)
    else:
        counts = _share(seen, 1.0 if selection.ratio is None else selection.ratio)
    return counts.to(torch.int64).clamp_min(1).unsqueeze(1).expand(-1, kv_heads)


def _share(seen: torch.Tensor, ratio: float) -> torch.Tensor:
    """Return `seen * ratio`, rounded up; 10 % of 200 tokens are 20 despite binary fractions."""
    return (seen.to(torch.float64) * ratio - 1e-6).ceil()


def _joined(masked: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return the weights of each KV head, `[T, n_kv, S]`.

    A KV head with one query head keeps its logits: softmax would only lose small ones.
    """
    count, query_heads, tokens = masked.shape
    if query_heads == kv_heads:
        return masked
    logs = masked.log_softmax(-1).view(count, kv_heads, query_heads // kv_heads, tokens)
    return logs.logsumexp(2)


def _largest(weights: torch.Tensor, counts: torch.Tensor, most: int) -> torch.Tensor:
    """Return the `counts[..., h]` largest of each row of `weights` `[..., n_kv, S]`, as bool.

    `most`: of each row at most. The host knows it, so that no device is waited for.
    """
    best = weights.topk(min(most, weights.shape[-1]), dim=-1).indices
    rank = torch.arange(best.shape[-1], device=weights.device)
    kept = rank < counts.unsqueeze(-1)
    return torch.zeros_like(weights, dtype=torch.bool).scatter_(-1, best, kept)
