"""Which worker a request prefers: where its prefix lies, then where there is room.

Pure. Takes only workers that can start the request now.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that could start the request now."""

    worker_id: str
    # Tokens of the request's prefix in the worker's store.
    cached_tokens: int
    # Of its cache that no request is charged for, between 0 and 1.
    free_share: float
    running_count: int


def choose_worker(candidates: Iterable[Candidate]) -> Candidate:
    """Most cached tokens, then the largest free share, then fewest running; last by name.

    A share and not bytes: of two workers with unequal memory the smaller one would
    idle until the other has less left than it has in all.

    Only the worker's own store counts here: what lies in another one every
    worker can fetch.

    At least one candidate. A worker that holds the prefix but is busy is not
    waited for: recomputing now beats reusing later for all but extreme kappa.
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
