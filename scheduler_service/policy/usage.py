"""What started requests hold of the workers' memory, charged to their tenants.

A tenant is charged an estimate when its request starts, more if that runs for longer, and
the difference to what it used when it ends: in the end exactly bytes times seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_service.policy.tenants import TenantShares

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
        """Note that a request still runs, and holds so many bytes more from now on."""
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
