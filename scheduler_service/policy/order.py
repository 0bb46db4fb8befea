"""The waiting requests by arrival, and by tenant and priority."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import Generic

from scheduler_service.policy.waiting import R, Waiting

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
