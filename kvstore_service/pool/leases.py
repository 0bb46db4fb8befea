"""Leases, which protect slots, and the chunks that eviction must leave. Pure: no clock.

A lease names slots of one session. It does not expire by itself: it ends when its session
releases it, or when the session's client is known to be gone. Eviction leaves leased chunks, those
about to get children, and their parents.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvstore_service.pool.prefix_index import Entry, PrefixIndex


class Protection:
    """Protects chunks of one pool.

    Args:
        chunks: the sealed chunks by slot, as they are now.
        on_end: called with the slot of a chunk that a guard protected no longer.
    """

    def __init__(
        self,
        index: PrefixIndex,
        leases: LeaseTable,
        chunks: Mapping[int, Entry],
        on_end: Callable[[int], None],
    ) -> None:
        self._index = index
        self._leases = leases
        self._chunks = chunks
        self._on_end = on_end
        self._guarded: Counter[bytes] = Counter()  # keys of chunks about to get children

    @contextmanager
    def guard(self, keys: Iterable[bytes]) -> Iterator[None]:
        """Protect chunks from eviction inside the block, by their keys."""
        guarded = [key for key in keys if self._index.get(key) is not None]
        self._guarded.update(guarded)
        try:
            yield
        finally:
            self._guarded.subtract(guarded)
            for key in guarded:
                if self._guarded[key] <= 0:
                    del self._guarded[key]
                entry = self._index.get(key)
                if entry is not None:
                    self._on_end(entry.slot)

    def has(self, entry: Entry) -> bool:
        """Return True if a chunk is protected itself, whatever continues it."""
        return self._leases.is_leased(entry.slot) or entry.key in self._guarded

    def is_evictable(self, slot: int) -> bool:
        """Return True if the chunk in a slot may be removed now: nothing continues it, either."""
        entry = self._chunks.get(slot)
        return entry is not None and not self.has(entry) and not self._index.has_children(entry.key)

    def kept(self) -> set[int]:
        """Return the slots of chunks that eviction cannot remove, whatever else it removes."""
        kept: set[int] = set()
        guarded = (self._index.get(key) for key in self._guarded)
        slots = [*self._leases.leased_slots, *(entry.slot for entry in guarded if entry)]
        for slot in slots:
            entry = self._chunks.get(slot)  # None if damaged
            while entry is not None and entry.slot not in kept:
                kept.add(entry.slot)
                entry = self._index.get(entry.parent_key)
        return kept


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
