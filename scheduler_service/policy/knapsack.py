"""Chooses the best set of requests for one worker, of those that wait for it.

Maximizes `sum(gain * computed / tokens + age)` over the set: its pages must be free, and the tokens
that it computes now are within the budget. A request's memory is held whole; its tokens can
be computed in parts. This is a knapsack problem with two limits, so the set is good, not best:
greedy by several densities, then swaps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

# Up to this many requests, all pairs are swapped; of more, only some single ones.
_SMALL = 16
_SWAPPED = 6
# Rounds of swaps.
_ROUNDS = 6
# What a swap must bring; less is rounding.
_LEAST_GAIN = 1e-9


@dataclass(slots=True)
class Offer:
    """One request as a candidate: what it is worth, and what it takes.

    Attributes:
        gain: part of its memory that computing fills, if all its tokens are computed.
        age: what its waiting counts, gamma * seconds.
        pages: device pages; all of them or none.
        tokens: new tokens, at least 1; some of them may be left to later steps.
    """

    gain: float
    age: float
    pages: int
    tokens: int

    @property
    def value(self) -> float:
        return self.gain + self.age


@dataclass(frozen=True, slots=True)
class Budget:
    """What a set may take: device pages, tokens of prefill, and places in the batch."""

    pages: int
    tokens: float
    places: int


def choose(offers: Sequence[Offer], budget: Budget) -> list[int]:
    """Return the indices of the chosen offers, the most valuable for its pages first."""
    fitting = [index for index, offer in enumerate(offers) if offer.pages <= budget.pages]
    if not fitting or budget.places < 1 or budget.tokens < 1:
        return []
    page_share, token_share = 1 / max(1, budget.pages), 1 / budget.tokens

    def per_page(index: int) -> float:
        return offers[index].value / max(1, offers[index].pages)

    def per_share(index: int) -> float:
        offer = offers[index]
        return offer.value / (offer.pages * page_share + offer.tokens * token_share)

    keys: tuple[Callable[[int], float], ...] = (per_page, per_share, lambda i: offers[i].value)
    starts = [_greedy(offers, sorted(fitting, key=key, reverse=True), budget) for key in keys]
    best = max(starts, key=lambda chosen: worth(offers, chosen, budget))
    if len(best) < len(fitting):
        best = _improved(offers, best, sorted(fitting, key=per_share, reverse=True), budget)
    return sorted(best, key=per_page, reverse=True)


def worth(offers: Sequence[Offer], chosen: Iterable[int], budget: Budget) -> float:
    """Return the value of a set; each request computes a token at least, small ones most."""
    picked = [offers[index] for index in chosen]
    total = sum(offer.age for offer in picked)
    if sum(offer.tokens for offer in picked) <= budget.tokens:
        return total + sum(offer.gain for offer in picked)
    left = budget.tokens - len(picked)
    for offer in sorted(picked, key=lambda each: -each.gain / each.tokens):
        more = min(left, offer.tokens - 1)
        total += offer.gain * (1 + more) / offer.tokens
        left -= more
    return total


def _greedy(offers: Sequence[Offer], order: Iterable[int], budget: Budget) -> list[int]:
    chosen: list[int] = []
    pages, tokens = budget.pages, budget.tokens
    for index in order:
        if len(chosen) >= budget.places or tokens < 1:
            break
        if offers[index].pages <= pages:
            chosen.append(index)
            pages -= offers[index].pages
            tokens -= min(offers[index].tokens, tokens)
    return chosen


def _improved(
    offers: Sequence[Offer], chosen: list[int], order: Sequence[int], budget: Budget
) -> list[int]:
    """Return the set after swaps of one or two requests for others, while any improves it."""
    best, most = chosen, worth(offers, chosen, budget)
    for _ in range(_ROUNDS):
        found = _best_swap(offers, best, order, budget, most)
        if found is None:
            break
        best, most = found
    return best


def _best_swap(
    offers: Sequence[Offer],
    chosen: Sequence[int],
    order: Sequence[int],
    budget: Budget,
    most: float,
) -> tuple[list[int], float] | None:
    """Return the best set that one swap makes, and its value; None if none is above `most`."""
    is_small = len(offers) <= _SMALL
    tried = _SMALL if is_small else _SWAPPED
    outside = [index for index in order if index not in chosen][:tried]
    inside = sorted(chosen, key=lambda i: offers[i].value / max(1, offers[i].pages))[:tried]
    leaving, coming = _changes(inside, is_small), _changes(outside, is_small)
    free = budget.pages - sum(offers[index].pages for index in chosen)
    whole = sum(offers[index].value for index in chosen)
    sizes = [(new, *_sums(offers, new)) for new in coming]
    most_places = min(budget.places, budget.tokens) - len(chosen)
    best = None
    for old in leaving:
        room, lost = _sums(offers, old)
        for new, size, value in sizes:
            # A set is worth at most all of its values.
            if size > free + room or whole - lost + value <= most:
                continue
            if len(new) - len(old) > most_places:
                continue
            changed = [*(index for index in chosen if index not in old), *new]
            found = worth(offers, changed, budget)
            if found > most + _LEAST_GAIN:
                best, most = changed, found
    return (best, most) if best is not None else None


def _changes(indices: Sequence[int], with_pairs: bool) -> list[tuple[int, ...]]:
    """Return none, each one, and each pair of these."""
    found: list[tuple[int, ...]] = [(), *((index,) for index in indices)]
    return [*found, *combinations(indices, 2)] if with_pairs else found


def _sums(offers: Sequence[Offer], indices: Iterable[int]) -> tuple[int, float]:
    """Return the pages and the value of these."""
    pages, value = 0, 0.0
    for index in indices:
        pages += offers[index].pages
        value += offers[index].value
    return pages, value
