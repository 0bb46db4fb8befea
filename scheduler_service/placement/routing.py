"""Chooses among the workers that can start a request now: by numerics, then prefix, then room."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# A worker with less than this part of the freest worker's free share is loaded: what its device
# holds does not count then, so that a prefix of many requests spreads over the workers.
_LOADED = 0.5


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
    # Leading tokens that are on the worker's device, as far as is known.
    device_tokens: int = 0
    # False if tokens of the answer have come from a worker that computes other bits.
    is_alike: bool = True


def choose_worker(candidates: Iterable[Candidate]) -> Candidate:
    """Prefer alike workers, so that an answer has one worker's bits; then most tokens that need
    not be computed, then most that need not be restored either.

    Then the largest free share, then fewest running requests. What the device of a loaded
    worker holds does not count.

    Needs at least one candidate. The free share and not bytes: by bytes, the smaller of
    two workers would idle until the larger one has less left than the smaller has in all.

    A busy worker that holds the prefix is not waited for: recomputing now beats reusing
    later for all but extreme kappa.
    """
    workers = list(candidates)
    least_share = _LOADED * max(worker.free_share for worker in workers)

    def device_tokens(worker: Candidate) -> int:
        return worker.device_tokens if worker.free_share >= least_share else 0

    return min(
        workers,
        key=lambda worker: (
            not worker.is_alike,
            -max(worker.cached_tokens, device_tokens(worker)),
            -device_tokens(worker),
            -worker.free_share,
            worker.running_count,
            worker.worker_id,
        ),
    )
