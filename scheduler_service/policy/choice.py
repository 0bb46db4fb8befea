"""Chooses the best set of requests for one worker, of all that wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Offer:
    """One request as a candidate: what it is worth, and what it takes.

    Attributes:
        value: `density + gamma * waited seconds`, above 0.
        pages: device pages; all of them or none.
        tokens: new tokens; they can be computed in parts, so the last one may exceed the budget.
    """

    value: float
    pages: int
    tokens: int


def choose(offers: Sequence[Offer], pages: int, tokens: float, places: int) -> list[int]:
    """Return the indices of the chosen offers, the most valuable for its pages first.

    Maximizes the sum of the values within `pages`, `tokens` (of which the last request of the set
    may exceed its part) and `places`.
    """
    chosen: list[int] = []
    order = sorted(range(len(offers)), key=lambda i: -offers[i].value / max(1, offers[i].pages))
    for index in order:
        offer = offers[index]
        if places <= 0 or tokens <= 0:
            break
        if offer.pages <= pages:
            chosen.append(index)
            pages -= offer.pages
            tokens -= offer.tokens
            places -= 1
    return chosen
