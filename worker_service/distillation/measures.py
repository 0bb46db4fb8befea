"""How well screens rank: the true top tokens, and the attention, that they find."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean

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


def found_by(
    make: Callable[[], LayerScreen], shape: AttentionShape, passages: Sequence[TokenRows]
) -> tuple[float, float]:
    """Return the shares of a query's true top tenth, and of its attention, in the guessed one.

    Both are means over queries of the second half of each passage.
    """
    hits, caught = [], []
    for rows in passages:
        tokens = len(rows.keys)
        guessed, true = _guessed(make, rows), _true(rows, shape)
        for place, position in enumerate(_positions(tokens)):
            seen = visible_tokens(position, 1, tokens, shape.window, rows.keys.device)[0]
            pair = guessed[place][:, seen], true[place][:, seen]
            hits.append(_hits(*pair))
            caught.append(_caught(*pair))
    return fmean(hits), fmean(caught)


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
