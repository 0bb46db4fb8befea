"""Chooses the best set of requests for one worker, of those that wait for it.

Maximizes the prompt tokens that are computed, plus age: `min(sum of T, budget) + sum of age` over
the set, whose pages must be free ("KV cache offloading bottlenecks", 7.4). A request's memory is
held whole; its tokens can be computed in parts. This is a knapsack problem with two limits. Greedy
sets by several densities begin; of few requests branch and bound then finds the best set, of many
swaps find a good one.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

# Requests of which the best set is searched, and sets that are looked at for that.
_FEW = 16
_MOST_LOOKS = 2000
# Of more requests, those that are swapped, and rounds of swaps.
_SWAPPED = 6
_ROUNDS = 6
# What a better set must bring; less is rounding.
_LEAST_GAIN = 1e-9


@dataclass(slots=True)
class Offer:
    """One request as a candidate: what it is worth, and what it takes.

    Attributes:
        tokens: T, prompt tokens to compute, at least 1; some of them may be left to later steps.
        age: what its waiting counts, in tokens.
        pages: device pages; all of them or none.
    """

    tokens: int
    age: float
    pages: int

    @property
    def value(self) -> float:
        return self.tokens + self.age


@dataclass(frozen=True, slots=True)
class Budget:
    """What a set may take: device pages, tokens of prefill, and places in the batch."""

    pages: int
    tokens: float
    places: int


def choose(offers: Sequence[Offer], budget: Budget) -> list[int]:
    """Return the indices of the chosen offers, the most valuable for its pages first."""
    fitting = [index for index, offer in enumerate(offers) if offer.pages <= budget.pages]
    # Each computes a token at least.
    budget = replace(budget, places=int(min(budget.places, budget.tokens)))
    if not fitting or budget.places < 1:
        return []
    page_share, token_share = 1 / max(1, budget.pages), 1 / budget.tokens

    def per_page(index: int) -> float:
        offer = offers[index]
        return offer.value / offer.pages if offer.pages else math.inf

    def per_share(index: int) -> float:
        offer = offers[index]
        share = offer.pages * page_share + offer.tokens * token_share
        return offer.value / share if share else math.inf

    keys: tuple[Callable[[int], float], ...] = (per_page, per_share, lambda i: offers[i].value)
    orders = [sorted(fitting, key=key, reverse=True) for key in keys]
    starts = [_greedy(offers, order, budget) for order in orders]
    best = max(starts, key=lambda chosen: worth(offers, chosen, budget))
    if len(best) < len(fitting) <= _FEW:
        best = _searched(offers, orders[0], best, budget)
    elif len(best) < len(fitting):
        best = _swapped(offers, best, orders[1], budget)
    return sorted(best, key=per_page, reverse=True)


def worth(offers: Sequence[Offer], chosen: Iterable[int], budget: Budget) -> float:
    """Return the value of a set."""
    picked = [offers[index] for index in chosen]
    age = sum(offer.age for offer in picked)
    return age + min(budget.tokens, sum(offer.tokens for offer in picked))


def _greedy(offers: Sequence[Offer], order: Iterable[int], budget: Budget) -> list[int]:
    chosen: list[int] = []
    pages, tokens = budget.pages, budget.tokens
    for index in order:
        if len(chosen) >= budget.places or tokens < 1:
            break
        if offers[index].pages <= pages:
            chosen.append(index)
            pages -= offers[index].pages
            tokens -= offers[index].tokens
    return chosen


def _searched(
    offers: Sequence[Offer], order: Sequence[int], best: list[int], budget: Budget
) -> list[int]:
    """Return the best set that branch and bound finds. `order`: the most for its pages first.

    No set is worth more than if a part of the next request could fill the last pages.
    """
    pages = [0, *accumulate(offers[index].pages for index in order)]
    values = [0.0, *accumulate(offers[index].value for index in order)]
    ages = [0.0, *accumulate(offers[index].age for index in order)]
    most, looks = worth(offers, best, budget), _MOST_LOOKS
    # Of each: the next place in the order, pages that are free, sums of the chosen, and these.
    stack: list[tuple[int, int, float, float, list[int]]] = [(0, budget.pages, 0, 0.0, [])]
    while stack and looks:
        looks -= 1
        place, free, tokens, age, chosen = stack.pop()
        if age + min(tokens, budget.tokens) > most + _LEAST_GAIN:
            most, best = age + min(tokens, budget.tokens), chosen
        if place == len(order) or len(chosen) == budget.places:
            continue
        full = pages[place] + free
        end = bisect_right(pages, full, lo=place) - 1
        rest = values[end] - values[place]
        if end < len(order):
            part = offers[order[end]]
            rest += (full - pages[end]) * part.value / part.pages
        if age + min(tokens + rest, budget.tokens + ages[-1] - ages[place]) <= most + _LEAST_GAIN:
            continue
        stack.append((place + 1, free, tokens, age, chosen))
        offer = offers[order[place]]
        if offer.pages <= free:
            sums = tokens + offer.tokens, age + offer.age
            stack.append((place + 1, free - offer.pages, *sums, [*chosen, order[place]]))
    return best


def _swapped(
    offers: Sequence[Offer], chosen: list[int], order: Sequence[int], budget: Budget
) -> list[int]:
    """Return the set after requests were added, or swapped for others, while that improves it."""
    best, most = chosen, worth(offers, chosen, budget)
    for _ in range(_ROUNDS):
        outside = [index for index in order if index not in best][:_SWAPPED]
        inside = sorted(best, key=lambda i: offers[i].value / max(1, offers[i].pages))[:_SWAPPED]
        without = [best, *([i for i in best if i != leaving] for leaving in inside)]
        changed = [[*kept, index] for kept in without for index in outside]
        possible = [each for each in changed if _fits(offers, each, budget)]
        found = max(possible, key=lambda each: worth(offers, each, budget), default=best)
        if worth(offers, found, budget) <= most + _LEAST_GAIN:
            break
        best, most = found, worth(offers, found, budget)
    return best


def _fits(offers: Sequence[Offer], chosen: Sequence[int], budget: Budget) -> bool:
    pages = sum(offers[index].pages for index in chosen)
    return pages <= budget.pages and len(chosen) <= budget.places
