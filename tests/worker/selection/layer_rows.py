"""Random rows of a layer, and the true logits of their queries."""

from __future__ import annotations

from dataclasses import replace

import torch

from worker_service.selection.screen import AttentionShape, Guess, TokenRows
from worker_service.selection.token_choice import visible_tokens

HIDDEN = 24
SHAPE = AttentionShape(query_heads=4, kv_heads=2, head_dim=16, scale=0.25, cap=None, window=None)
SHAPES = {
    "grouped": SHAPE,
    "multi-head": replace(SHAPE, kv_heads=4),
    "window": replace(SHAPE, window=20),
    "cap": replace(SHAPE, cap=2.0),
}


def random_rows(tokens: int, shape: AttentionShape = SHAPE, seed: int = 0) -> TokenRows:
    """Return rows whose q and k are linear in X, in few directions, as a model's."""
    random = torch.Generator().manual_seed(seed)
    maps = torch.Generator().manual_seed(99)
    inputs = torch.randn((tokens, HIDDEN), generator=random) * torch.linspace(2, 0.1, HIDDEN)
    heads = shape.query_heads + shape.kv_heads
    mixed = torch.einsum(
        "th,hnd->tnd", inputs, torch.randn((HIDDEN, heads, shape.head_dim), generator=maps)
    )
    # A constant part of each key, which no ranking depends on.
    mixed[:, shape.query_heads :] += 3.0
    mixed /= HIDDEN**0.5
    return TokenRows(inputs, mixed[:, : shape.query_heads], mixed[:, shape.query_heads :])


def part(rows: TokenRows, first: int, last: int) -> TokenRows:
    return TokenRows(
        rows.inputs[first:last], rows.queries[first:last], rows.keys[first:last], first
    )


def guess_from(rows: TokenRows, first: int) -> Guess:
    """Return the queries from `first` on."""
    return Guess(rows.inputs[first:], rows.queries[first:], first)


def true_logits(rows: TokenRows, first: int, shape: AttentionShape = SHAPE) -> torch.Tensor:
    """Return `[T, n_q, S]` of the queries from `first` on."""
    keys = rows.keys.repeat_interleave(shape.query_heads // shape.kv_heads, 1)
    logits = torch.einsum("tqd,sqd->tqs", rows.queries[first:], keys) * shape.scale
    return logits if shape.cap is None else shape.cap * torch.tanh(logits / shape.cap)


def visible(rows: TokenRows, first: int, shape: AttentionShape = SHAPE) -> torch.Tensor:
    tokens = len(rows.keys)
    return visible_tokens(first, tokens - first, tokens, shape.window, rows.keys.device)
