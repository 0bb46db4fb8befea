"""Who may start now, who waits, who never will: FIFO over each worker's memory ledger.

Pure: no clock, no I/O. A request that waits keeps every worker it could use
from those behind it, so nothing overtakes on the memory it needs and nothing
starves; a request pinned to a busy worker holds up only that worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler_service.placement.fetch_plan import FetchSource
from scheduler_service.placement.footprint import (
    Demand,
    Fits,
    NeverFits,
    WorkerFacts,
    footprint_of,
    resident_share,
)
from scheduler_service.placement.routing import Candidate, choose_worker
from splitpoint.config import format_size
from splitpoint.planning.planner import Residency
from splitpoint.words import counted


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request that asks to be placed."""

    # Order of arrival, and the request's name here: no two share one, and a
    # request that is placed again keeps its own.
    arrival: int
    demand: Demand
    # Run there and nowhere else. Empty: anywhere.
    worker_id: str = ""
    # Tokens of its prefix in each worker's store; absent means none.
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    # Other stores that each worker could fetch the prefix from.
    sources: Mapping[str, tuple[FetchSource, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Admitted:
    """Memory is granted; release it under the ticket's arrival."""

    ticket: Ticket
    worker_id: str
    residency: Residency
    # Charged, `spare_bytes` included.
    size_bytes: int
    reason: str
    # Streamed: for a part of the cache that stays on the device.
    spare_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Queued:
    position: int
    reason: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """Turned away. With the numbers of the largest worker if it can never fit; else try again."""

    reason: str
    numbers: NeverFits | None = None


class Ledger:
    """What of one worker's cache is promised, and to whom."""

    def __init__(self, facts: WorkerFacts) -> None:
        self.facts = facts
        self.charged_bytes = 0
        # A draining worker keeps its grants and gets no new ones.
        self.is_closed = False
        self._grants: dict[int, int] = {}

    @property
    def free_bytes(self) -> int:
        return self.facts.cache_capacity_bytes - self.charged_bytes

    @property
    def free_share(self) -> float:
        """Of the whole; 0 of a worker without any."""
        return self.free_bytes / max(1, self.facts.cache_capacity_bytes)

    @property
    def running_count(self) -> int:
        return len(self._grants)

    def has_room(self, size_bytes: int) -> bool:
        """Memory, and a place in the batch: else the worker would queue by itself."""
        return size_bytes <= self.free_bytes and self.running_count < self.facts.max_batch_size

    def grant(self, arrival: int, size_bytes: int) -> None:
        """Raises ValueError for a second grant, or for more than is free."""
        if arrival in self._grants:
            raise ValueError(f"request {arrival} is charged already")
        if not self.has_room(size_bytes):
            raise ValueError(f"{size_bytes} bytes exceed the {self.free_bytes} free ones")
        self._grants[arrival] = size_bytes
        self.charged_bytes += size_bytes

    @property
    def arrivals(self) -> list[int]:
        """Who is charged."""
        return list(self._grants)

    def release(self, arrival: int) -> None:
        """Releasing what is not held does nothing."""
        self.charged_bytes -= self._grants.pop(arrival, 0)

    def check_integrity(self) -> list[str]:
        """One line per violated invariant."""
        problems = []
        if self.charged_bytes != sum(self._grants.values()):
            problems.append(f"{self.charged_bytes} bytes charged for {self._grants}")
        if not 0 <= self.charged_bytes <= self.facts.cache_capacity_bytes:
            problems.append(f"{self.charged_bytes} of {self.facts.cache_capacity_bytes} charged")
        return problems


class SlotLedger:
    """Slots of one store that are promised to streamed requests, on whatever worker.

    What a streamed request computes stays leased until it ends, so together
    they must fit; chunks of resident ones can be evicted, or are not stored.
    """

    def __init__(self) -> None:
        self._grants: dict[int, int] = {}

    @property
    def promised_count(self) -> int:
        return sum(self._grants.values())

    def has_room(self, slot_count: int, store_slot_count: int | None) -> bool:
        """A store that could not be asked for its size is not held against anybody."""
        if not slot_count or store_slot_count is None:
            return True
        return self.promised_count + slot_count <= store_slot_count

    def grant(self, arrival: int, slot_count: int) -> None:
        if slot_count:
            self._grants[arrival] = slot_count

    def release(self, arrival: int) -> None:
        """Releasing what is not held does nothing."""
        self._grants.pop(arrival, None)


class Admission:
    """Ledgers of the workers that are ready, and the queue in front of them."""

    def __init__(self, queue_capacity: int) -> None:
        self.queue_capacity = queue_capacity
        self._ledgers: dict[str, Ledger] = {}
        self._slots: dict[str, SlotLedger] = {}  # by the store's address
        self._queue: list[Ticket] = []  # by arrival

    # -- workers ------------------------------------------------------------------

    def add_worker(self, facts: WorkerFacts) -> None:
        """A worker became ready, with nothing running on it."""
        self._ledgers[facts.worker_id] = Ledger(facts)

    def close_worker(self, worker_id: str) -> None:
        """It takes nothing new; what runs there goes on."""
        ledger = self._ledgers.get(worker_id)
        if ledger is not None:
            ledger.is_closed = True

    def remove_worker(self, worker_id: str) -> None:
        """It is gone, and with it what was promised there."""
        ledger = self._ledgers.pop(worker_id, None)
        if ledger is not None:
            for arrival in ledger.arrivals:
                self._slots_of(ledger).release(arrival)

    def ledger(self, worker_id: str) -> Ledger | None:
        return self._ledgers.get(worker_id)

    def ledgers(self) -> list[Ledger]:
        return list(self._ledgers.values())

    @property
    def running_count(self) -> int:
        """Requests that are charged anywhere."""
        return sum(ledger.running_count for ledger in self._ledgers.values())

    def promised_slots(self, store_address: str) -> int:
        """Slots of a store that streamed requests may still fill."""
        slots = self._slots.get(store_address)
        return slots.promised_count if slots is not None else 0

    # -- requests -----------------------------------------------------------------

    def submit(self, ticket: Ticket) -> Queued | Rejected:
        """Queue a new request; `admit` then takes it out, perhaps at once."""
        verdicts = self._verdicts(ticket)
        misfits = [verdict for verdict in verdicts.values() if isinstance(verdict, NeverFits)]
        if misfits and len(misfits) == len(verdicts):
            largest = max(misfits, key=lambda misfit: misfit.capacity_bytes)
            return Rejected(f"can never fit: {largest.reason}", numbers=largest)
        if len(self._queue) >= self.queue_capacity and not self._would_start(ticket):
            return Rejected(
                "the queue is full "
                f"({counted(self.queue_capacity, 'request waits', 'requests wait')})"
            )
        return self.resubmit(ticket)

    def resubmit(self, ticket: Ticket) -> Queued:
        """Queue a request that was admitted before, at its old place, whatever the capacity."""
        position = sum(waiting.arrival < ticket.arrival for waiting in self._queue)
        self._queue.insert(position, ticket)
        return Queued(position, self.reason_to_wait(ticket))

    def withdraw(self, arrival: int) -> None:
        """Take a request out of the queue; nothing happens when it is not there."""
        self._queue = [ticket for ticket in self._queue if ticket.arrival != arrival]

    def admit(self) -> Admitted | None:
        """Grant memory to the first request that may start now; None when there is none."""
        taken: set[str] = set()
        open_count = sum(not ledger.is_closed for ledger in self._ledgers.values())
        for index, ticket in enumerate(self._queue):
            wanted = self._fitting(ticket)
            admitted = self._place(ticket, {w: f for w, f in wanted.items() if w not in taken})
            if admitted is not None:
                del self._queue[index]
                ledger = self._ledgers[admitted.worker_id]
                ledger.grant(ticket.arrival, admitted.size_bytes)
                slot_count = wanted[admitted.worker_id].slot_count
                self._slots_of(ledger).grant(ticket.arrival, slot_count)
                return admitted
            taken |= wanted.keys()
            if len(taken) >= open_count:
                break
        return None

    def release(self, worker_id: str, arrival: int) -> None:
        """Its placement on this worker is over; nothing happens when the worker is gone."""
        ledger = self._ledgers.get(worker_id)
        if ledger is not None:
            ledger.release(arrival)
            self._slots_of(ledger).release(arrival)

    # -- questions ----------------------------------------------------------------

    def queue(self) -> list[Ticket]:
        """Who waits, first come first."""
        return list(self._queue)

    def is_placeable(self, ticket: Ticket) -> bool:
        """Whether a worker that is ready could run it some day."""
        return bool(self._fitting(ticket))

    def reason_to_wait(self, ticket: Ticket) -> str:
        """One sentence for people."""
        fitting = self._fitting(ticket)
        if not fitting:
            return "no worker that could run it is ready"
        parts = []
        for worker_id, fits in fitting.items():
            ledger = self._ledgers[worker_id]
            if self._has_room(ledger, fits):
                parts.append(f"earlier requests come first on worker {worker_id}")
            elif not self._has_slots(ledger, fits):
                parts.append(
                    f"streamed requests hold {self._slots_of(ledger).promised_count:,} of the "
                    f"store's {counted(ledger.facts.store_slot_count or 0, 'slot')}, "
                    f"{fits.slot_count:,} are needed"
                )
            elif fits.size_bytes > ledger.free_bytes:
                parts.append(
                    f"worker {worker_id} has {format_size(ledger.free_bytes)} free of the "
                    f"{format_size(fits.size_bytes)} needed"
                )
            else:
                parts.append(
                    f"worker {worker_id} runs {counted(ledger.running_count, 'request')}, its most"
                )
        return "; ".join(parts)

    def footprint_bytes(self, ticket: Ticket) -> int:
        """The least that it would be charged on a ready worker; 0 when there is none."""
        return min((fits.size_bytes for fits in self._fitting(ticket).values()), default=0)

    def check_integrity(self) -> list[str]:
        """One line per violated invariant; empty when all hold."""
        problems = [line for ledger in self._ledgers.values() for line in ledger.check_integrity()]
        arrivals = [ticket.arrival for ticket in self._queue]
        if arrivals != sorted(set(arrivals)):
            problems.append(f"the queue is out of order: {arrivals}")
        return problems

    # -- inside -------------------------------------------------------------------

    def _slots_of(self, ledger: Ledger) -> SlotLedger:
        return self._slots.setdefault(ledger.facts.kvstore_address, SlotLedger())

    def _has_slots(self, ledger: Ledger, fits: Fits) -> bool:
        return self._slots_of(ledger).has_room(fits.slot_count, ledger.facts.store_slot_count)

    def _has_room(self, ledger: Ledger, fits: Fits) -> bool:
        return ledger.has_room(fits.size_bytes) and self._has_slots(ledger, fits)

    def _verdicts(self, ticket: Ticket) -> dict[str, Fits | NeverFits]:
        return {
            worker_id: footprint_of(ticket.demand, ledger.facts)
            for worker_id, ledger in self._ledgers.items()
            if not ledger.is_closed and ticket.worker_id in ("", worker_id)
        }

    def _fitting(self, ticket: Ticket) -> dict[str, Fits]:
        """The workers that could run it when empty."""
        return {
            worker_id: verdict
            for worker_id, verdict in self._verdicts(ticket).items()
            if isinstance(verdict, Fits)
        }

    def _would_start(self, ticket: Ticket) -> bool:
        """Whether nobody who waits has a claim on a worker with room for it."""
        claimed: set[str] = set()
        for waiting in self._queue:
            claimed |= self._fitting(waiting).keys()
        free = {w: f for w, f in self._fitting(ticket).items() if w not in claimed}
        return self._place(ticket, free) is not None

    def _place(self, ticket: Ticket, fitting: Mapping[str, Fits]) -> Admitted | None:
        candidates = []
        for worker_id, fits in fitting.items():
            ledger = self._ledgers[worker_id]
            if self._has_room(ledger, fits):
                cached = ticket.cached_tokens.get(worker_id, 0)
                candidates.append(
                    Candidate(worker_id, cached, ledger.free_share, ledger.running_count)
                )
        if not candidates:
            return None
        chosen = choose_worker(candidates).worker_id
        fits = fitting[chosen]
        return self._admitted(ticket, chosen, fits)

    def _admitted(self, ticket: Ticket, worker_id: str, fits: Fits) -> Admitted:
        ledger = self._ledgers[worker_id]
        is_alone = not any(waiting.arrival != ticket.arrival for waiting in self._queue)
        spare = 0
        if is_alone:
            spare = resident_share(fits, ledger.free_bytes, ledger.facts.page_bytes)
        reason = fits.reason
        if spare:
            reason += f", and {format_size(spare)} for a part that stays on the device"
        return Admitted(
            ticket, worker_id, fits.residency, fits.size_bytes + spare, reason, spare_bytes=spare
        )
