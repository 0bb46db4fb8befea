"""What is read: budgets, tokens that are always read, windows and groups."""

from __future__ import annotations

import math

import pytest
import torch

from splitpoint.residency.selecting import wanted_rows
from splitpoint.selection import Selection
from worker_service.selection.token_choice import (
    choose,
    choose_near,
    choose_rows,
    visible_tokens,
)

CPU = torch.device("cpu")


def random_scores(count: int, heads: int, columns: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn((count, heads, columns), generator=torch.Generator().manual_seed(seed))


def chosen(text: str, scores: torch.Tensor, **changes: object) -> torch.Tensor:
    settings = {
        "first_position": scores.shape[-1] - len(scores),
        "tokens": scores.shape[-1],
        "kv_heads": scores.shape[1],
        **changes,
    }
    return choose(scores, Selection.parsed(text), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    ["columns:1", "columns:budget_tokens=512", "columns:alpha=inf,cap=1", "window:1,sinks=0"],
)
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_full_budget_reads_all_that_is_visible(
    text: str, window: int | None, kv_heads: int
) -> None:
    tokens = 45
    scores = random_scores(12, 4, tokens)
    read = chosen(
        text,
        scores,
        first_position=tokens - 12,
        tokens=tokens,
        kv_heads=kv_heads,
        window=window,
    )
    visible = visible_tokens(tokens - 12, 12, tokens, window, CPU)
    assert torch.equal(read, visible.unsqueeze(1).expand(-1, kv_heads, -1))


def test_a_ratio_reads_so_many_tokens_with_the_largest_scores() -> None:
    scores = random_scores(5, 3, 400)
    read = chosen("columns:0.1", scores)
    for query, of_query in enumerate(read):
        position = 395 + query
        assert of_query.sum(-1).tolist() == [math.ceil(0.1 * (position + 1))] * 3
        for head, mask in enumerate(of_query):
            assert mask[:4].all()
            assert mask[position - 15 : position + 1].all()
            assert not mask[position + 1 :].any()
            free = torch.arange(4, position - 15)
            taken, left = free[mask[free]], free[~mask[free]]
            row = scores[query, head]
            assert row[taken].min() > row[left].max()


def test_tokens_that_are_always_read_outweigh_a_small_budget() -> None:
    read = chosen("columns:budget_tokens=1,sinks=2,recent=3", random_scores(1, 2, 50))
    assert [mask.nonzero().flatten().tolist() for mask in read[0]] == [[0, 1, 47, 48, 49]] * 2


def test_first_tokens_outside_of_a_window_are_not_read() -> None:
    read = chosen("columns:0.5,recent=2", random_scores(1, 1, 50), window=10)
    assert read[0, 0].sum() == 5
    assert not read[0, 0, :40].any()


@pytest.mark.parametrize("alpha", [0.5, 2.0, 4.0])
def test_alpha_reads_the_mean_count_of_scores_near_the_largest(alpha: float) -> None:
    """InfiniGen's rule, counted by hand; a query's own token is one more, whatever its score."""
    scores = random_scores(1, 4, 300)
    for own in (-9.0, 99.0):
        scores[..., -1] = own
        read = chosen(f"infinigen:alpha={alpha},cap=1,sinks=0,recent=1", scores)
        near = [1 + int((row[:-1] > row[:-1].max() - alpha).sum()) for row in scores[0]]
        assert read.sum(-1).tolist() == [[round(sum(near) / 4)] * 4]
        assert read[..., -1].all()


def test_alpha_reads_the_best_beside_what_is_always_read() -> None:
    """One token alone is near the largest score: its own, the first and the newest ones are not."""
    scores = random_scores(1, 2, 300)
    scores[:, 0, 150], scores[:, 1, 90] = 50.0, 50.0
    selection = Selection.parsed("infinigen:alpha=2,cap=0.2")
    ends = {*range(selection.sinks), *range(300 - selection.recent, 300)}
    read = chosen(str(selection), scores)
    assert [set(head.nonzero().flatten().tolist()) for head in read[0]] == [
        ends | {150},
        ends | {90},
    ]
    # What serves it knows no score of the query's own token.
    rows = choose_near(scores[..., :-1], selection, 2, range(299), 60)
    assert rows.is_wanted is not None
    for head, wanted, best in zip(rows.tokens, rows.is_wanted, (150, 90), strict=True):
        assert {*head[wanted].tolist()} == ends - {299} | {best}


def test_the_cap_bounds_alpha() -> None:
    read = chosen("infinigen:alpha=50,cap=0.2", random_scores(1, 2, 300))
    assert read.sum(-1).tolist() == [[60, 60]]


def test_more_budget_reads_more_and_nothing_less() -> None:
    scores = random_scores(6, 4, 300)
    for rule, values in (("", (0.1, 0.2, 0.5, 1.0)), ("alpha=", (0.0, 1.0, 3.0, 6.0, math.inf))):
        before = torch.zeros((6, 2, 300), dtype=torch.bool)
        for value in values:
            read = chosen(f"columns:{rule}{value},cap=0.9", scores, kv_heads=2)
            assert not (before & ~read).any()
            before = read


def test_query_heads_of_a_group_read_the_same() -> None:
    """One head's clear choice is read for the group, and a shift of its logits changes nothing."""
    scores = random_scores(1, 4, 200)
    scores[0, 1, 77] = 30.0
    shifted = scores.clone()
    shifted[0, 1] += 100.0
    text = "columns:0.15"
    read = chosen(text, scores, kv_heads=2)
    assert read.shape == (1, 2, 200)
    assert read[0, 0, 77]
    assert torch.equal(read, chosen(text, shifted, kv_heads=2))


def test_the_order_of_slots_does_not_matter() -> None:
    """Free tokens in another order are read just the same."""
    scores = random_scores(1, 2, 120)
    order = torch.cat((torch.arange(4), 4 + torch.randperm(100), torch.arange(104, 120)))
    read = chosen("columns:0.3", scores)
    assert torch.equal(chosen("columns:0.3", scores[..., order]), read[..., order])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("text", ["columns:0.25", "columns:budget_tokens=13"])
def test_choosing_by_index_equals_choosing_by_mask(text: str, kv_heads: int) -> None:
    selection = Selection.parsed(text)
    random = torch.Generator().manual_seed(kv_heads)
    for tokens in (30, 57, 200):
        scores = torch.randn((1, 4, tokens), generator=random)
        # What the query's own token weighs is left out of the groups' weights.
        scores[..., -1] = -math.inf
        mask = choose(
            scores, selection, first_position=tokens - 1, tokens=tokens, kv_heads=kv_heads
        )
        rows = choose_rows(
            scores.clone(),
            max(wanted_rows(selection, tokens), selection.sinks + selection.recent),
            kv_heads,
            first=selection.sinks,
            newest=selection.recent,
        )
        assert rows.is_wanted is None
        for head, chosen in zip(mask[0], rows.tokens, strict=True):
            assert sorted(chosen.tolist()) == head.nonzero().flatten().tolist()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("text", ["alpha=1.5,cap=0.4", "alpha=9,cap=0.3", "alpha=0,recent=1"])
def test_stored_tokens_near_the_largest_score_are_those_of_the_mask(
    text: str, kv_heads: int
) -> None:
    """Whatever part of the tokens is in the store: the others take part in the rule."""
    selection = Selection.parsed(f"columns:{text}")
    random = torch.Generator().manual_seed(kv_heads)
    for tokens, stored in ((30, range(8, 24)), (57, range(56)), (200, range(16, 192))):
        scores = torch.randn((1, 4, tokens), generator=random)
        scores[..., 2] += 3
        mask = choose(
            scores, selection, first_position=tokens - 1, tokens=tokens, kv_heads=kv_heads
        )
        for most in (len(stored), 5):
            rows = choose_near(scores[..., :-1].clone(), selection, kv_heads, stored, most)
            assert rows.is_wanted is not None
            for head, chosen, wanted in zip(mask[0], rows.tokens, rows.is_wanted, strict=True):
                read = set((head[stored.start : stored.stop]).nonzero().flatten().tolist())
                found = chosen[wanted].tolist()
                assert len(found) == len(set(found)) == min(most, len(read))
                assert set(found) <= read
