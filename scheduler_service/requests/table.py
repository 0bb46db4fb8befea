"""The requests that the scheduler knows by their ids."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from scheduler_service.api.request import Request
from scheduler_service.limits import Limits
from splitpoint.config import counted
from splitpoint.errors import AlreadyExists, ResourceExhausted


@dataclass(slots=True)
class RequestTable:
    """Requests by tenant and id: those that run, and for a while those that completed."""

    limits: Limits
    _known: dict[tuple[str, str], Request] = field(default_factory=dict)
    # Completed ones, the oldest first.
    _completed: OrderedDict[tuple[str, str], Request] = field(default_factory=OrderedDict)
    # Those that have not ended, by tenant.
    _unended: dict[str, set[Request]] = field(default_factory=dict)

    def find(self, request: Request) -> Request | None:
        """Return the known request of the same id and body.

        Raises AlreadyExists for the same id with another body.
        """
        known = self._known.get(request.key)
        if known is not None and known.body_digest != request.body_digest:
            raise AlreadyExists(
                "this request_id belongs to a request with another body", reason="REQUEST_ID_TAKEN"
            )
        return known

    def check_quota(self, tenant: str) -> None:
        """Raises ResourceExhausted if the tenant has as many requests as it may have."""
        most = self.limits.tenant_requests
        if most is not None and len(self._unended.get(tenant, ())) >= most:
            run = counted(most, "request runs or waits", "requests run or wait")
            raise ResourceExhausted(
                f"{run} for this tenant already, which is its limit",
                reason="TENANT_QUOTA",
                retry_after_seconds=self.limits.retry_seconds,
                tenant_requests=most,
            )

    def add(self, request: Request) -> None:
        self._known[request.key] = request
        self._unended.setdefault(request.tenant, set()).add(request)

    def ended(self, request: Request) -> None:
        """Remember a completed request; forget a failed one, so that it may be tried again."""
        unended = self._unended.get(request.tenant, set())
        unended.discard(request)
        if not unended:
            self._unended.pop(request.tenant, None)
        if request.has_completed:
            self._completed[request.key] = request
        elif self._known.get(request.key) is request:
            del self._known[request.key]

    def expire(self, now: float) -> None:
        """Forget completed requests that are too old or too many."""
        while self._completed:
            oldest = next(iter(self._completed.values()))
            age = now - (oldest.ended_at or now)
            is_recent = age < self.limits.remember_seconds
            if is_recent and len(self._completed) <= self.limits.remember_count:
                break
            self._completed.popitem(last=False)
            del self._known[oldest.key]

    def running(self) -> list[Request]:
        return [request for request in self._known.values() if not request.has_ended]

    def __len__(self) -> int:
        return len(self._known)
