"""The waiting requests in a given order: by arrival (fifo), or by the tenants' shares (fair)."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Generic

from scheduler_service.policy.owner import Decision, Owner, Start
from scheduler_service.policy.rooms import WorkerRooms
from scheduler_service.policy.tenants import TenantShares
from scheduler_service.policy.waiting import Need, R, Waiting

_ARRIVAL = attrgetter("arrival")
_RANK = attrgetter("rank")


class WaitingOrder(Generic[R]):
    """Every waiting request once."""

    def __init__(self) -> None:
        self._by_arrival: list[Waiting[R]] = []
        self._by_tenant: dict[str, list[Waiting[R]]] = {}

    def __len__(self) -> int:
        return len(self._by_arrival)

    def __iter__(self) -> Iterator[Waiting[R]]:
        """Iterate in order of arrival."""
        return iter(self._by_arrival)

    def of_tenant(self, tenant: str) -> list[Waiting[R]]:
        """Return a tenant's requests: highest priority, then earliest arrival first."""
        return self._by_tenant.get(tenant, [])

    def heads(self, tenant: str) -> list[Waiting[R]]:
        """Return the earliest request of each of a tenant's priorities."""
        theirs = self.of_tenant(tenant)
        found, index = [], 0
        while index < len(theirs):
            found.append(theirs[index])
            index = bisect_right(theirs, (-theirs[index].priority, math.inf), key=_RANK)
        return found

    def find(self, arrival: int) -> Waiting[R] | None:
        index = bisect_left(self._by_arrival, arrival, key=_ARRIVAL)
        if index < len(self._by_arrival) and self._by_arrival[index].arrival == arrival:
            return self._by_arrival[index]
        return None

    def add(self, waiting: Waiting[R]) -> int:
        """Add a request. Return how many arrived before it."""
        position = bisect_left(self._by_arrival, waiting.arrival, key=_ARRIVAL)
        self._by_arrival.insert(position, waiting)
        insort(self._by_tenant.setdefault(waiting.tenant, []), waiting, key=_RANK)
        return position

    def remove(self, waiting: Waiting[R]) -> None:
        del self._by_arrival[bisect_left(self._by_arrival, waiting.arrival, key=_ARRIVAL)]
        theirs = self._by_tenant[waiting.tenant]
        del theirs[bisect_left(theirs, waiting.rank, key=_RANK)]
        if not theirs:
            del self._by_tenant[waiting.tenant]


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
