"""Chooses among the workers that can start a request now: by the first token's predicted time.

Workers may be unlike: a request whose prefix must cross the link goes to the fastest link, one that
must be computed to the fastest device, one whose prefix a worker holds to that worker if that saves
more than its queue costs. The prediction is a closed form (`splitpoint.costs.first_token`), made
anew for each decision: microseconds for each worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler_service.placement.account import Need, WorkerAccount
from scheduler_service.placement.demand import Demand
from scheduler_service.worker_facts import WorkerFacts
from splitpoint.costs.fetching import rate_of

# A worker with less than this part of the freest worker's free share is loaded: what its device
# holds does not count then, so that a prefix of many requests spreads over the workers.
_LOADED = 0.5
# Predictions up to this multiple of the least one, plus this time, count as equal: they leave
# out tiles, chunks and the steps of requests that decode.
_ALIKE_SHARE = 1.1
_ALIKE_SECONDS = 2e-3


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that could start the request now."""

    worker_id: str
    # Predicted seconds to the first token there; the same without what its device holds.
    seconds: float
    seconds_off_device: float
    # Part of its cache that no request is charged for, between 0 and 1.
    free_share: float
    running_count: int
    # False if tokens of the answer have come from a worker that computes other bits.
    is_alike: bool = True
    # False if it cannot follow the selection, or has not the drafter, that the request asks for.
    can_serve: bool = True


def choose_worker(candidates: Iterable[Candidate]) -> Candidate:
    """Prefer alike workers, so that an answer has one worker's bits; then those that serve all
    that the request asks for; then the earliest first token.

    Of first tokens that come about equally early: the largest free share, then fewest running
    requests, then the earliest one. What the device of a loaded worker holds does not count.

    Needs at least one candidate. The free share and not bytes: by bytes, the smaller of
    two workers would idle until the larger one has less left than the smaller has in all.
    """
    workers = list(candidates)
    if len(workers) == 1:
        return workers[0]
    best = min((not worker.is_alike, not worker.can_serve) for worker in workers)
    workers = [w for w in workers if (not w.is_alike, not w.can_serve) == best]
    least_share = _LOADED * max(worker.free_share for worker in workers)
    seconds = [w.seconds if w.free_share >= least_share else w.seconds_off_device for w in workers]
    most = _ALIKE_SHARE * min(seconds) + _ALIKE_SECONDS
    return min(
        ((worker, each) for worker, each in zip(workers, seconds, strict=True) if each <= most),
        key=lambda found: (
            -found[0].free_share,
            found[0].running_count,
            found[1],
            found[0].worker_id,
        ),
    )[0]


def candidate_of(demand: Demand, account: WorkerAccount, need: Need) -> Candidate:
    """Return a worker as a candidate for a request that needs this of it."""
    worker = account.facts
    off_device = _seconds_there(demand, account, 0)
    device = need.device_tokens
    return Candidate(
        worker.worker_id,
        _seconds_there(demand, account, device) if device else off_device,
        off_device,
        account.free_share,
        account.running_count,
        is_alike=demand.numerics_digest in (None, worker.numerics_digest),
        can_serve=_can_serve(demand, worker),
    )


def _seconds_there(demand: Demand, account: WorkerAccount, device: int) -> float:
    """Return the predicted seconds to the first token. `device`: tokens that need no restore."""
    worker, total, backlog = account.facts, demand.known_count, account.backlog
    stored = demand.cached.own.get(worker.worker_id, 0)
    cached = demand.cached_tokens(worker.worker_id, device)
    best = account.first_token.seconds(
        cached, total - cached, device=min(device, cached), backlog=backlog
    )
    for source in demand.cached.sources.get(worker.worker_id, ()):
        longer = min(source.cached_tokens, total - 1)
        if longer <= cached:
            continue
        # What the device alone holds must come, too: a chunk has its place behind its parent.
        chunks = longer // worker.chunk_tokens - stored // worker.chunk_tokens
        size = chunks * worker.slot_bytes
        fetch_seconds = rate_of(worker.profile, source.place).seconds(size)
        if fetch_seconds >= best:
            continue
        with_fetch = account.first_token.seconds(
            longer,
            total - longer,
            device=min(device, longer),
            backlog=backlog,
            fetch_seconds=fetch_seconds,
        )
        best = min(best, with_fetch)
    return best


def _can_serve(demand: Demand, worker: WorkerFacts) -> bool:
    """Return True if the worker can do all that the request asks for, besides its tokens."""
    selection = demand.selection
    if not selection.reads_all and worker.followed(selection).reads_all:
        return False
    return demand.drafter is None or demand.drafter in worker.draft_methods
