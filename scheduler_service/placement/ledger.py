"""Accounts of promised memory: device pages of each worker, slots of each store."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from scheduler_service.placement.power import PowerAdvice, RecentKappa, advise_power
from scheduler_service.placement.trial import Trial
from scheduler_service.worker_facts import WorkerFacts
from splitpoint.config import counted
from splitpoint.costs.first_token import kappa_crit
from splitpoint.v1 import types_pb2


@dataclass(frozen=True, slots=True)
class Charge:
    """Pages of one request: one of each full chunk of its prompt, and its own.

    Pages of chunks are shared: a worker that runs several requests with a chunk holds it once.
    """

    # Marks of the leading full chunks, in order.
    marks: Sequence[bytes] = ()
    # Pages for the rest of the prompt and for the answer, or of a streamed request.
    own_pages: int = 0


# A request of another scheduler that has waited longer than this goes first, however large it is.
_LONG_WAIT_SECONDS = 5.0
# Ticks without any charge on a worker after which nothing is kept free for other schedulers: each
# of them may be waiting for the others.
_IDLE_TICKS = 3


@dataclass(frozen=True, slots=True)
class OthersHold:
    """What other schedulers hold and want on one worker, by its last message.

    Attributes:
        pages: charged to their requests.
        request_count: places in the batch that these have.
        slot_count: slots of the worker's store that are promised to streamed ones.
        busy_count: schedulers that have requests there, running or waiting.
        wanted_pages: needed by the request that has waited longest; 0 if none waits.
        waited_seconds: how long it has waited since its scheduler last started a request there.
    """

    pages: int = 0
    request_count: int = 0
    slot_count: int = 0
    busy_count: int = 0
    wanted_pages: int = 0
    waited_seconds: float = 0.0


class Ledger:
    """How much of one worker's cache is promised, and to which requests, by arrival.

    Answers grow, so the charges may exceed the capacity; nothing is granted then. Neither is what
    other schedulers hold, nor a share that is theirs while their requests wait.
    """

    def __init__(self, facts: WorkerFacts) -> None:
        self.set_facts(facts)
        # A draining worker keeps its grants and gets no new ones.
        self.is_closed = False
        self.trial = Trial()
        self.kappa = RecentKappa()
        # Marks of the chunks on its device, by its last report.
        self.device_marks: frozenset[bytes] = frozenset()
        self.others = OthersHold()
        # How long our own first request has waited for this worker, or since the last start there.
        self.waited_seconds = 0.0
        # Requests that were ever charged.
        self.grant_count = 0
        # Ticks since anything was charged on it, by any scheduler.
        self._idle_ticks = _IDLE_TICKS
        self._grants: dict[int, Charge] = {}
        # How many of the requests have each chunk, by mark.
        self._holders: Counter[bytes] = Counter()
        self._own_pages = 0

    def set_facts(self, facts: WorkerFacts) -> None:
        """Note what is known of the worker now; only its measured costs may have changed."""
        self.facts = facts
        self.page_count = facts.cache_capacity_bytes // facts.page_bytes
        self.first_token = facts.first_token()
        self.kappa_crit = kappa_crit(facts.shape, facts.profile, facts.encoding)
        self.stored_bytes_per_token = facts.shape.stored_kv_bytes_per_token(facts.encoding)

    def advise_power(self, telemetry: types_pb2.Telemetry | None) -> PowerAdvice | None:
        """Return the power cap that its requests leave room for. None: none, or no card."""
        limit = telemetry.power_default_limit_watts if telemetry is not None else 0.0
        return advise_power(self.kappa, self.kappa_crit, limit)

    @property
    def charged_pages(self) -> int:
        return len(self._holders) + self._own_pages

    @property
    def charged_bytes(self) -> int:
        return self.charged_pages * self.facts.page_bytes

    @property
    def free_pages(self) -> int:
        """Pages that no scheduler has charged; negative if more is charged than there is."""
        return self.page_count - self.charged_pages - self.others.pages

    @property
    def free_places(self) -> int:
        """Places in the batch that no scheduler has given to a request."""
        return self.facts.max_batch_size - self.running_count - self.others.request_count

    @property
    def free_bytes(self) -> int:
        return self.free_pages * self.facts.page_bytes

    @property
    def free_share(self) -> float:
        """Free part of the cache, at most 1; 0 for a worker without any, and below if more is
        charged than there is."""
        return self.free_bytes / max(1, self.facts.cache_capacity_bytes)

    @property
    def running_count(self) -> int:
        return len(self._grants)

    @property
    def arrivals(self) -> list[int]:
        """The requests that are charged."""
        return list(self._grants)

    def shared_count(self, marks: Sequence[bytes]) -> int:
        """Return how many of these leading chunks running requests have already.

        A request that has a chunk has all chunks before it, so the end is found by halving.
        """
        return bisect_left(marks, True, key=lambda mark: mark not in self._holders)

    def device_count(self, marks: Sequence[bytes]) -> int:
        """Return how many of these leading chunks its device holds, as far as is known.

        What a running request has is there, or will be when this one starts.
        """
        count = self.shared_count(marks)
        while count < len(marks) and marks[count] in self.device_marks:
            count += 1
        return count

    def pages_of(self, charge: Charge) -> int:
        """Return the pages that a charge would add now."""
        return len(charge.marks) - self.shared_count(charge.marks) + charge.own_pages

    def pages_held(self, arrival: int) -> int:
        """Return the pages of a charged request, shared ones included."""
        charge = self._grants[arrival]
        return len(charge.marks) + charge.own_pages

    def has_room(self, charge: Charge) -> bool:
        """Return True if memory and a place in the batch are free.

        Without a place in the batch the worker would queue the request by itself.
        """
        return self.has_room_for(self.pages_of(charge))

    def has_room_for(self, pages: int) -> bool:
        """Return True if a place in the batch and so many pages are free."""
        return self.free_places > 0 and pages <= self.free_pages and self.leaves_share(pages)

    def has_room_after(self, pages: int, leaving: Collection[int]) -> bool:
        """Return True if a place and so many pages are free once these requests have left.

        A page that they share counts as freed by each of them, so it may be too early.
        """
        freed = sum(map(self.pages_held, leaving))
        return self.free_places + len(leaving) > 0 and self.free_pages + freed >= pages

    def leaves_share(self, pages: int) -> bool:
        """Return True if so many more pages leave other schedulers what is theirs.

        While their requests wait, a scheduler that has its equal share of the worker leaves free
        what the first of them needs. One that has waited long, and longer than ours, is left its
        memory in any case. On an idle worker the one that has waited longest goes first.
        """
        others = self.others
        if not others.wanted_pages:
            return True
        is_first = self.waited_seconds >= others.waited_seconds
        if self._is_idle and (is_first or self._idle_ticks >= _IDLE_TICKS):
            return True
        if max(self.waited_seconds, others.waited_seconds) >= _LONG_WAIT_SECONDS:
            if is_first:
                return True
        elif self._has_share(pages, others.busy_count + 1):
            return True
        return self.free_pages - pages >= others.wanted_pages and self.free_places > 1

    def _has_share(self, pages: int, sharers: int) -> bool:
        """Return True if so many more pages, and a place, are within an equal share."""
        return (
            self.charged_pages + pages <= self.page_count // sharers
            and self.running_count < self.facts.max_batch_size // sharers
        )

    @property
    def _is_idle(self) -> bool:
        return not (self.charged_pages or self.others.pages)

    def tick(self) -> None:
        """Note that a moment has passed."""
        self._idle_ticks = self._idle_ticks + 1 if self._is_idle else 0

    def grant(self, arrival: int, charge: Charge) -> None:
        """Charge a request. Raises ValueError for a second grant, or for more than is free."""
        if arrival in self._grants:
            raise ValueError(f"request {arrival} is charged already")
        if not self.has_room(charge):
            raise ValueError(f"{self.pages_of(charge)} pages exceed the {self.free_pages} free")
        self._grants[arrival] = charge
        self._idle_ticks, self.waited_seconds = 0, 0.0
        self.grant_count += 1
        self._holders.update(charge.marks)
        self._own_pages += charge.own_pages

    def grow(self, arrival: int, page_count: int) -> int:
        """Charge a request for so many pages, shared ones included, if that is more than before.

        Return the pages that were added; 0 for a request that is not charged.
        """
        charge = self._grants.get(arrival)
        if charge is None:
            return 0
        added = max(0, page_count - len(charge.marks) - charge.own_pages)
        if added:
            self._own_pages += added
            self._grants[arrival] = Charge(charge.marks, charge.own_pages + added)
        return added

    def release(self, arrival: int) -> None:
        """End a request's charge, if it has one."""
        charge = self._grants.pop(arrival, None)
        self.trial.end(arrival)
        if charge is None:
            return
        self._own_pages -= charge.own_pages
        for mark in charge.marks:
            self._holders[mark] -= 1
            if not self._holders[mark]:
                del self._holders[mark]

    def check_integrity(self) -> list[str]:
        """Return one line per violated invariant."""
        problems = []
        charges = list(self._grants.values())
        own_pages = sum(charge.own_pages for charge in charges)
        if self._own_pages != own_pages:
            problems.append(f"{self._own_pages} own pages charged instead of {own_pages}")
        holders = Counter(mark for charge in charges for mark in charge.marks)
        if self._holders != holders:
            counts = counted(len(self._holders), "chunk is", "chunks are")
            problems.append(f"{counts} counted instead of {len(holders)}")
        if any(charge.own_pages < 0 for charge in charges):
            problems.append("a request is charged a negative number of pages")
        if len(charges) > self.facts.max_batch_size:
            problems.append(
                f"{counted(len(charges), 'request')} in a batch of {self.facts.max_batch_size}"
            )
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

    def promised_to(self, arrivals: Collection[int]) -> int:
        """Return the slots that are promised to these requests."""
        return sum(self._grants.get(arrival, 0) for arrival in arrivals)

    def has_room(
        self, slot_count: int, store_slot_count: int | None, *, others_slots: int = 0
    ) -> bool:
        """Return True if the slots are free, or if the store's size is not known (None).

        `others_slots`: promised by other schedulers.
        """
        if not slot_count or store_slot_count is None:
            return True
        return self.promised_count + others_slots + slot_count <= store_slot_count

    def grant(self, arrival: int, slot_count: int) -> None:
        if slot_count:
            self._grants[arrival] = slot_count

    def release(self, arrival: int) -> bool:
        """End a request's promise. Return True if it has one."""
        return self._grants.pop(arrival, None) is not None
