"""Chooses among the workers that can start a request now: first by prefix, then by room."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that could start the request now."""

    worker_id: str
    # Tokens of the request's prefix in the worker's own store. Other stores do not count:
    # every worker can fetch from them.
    cached_tokens: int
    # Part of its cache that no request is charged for, between 0 and 1.
    free_share: float
    running_count: int


def choose_worker(candidates: Iterable[Candidate]) -> Candidate:
    """Prefer most cached tokens, then the largest free share, then fewest running requests.

    Needs at least one candidate. The free share and not bytes: by bytes, the smaller of
    two workers would idle until the larger one has less left than the smaller has in all.

    A busy worker that holds the prefix is not waited for: recomputing now beats reusing
    later for all but extreme kappa.
    """
    return min(
        candidates,
        key=lambda worker: (
            -worker.cached_tokens,
            -worker.free_share,
            worker.running_count,
            worker.worker_id,
        ),
    )
