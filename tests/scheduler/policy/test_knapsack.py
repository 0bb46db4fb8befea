"""The set that is chosen, compared with the best of all sets."""

from __future__ import annotations

import random

import numpy as np
import pytest

from scheduler_service.policy.knapsack import Budget, Offer, choose, worth


def best_worth(offers: list[Offer], budget: Budget) -> float:
    """Return the value of the best set, by trying all of them."""
    masks = np.arange(2 ** len(offers))
    chosen = (masks[:, None] >> np.arange(len(offers))) & 1 == 1
    pages = chosen @ np.array([offer.pages for offer in offers])
    counts = chosen.sum(axis=1)
    possible = (pages <= budget.pages) & (counts <= min(budget.places, budget.tokens))
    chosen, counts = chosen[possible], counts[possible]
    left = budget.tokens - counts
    total = chosen @ np.array([offer.age for offer in offers])
    for index in sorted(range(len(offers)), key=lambda i: -offers[i].gain / offers[i].tokens):
        offer = offers[index]
        more = np.where(chosen[:, index], np.minimum(left, offer.tokens - 1), 0)
        total = total + chosen[:, index] * offer.gain * (1 + more) / offer.tokens
        left = left - more
    return float(total.max())


def random_queue(rng: random.Random) -> tuple[list[Offer], Budget]:
    """Return up to 14 requests: alike, of high kappa, or of both kinds; old or new."""
    kind = rng.choice(["alike", "high kappa", "mixed"])
    offers = []
    for _ in range(rng.randint(1, 14)):
        if kind == "alike":
            cached, new = rng.randint(0, 20), rng.randint(1, 10)
        elif kind == "high kappa" or rng.random() < 0.5:
            cached, new = rng.randint(50, 4000), rng.randint(1, 200)
        else:
            cached, new = 0, rng.randint(10, 2000)
        age = rng.choice([0.0, rng.random() * 2])
        offers.append(Offer(new / (cached + new), age, cached + new, new))
    pages = int(sum(offer.pages for offer in offers) * rng.uniform(0.2, 0.8))
    tokens = int(sum(offer.tokens for offer in offers) * rng.uniform(0.2, 0.9))
    smallest = min(offer.pages for offer in offers)
    places = rng.choice([1000, max(1, len(offers) // 2)])
    return offers, Budget(max(pages, smallest), max(1, tokens), places)


def test_a_chosen_set_is_within_two_percent_of_the_best() -> None:
    rng = random.Random(16)
    for _ in range(1000):
        offers, budget = random_queue(rng)
        chosen = choose(offers, budget)
        assert len(set(chosen)) == len(chosen) <= budget.places
        assert sum(offers[index].pages for index in chosen) <= budget.pages
        assert worth(offers, chosen, budget) >= 0.98 * best_worth(offers, budget)


@pytest.mark.parametrize("count", [30, 200])
def test_large_queues_are_within_their_limits_and_better_than_by_arrival(count: int) -> None:
    rng = random.Random(count)
    for _ in range(20):
        offers = []
        for _ in range(count):
            cached, new = rng.choice([0, 0, rng.randint(100, 4000)]), rng.randint(1, 500)
            offers.append(Offer(new / (cached + new), rng.random(), -(-(cached + new) // 16), new))
        budget = Budget(rng.randint(100, 1500), rng.choice([512, 4096]), 64)
        chosen = choose(offers, budget)
        assert sum(offers[index].pages for index in chosen) <= budget.pages
        by_arrival, pages, tokens = [], budget.pages, budget.tokens
        for index, offer in enumerate(offers):
            if offer.pages <= pages and tokens > 0:
                by_arrival.append(index)
                pages, tokens = pages - offer.pages, tokens - offer.tokens
        assert worth(offers, chosen, budget) >= worth(offers, by_arrival, budget)


def test_nothing_fits_or_nothing_may_be_computed() -> None:
    offer = Offer(0.5, 0.0, 4, 2)
    assert choose([], Budget(10, 10, 10)) == []
    assert choose([offer], Budget(3, 10, 10)) == []
    assert choose([offer], Budget(10, 0.0, 10)) == []
    assert choose([offer], Budget(10, 10, 0)) == []
    # Its tokens exceed the step: it computes a part of them now.
    assert choose([offer], Budget(4, 1, 1)) == [0]
