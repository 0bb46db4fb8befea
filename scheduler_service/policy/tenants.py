"""Shares of the tenants: weighted fair queueing, with VRAM-seconds as the cost.

Each tenant has a virtual time: what it was charged, divided by its weight. The tenant with the
least goes first. One that waited for nothing starts at the present minimum, so that it cannot save
up (start-time fair queueing).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

# Tenants without requests that are remembered, for what they are ahead.
_MOST_IDLE = 256


@dataclass(slots=True)
class _Tenant:
    virtual: float = 0.0
    # Byte-seconds charged so far, estimates included.
    charged: float = 0.0
    waiting: int = 0
    running: int = 0

    @property
    def is_active(self) -> bool:
        return bool(self.waiting or self.running)


class TenantShares:
    """Virtual times of the tenants, in byte-seconds per weight."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        # Of each tenant's latest request; kept for idle tenants, too.
        self._weights: dict[str, float] = {}
        # (virtual time, name) of those that wait for something.
        self._order: list[tuple[float, str]] = []
        # The largest minimum so far: where a tenant that was idle begins.
        self._floor = 0.0
        # Requests that wait or run.
        self._request_count = 0

    def known(self) -> list[str]:
        """Return the tenants that are remembered."""
        return list(self._tenants)

    def __len__(self) -> int:
        """Return the number of tenants that wait."""
        return len(self._order)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the tenants that wait, the one that is furthest behind first."""
        return iter([name for _, name in self._order])

    def within(self, lead: float) -> list[str]:
        """Return the waiting tenants that are at most `lead` ahead of the least, in order."""
        if not self._order:
            return []
        most = self._order[0][0] + lead
        return [name for virtual, name in self._order if virtual <= most]

    def lead_of(self, name: str) -> float:
        """Return how far a tenant is ahead of the least that waits; 0 if nothing waits."""
        tenant = self._tenants.get(name)
        if tenant is None or not self._order:
            return 0.0
        return max(0.0, tenant.virtual - self._order[0][0])

    def charged(self, name: str) -> float:
        """Return the byte-seconds that a tenant was charged since it was last idle."""
        tenant = self._tenants.get(name)
        return tenant.charged if tenant is not None else 0.0

    def weight(self, name: str) -> float:
        """Return the weight of a tenant's latest request; 1 if it never had one."""
        return self._weights.get(name, 1.0)

    def waiting_count(self, name: str) -> int:
        tenant = self._tenants.get(name)
        return tenant.waiting if tenant is not None else 0

    def running_count(self, name: str) -> int:
        tenant = self._tenants.get(name)
        return tenant.running if tenant is not None else 0

    def share(self, name: str) -> float:
        """Return a tenant's part of all charges of the tenants that are active, 0 to 1."""
        total = sum(tenant.charged for tenant in self._tenants.values() if tenant.is_active)
        return self.charged(name) / total if total > 0 else 0.0

    def entitled(self, name: str) -> float:
        """Return a tenant's part of the weights of the active tenants, 0 to 1."""
        active = [each for each, tenant in self._tenants.items() if tenant.is_active]
        total = sum(self.weight(each) for each in active)
        return self.weight(name) / total if name in self._tenants else 0.0

    def waits(self, name: str, weight: float) -> None:
        """Note one more waiting request. The weight of the latest one counts."""
        tenant = self._tenants.setdefault(name, _Tenant())
        if not tenant.waiting:
            tenant.virtual = max(tenant.virtual, self._present())
            insort(self._order, (tenant.virtual, name))
        self._weights[name] = weight
        tenant.waiting += 1
        self._request_count += 1

    def waits_no_more(self, name: str) -> None:
        """Note that one waiting request left the queue."""
        tenant = self._tenants[name]
        tenant.waiting -= 1
        if not tenant.waiting:
            self._unlist(name, tenant)
        self._leave()

    def starts(self, name: str, cost: float) -> None:
        """Charge the estimated cost of a request that starts, in byte-seconds."""
        self._floor = max(self._floor, self._present())
        self._tenants.setdefault(name, _Tenant()).running += 1
        self._request_count += 1
        self.charge(name, cost)

    def charge(self, name: str, cost: float) -> None:
        """Add byte-seconds; negative ones correct an estimate."""
        tenant = self._tenants[name]
        if tenant.waiting:
            self._unlist(name, tenant)
        tenant.virtual += cost / self.weight(name)
        tenant.charged += cost
        if tenant.waiting:
            insort(self._order, (tenant.virtual, name))

    def ends(self, name: str) -> None:
        """Note that a request that started has ended, after its charge was corrected."""
        self._tenants[name].running -= 1
        self._leave()

    def check_integrity(self) -> list[str]:
        """Return one line per violated invariant."""
        listed = sorted(
            (each.virtual, name) for name, each in self._tenants.items() if each.waiting
        )
        problems = [] if listed == self._order else ["the order of the tenants is wrong"]
        counts = [(each.waiting, each.running) for each in self._tenants.values()]
        if any(min(pair) < 0 for pair in counts):
            problems.append("a tenant has fewer than 0 requests")
        return problems

    def _present(self) -> float:
        return max(self._floor, self._order[0][0]) if self._order else self._floor

    def _unlist(self, name: str, tenant: _Tenant) -> None:
        del self._order[bisect_left(self._order, (tenant.virtual, name))]

    def _leave(self) -> None:
        """Note that a request left. Forget tenants that have none and no debt.

        All are forgotten when no request is left: there is nothing to share then.
        """
        self._request_count -= 1
        if not self._request_count:
            self._tenants.clear()
            self._floor = 0.0
        elif len(self._tenants) > _MOST_IDLE + len(self._order):
            present = self._present()
            for idle in [each for each, t in self._tenants.items() if not t.is_active]:
                if self._tenants[idle].virtual <= present:
                    del self._tenants[idle]
