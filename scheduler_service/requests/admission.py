"""Decides which requests start, wait, or are rejected, by the accounts of the workers.

`policy/queue.py` chooses the next request and charges its worker. Pure: no I/O, and the clock is
passed in.

Under fifo and fair, no later request starts on a worker that a waiting request could run on, so
none takes memory that an earlier one waits for and nothing starves. A request pinned to a
busy worker holds up only that worker. Requests that may have ended an engine
run apart from each other (`placement.account.Trial`). A paused request, whose reader is behind, is
passed over: it would hold memory, or a trial's worker, for as long as it does not run. One that
runs already gives up its place when another request waits for it (`to_put_back`).

A resident request is charged for its prompt and its expected answer. The charge grows with the
answer, and may then exceed the worker's memory: the worker takes a sequence off its device, and
nothing new is granted until there is room again.

A request without room in memory waits, or is streamed at once, by what is predicted to be
better (`placement/residency.py`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from scheduler_service.api.request import Request
from scheduler_service.placement.account import Need, OthersHold, WorkerAccount
from scheduler_service.placement.answer_lengths import AnswerLengths
from scheduler_service.placement.footprint import Fits, NeverFits
from scheduler_service.placement.waiting import Explanation, Place, explain
from scheduler_service.policy.queue import PolicyQueue
from scheduler_service.policy.settings import PolicySettings
from scheduler_service.policy.workers import grant_for
from scheduler_service.requests.attempt import Attempt
from scheduler_service.worker_facts import WorkerFacts
from splitpoint.config import counted
from splitpoint.options.scheduler import Policy
from splitpoint.planning.plan import Objective

_FIFO = PolicySettings()


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
    """The queue of requests, and the accounts of the ready workers.

    `lengths`, `objective`: see `Workers`. `clock`: seconds, by which waiting and held memory count.
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
        self.policy = PolicyQueue(policy, lengths, objective)
        self._clock = clock
        self._workers = self.policy.workers
        # Those that wait or run, by arrival.
        self._requests: dict[int, Request] = {}
        # One count for all requests: no attempt is ever mistaken for another.
        self._numbers = itertools.count(1)

    # -- workers ------------------------------------------------------------------

    def add_worker(self, facts: WorkerFacts) -> None:
        """Add a worker that became ready; nothing runs on it."""
        self.policy.add_worker(facts)

    def close_worker(self, worker_id: str) -> None:
        """Place nothing new on this worker; what runs there goes on."""
        self.policy.close_worker(worker_id)

    def remove_worker(self, worker_id: str) -> None:
        """Remove a lost worker with all that runs on it."""
        account = self.account(worker_id)
        if account is not None:
            for arrival in account.running:
                del self._requests[arrival]
            self.policy.remove_worker(worker_id, self._clock())

    def account(self, worker_id: str) -> WorkerAccount | None:
        return self._workers.accounts.get(worker_id)

    def accounts(self) -> list[WorkerAccount]:
        return list(self._workers.accounts.values())

    @property
    def running_count(self) -> int:
        """Requests that are charged on any worker."""
        return sum(account.running_count for account in self.accounts())

    def set_facts(self, facts: WorkerFacts) -> None:
        """Note what is known of a worker now, such as costs that it measured anew."""
        account = self.account(facts.worker_id)
        if account is not None:
            account.set_facts(facts)

    def set_device_marks(self, worker_id: str, marks: Iterable[bytes]) -> None:
        """Note which chunks a worker's device holds now."""
        account = self.account(worker_id)
        if account is not None:
            account.device_marks = frozenset(marks)

    def set_others(self, worker_id: str, others: OthersHold) -> None:
        """Note what other schedulers hold and want on a worker."""
        account = self.account(worker_id)
        if account is not None:
            account.others = others
            self.policy.touch(worker_id)

    # -- requests -----------------------------------------------------------------

    def submit(self, request: Request) -> Queued | Rejected:
        """Queue a new request; `admit` then takes it out, perhaps at once."""
        workers = self._workers
        verdicts = [workers.verdict(request, account) for account in workers.open_to(request)]
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
        request.verdicts.clear()
        self._requests[request.arrival] = request
        return Queued(self.policy.push(request, self._clock()))

    def resumed(self, request: Request) -> None:
        """Note that a waiting request is not paused any more: it waits from now on."""
        self.policy.freshen(request.arrival, self._clock())

    def withdraw(self, request: Request) -> None:
        """Take a request out of the queue, if it is there."""
        if self.policy.find(request.arrival) is not None:
            self.policy.withdraw(request.arrival)
            del self._requests[request.arrival]

    def admit(self) -> Attempt | None:
        """Grant memory to the next request that may start now; None if there is none.

        Release it when the attempt is over. Raises GrantError if that fails. The request neither
        waits nor runs then.
        """
        now = self._clock()
        start = self.policy.next(now)
        if start is None:
            return None
        request = self._requests[start.demand.arrival]
        account = self._workers.accounts[start.worker_id]
        try:
            self.policy.start(start, now)
            # Spare memory is given only while no request waits for it, here or elsewhere.
            is_wanted = bool(len(self.policy) or account.others.wanted_pages)
            answer = self._workers.expected_answer(request)
            grant = grant_for(account, request, start.need, answer, spares=not is_wanted)
        except Exception as error:
            self._end(request.arrival)
            raise GrantError(request) from error
        request.verdicts.clear()
        return Attempt(request, start.worker_id, grant, next(self._numbers))

    def tokens_came(self, request: Request) -> bool:
        """Note new tokens of a running request. Return True if another one may start now."""
        return self.policy.tokens_came(request, self._clock())

    def computed(self, worker_id: str, token_count: int) -> bool:
        """Note that a worker's step prefilled this many tokens. Return True if more may start."""
        return self.policy.computed(worker_id, token_count)

    def completed(self, request: Request) -> None:
        """Learn from the length of an answer that ended."""
        self._workers.completed(request)

    def release(self, request: Request) -> None:
        """End what a request holds. Does nothing if its worker is gone."""
        if self.policy.has_started(request.arrival):
            self._end(request.arrival)

    # -- paused requests ------------------------------------------------------------

    @property
    def is_waited_for(self) -> bool:
        """True if a request waits, here or at another scheduler."""
        return bool(len(self.policy)) or any(
            account.others.wanted_pages for account in self.accounts()
        )

    def to_put_back(self, leaving: Collection[int]) -> list[Request]:
        """Return the paused requests that should leave their workers, for others that wait.

        They make room for the first waiting request without room of each worker, here and at
        other schedulers: as few as it needs, the latest arrivals. None leaves where all of them
        would not be enough. `leaving`: arrivals of running requests that leave already.
        """
        if not any(
            each.demand.is_paused and arrival not in leaving
            for account in self.accounts()
            for arrival, each in account.running.items()
        ):
            return []
        found: dict[int, None] = {}
        for account in self.accounts():
            wanted = account.others.wanted_pages
            if wanted:
                found |= dict.fromkeys(_making_room(account, wanted, 0, leaving) or ())
        seen: set[str] = set()
        for waiting in self.policy.in_turn():
            if len(seen) >= len(self._workers.open):
                break
            needs = self._workers.needs(waiting, seen)
            if any(need.can_start for need in needs.values()):
                continue  # it has room: perhaps it waits for a later one, which has none
            seen |= needs.keys()
            choices = [
                _making_room(
                    self._workers.accounts[worker_id], need.pages, need.fits.slot_count, leaving
                )
                for worker_id, need in needs.items()
            ]
            possible = [each for each in choices if each is not None]
            if possible:
                fewest = min(possible, key=len)
                found |= dict.fromkeys(fewest)
        return [self._requests[arrival] for arrival in found]

    # -- questions ----------------------------------------------------------------

    def queue(self) -> list[Request]:
        """Return the waiting requests in order of arrival."""
        return [self._requests[waiting.arrival] for waiting in self.policy]

    def is_placeable(self, request: Request) -> bool:
        """Return True if a ready worker could run it, now or later."""
        return any(
            isinstance(self._workers.verdict(request, account), Fits)
            for account in self._workers.open_to(request)
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
        return [self._requests[waiting.arrival] for waiting in self.policy.in_turn()]

    def explain(self, request: Request) -> Explanation:
        """Return why a request waits."""
        places = []
        for account in self._workers.open_to(request):
            need = self._workers.need_on(request, account)
            if need is not None:
                places.append(self._place(request, account, need))
        return explain(places, is_paused=request.is_paused)

    def first_waiting(self, worker_id: str) -> tuple[Request, int] | None:
        """Return the first request that could run on this worker, and the pages it needs there.

        None if none waits.
        """
        for waiting in self.policy.in_turn():
            need = self._workers.need(waiting, worker_id)
            if need is not None:
                return self._requests[waiting.arrival], need.pages
        return None

    def check_integrity(self) -> list[str]:
        """Return one line per violated invariant; empty if all hold."""
        problems = self.policy.check_integrity()
        charged = {arrival for account in self.accounts() for arrival in account.running}
        if charged | {waiting.arrival for waiting in self.policy} != self._requests.keys():
            problems.append("requests are known that neither wait nor run")
        return problems

    # -- inside -------------------------------------------------------------------

    def _end(self, arrival: int) -> None:
        self.policy.ended(arrival, self._clock())
        del self._requests[arrival]

    def _place(self, request: Request, account: WorkerAccount, need: Need) -> Place:
        return Place(
            account,
            need,
            may_start=account.trial.may_start(is_suspect=request.is_suspect),
            hold=self.policy.hold(request.arrival, account.facts.worker_id, need),
        )

    def _is_full(self) -> bool:
        """Return True if the queue takes no more. Paused requests wait for their readers only."""
        most, count = self.capacity + self._held_back(), len(self.policy)
        return count >= most and count - sum(each.is_paused for each in self.policy) >= most

    def _held_back(self) -> int:
        """Return the places on workers that have room, but enough prefill work for now."""
        accounts = self._workers.accounts
        return sum(max(0, accounts[name].free_places) for name in self.policy.busy_workers())

    def _would_start(self, request: Request) -> bool:
        """Return True if a worker that no waiting request could use has room for it."""
        workers, free = self._workers, []
        for account in workers.open_to(request):
            need = workers.need_on(request, account)
            if need is not None and need.can_start:
                free.append(account)
        for waiting in self.policy:
            if not free:
                break
            if not waiting.is_paused:
                theirs = list(workers.open_to(waiting))
                free = [
                    account
                    for account in free
                    if account not in theirs
                    or isinstance(workers.verdict(waiting, account), NeverFits)
                ]
        return bool(free)


def _making_room(
    account: WorkerAccount, pages: int, slot_count: int, leaving: Collection[int]
) -> list[int] | None:
    """Return the fewest latest of a worker's paused requests that must leave, beside those
    that do, for a place, this many pages and slots of its store. None if all are too few."""
    rest = sorted(
        arrival
        for arrival, each in account.running.items()
        if each.demand.is_paused and arrival not in leaving
    )
    gone = [arrival for arrival in account.running if arrival in leaving]
    found: list[int] = []
    while not (
        account.has_room_after(pages, gone)
        and account.store.has_room(slot_count, account.facts.store_slot_count, gone)
    ):
        if not rest:
            return None
        found.append(rest.pop())
        gone.append(found[-1])
    return found
