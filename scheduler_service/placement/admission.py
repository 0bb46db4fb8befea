"""Decides which requests start, wait, or are rejected, by the ledgers of the workers.

`policy/queue.py` chooses the next request; this module tells it what each would take of which
worker, and keeps the accounts of memory. Pure: no I/O, and the clock is passed in.

Under fifo and fair, no later request starts on a worker that a waiting request could run on, so
none takes memory that an earlier one waits for and nothing starves. A request pinned to a
busy worker holds up only that worker. Requests that may have ended an engine
run apart from each other (`trial.py`). A paused request, whose reader is behind, is passed over: it
would hold memory, or a trial's worker, for as long as it does not run. One that runs already gives
up its place when another request waits for it (`to_put_back`).

A resident request is charged for its prompt and its expected answer. The charge grows with the
answer, and may then exceed the worker's memory: the worker takes a sequence off its device, and
nothing new is granted until there is room again.

A request without room in memory waits, or is streamed at once, by what is predicted to be
better (`residency.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from scheduler_service.api.request import Request
from scheduler_service.placement.answer_lengths import AnswerLengths
from scheduler_service.placement.charging import Charging, Way
from scheduler_service.placement.footprint import Fits, Grant, NeverFits
from scheduler_service.placement.ledger import Ledger, OthersHold
from scheduler_service.placement.reasons import Explanation, Place, explain
from scheduler_service.placement.residency import streamed_instead
from scheduler_service.placement.routing import candidate_of, choose_worker
from scheduler_service.placement.ways import Ways
from scheduler_service.policy.order import needs_of
from scheduler_service.policy.queue import PolicyQueue
from scheduler_service.policy.rooms import WorkerLimits
from scheduler_service.policy.settings import PolicySettings
from scheduler_service.policy.waiting import Need, Waiting
from scheduler_service.worker_facts import WorkerFacts
from splitpoint.config import counted
from splitpoint.costs.first_token import Backlog
from splitpoint.options.scheduler import Policy
from splitpoint.planning.plan import Objective, Residency
from splitpoint.shapes import chunks_of

_FIFO = PolicySettings()


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request may start on this worker; release the grant when it is over."""

    request: Request
    worker_id: str
    grant: Grant


class GrantError(Exception):
    """What the policy chose for one request could not be granted: the books are wrong."""

    def __init__(self, request: Request) -> None:
        super().__init__("the memory that was chosen could not be granted")
        self.request = request


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
    no charge ever grows. `objective`: what waiting and streaming are compared by. `clock`: seconds,
    by which waiting and held memory count.
    """

    def __init__(
        self,
        capacity: int,
        lengths: AnswerLengths | None = None,
        objective: Objective = Objective.LATENCY,
        policy: PolicySettings = _FIFO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.capacity = capacity
        self.policy: PolicyQueue[Request] = PolicyQueue(self, policy)
        self._objective = objective
        self._clock = clock
        self._running: dict[int, Admitted] = {}  # by arrival
        self._charging = Charging(lengths)
        self._ways = Ways(self._charging)
        self._ledgers = self._ways.ledgers

    # -- workers ------------------------------------------------------------------

    def add_worker(self, facts: WorkerFacts) -> None:
        """Add a worker that became ready; nothing runs on it."""
        self._ledgers[facts.worker_id] = Ledger(facts)
        self._ways.forget_worker(facts.worker_id)
        limits = WorkerLimits(
            facts.cache_capacity_bytes, facts.page_bytes, facts.max_batched_tokens
        )
        self.policy.add_worker(facts.worker_id, limits)

    def close_worker(self, worker_id: str) -> None:
        """Place nothing new on this worker; what runs there goes on."""
        ledger = self._ledgers.get(worker_id)
        if ledger is not None:
            ledger.is_closed = True
            self.policy.close_worker(worker_id)

    def remove_worker(self, worker_id: str) -> None:
        """Remove a lost worker with all its grants."""
        ledger = self._ledgers.pop(worker_id, None)
        if ledger is not None:
            for arrival in ledger.arrivals:
                self._release_slots(arrival, ledger)
                self._running.pop(arrival, None)
            self.policy.remove_worker(worker_id, self._clock())

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
        return self._ways.promised_slots(store_address)

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

    def set_others(self, worker_id: str, others: OthersHold) -> None:
        """Note what other schedulers hold and want on a worker."""
        ledger = self._ledgers.get(worker_id)
        if ledger is not None:
            ledger.others = others
            self.policy.touch(worker_id)

    def slots_promised_on(self, worker_id: str) -> int:
        """Return the slots that streamed requests on this worker may still fill."""
        ledger = self._ledgers[worker_id]
        return self._ways.slots_of(ledger).promised_to(ledger.arrivals)

    # -- requests -----------------------------------------------------------------

    def submit(self, request: Request) -> Queued | Rejected:
        """Queue a new request; `admit` then takes it out, perhaps at once."""
        verdicts = [self._ways.verdict(request, ledger) for ledger in self._ways.open_to(request)]
        misfits = [verdict for verdict in verdicts if isinstance(verdict, NeverFits)]
        if misfits and len(misfits) == len(verdicts):
            largest = max(misfits, key=lambda misfit: misfit.capacity_bytes)
            return Rejected(f"can never fit: {largest.reason}", numbers=largest)
        if self._is_full() and not self._would_start(request):
            waiting = counted(self.capacity, "request waits", "requests wait")
            return Rejected(f"the queue is full ({waiting})")
        return self.resubmit(request)

    def resubmit(self, request: Request) -> Queued:
        """Queue a request that was admitted before, at its old place, whatever the capacity."""
        began = request.times.queued
        waiting = Waiting(
            request,
            request.arrival,
            request.tenant,
            request.weight,
            request.priority,
            self._clock() if began is None else began,
        )
        self._ways.remember(request)
        return Queued(self.policy.push(waiting))

    def resumed(self, request: Request) -> None:
        """Note that a waiting request is not paused any more: it waits from now on."""
        self.policy.freshen(request.arrival, self._clock())

    def withdraw(self, request: Request) -> None:
        """Take a request out of the queue, if it is there."""
        self.policy.withdraw(request.arrival)
        self._ways.forget(request)

    def admit(self) -> Admitted | None:
        """Grant memory to the next request that may start now; None if there is none.

        Raises GrantError if that fails. The request neither waits nor runs then.
        """
        start = self.policy.next(self._clock())
        if start is None:
            return None
        request, ledger = start.waiting.item, self._ledgers[start.worker_id]
        self._ways.forget(request)
        try:
            admitted = self._grant(request, ledger, _way(start.need).fits)
        except Exception as error:
            self._release(request.arrival, ledger)
            raise GrantError(request) from error
        self._running[request.arrival] = admitted
        return admitted

    def tokens_came(self, admitted: Admitted) -> bool:
        """Note new tokens of a running request. Return True if another one may start now."""
        ledger, request = self._ledgers.get(admitted.worker_id), admitted.request
        if ledger is None:
            return False
        request.numerics_digest = ledger.facts.numerics_digest
        grown = 0
        if admitted.grant.residency is Residency.RESIDENT:
            pages = chunks_of(request.known_count, ledger.facts.chunk_tokens)
            grown = ledger.grow(request.arrival, pages) * ledger.facts.page_bytes
        more = self.policy.tokens_came(request.arrival, grown, self._clock())
        is_cleared = ledger.trial.got_tokens(request.arrival, is_suspect=request.is_suspect)
        if is_cleared:
            self.policy.touch(admitted.worker_id)
        return more or is_cleared

    def computed(self, worker_id: str, token_count: int) -> bool:
        """Note that a worker's step prefilled so many tokens. Return True if more may start."""
        return self.policy.computed(worker_id, token_count)

    def completed(self, request: Request) -> None:
        """Learn from the length of an answer that ended."""
        self._charging.completed(request)

    def release(self, admitted: Admitted) -> None:
        """End a grant. Does nothing if the worker is gone."""
        ledger = self._ledgers.get(admitted.worker_id)
        if ledger is not None:
            self._release(admitted.request.arrival, ledger)

    # -- paused requests ------------------------------------------------------------

    @property
    def is_waited_for(self) -> bool:
        """True if a request waits, here or at another scheduler."""
        return bool(len(self.policy)) or any(
            ledger.others.wanted_pages for ledger in self._ledgers.values()
        )

    def to_put_back(self, leaving: Collection[int]) -> list[Admitted]:
        """Return the paused requests that should leave their workers, for others that wait.

        They make room for the first waiting request without room of each worker, here and at
        other schedulers: as few as it needs, the latest arrivals. None leaves where all of them
        would not be enough. `leaving`: arrivals of running requests that leave already.
        """
        paused = [
            each
            for each in self._running.values()
            if each.request.is_paused and each.request.arrival not in leaving
        ]
        if not paused:
            return []
        found: list[Admitted] = []
        for ledger in self._ledgers.values():
            wanted = ledger.others.wanted_pages
            if wanted:
                found += self._making_room(ledger, wanted, None, paused, leaving) or ()
        seen: set[str] = set()
        for waiting in self.policy.in_turn():
            if len(seen) >= self.policy.rooms.open_count:
                break
            needs = needs_of(self, waiting, seen)
            if any(need.can_start for need in needs.values()):
                continue  # it has room: perhaps it waits for a later one, which has none
            seen |= needs.keys()
            choices = [
                self._making_room(
                    self._ledgers[worker_id], need.pages, _way(need).fits, paused, leaving
                )
                for worker_id, need in needs.items()
            ]
            possible = [each for each in choices if each is not None]
            if possible:
                fewest = min(possible, key=len)
                found += fewest
        return list({each.request.arrival: each for each in found}.values())

    # -- questions ----------------------------------------------------------------

    def queue(self) -> list[Request]:
        """Return the waiting requests in order of arrival."""
        return [waiting.item for waiting in self.policy]

    def is_placeable(self, request: Request) -> bool:
        """Return True if a ready worker could run it, now or later."""
        return any(
            isinstance(self._ways.verdict(request, each), Fits)
            for each in self._ways.open_to(request)
        )

    @property
    def waiting_count(self) -> int:
        return len(self.policy)

    @property
    def decides_by_time(self) -> bool:
        """True if requests wait that may start without any event, since they have waited long."""
        return self.policy.settings.policy is Policy.UTILISATION and bool(len(self.policy))

    def in_turn(self) -> list[Request]:
        """Return the waiting requests in the order in which their turn comes, as far as it is
        known: sets that fill a device better may go before."""
        return [waiting.item for waiting in self.policy.in_turn()]

    def explain(self, request: Request) -> Explanation:
        """Return why a request waits."""
        places = []
        for ledger in self._ways.open_to(request):
            way = self._ways.way(request, ledger)
            if way is not None:
                places.append(self._place(request, ledger, way))
        return explain(places, is_paused=request.is_paused)

    def first_waiting(self, worker_id: str) -> tuple[Request, int] | None:
        """Return the first request that could run on this worker, and the pages it needs there.

        None if none waits.
        """
        for waiting in self.policy.in_turn():
            way = self.need(waiting.item, worker_id)
            if way is not None:
                return waiting.item, way.pages
        return None

    def check_integrity(self) -> list[str]:
        """Return one line per violated invariant; empty if all hold."""
        problems = [line for ledger in self._ledgers.values() for line in ledger.check_integrity()]
        problems += self.policy.check_integrity()
        charged = {arrival for ledger in self._ledgers.values() for arrival in ledger.arrivals}
        if charged != self._running.keys():
            problems.append(f"{sorted(charged)} are charged, {sorted(self._running)} are running")
        if charged != self.policy.started():
            problems.append(f"{sorted(charged)} are charged, others have started")
        if self._ways.remembered() != {waiting.arrival for waiting in self.policy}:
            problems.append("verdicts are kept of requests that do not wait")
        return problems

    # -- what the policy asks ---------------------------------------------------------------

    def workers_for(self, item: Request) -> Iterable[str]:
        return [ledger.facts.worker_id for ledger in self._ways.open_to(item)]

    def need(self, item: Request, worker_id: str) -> Way | None:
        ledger = self._ledgers[worker_id]
        if item.is_paused or not self._ways.is_open_to(item, ledger):
            return None
        return self._ways.way(item, ledger)

    def room(self, worker_id: str) -> tuple[int, int]:
        ledger = self._ledgers[worker_id]
        return ledger.free_pages, ledger.free_places

    def prefer(self, item: Request, needs: Mapping[str, Need]) -> str:
        if len(needs) == 1:
            return next(iter(needs))
        return choose_worker(
            candidate_of(item, self._ledgers[worker_id], _way(need).fits, self._backlog(worker_id))
            for worker_id, need in needs.items()
        ).worker_id

    def instead(self, item: Request, needs: Mapping[str, Need]) -> dict[str, Need]:
        """Return the workers where it had better be streamed now than wait for memory."""
        found: dict[str, Need] = {}
        for worker_id, need in needs.items():
            ledger = self._ledgers[worker_id]
            running = [self._running[arrival] for arrival in ledger.arrivals]
            streamed = streamed_instead(
                item,
                ledger,
                _way(need).fits,
                self._charging,
                [(each.request, each.grant.residency) for each in running],
                self._objective,
            )
            if streamed is not None:
                found[worker_id] = self._ways.way_of(item, ledger, streamed)
        return found

    # -- inside -------------------------------------------------------------------

    def _place(self, request: Request, ledger: Ledger, way: Way) -> Place:
        worker_id = ledger.facts.worker_id
        return Place(
            ledger,
            way,
            promised_slots=self._ways.slots_of(ledger).promised_count,
            has_slots=self._ways.has_slots(ledger, way.fits),
            may_start=ledger.trial.may_start(is_suspect=request.is_suspect),
            hold=self.policy.hold(request.arrival, worker_id, way),
            bound_tokens=self.policy.rooms.bound_tokens(worker_id),
            restoring_bytes=self.policy.rooms.restoring_bytes(worker_id),
        )

    def _backlog(self, worker_id: str) -> Backlog:
        """Return what is queued on a worker before its next request."""
        rooms = self.policy.rooms
        return Backlog(rooms.bound_tokens(worker_id), rooms.link_bytes(worker_id))

    def _making_room(
        self,
        ledger: Ledger,
        pages: int,
        fits: Fits | None,
        paused: Sequence[Admitted],
        leaving: Collection[int],
    ) -> list[Admitted] | None:
        """Return the fewest latest of a worker's paused requests that must leave, beside those
        that do, for a place, so many pages and the slots of `fits`. None if all are too few."""
        worker_id = ledger.facts.worker_id
        rest = sorted(
            (each for each in paused if each.worker_id == worker_id),
            key=lambda each: each.request.arrival,
        )
        gone = [arrival for arrival in ledger.arrivals if arrival in leaving]
        found: list[Admitted] = []
        while not (
            ledger.has_room_after(pages, gone)
            and (fits is None or self._ways.has_slots(ledger, fits, gone))
        ):
            if not rest:
                return None
            found.append(rest.pop())
            gone.append(found[-1].request.arrival)
        return found

    def _is_full(self) -> bool:
        """Return True if the queue takes no more. Paused requests wait for their readers only."""
        most, count = self.capacity + self._held_back(), len(self.policy)
        return count >= most and count - sum(each.item.is_paused for each in self.policy) >= most

    def _held_back(self) -> int:
        """Return the places on workers that have room, but enough prefill work for now."""
        return sum(
            max(0, self._ledgers[worker_id].free_places) for worker_id in self.policy.busy_workers()
        )

    def _would_start(self, request: Request) -> bool:
        """Return True if a worker that no waiting request could use has room for it."""
        free = []
        for ledger in self._ways.open_to(request):
            way = self._ways.way(request, ledger)
            if way is not None and way.can_start:
                free.append(ledger)
        for waiting in self.policy:
            if not free:
                break
            if not waiting.item.is_paused:
                theirs = list(self._ways.open_to(waiting.item))
                free = [
                    ledger
                    for ledger in free
                    if ledger not in theirs
                    or isinstance(self._ways.verdict(waiting.item, ledger), NeverFits)
                ]
        return bool(free)

    def _grant(self, request: Request, ledger: Ledger, fits: Fits) -> Admitted:
        # Spare memory is given only while no request waits for it, here or at other schedulers.
        is_wanted = bool(len(self.policy) or ledger.others.wanted_pages)
        spare_bytes = 0 if is_wanted else ledger.free_bytes
        grant, charge = self._charging.grant(request, ledger, fits, spare_bytes)
        ledger.grant(request.arrival, charge)
        ledger.trial.start(request.arrival, is_suspect=request.is_suspect)
        self._ways.slots_of(ledger).grant(request.arrival, fits.slot_count)
        return Admitted(request, ledger.facts.worker_id, grant)

    def _release(self, arrival: int, ledger: Ledger) -> None:
        """End what a request has of a worker, all of it or the part that was granted."""
        ledger.release(arrival)
        self._release_slots(arrival, ledger)
        self._running.pop(arrival, None)
        self.policy.ended(arrival, self._clock())

    def _release_slots(self, arrival: int, ledger: Ledger) -> None:
        """End a request's promise of slots, which others may use on every worker of the store."""
        if self._ways.slots_of(ledger).release(arrival):
            for each in self._ways.of_same_store(ledger):
                self.policy.touch(each.facts.worker_id)


def _way(need: Need) -> Way:
    """Return a need that this module made as what it is."""
    if not isinstance(need, Way):
        raise TypeError(f"{need} is no way to run a request")
    return need
