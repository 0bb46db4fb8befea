"""The bounded pool against a plain model with one list for each KV head."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass, field

import pytest
import torch

from splitpoint.selection import PoolPolicy, Selection
from worker_service.selection.pool import COUNTER_MOST, TokenPool

HEADS, SINKS, RECENT = 3, 2, 5


def selection_of(policy: PoolPolicy, pool: float = 0.6) -> Selection:
    text = f"columns:0.2,pool={pool},policy={policy},sinks={SINKS},recent={RECENT}"
    return Selection.parsed(text)


@dataclass
class PlainPool:
    """One KV head's pool: the ranks of the tokens that are left."""

    policy: PoolPolicy
    pool: float
    window: int | None
    tokens: int = 0
    ranks: dict[int, int] = field(default_factory=dict)
    gone: list[int] = field(default_factory=list)

    def admit(self, count: int) -> None:
        median = statistics.median_low(self.ranks.values()) if self.ranks else 0
        for _ in range(count):
            counted = self.policy is PoolPolicy.COUNTER
            self.ranks[self.tokens] = median if counted else self.tokens
            self.tokens += 1

    def read(self, position: int, tokens: list[int]) -> None:
        for token in tokens:
            if self.policy is PoolPolicy.LRU:
                self.ranks[token] = position
            elif self.policy is PoolPolicy.COUNTER:
                self.ranks[token] += 1
        if self.policy is PoolPolicy.COUNTER and max(self.ranks.values()) >= COUNTER_MOST:
            self.ranks = {token: rank // 2 for token, rank in self.ranks.items()}

    def evict(self) -> None:
        hidden = max(0, self.tokens - self.window) if self.window else 0
        self.ranks = {token: rank for token, rank in self.ranks.items() if token >= hidden}
        limit = math.ceil(self.pool * (self.tokens - hidden) - 1e-6)
        free = [token for token in self.ranks if SINKS <= token < self.tokens - RECENT]
        for token in sorted(free, key=lambda each: (self.ranks[each], each)):
            if len(self.ranks) <= limit:
                return
            del self.ranks[token]
            self.gone.append(token)


@pytest.mark.parametrize("policy", PoolPolicy)
@pytest.mark.parametrize("window", [None, 60])
@pytest.mark.parametrize("seed", range(3))
def test_a_pool_is_the_plain_model(policy: PoolPolicy, window: int | None, seed: int) -> None:
    """Each token leaves at most once, protected ones never, and the others in the same order."""
    rng = random.Random(seed)
    pool = TokenPool(selection_of(policy), HEADS, window)
    plain = [PlainPool(policy, 0.6, window) for _ in range(HEADS)]
    tokens = 0
    for _ in range(40):
        count = rng.choice((1, 1, 7, 30))
        pool.admit(count)
        chosen = torch.zeros((count, HEADS, tokens + count), dtype=torch.bool)
        for head, one in enumerate(plain):
            one.admit(count)
            for query in range(count):
                left = sorted(one.ranks)
                # Some tokens are read often, so that their counters saturate.
                often = [token for token in left if token % 9 == 0]
                read = [*{*rng.sample(left, len(left) // 8), *often}]
                chosen[query, head, read] = True
                one.read(tokens + query, read)
        pool.read(chosen, tokens)
        tokens += count
        before = pool.left(tokens)
        pool.evict()
        for head, one in enumerate(plain):
            one.evict()
            assert pool.left(tokens)[head].nonzero().flatten().tolist() == sorted(one.ranks)
            hidden = max(0, tokens - window) if window else 0
            kept = [
                *range(hidden, min(SINKS, tokens)),
                *range(max(hidden, tokens - RECENT), tokens),
            ]
            assert pool.left(tokens)[head, kept].all()
            assert len(one.gone) == len({*one.gone})
        assert not (pool.left(tokens) & ~before).any()
        assert pool.evicted == sum(len(one.gone) for one in plain)
        visible = tokens if window is None else min(tokens, window)
        most = max(math.ceil(0.6 * visible - 1e-6), min(SINKS + RECENT, tokens))
        assert pool.left(tokens).sum(-1).max() <= most


def test_a_saturated_counter_halves_those_of_its_head() -> None:
    """Behind it, tokens that one head read 100 times stand below new ones of the other head."""
    pool = TokenPool(Selection.parsed("columns:0.2,pool=0.1,sinks=0,recent=1"), 2, None)
    pool.admit(20)
    # Head 0 reads token 7 at each step; both heads read token 8 in the first 200 steps, and then
    # token 9 in 120.
    first = torch.zeros((COUNTER_MOST, 2, 20), dtype=torch.bool)
    first[:, 0, 7] = True
    first[:200, :, 8] = True
    pool.read(first, 0)
    then = torch.zeros((120, 2, 20), dtype=torch.bool)
    then[:, :, 9] = True
    pool.read(then, COUNTER_MOST)
    pool.evict()
    left = [of_head.nonzero().flatten().tolist() for of_head in pool.left(20)]
    # Counters: 127, 100 and 120 of head 0; 0, 200 and 120 of head 1.
    assert left == [[7, 19], [8, 19]]


def test_a_whole_pool_evicts_nothing() -> None:
    pool = TokenPool(selection_of(PoolPolicy.LRU, 1.0), HEADS, None)
    pool.admit(100)
    pool.evict()
    assert pool.left(120).all()
    assert pool.evicted == 0


def test_evicted_tokens_score_nothing() -> None:
    pool = TokenPool(selection_of(PoolPolicy.FIFO, 0.5), 2, None)
    # The last tokens are not in the pool yet.
    pool.admit(35)
    pool.evict()
    masked = pool.masked(torch.zeros((3, 4, 45)))
    for head in range(4):
        wanted = pool.left(45)[head // 2].tolist()
        assert not all(wanted)
        assert (masked[:, head] == 0).tolist() == [wanted] * 3


@pytest.mark.parametrize("policy", PoolPolicy)
def test_each_eviction_is_of_another_token(policy: PoolPolicy) -> None:
    """Places are written over again and again; what they had never comes back."""
    rng = torch.Generator().manual_seed(5)
    pool = TokenPool(selection_of(policy), HEADS)
    pool.admit(40)
    gone = [set[int]() for _ in range(HEADS)]
    last = [set(range(40)) for _ in range(HEADS)]
    for step in range(40, 240, 8):
        pool.read(torch.rand((8, HEADS, 40), generator=rng) < 0.2, step)
        places = pool.evict_oldest(8, first_place=0, first_recent=step - RECENT)
        tokens = pool.tokens.gather(1, places)
        assert not pool.held.gather(1, places).any()
        pool.overwrite(places)
        for head in range(HEADS):
            leaving, held = set(tokens[head].tolist()), set(pool.tokens[head].tolist())
            assert len(leaving) == 8
            assert gone[head].isdisjoint(leaving)
            assert leaving <= last[head]
            gone[head] |= leaving
            assert held == last[head] - leaving | set(range(step, step + 8))
            assert held >= {*range(SINKS), *range(step - RECENT, step)}
            last[head] = held
    assert pool.evicted == 25 * 8 * HEADS


def test_policies_differ_in_what_leaves_first() -> None:
    """Token 2 is read first and often, token 3 late and once; the others never."""
    read = torch.zeros((9, 1, 12), dtype=torch.bool)
    read[:8, 0, 2] = read[8, 0, 3] = True
    first = {}
    for policy in PoolPolicy:
        pool = TokenPool(selection_of(policy), 1)
        pool.admit(12)
        pool.read(read, 12)
        places = pool.evict_oldest(5, first_place=0, first_recent=7)
        first[policy] = places[0].tolist()
    assert first == {
        PoolPolicy.FIFO: [2, 3, 4, 5, 6],
        PoolPolicy.LRU: [4, 5, 6, 2, 3],
        PoolPolicy.COUNTER: [4, 5, 6, 3, 2],
    }


def test_only_places_behind_the_first_ones_are_given_away() -> None:
    pool = TokenPool(selection_of(PoolPolicy.FIFO), HEADS)
    pool.admit(30)
    places = pool.evict_oldest(4, first_place=10, first_recent=30)
    assert places.tolist() == [[10, 11, 12, 13]] * HEADS
    pool.restore()
    assert pool.held.all()
    assert pool.evicted == 0
