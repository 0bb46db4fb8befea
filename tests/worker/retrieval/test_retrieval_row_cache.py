"""The rows' bookkeeping equals a plain model of it, token by token."""

from __future__ import annotations

import random
from collections import OrderedDict

import torch

from worker_service.retrieval.row_cache import RowCache

CPU = torch.device("cpu")


class PlainCache:
    """One head: the tokens of its rows, the one unused for longest first."""

    def __init__(self, rows: int) -> None:
        self.free = list(range(rows))
        self.rows: OrderedDict[int, int] = OrderedDict()

    def place(self, wanted: list[int]) -> dict[int, tuple[int, bool]]:
        """Return the row of each token, and whether it has to be fetched."""
        held = [token for token in wanted if token in self.rows]
        for token in held:
            self.rows.move_to_end(token)
        placed = {token: (self.rows[token], False) for token in held}
        for token in wanted:
            if token not in placed:
                row = self.free.pop(0) if self.free else self.rows.popitem(last=False)[1]
                self.rows[token] = row
                placed[token] = (row, True)
        return placed


def test_it_equals_a_plain_model() -> None:
    """Drawn sizes and wishes; of what one step wanted any may leave first."""
    for seed in range(40):
        rng = random.Random(seed)
        heads, rows = rng.choice([1, 3]), rng.randint(1, 12)
        stored = rows + rng.randint(0, 30)
        cache = RowCache(heads, CPU)
        cache.grow(rows)
        used: list[dict[int, int]] = [{} for _ in range(heads)]
        for step in range(1, 25):
            count = rng.randint(1, rows)
            wanted = [rng.sample(range(stored), count) for _ in range(heads)]
            # Each head wants some of its tokens; it may name more than there are rows.
            some = None if rng.random() < 0.5 else torch.rand((heads, count)) < rng.random()
            if some is not None:
                wanted = [head + [stored - 1] * 5 for head in wanted]
                some = torch.cat((some, torch.zeros((heads, 5), dtype=torch.bool)), 1)
            before = cache.tokens.clone()
            placed = cache.place(torch.tensor(wanted), some, stored)
            for head in range(heads):
                is_wanted = [True] * count if some is None else some[head].tolist()
                wishes = [t for t, yes in zip(wanted[head], is_wanted, strict=True) if yes]
                held = [token for token in before[head].tolist() if token >= 0]
                missing = [token for token in wishes if token not in held]
                is_new = placed.is_new[head].tolist()
                assert [t for t, new in zip(wanted[head], is_new, strict=True) if new] == missing
                now = cache.tokens[head].tolist()
                for token, row, yes in zip(
                    wanted[head], placed.rows[head].tolist(), is_wanted, strict=True
                ):
                    assert not yes or now[row] == token
                in_rows = torch.tensor(now)[cache.is_wanted[head]].tolist()
                assert sorted(in_rows) == sorted(wishes)
                # Who left was unused for longest, and nothing left while a row was empty.
                gone = set(held) - set(now)
                empty = before[head].tolist().count(-1)
                assert len(gone) == max(0, len(missing) - empty)
                stays = [used[head][t] for t in held if t not in gone and t not in wishes]
                assert not gone & set(wishes)
                assert all(used[head][left] <= min(stays, default=step) for left in gone)
                used[head].update(dict.fromkeys(wishes, step))


def test_one_token_at_a_time_it_equals_an_ordered_dict() -> None:
    """Without ties even the rows are the same."""
    rng = random.Random(7)
    cache, plain = RowCache(1, CPU), PlainCache(6)
    cache.grow(6)
    for _ in range(300):
        token = min(int(rng.expovariate(0.15)), 39)
        placed = cache.place(torch.tensor([[token]]), None, 40)
        row, is_new = plain.place([token])[token]
        assert placed.rows.tolist() == [[row]]
        assert placed.is_new.tolist() == [[is_new]]


def test_rows_that_are_added_are_filled_first() -> None:
    cache = RowCache(2, CPU)
    cache.grow(2)
    cache.place(torch.tensor([[0, 1], [2, 3]]), None, 8)
    cache.grow(4)
    placed = cache.place(torch.tensor([[1, 5, 6, 0], [7, 6, 5, 4]]), None, 8)
    assert placed.is_new.tolist() == [[False, True, True, False], [True] * 4]
    assert placed.rows[0].tolist() == [1, 2, 3, 0]
    assert sorted(cache.tokens[1].tolist()) == [4, 5, 6, 7]
