"""The leases that protect slots from eviction. Pure: no clock, no states.

A lease names slots of one session. It does not expire by itself: it ends when its session
releases it, or when the session's client is known to be gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class Lease:
    lease_id: int
    session_id: bytes
    slots: set[int] = field(default_factory=set)


class LeaseTable:
    """All leases. Lease ids count from 1 and are never reused."""

    def __init__(self) -> None:
        self._leases: dict[int, Lease] = {}
        self._lease_counts: Counter[int] = Counter()  # slot -> leases that name it
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    @property
    def leased_slots(self) -> Iterable[int]:
        """Slots that at least one lease names."""
        return self._lease_counts.keys()

    @property
    def leased_slot_count(self) -> int:
        return len(self._lease_counts)

    def is_leased(self, slot: int) -> bool:
        return slot in self._lease_counts

    def get(self, lease_id: int) -> Lease | None:
        return self._leases.get(lease_id)

    def create(self, session_id: bytes, slots: Iterable[int]) -> Lease:
        """Return a new lease of the session on these slots."""
        self._last_id += 1
        lease = Lease(self._last_id, session_id)
        self._leases[lease.lease_id] = lease
        self.extend(lease, slots)
        return lease

    def extend(self, lease: Lease, slots: Iterable[int]) -> None:
        """Add slots to a lease. Slots that it names already are ignored."""
        for slot in slots:
            if slot not in lease.slots:
                lease.slots.add(slot)
                self._lease_counts[slot] += 1

    def end(self, lease: Lease) -> list[int]:
        """End a lease. Return the slots that no lease protects any more."""
        del self._leases[lease.lease_id]
        unprotected = []
        for slot in lease.slots:
            self._lease_counts[slot] -= 1
            if not self._lease_counts[slot]:
                del self._lease_counts[slot]
                unprotected.append(slot)
        return unprotected

    def check_integrity(self, live_slots: set[int]) -> list[str]:
        """Return the violated invariants: leases on slots without a chunk, wrong counts."""
        violations = []
        counted: Counter[int] = Counter()
        for lease in self._leases.values():
            counted.update(lease.slots)
            dead = sorted(lease.slots - live_slots)
            if dead:
                violations.append(f"lease {lease.lease_id} names slots without a chunk: {dead}")
        if counted != self._lease_counts:
            violations.append("the lease counts of slots differ from the leases")
        return violations
