"""The set that is chosen, compared with the best of all sets."""

from __future__ import annotations

import random

import numpy as np
import pytest
from policy_doubles import Devices, Job

from scheduler_service.policy.knapsack import Budget, Offer, choose, worth
from scheduler_service.policy.settings import PolicySettings
from splitpoint.options.scheduler import Policy


def best_worth(offers: list[Offer], budget: Budget) -> float:
    """Return the value of the best set, by trying all of them: min(sum of T, budget) + ages."""
    masks = np.arange(2 ** len(offers))
    chosen = (masks[:, None] >> np.arange(len(offers))) & 1 == 1
    pages = chosen @ np.array([offer.pages for offer in offers])
    counts = chosen.sum(axis=1)
    chosen = chosen[(pages <= budget.pages) & (counts <= min(budget.places, budget.tokens))]
    tokens = chosen @ np.array([offer.tokens for offer in offers])
    ages = chosen @ np.array([offer.age for offer in offers])
    return float((np.minimum(tokens, budget.tokens) + ages).max())


def random_job(rng: random.Random, kind: str) -> tuple[int, int]:
    """Return K and T of a request: of one like the others, of a high kappa, or a new prompt."""
    if kind == "alike":
        return rng.randint(0, 20), rng.randint(1, 10)
    if kind == "high kappa" or rng.random() < 0.5:
        return rng.randint(50, 4000), rng.randint(1, 200)
    return 0, rng.randint(10, 2000)


def random_queue(rng: random.Random) -> tuple[list[Offer], Budget]:
    """Return up to 14 requests; all are new, or some have waited for long."""
    kind = rng.choice(["alike", "high kappa", "mixed"])
    is_aged = rng.random() < 0.5
    offers = []
    for _ in range(rng.randint(1, 14)):
        cached, new = random_job(rng, kind)
        age = rng.choice([0.0, rng.random() * 2 * (cached + new)]) if is_aged else 0.0
        offers.append(Offer(new, age, cached + new))
    pages = int(sum(offer.pages for offer in offers) * rng.uniform(0.2, 0.8))
    tokens = int(sum(offer.tokens for offer in offers) * rng.uniform(0.2, 0.9))
    smallest = min(offer.pages for offer in offers)
    places = rng.choice([1000, max(1, len(offers) // 2)])
    return offers, Budget(max(pages, smallest), max(1, tokens), places)


def test_a_chosen_set_is_within_two_percent_of_the_best() -> None:
    rng = random.Random(16)
    for _ in range(2000):
        offers, budget = random_queue(rng)
        chosen = choose(offers, budget)
        assert len(set(chosen)) == len(chosen) <= budget.places
        assert sum(offers[index].pages for index in chosen) <= budget.pages
        assert worth(offers, chosen, budget) >= 0.98 * best_worth(offers, budget)


def test_a_queue_starts_the_prompt_tokens_of_the_best_set() -> None:
    """The whole policy: K, T and memory are those of its requests, which arrive at once."""
    rng = random.Random(33)
    for _ in range(200):
        kind = rng.choice(["alike", "high kappa", "mixed"])
        jobs = [Job(*random_job(rng, kind)) for _ in range(rng.randint(1, 10))]
        sizes = [job.pages for job in jobs]
        pages = max(min(sizes), int(sum(sizes) * rng.uniform(0.2, 0.8)))
        step = max(1, int(sum(job.new for job in jobs) * rng.uniform(0.2, 0.9)))
        settings = PolicySettings(Policy.UTILISATION, ahead_steps=1)
        devices = Devices(settings, pages=pages, step_tokens=step)
        # No request is link-bound: one that is would come first while the link is idle.
        devices.queue.workers.accounts["0"].kappa_crit = 1e9
        for job in jobs:
            devices.push(job)
        started = devices.start()
        offers = [Offer(job.new, 0.0, job.pages) for job in jobs]
        found = min(step, sum(jobs[arrival].new for arrival in started))
        assert found >= 0.98 * best_worth(offers, Budget(pages, step, 1000))


def test_a_large_prompt_beats_a_small_one_of_a_better_ratio() -> None:
    """(K, T) = (0, 1) and (5, 5), memory for 10, steps of 5: T / (K + T) would say the first."""
    assert choose([Offer(1, 0.0, 1), Offer(5, 0.0, 10)], Budget(10, 5, 10)) == [1]


@pytest.mark.parametrize("count", [30, 200])
def test_large_queues_are_within_their_limits_and_better_than_by_arrival(count: int) -> None:
    rng = random.Random(count)
    for _ in range(20):
        offers = []
        for _ in range(count):
            cached, new = rng.choice([0, 0, rng.randint(100, 4000)]), rng.randint(1, 500)
            age = rng.random() * (cached + new)
            offers.append(Offer(new, age, -(-(cached + new) // 16)))
        budget = Budget(rng.randint(100, 1500), rng.choice([512, 4096]), 64)
        chosen = choose(offers, budget)
        assert len(set(chosen)) == len(chosen) <= budget.places
        assert sum(offers[index].pages for index in chosen) <= budget.pages
        by_arrival, pages, tokens = [], budget.pages, budget.tokens
        for index, offer in enumerate(offers):
            if offer.pages <= pages and tokens > 0:
                by_arrival.append(index)
                pages, tokens = pages - offer.pages, tokens - offer.tokens
        assert worth(offers, chosen, budget) >= worth(offers, by_arrival, budget)


def test_a_large_queue_swaps_what_greedy_sets_began_with() -> None:
    """20 requests of 3 pages and 4 tokens leave 2 of 11 pages: one of 5 pages fills them better."""
    offers = [*(Offer(4, 0.0, 3) for _ in range(20)), Offer(6, 0.0, 5)]
    chosen = choose(offers, Budget(11, 100, 10))
    assert worth(offers, chosen, Budget(11, 100, 10)) == 14


def test_nothing_fits_or_nothing_may_be_computed() -> None:
    offer = Offer(2, 0.0, 4)
    assert choose([], Budget(10, 10, 10)) == []
    assert choose([offer], Budget(3, 10, 10)) == []
    assert choose([offer], Budget(10, 0.0, 10)) == []
    assert choose([offer], Budget(10, 10, 0)) == []
    # Its tokens exceed the step: it computes a part of them now.
    assert choose([offer], Budget(4, 1, 1)) == [0]
    # Without a page of its own it takes nothing away.
    assert sorted(choose([Offer(1, 0.0, 0), offer], Budget(4, 10, 2))) == [0, 1]
