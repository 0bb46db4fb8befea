"""Decides which requests start, wait, or are rejected: FIFO over each worker's ledger.

Pure: no clock, no I/O. No later request starts on a worker that a waiting request could run on, so
none takes memory that an earlier one waits for and nothing starves. A
request pinned to a busy worker holds up only that worker. Requests that may have ended an engine
run apart from each other (`trial.py`). A paused request, whose reader is behind, is passed over: it
would hold memory, or a trial's worker, for as long as it does not run.

A resident request is charged for its prompt and its expected answer. The charge grows with the
answer, and may then exceed the worker's memory: the worker takes a sequence off its device, and
nothing new is granted until there is room again.

A request without room in memory waits, or is streamed at once, by what is predicted to be
better (`residency.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from scheduler_service.api.request import Request
from scheduler_service.api.selection import followed_by
from scheduler_service.placement.answer_lengths import AnswerLengths
from scheduler_service.placement.charging import Charging
from scheduler_service.placement.footprint import Fits, Grant, NeverFits, footprint_of
from scheduler_service.placement.ledger import Ledger, SlotLedger
from scheduler_service.placement.residency import streamed_instead
from scheduler_service.placement.routing import candidate_of, choose_worker
from scheduler_service.worker_facts import WorkerFacts
from splitpoint.config import format_size
from splitpoint.planning.plan import Objective, Residency
from splitpoint.shapes import chunks_of
from splitpoint.words import counted


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request may start on this worker; release the grant when it is over."""

    request: Request
    worker_id: str
    grant: Grant


@dataclass(frozen=True, slots=True)
class Queued:
    position: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """`numbers` of the largest worker if the request can never fit; None: try again later."""

    reason: str
    numbers: NeverFits | None = None


class AdmissionQueue:
    """The queue of requests, and the ledgers of the ready workers.

    `lengths` predicts answers. None: each is charged for its longest possible answer, so that
    no charge ever grows. `objective`: what waiting and streaming are compared by.
    """

    def __init__(
        self,
        capacity: int,
        lengths: AnswerLengths | None = None,
        objective: Objective = Objective.LATENCY,
    ) -> None:
        self.capacity = capacity
        self._objective = objective
        self._running: dict[int, Admitted] = {}  # by arrival
        self._charging = Charging(lengths)
        self._ledgers: dict[str, Ledger] = {}
        self._slots: dict[str, SlotLedger] = {}  # by the store's address
        self._queue: list[Request] = []  # by arrival

    # -- workers ------------------------------------------------------------------

    def add_worker(self, facts: WorkerFacts) -> None:
        """Add a worker that became ready; nothing runs on it."""
        self._ledgers[facts.worker_id] = Ledger(facts)

    def close_worker(self, worker_id: str) -> None:
        """Place nothing new on this worker; what runs there goes on."""
        ledger = self._ledgers.get(worker_id)
        if ledger is not None:
            ledger.is_closed = True

    def remove_worker(self, worker_id: str) -> None:
        """Remove a lost worker with all its grants."""
        ledger = self._ledgers.pop(worker_id, None)
        if ledger is not None:
            for arrival in ledger.arrivals:
                self._slots_of(ledger).release(arrival)
                self._running.pop(arrival, None)

    def ledger(self, worker_id: str) -> Ledger | None:
        return self._ledgers.get(worker_id)

    def ledgers(self) -> list[Ledger]:
        return list(self._ledgers.values())

    @property
    def running_count(self) -> int:
        """Requests that are charged on any worker."""
        return sum(ledger.running_count for ledger in self._ledgers.values())

    def promised_slots(self, store_address: str) -> int:
        """Return the slots of a store that streamed requests may still fill."""
        slots = self._slots.get(store_address)
        return slots.promised_count if slots is not None else 0

    def set_facts(self, facts: WorkerFacts) -> None:
        """Note what is known of a worker now, such as costs that it measured anew."""
        ledger = self._ledgers.get(facts.worker_id)
        if ledger is not None:
            ledger.set_facts(facts)

    def set_device_marks(self, worker_id: str, marks: Iterable[bytes]) -> None:
        """Note which chunks a worker's device holds now."""
        ledger = self._ledgers.get(worker_id)
        if ledger is not None:
            ledger.device_marks = frozenset(marks)

    def slots_promised_on(self, worker_id: str) -> int:
        """Return the slots that streamed requests on this worker may still fill."""
        ledger = self._ledgers[worker_id]
        return self._slots_of(ledger).promised_to(ledger.arrivals)

    # -- requests -----------------------------------------------------------------

    def submit(self, request: Request) -> Queued | Rejected:
        """Queue a new request; `admit` then takes it out, perhaps at once."""
        verdicts = self._verdicts(request)
        misfits = [verdict for verdict in verdicts.values() if isinstance(verdict, NeverFits)]
        if misfits and len(misfits) == len(verdicts):
            largest = max(misfits, key=lambda misfit: misfit.capacity_bytes)
            return Rejected(f"can never fit: {largest.reason}", numbers=largest)
        if len(self._queue) >= self.capacity and not self._would_start(request):
            waiting = counted(self.capacity, "request waits", "requests wait")
            return Rejected(f"the queue is full ({waiting})")
        return self.resubmit(request)

    def resubmit(self, request: Request) -> Queued:
        """Queue a request that was admitted before, at its old place, whatever the capacity."""
        position = sum(waiting.arrival < request.arrival for waiting in self._queue)
        self._queue.insert(position, request)
        return Queued(position)

    def withdraw(self, request: Request) -> None:
        """Take a request out of the queue, if it is there."""
        self._queue = [waiting for waiting in self._queue if waiting is not request]

    def admit(self) -> Admitted | None:
        """Grant memory to the first request that may start now; None if there is none."""
        claimed: set[str] = set()
        open_count = sum(not ledger.is_closed for ledger in self._ledgers.values())
        for index, request in enumerate(self._queue):
            if request.is_paused or request.worker_id in claimed:
                continue
            # What is claimed here stays so: no worker is compared for streaming twice.
            fitting = self._fitting(request, claimed)
            worker_id = self._choose(request, fitting)
            if worker_id is None:
                streamed = self._streamed_instead(request, fitting)
                worker_id = self._choose(request, streamed)
                fitting |= streamed
            if worker_id is not None:
                del self._queue[index]
                return self._grant(request, worker_id, fitting[worker_id])
            claimed |= fitting.keys()
            if len(claimed) >= open_count:
                break
        return None

    def tokens_came(self, admitted: Admitted) -> bool:
        """Note new tokens of a running request. Return True if another one may start now."""
        ledger, request = self._ledgers.get(admitted.worker_id), admitted.request
        if ledger is None:
            return False
        request.numerics_digest = ledger.facts.numerics_digest
        if admitted.grant.residency is Residency.RESIDENT:
            pages = chunks_of(request.known_count, ledger.facts.chunk_tokens)
            ledger.grow(request.arrival, pages)
        return ledger.trial.got_tokens(request.arrival, is_suspect=request.is_suspect)

    def completed(self, request: Request) -> None:
        """Learn from the length of an answer that ended."""
        self._charging.completed(request)

    def release(self, admitted: Admitted) -> None:
        """End a grant. Does nothing if the worker is gone."""
        ledger = self._ledgers.get(admitted.worker_id)
        if ledger is not None:
            ledger.release(admitted.request.arrival)
            self._slots_of(ledger).release(admitted.request.arrival)
            self._running.pop(admitted.request.arrival, None)

    # -- questions ----------------------------------------------------------------

    def queue(self) -> list[Request]:
        """Return the waiting requests in order of arrival."""
        return list(self._queue)

    def is_placeable(self, request: Request) -> bool:
        """Return True if a ready worker could run it, now or later."""
        return bool(self._fitting(request))

    def reason_to_wait(self, request: Request) -> str:
        """Return one sentence for people."""
        if request.is_paused:
            return "its reader is behind; it starts again once that has caught up"
        fitting = self._fitting(request)
        if not fitting:
            return "no worker that could run it is ready"
        return "; ".join(
            self._reason_to_wait_for(self._ledgers[worker_id], request, fits)
            for worker_id, fits in fitting.items()
        )

    def first_waiting(self, worker_id: str) -> tuple[Request, int] | None:
        """Return the first request that could run on this worker, and the pages it needs there.

        None if none waits.
        """
        for request in self._queue:
            fits = None if request.is_paused else self._fitting(request).get(worker_id)
            if fits is not None:
                ledger = self._ledgers[worker_id]
                return request, ledger.pages_of(self._charging.charge(request, ledger, fits))
        return None

    def footprint_bytes(self, request: Request) -> int:
        """Return its smallest charge on any ready worker; 0 if there is none."""
        sizes = []
        for worker_id, fits in self._fitting(request).items():
            ledger = self._ledgers[worker_id]
            pages = ledger.pages_of(self._charging.charge(request, ledger, fits))
            sizes.append(pages * ledger.facts.page_bytes)
        return min(sizes, default=0)

    def check_integrity(self) -> list[str]:
        """Return one line per violated invariant; empty if all hold."""
        problems = [line for ledger in self._ledgers.values() for line in ledger.check_integrity()]
        arrivals = [request.arrival for request in self._queue]
        if arrivals != sorted(set(arrivals)):
            problems.append(f"the queue is out of order: {arrivals}")
        charged = {arrival for ledger in self._ledgers.values() for arrival in ledger.arrivals}
        if charged != self._running.keys():
            problems.append(f"{sorted(charged)} are charged, {sorted(self._running)} are running")
        return problems

    # -- inside -------------------------------------------------------------------

    def _slots_of(self, ledger: Ledger) -> SlotLedger:
        return self._slots.setdefault(ledger.facts.kvstore_address, SlotLedger())

    def _has_slots(self, ledger: Ledger, fits: Fits) -> bool:
        address = ledger.facts.kvstore_address
        others_slots = sum(
            each.others.slot_count
            for each in self._ledgers.values()
            if each.facts.kvstore_address == address
        )
        return self._slots_of(ledger).has_room(
            fits.slot_count, ledger.facts.store_slot_count, others_slots=others_slots
        )

    def _has_room(self, request: Request, ledger: Ledger, fits: Fits) -> bool:
        charge = self._charging.charge(request, ledger, fits)
        return ledger.has_room(charge) and self._has_slots(ledger, fits)

    def _verdicts(
        self, request: Request, claimed: Collection[str] = frozenset()
    ) -> dict[str, Fits | NeverFits]:
        return {
            worker_id: footprint_of(
                request.token_count,
                request.residency,
                ledger.facts,
                followed_by(ledger.facts, request.selection),
            )
            for worker_id, ledger in self._ledgers.items()
            if not ledger.is_closed
            and request.worker_id in ("", worker_id)
            and worker_id not in claimed
        }

    def _fitting(self, request: Request, claimed: Collection[str] = frozenset()) -> dict[str, Fits]:
        """Return the workers that could run it when empty, without those that are claimed."""
        return {
            worker_id: verdict
            for worker_id, verdict in self._verdicts(request, claimed).items()
            if isinstance(verdict, Fits)
        }

    def _would_start(self, request: Request) -> bool:
        """Return True if a worker that no waiting request could use has room for it."""
        claimed: set[str] = set()
        for waiting in self._queue:
            if not waiting.is_paused:
                claimed |= self._fitting(waiting, claimed).keys()
        return self._choose(request, self._fitting(request, claimed)) is not None

    def _choose(self, request: Request, fitting: Mapping[str, Fits]) -> str | None:
        """Return the best of these workers that has room."""
        candidates = []
        for worker_id, fits in fitting.items():
            ledger = self._ledgers[worker_id]
            is_open = ledger.trial.may_start(is_suspect=request.is_suspect)
            if is_open and self._has_room(request, ledger, fits):
                candidates.append(candidate_of(request, ledger, fits))
        return choose_worker(candidates).worker_id if candidates else None

    def _streamed_instead(self, request: Request, fitting: Mapping[str, Fits]) -> dict[str, Fits]:
        """Return the workers where it had better be streamed now than wait for memory."""
        found = {}
        for worker_id, fits in fitting.items():
            ledger = self._ledgers[worker_id]
            running = [self._running[arrival] for arrival in ledger.arrivals]
            streamed = streamed_instead(
                request,
                ledger,
                fits,
                self._charging,
                [(each.request, each.grant.residency) for each in running],
                self._objective,
            )
            if streamed is not None:
                found[worker_id] = streamed
        return found

    def _grant(self, request: Request, worker_id: str, fits: Fits) -> Admitted:
        ledger = self._ledgers[worker_id]
        # Spare memory is given only while no other request waits for it.
        free_bytes = 0 if self._queue else ledger.free_bytes
        grant, charge = self._charging.grant(request, ledger, fits, free_bytes)
        ledger.grant(request.arrival, charge)
        ledger.trial.start(request.arrival, is_suspect=request.is_suspect)
        self._slots_of(ledger).grant(request.arrival, fits.slot_count)
        admitted = Admitted(request, worker_id, grant)
        self._running[request.arrival] = admitted
        return admitted

    def _reason_to_wait_for(self, ledger: Ledger, request: Request, fits: Fits) -> str:
        worker_id = ledger.facts.worker_id
        if not ledger.trial.may_start(is_suspect=request.is_suspect):
            return (
                f"worker {worker_id} finds out which request ended an engine: suspects start one "
                "after the other"
            )
        if self._has_room(request, ledger, fits):
            return f"earlier requests come first on worker {worker_id}"
        if not self._has_slots(ledger, fits):
            return (
                f"streamed requests hold {self._slots_of(ledger).promised_count:,} of the "
                f"store's {counted(ledger.facts.store_slot_count or 0, 'slot')}, "
                f"{fits.slot_count:,} are needed"
            )
        needed = (
            ledger.pages_of(self._charging.charge(request, ledger, fits)) * ledger.facts.page_bytes
        )
        if ledger.free_bytes < 0:
            return (
                f"worker {worker_id} is overcommitted by {format_size(-ledger.free_bytes)}: "
                "answers became longer than expected"
            )
        if needed > ledger.free_bytes:
            return (
                f"worker {worker_id} has {format_size(ledger.free_bytes)} free of the "
                f"{format_size(needed)} needed"
            )
        if ledger.free_places > 0:
            return f"the rest of worker {worker_id} is kept for requests of other schedulers"
        running = ledger.running_count + ledger.others.request_count
        return f"worker {worker_id} runs {counted(running, 'request')}, its batch limit"
