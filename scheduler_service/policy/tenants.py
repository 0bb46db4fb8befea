"""Shares of the tenants: weighted fair queueing, with VRAM-seconds as the cost.

Each tenant has a virtual time: what it was charged, divided by its weight. The tenant with the
least goes first. One that waited for nothing starts at the present minimum, so that it cannot save
up (start-time fair queueing).

A tenant is charged an estimate when its request starts, more if that runs for longer, and
the difference to what it used when it ends: in the end exactly bytes times seconds.
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
        # From each tenant's latest request; kept for idle tenants, too.
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


# Weight of the newest sample in the mean of the seconds that requests hold memory.
_NEWEST = 0.1


@dataclass(slots=True)
class _Held:
    """One request's memory. `used` byte-seconds until `counted`, `charged` of them so far."""

    tenant: str
    worker_id: str
    size_bytes: int
    started: float
    charged: float
    used: float
    counted: float
    # When it has used what was charged.
    exhausted: float

    def use_until(self, now: float) -> None:
        if now > self.counted:
            self.used += self.size_bytes * (now - self.counted)
            self.counted = now


class Usage:
    """Started requests by arrival. Times in seconds."""

    def __init__(self, shares: TenantShares) -> None:
        self._shares = shares
        self._held: dict[int, _Held] = {}
        self._mean_seconds = 1.0
        # Byte-seconds of requests that have ended, by tenant.
        self._served: dict[str, float] = {}
        # Mean byte-seconds of a request; 0: none has started.
        self.mean_cost = 0.0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def arrivals(self) -> set[int]:
        return set(self._held)

    def on(self, worker_id: str) -> list[int]:
        """Return the requests that started on a worker."""
        return [arrival for arrival, held in self._held.items() if held.worker_id == worker_id]

    def service(self, now: float) -> dict[str, float]:
        """Return the byte-seconds that each tenant's requests have used until now."""
        found = dict(self._served)
        for held in self._held.values():
            held.use_until(now)
            found[held.tenant] = found.get(held.tenant, 0.0) + held.used
        return found

    def worker_of(self, arrival: int) -> str | None:
        """Return where a request started; None if it has not, or has ended."""
        held = self._held.get(arrival)
        return held.worker_id if held is not None else None

    def start(self, arrival: int, tenant: str, worker_id: str, size_bytes: int, now: float) -> None:
        """Charge the estimate: the request's bytes for the mean time of earlier requests."""
        cost = size_bytes * self._mean_seconds
        self.mean_cost = self.mean_cost or cost
        self._shares.starts(tenant, cost)
        self._held[arrival] = _Held(
            tenant, worker_id, size_bytes, now, cost, 0.0, now, now + self._mean_seconds
        )

    def runs(self, arrival: int, more_bytes: int, now: float) -> None:
        """Note that a request still runs, and holds this many bytes more from now on."""
        held = self._held.get(arrival)
        if held is None or (not more_bytes and now < held.exhausted):
            return
        held.use_until(now)
        held.size_bytes += more_bytes
        if held.used >= held.charged:  # it runs longer than was estimated: as long again
            more = held.used + held.size_bytes * (now - held.started) - held.charged
            self._shares.charge(held.tenant, more)
            held.charged += more
        left = held.charged - held.used
        held.exhausted = now + left / held.size_bytes if held.size_bytes else float("inf")

    def end(self, arrival: int, now: float) -> str | None:
        """Correct the charge of a request that ends. Return its worker; None if unknown."""
        held = self._held.pop(arrival, None)
        if held is None:
            return None
        held.use_until(now)
        self._shares.charge(held.tenant, held.used - held.charged)
        self._shares.ends(held.tenant)
        self._served[held.tenant] = self._served.get(held.tenant, 0.0) + held.used
        self.mean_cost += _NEWEST * (held.used - self.mean_cost)
        self._mean_seconds += _NEWEST * (now - held.started - self._mean_seconds)
        return held.worker_id
