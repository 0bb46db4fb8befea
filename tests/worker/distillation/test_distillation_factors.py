"""Factors in closed form: best of their rank, and what they leave as it is."""

from __future__ import annotations

import pytest
import torch

from worker_service.distillation.factors import (
    Sums,
    closed_form,
    projected_form,
    roots,
    rotated_form,
    skew,
)
from worker_service.selection.columns import ColumnScreen
from worker_service.selection.maple import MapleScreen, MapleWeights, project, sparse_signs
from worker_service.selection.screen import AttentionShape, Guess, TokenRows

KV_HEADS, GROUP, WIDTH, TOKENS, RANK = 2, 2, 16, 200, 5


def uneven_rows(seed: int) -> TokenRows:
    """Return rows with few strong directions, different ones in q and k of each head."""
    random = torch.Generator().manual_seed(seed)
    maps = torch.Generator().manual_seed(1)
    strengths = torch.logspace(0, -2, WIDTH)
    spread = [torch.randn((KV_HEADS, WIDTH, WIDTH), generator=maps) for _ in range(2)]
    queries = torch.randn((TOKENS, KV_HEADS, GROUP, WIDTH), generator=random) * strengths
    keys = torch.randn((TOKENS, KV_HEADS, WIDTH), generator=random) * strengths
    return TokenRows(
        inputs=torch.randn((TOKENS, 24), generator=random),
        queries=torch.einsum("tkgd,kde->tkge", queries, spread[0]).flatten(1, 2),
        keys=torch.einsum("tkd,kde->tke", keys, spread[1]),
    )


def sums_of(*passages: TokenRows) -> Sums:
    sums = Sums.empty(KV_HEADS, WIDTH, torch.device("cpu"))
    for rows in passages:
        sums.add(rows)
    return sums


def error(rows: TokenRows, query_map: torch.Tensor, key_map: torch.Tensor) -> float:
    """Return the relative Frobenius error of all products of queries and keys."""
    queries = rows.queries.view(TOKENS, KV_HEADS, GROUP, WIDTH)
    true = torch.einsum("tkgd,skd->kgts", queries, rows.keys)
    guessed = torch.einsum(
        "tkgd,kdr,ker,ske->kgts", queries, query_map[..., :RANK], key_map[..., :RANK], rows.keys
    )
    return float((guessed - true).norm() / true.norm())


def test_roots_give_the_gram_matrix_and_its_inverse() -> None:
    """Also if it has not its full rank."""
    rows = torch.randn((50, 6), generator=torch.Generator().manual_seed(0)).double()
    rows[:, 5] = rows[:, 0] + rows[:, 1]
    gram = rows.T @ rows
    root, inverse = roots(gram)
    torch.testing.assert_close(root.T @ root, gram)
    torch.testing.assert_close(rows @ inverse @ root, rows)


def test_the_closed_form_is_the_best_of_its_rank() -> None:
    """As good as truncating the products themselves, and better than skewed or random columns."""
    rows = uneven_rows(0)
    sums = sums_of(rows)
    maps = closed_form(sums.queries, sums.keys)
    queries = rows.queries.view(TOKENS, KV_HEADS, GROUP, WIDTH)
    products = torch.einsum("tkgd,skd->kgts", queries, rows.keys).flatten(1, 2)
    values = torch.linalg.svdvals(products.double())
    best = float(values[:, RANK:].norm() / values.norm())
    assert error(rows, *maps) == pytest.approx(best, rel=1e-3)

    rotation = skew(sums)
    assert error(rows, rotation, rotation) > 1.2 * best
    random = torch.linalg.qr(torch.randn((KV_HEADS, WIDTH, WIDTH))).Q
    assert error(rows, random, random) > 2 * best
    # All columns give the products themselves.
    full = torch.einsum("kdr,ker->kde", *maps)
    torch.testing.assert_close(full, torch.eye(WIDTH).expand_as(full), atol=1e-3, rtol=0)


def test_the_closed_form_holds_on_rows_that_it_never_saw() -> None:
    sums = sums_of(uneven_rows(0), uneven_rows(1))
    unseen = uneven_rows(2)
    rotation = skew(sums)
    assert error(unseen, *closed_form(sums.queries, sums.keys)) < error(unseen, rotation, rotation)


def test_skewing_changes_no_logit() -> None:
    rows = uneven_rows(3)
    rotation = skew(sums_of(uneven_rows(4)))
    eye = torch.eye(WIDTH).expand(KV_HEADS, -1, -1)
    torch.testing.assert_close(rotation @ rotation.transpose(1, 2), eye, atol=1e-5, rtol=0)
    shape = AttentionShape(KV_HEADS * GROUP, KV_HEADS, WIDTH, 0.25, None, None)
    guess = Guess(rows.inputs, rows.queries, 0)
    scores = []
    for factor in (None, rotation):
        screen = ColumnScreen(shape, WIDTH, int8=False, skew=factor)
        screen.extend(rows)
        scores.append(screen.scores(guess))
    torch.testing.assert_close(*scores, atol=1e-4, rtol=1e-4)


def test_skewing_gathers_the_queries_in_few_columns() -> None:
    """As much of their energy as any rotation can: what their largest eigenvalues say."""
    rows = uneven_rows(3)
    queries = rows.queries.view(TOKENS, KV_HEADS, GROUP, WIDTH)
    by_column = torch.einsum("tkgd,kde->tkge", queries, skew(sums_of(rows))).square().sum((0, 2))
    gram = torch.einsum("tkgd,tkge->kde", queries, queries)
    wanted = torch.linalg.eigvalsh(gram).flip(-1)[:, :RANK].sum(-1) / queries.square().sum(
        (0, 2, 3)
    )
    torch.testing.assert_close(by_column[:, :RANK].sum(-1) / by_column.sum(-1), wanted)
    unskewed = queries.square().sum((0, 2)).topk(RANK).values.sum(-1)
    assert (wanted > 1.3 * unskewed / by_column.sum(-1)).all()


def error_of_projected(rank: int, constant: float) -> float:
    """Return the relative error of products less their mean over keys, which ranks none.

    q and k are linear in X P, with a product of rank RANK; `constant` is added to all keys.
    """
    random = torch.Generator().manual_seed(8)
    inputs = torch.randn((TOKENS, 24), generator=random) + 1
    signs = sparse_signs(24, 12, random)
    few = [torch.randn((13, heads, RANK), generator=random) for heads in (4, KV_HEADS)]
    wide = torch.linalg.qr(torch.randn((KV_HEADS, WIDTH, WIDTH), generator=random)).Q[:, :RANK]
    per_query = wide.repeat_interleave(GROUP, 0)
    mixed = project(inputs, signs)
    rows = TokenRows(
        inputs,
        torch.einsum("tm,mqr,qrd->tqd", mixed, few[0], per_query),
        torch.einsum("tm,mkr,krd->tkd", mixed, few[1], wide) + constant,
    )
    query, key = projected_form([mixed], [rows], rank)
    assert (query.shape, key.shape) == ((13, 4, rank), (13, KV_HEADS, rank))
    centred = rows.keys - rows.keys.mean(0)
    true = torch.einsum(
        "tkgd,skd->kgts", rows.queries.view(TOKENS, KV_HEADS, GROUP, WIDTH), centred
    )
    guessed_keys = torch.einsum("tm,mkr->tkr", mixed, key)
    guessed_keys = guessed_keys - guessed_keys.mean(0)
    guessed = torch.einsum(
        "tkgr,skr->kgts",
        torch.einsum("tm,mqr->tqr", mixed, query).view(TOKENS, KV_HEADS, GROUP, rank),
        guessed_keys,
    )
    return float((guessed - true).norm() / true.norm())


def test_projected_factors_find_products_that_are_there() -> None:
    assert error_of_projected(RANK, constant=0.0) < 1e-5


def test_a_constant_part_of_keys_takes_no_column() -> None:
    few = RANK - 2
    plain = error_of_projected(few, constant=0.0)
    assert 0.05 < plain < 0.9
    assert error_of_projected(few, constant=300.0) == pytest.approx(plain, rel=1e-3)


FAST = torch.linspace(1.5, 0.1, WIDTH // 2)
SLOW = torch.linspace(4e-4, 1e-4, WIDTH // 2)


def rotated_rows(rope: torch.Tensor, mixing: torch.Tensor) -> TokenRows:
    """Return rows whose q and k are linear in X before RoPE, with biases.

    Their pairs are mixed by `[n, d / 2]`.
    """
    random = torch.Generator().manual_seed(9)
    inputs = torch.randn((TOKENS, 24), generator=random)
    maps = torch.randn((24, KV_HEADS * (GROUP + 1), len(mixing), 2), generator=random)
    biases = torch.randn(maps.shape[1:], generator=random)
    made = torch.einsum("th,hnmc->tnmc", inputs, maps) + biases
    heads = torch.einsum("tnmc,mp->tnpc", made, mixing).contiguous()
    angles = torch.arange(TOKENS).view(-1, 1, 1) * rope
    turned = torch.view_as_complex(heads) * torch.polar(torch.ones_like(angles), angles)
    flat = torch.cat((turned.real, turned.imag), -1)
    return TokenRows(inputs, flat[:, : KV_HEADS * GROUP], flat[:, KV_HEADS * GROUP :])


def error_of_maple(rows: TokenRows, rank: int, rope: torch.Tensor) -> float:
    """Return the relative error of all logits by factors that were made from these rows."""
    signs = rows.inputs.new_empty((24, 0))
    query, key, frequencies = rotated_form([project(rows.inputs, signs)], [rows], rank, rope)
    shape = AttentionShape(KV_HEADS * GROUP, KV_HEADS, WIDTH, 1.0, None, None)
    weights = MapleWeights(signs, query, key, frequencies)
    screen = MapleScreen(shape, weights, int8=False)
    screen.extend(rows)
    guessed = screen.scores(Guess(rows.inputs, rows.queries, 0))
    keys = rows.keys.repeat_interleave(GROUP, 1)
    true = torch.einsum("tqd,sqd->tqs", rows.queries, keys)
    return float((guessed - true).norm() / true.norm())


def test_pairs_rotated_by_their_frequencies_give_the_products_behind_rope() -> None:
    rows = rotated_rows(FAST, torch.eye(WIDTH // 2))
    assert error_of_maple(rows, WIDTH, FAST) < 1e-4
    # Half of the pairs, which are equally strong.
    assert error_of_maple(rows, WIDTH // 2, FAST) > 0.3


def test_the_strongest_pairs_are_kept() -> None:
    """Two of eight, when each has a tenth of the product of the one before."""
    rows = rotated_rows(FAST, torch.diag(torch.logspace(-3.5, 0, WIDTH // 2)))
    assert error_of_maple(rows, 4, FAST) < 0.03


def test_slow_pairs_are_combined() -> None:
    """All pairs of two directions, which hardly turn over a passage, need four columns."""
    mixing = torch.randn((2, WIDTH // 2), generator=torch.Generator().manual_seed(3))
    assert error_of_maple(rotated_rows(SLOW, mixing), 4, SLOW) < 0.05
    # As fast ones they could not be.
    assert error_of_maple(rotated_rows(FAST, mixing), 4, FAST) > 0.3
