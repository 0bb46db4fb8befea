"""Starts requests in a given order: by arrival (fifo), or by the tenants' shares (fair)."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace

from scheduler_service.policy.order import WaitingOrder
from scheduler_service.policy.owner import Decision, Owner, Start
from scheduler_service.policy.rooms import WorkerRooms
from scheduler_service.policy.tenants import TenantShares
from scheduler_service.policy.waiting import Need, R, Waiting

# Tenants whose first requests are compared by their cached prefixes.
_HEADS = 8


def fair_order(order: WaitingOrder[R], shares: TenantShares) -> Iterator[Waiting[R]]:
    """Iterate over all: the tenant furthest behind first, each by priority, then by arrival."""
    for tenant in list(shares):
        yield from order.of_tenant(tenant)


def prefixes_first(
    owner: Owner[R], order: WaitingOrder[R], shares: TenantShares, lead: float
) -> Iterator[Waiting[R]]:
    """Iterate as `fair_order`, but of the first requests of tenants within the lead, those come
    first that have most of their tokens cached (DLPM: locality within a deficit)."""
    heads = [order.of_tenant(tenant)[0] for tenant in shares.within(lead)[:_HEADS]]
    if len(heads) > 1:
        heads.sort(key=lambda waiting: -_cached_share(needs_of(owner, waiting).values()))
        yield from heads
        first = set(heads)
        yield from (waiting for waiting in fair_order(order, shares) if waiting not in first)
    else:
        yield from fair_order(order, shares)


def _cached_share(needs: Iterable[Need]) -> float:
    """Return the largest part of a request's tokens that a worker has cached."""
    return max((n.cached_tokens / (n.cached_tokens + n.new_tokens) for n in needs), default=0.0)


def first_in_order(
    owner: Owner[R], order: Iterable[Waiting[R]], rooms: WorkerRooms | None, worker_count: int
) -> Start[R] | None:
    """Return the first request that can start; None if none can.

    One that cannot holds up the later ones on every worker that could run it. `rooms`: what
    holds requests back besides memory; None: nothing does. `worker_count`: of the open ones.
    """
    claimed: set[str] = set()
    for waiting in order:
        needs = needs_of(owner, waiting, claimed)
        start = start_in(owner, waiting, needs, rooms)
        if start is None and needs:
            start = streamed_in(owner, waiting, needs, rooms)
        if start is not None:
            return start
        claimed |= needs.keys()
        if len(claimed) >= worker_count:
            break
    return None


def needs_of(owner: Owner[R], waiting: Waiting[R], without: Container[str] = ()) -> dict[str, Need]:
    """Return what a request would take of each worker that could run it."""
    found = {}
    for worker_id in owner.workers_for(waiting.item):
        if worker_id not in without:
            need = owner.need(waiting.item, worker_id)
            if need is not None:
                found[worker_id] = need
    return found


def start_in(
    owner: Owner[R],
    waiting: Waiting[R],
    needs: Mapping[str, Need],
    rooms: WorkerRooms | None,
) -> Start[R] | None:
    """Return the request's start on the best of these workers; None if none has room."""
    possible = {
        worker_id: need
        for worker_id, need in needs.items()
        if need.can_start and (rooms is None or rooms.hold(worker_id, need) is None)
    }
    if not possible:
        return None
    worker_id = owner.prefer(waiting.item, possible)
    return Start(waiting, worker_id, possible[worker_id])


def streamed_in(
    owner: Owner[R],
    waiting: Waiting[R],
    lacking: Mapping[str, Need],
    rooms: WorkerRooms | None,
) -> Start[R] | None:
    """Return the start of a request that had better be streamed than wait for the memory that
    these workers lack."""
    start = start_in(owner, waiting, owner.instead(waiting.item, lacking), rooms)
    return None if start is None else replace(start, decision=Decision.STREAMED)
