"""Accounts of promised memory: device cache of each worker, slots of each store."""

from __future__ import annotations

from scheduler_service.placement.trial import Trial
from scheduler_service.worker_facts import WorkerFacts


class Ledger:
    """How much of one worker's cache is promised, and to which requests, by arrival."""

    def __init__(self, facts: WorkerFacts) -> None:
        self.facts = facts
        self.charged_bytes = 0
        # A draining worker keeps its grants and gets no new ones.
        self.is_closed = False
        self.trial = Trial()
        self._grants: dict[int, int] = {}

    @property
    def free_bytes(self) -> int:
        return self.facts.cache_capacity_bytes - self.charged_bytes

    @property
    def free_share(self) -> float:
        """Free part of the cache, from 0 to 1; 0 for a worker without any."""
        return self.free_bytes / max(1, self.facts.cache_capacity_bytes)

    @property
    def running_count(self) -> int:
        return len(self._grants)

    @property
    def arrivals(self) -> list[int]:
        """The requests that are charged."""
        return list(self._grants)

    def has_room(self, size_bytes: int) -> bool:
        """Return True if memory and a place in the batch are free.

        Without a place in the batch the worker would queue the request by itself.
        """
        return size_bytes <= self.free_bytes and self.running_count < self.facts.max_batch_size

    def grant(self, arrival: int, size_bytes: int) -> None:
        """Charge a request. Raises ValueError for a second grant, or for more than is free."""
        if arrival in self._grants:
            raise ValueError(f"request {arrival} is charged already")
        if not self.has_room(size_bytes):
            raise ValueError(f"{size_bytes} bytes exceed the {self.free_bytes} free ones")
        self._grants[arrival] = size_bytes
        self.charged_bytes += size_bytes

    def release(self, arrival: int) -> None:
        """End a request's charge, if it has one."""
        self.charged_bytes -= self._grants.pop(arrival, 0)
        self.trial.end(arrival)

    def check_integrity(self) -> list[str]:
        """Return one line per violated invariant."""
        problems = []
        if self.charged_bytes != sum(self._grants.values()):
            problems.append(f"{self.charged_bytes} bytes charged for {self._grants}")
        if not 0 <= self.charged_bytes <= self.facts.cache_capacity_bytes:
            problems.append(f"{self.charged_bytes} of {self.facts.cache_capacity_bytes} charged")
        return problems + self.trial.check_integrity(set(self._grants))


class SlotLedger:
    """Slots of one store that are promised to streamed requests, on all of its workers.

    A streamed request leases what it computes until it ends, so together they must fit.
    Chunks of resident requests can be evicted, or are not stored.
    """

    def __init__(self) -> None:
        self._grants: dict[int, int] = {}

    @property
    def promised_count(self) -> int:
        return sum(self._grants.values())

    def has_room(self, slot_count: int, store_slot_count: int | None) -> bool:
        """Return True if the slots are free, or if the store's size is not known (None)."""
        if not slot_count or store_slot_count is None:
            return True
        return self.promised_count + slot_count <= store_slot_count

    def grant(self, arrival: int, slot_count: int) -> None:
        if slot_count:
            self._grants[arrival] = slot_count

    def release(self, arrival: int) -> None:
        """End a request's promise, if it has one."""
        self._grants.pop(arrival, None)
