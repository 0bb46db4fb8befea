"""How well screens rank: recall of the true top tokens, and agreement of two screens' ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from worker_service.selection.screen import (
    AttentionShape,
    Guess,
    LayerScreen,
    TokenRows,
    grouped_products,
    to_logits,
)
from worker_service.selection.token_choice import visible_tokens

# Share of the visible tokens whose recall is measured.
TOP_SHARE = 0.1
# Queries of each passage that are measured, spread over its second half.
_QUERIES = 64


def recall(
    make: Callable[[], LayerScreen], shape: AttentionShape, passages: Sequence[TokenRows]
) -> float:
    """Return the mean share of a query's true top tenth that is in the guessed top tenth."""
    return _beside_the_truth(make, shape, passages, _hits)


def weight(
    make: Callable[[], LayerScreen], shape: AttentionShape, passages: Sequence[TokenRows]
) -> float:
    """Return the mean share of a query's attention that goes to the guessed top tenth."""
    return _beside_the_truth(make, shape, passages, _caught)


def _beside_the_truth(
    make: Callable[[], LayerScreen],
    shape: AttentionShape,
    passages: Sequence[TokenRows],
    measure: Callable[[torch.Tensor, torch.Tensor], float],
) -> float:
    """Return the mean of a measure of guessed and true scores."""
    return _mean_over_rows(
        passages, shape, lambda rows: (_guessed(make, rows), _true(rows, shape)), measure
    )


def rank_agreement(
    one: Callable[[], LayerScreen],
    other: Callable[[], LayerScreen],
    shape: AttentionShape,
    passages: Sequence[TokenRows],
) -> float:
    """Return the mean Spearman correlation of two screens' scores of a query's visible tokens."""
    return _mean_over_rows(
        passages, shape, lambda rows: (_guessed(one, rows), _guessed(other, rows)), spearman
    )


def spearman(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the mean rank correlation of the rows of `[n, S]`; ties count in their order."""
    ranks = [
        each.argsort(dim=-1, stable=True).argsort(dim=-1, stable=True).double()
        for each in (one, other)
    ]
    first, second = (each - each.mean(-1, keepdim=True) for each in ranks)
    products = (first * second).sum(-1)
    return float((products / (first.norm(dim=-1) * second.norm(dim=-1))).mean())


def _mean_over_rows(
    passages: Sequence[TokenRows],
    shape: AttentionShape,
    scores: Callable[[TokenRows], tuple[torch.Tensor, torch.Tensor]],
    measure: Callable[[torch.Tensor, torch.Tensor], float],
) -> float:
    """Return the mean of a measure of two `[n_q, S]` over queries of the second half."""
    values = []
    for rows in passages:
        tokens = len(rows.keys)
        one, other = scores(rows)
        for place, position in enumerate(_positions(tokens)):
            seen = visible_tokens(position, 1, tokens, shape.window, rows.keys.device)[0]
            values.append(measure(one[place][:, seen], other[place][:, seen]))
    return math.fsum(values) / len(values)


def _positions(tokens: int) -> list[int]:
    half = tokens // 2
    count = min(_QUERIES, tokens - half)
    return [half + (tokens - half) * index // count for index in range(count)]


def _guessed(make: Callable[[], LayerScreen], rows: TokenRows) -> torch.Tensor:
    screen = make()
    screen.extend(rows)
    # One at a time: a guess is of consecutive tokens.
    guesses = (
        Guess(rows.inputs[place : place + 1], rows.queries[place : place + 1], place)
        for place in _positions(len(rows.keys))
    )
    return torch.cat([screen.scores(guess) for guess in guesses])


def _true(rows: TokenRows, shape: AttentionShape) -> torch.Tensor:
    index = torch.tensor(_positions(len(rows.keys)), device=rows.keys.device)
    return to_logits(grouped_products(rows.queries[index], rows.keys), shape)


def _hits(guessed: torch.Tensor, true: torch.Tensor) -> float:
    count = math.ceil(TOP_SHARE * true.shape[-1])
    top = torch.zeros_like(true, dtype=torch.bool)
    top.scatter_(-1, true.topk(count).indices, value=True)
    return float(top.gather(-1, guessed.topk(count).indices).float().mean())


def _caught(guessed: torch.Tensor, true: torch.Tensor) -> float:
    count = math.ceil(TOP_SHARE * true.shape[-1])
    return float(true.softmax(-1).gather(-1, guessed.topk(count).indices).sum(-1).mean())
