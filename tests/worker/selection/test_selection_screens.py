"""Screens: what they keep, and how close their scores are to the true ones."""

from __future__ import annotations

import pytest
import torch

from worker_service.selection.columns import ColumnScreen
from worker_service.selection.screen import AttentionShape, Guess, TokenRows, grouped_products

SHAPE = AttentionShape(query_heads=4, kv_heads=2, head_dim=16, scale=0.25, cap=None, window=None)


def random_rows(tokens: int, shape: AttentionShape = SHAPE, seed: int = 0) -> TokenRows:
    random = torch.Generator().manual_seed(seed)
    return TokenRows(
        inputs=torch.randn((tokens, 24), generator=random),
        queries=torch.randn((tokens, shape.query_heads, shape.head_dim), generator=random),
        keys=torch.randn((tokens, shape.kv_heads, shape.head_dim), generator=random),
    )


def true_logits(rows: TokenRows, shape: AttentionShape = SHAPE) -> torch.Tensor:
    keys = rows.keys.repeat_interleave(shape.query_heads // shape.kv_heads, 1)
    return torch.einsum("tqd,sqd->tqs", rows.queries, keys) * shape.scale


def guess_of_all(rows: TokenRows) -> Guess:
    return Guess(rows.inputs, rows.queries, 0)


def test_products_are_those_of_each_groups_key() -> None:
    rows = random_rows(30)
    torch.testing.assert_close(
        grouped_products(rows.queries, rows.keys) * SHAPE.scale, true_logits(rows)
    )


@pytest.mark.parametrize("pieces", [(40,), (1, 7, 32)])
def test_all_columns_give_the_true_logits(pieces: tuple[int, ...]) -> None:
    rows = random_rows(40)
    screen = ColumnScreen(SHAPE, 16, int8=False)
    first = 0
    for count in pieces:
        part = slice(first, first + count)
        screen.extend(TokenRows(rows.inputs[part], rows.queries[part], rows.keys[part]))
        first += count
    torch.testing.assert_close(screen.scores(guess_of_all(rows)), true_logits(rows))
    assert screen.device_bytes == rows.keys.nbytes
