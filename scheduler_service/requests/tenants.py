"""What each tenant has, and what it waits for: for the status and the metrics.

Metrics call tenants by pseudonyms, since a monitoring system must not learn their names, and name
a bounded number of them, since each label is a series for ever. The status, for admins, has both
names.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_service.requests.admission import AdmissionQueue
from splitpoint.keys import tenant_pseudonym

# Tenants with a label of their own in the metrics: the first ones that came.
_MOST_LABELS = 20
OTHERS = "other"
UNNAMED = "unnamed"


@dataclass(frozen=True, slots=True)
class TenantFacts:
    """One tenant now.

    Attributes:
        oldest_wait_seconds: of its longest-waiting request that is not paused; 0 if none waits.
        service: byte-seconds of device memory that its requests have used.
    """

    tenant: str
    weight: float
    running_count: int
    waiting_count: int
    oldest_wait_seconds: float
    service: float

    def joined(self, other: TenantFacts | None) -> TenantFacts:
        """Return the facts of both as if they were one tenant of this one's name."""
        if other is None:
            return self
        return TenantFacts(
            self.tenant,
            self.weight + other.weight,
            self.running_count + other.running_count,
            self.waiting_count + other.waiting_count,
            max(self.oldest_wait_seconds, other.oldest_wait_seconds),
            self.service + other.service,
        )


class TenantLabels:
    """Gives tenants their labels in the metrics. A tenant keeps its label."""

    def __init__(self, server_key: bytes) -> None:
        self._server_key = server_key
        self._labels: dict[str, str] = {}

    def label(self, tenant: str) -> str:
        """Return a tenant's label; OTHERS once enough tenants have one."""
        found = self._labels.get(tenant)
        if found is not None:
            return found
        if len(self._labels) >= _MOST_LABELS:
            return OTHERS
        pseudonym = tenant_pseudonym(self._server_key, tenant) if tenant else UNNAMED
        return self._labels.setdefault(tenant, pseudonym)


def tenants_of(admission: AdmissionQueue, now: float) -> list[TenantFacts]:
    """Return every tenant that has had a request, the one with most service first."""
    policy = admission.policy
    oldest: dict[str, float] = {}
    for waiting in policy:
        since = now if waiting.is_paused else waiting.since
        oldest[waiting.tenant] = min(since, oldest.get(waiting.tenant, now))
    service = dict.fromkeys(oldest, 0.0) | policy.service(now)
    found = [
        TenantFacts(
            tenant,
            policy.shares.weight(tenant),
            policy.shares.running_count(tenant),
            policy.shares.waiting_count(tenant),
            now - oldest.get(tenant, now),
            used,
        )
        for tenant, used in service.items()
    ]
    found.sort(key=lambda facts: (-facts.service, facts.tenant))
    return found
