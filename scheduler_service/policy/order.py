"""The waiting requests in a given order: by arrival (fifo), or by the tenants' shares (fair)."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import attrgetter

from scheduler_service.placement.account import Need
from scheduler_service.placement.demand import Demand
from scheduler_service.policy.tenants import TenantShares
from scheduler_service.policy.workers import Workers

_ARRIVAL = attrgetter("arrival")
_RANK = attrgetter("rank")


class Decision(StrEnum):
    """Why a request starts now."""

    # It was the first in turn that could.
    TURN = "turn"
    # It belongs to the set that fills its worker best.
    SET = "set"
    # The same, of a tenant ahead of its share: no other could use the worker.
    SPARE = "spare"
    # Memory was kept for it.
    RESERVATION = "reservation"
    # It lacks memory, and had better be streamed than wait.
    STREAMED = "streamed"


@dataclass(frozen=True, slots=True)
class Start:
    """A request that starts now, and what it takes."""

    demand: Demand
    worker_id: str
    need: Need
    decision: Decision = Decision.TURN


class WaitingOrder:
    """Every waiting request once."""

    def __init__(self) -> None:
        self._by_arrival: list[Demand] = []
        self._by_tenant: dict[str, list[Demand]] = {}

    def __len__(self) -> int:
        return len(self._by_arrival)

    def __iter__(self) -> Iterator[Demand]:
        """Iterate in order of arrival."""
        return iter(self._by_arrival)

    def of_tenant(self, tenant: str) -> list[Demand]:
        """Return a tenant's requests: highest priority, then earliest arrival first."""
        return self._by_tenant.get(tenant, [])

    def heads(self, tenant: str) -> list[Demand]:
        """Return the earliest request of each of a tenant's priorities."""
        theirs = self.of_tenant(tenant)
        found, index = [], 0
        while index < len(theirs):
            found.append(theirs[index])
            index = bisect_right(theirs, (-theirs[index].priority, math.inf), key=_RANK)
        return found

    def find(self, arrival: int) -> Demand | None:
        index = bisect_left(self._by_arrival, arrival, key=_ARRIVAL)
        if index < len(self._by_arrival) and self._by_arrival[index].arrival == arrival:
            return self._by_arrival[index]
        return None

    def add(self, waiting: Demand) -> int:
        """Add a request. Return how many arrived before it."""
        position = bisect_left(self._by_arrival, waiting.arrival, key=_ARRIVAL)
        self._by_arrival.insert(position, waiting)
        insort(self._by_tenant.setdefault(waiting.tenant, []), waiting, key=_RANK)
        return position

    def remove(self, waiting: Demand) -> None:
        del self._by_arrival[bisect_left(self._by_arrival, waiting.arrival, key=_ARRIVAL)]
        theirs = self._by_tenant[waiting.tenant]
        del theirs[bisect_left(theirs, waiting.rank, key=_RANK)]
        if not theirs:
            del self._by_tenant[waiting.tenant]


# Tenants whose first requests are compared by their cached prefixes.
_HEADS = 8


def fair_order(order: WaitingOrder, shares: TenantShares) -> Iterator[Demand]:
    """Iterate over all: the tenant furthest behind first, each by priority, then by arrival."""
    for tenant in list(shares):
        yield from order.of_tenant(tenant)


def prefixes_first(
    workers: Workers, order: WaitingOrder, shares: TenantShares, lead: float
) -> Iterator[Demand]:
    """Iterate as `fair_order`, but of the first requests of tenants within the lead, those come
    first that have most of their tokens cached (DLPM: locality within a deficit)."""
    heads = [order.of_tenant(tenant)[0] for tenant in shares.within(lead)[:_HEADS]]
    if len(heads) > 1:
        heads.sort(key=lambda waiting: -_cached_share(workers.needs(waiting).values()))
        yield from heads
        first = set(heads)
        yield from (waiting for waiting in fair_order(order, shares) if waiting not in first)
    else:
        yield from fair_order(order, shares)


def _cached_share(needs: Iterable[Need]) -> float:
    """Return the largest part of a request's tokens that a worker has cached."""
    return max((n.cached_tokens / (n.cached_tokens + n.new_tokens) for n in needs), default=0.0)


def first_in_order(workers: Workers, order: Iterable[Demand], *, holds: bool) -> Start | None:
    """Return the first request that can start; None if none can.

    One that cannot holds up the later ones on every worker that could run it. `holds`:
    prefill work and restores hold requests back, too.
    """
    claimed: set[str] = set()
    worker_count = len(workers.open)
    for waiting in order:
        needs = workers.needs(waiting, claimed)
        start = start_in(workers, waiting, needs, holds=holds)
        if start is None and needs:
            start = streamed_in(workers, waiting, needs, holds=holds)
        if start is not None:
            return start
        claimed |= needs.keys()
        if len(claimed) >= worker_count:
            break
    return None


def start_in(
    workers: Workers,
    waiting: Demand,
    needs: Mapping[str, Need],
    *,
    holds: bool,
) -> Start | None:
    """Return the request's start on the best of these workers; None if none has room."""
    possible = {
        worker_id: need
        for worker_id, need in needs.items()
        if need.can_start and not (holds and workers.accounts[worker_id].hold(need))
    }
    if not possible:
        return None
    worker_id = workers.best(waiting, possible)
    return Start(waiting, worker_id, possible[worker_id])


def streamed_in(
    workers: Workers,
    waiting: Demand,
    lacking: Mapping[str, Need],
    *,
    holds: bool,
) -> Start | None:
    """Return the start of a request that had better be streamed than wait for the memory that
    these workers lack."""
    start = start_in(workers, waiting, workers.streamed(waiting, lacking), holds=holds)
    return None if start is None else replace(start, decision=Decision.STREAMED)
