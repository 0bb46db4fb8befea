"""The queue that decides: which waiting request starts next, and on which worker.

    push -> next -> start (charges the worker's account) -> tokens_came -> ended

The scheduler's admission queue and `splitpoint simulate` drive this class. Times are told by the
caller, in seconds of any clock that never goes back.
"""

from __future__ import annotations

from collections.abc import Iterator

from scheduler_service.placement.account import Hold, Need
from scheduler_service.placement.answer_lengths import AnswerLengths
from scheduler_service.placement.demand import Demand
from scheduler_service.policy.best_sets import BestSets
from scheduler_service.policy.order import (
    Decision,
    Start,
    WaitingOrder,
    fair_order,
    first_in_order,
    prefixes_first,
)
from scheduler_service.policy.settings import PolicySettings
from scheduler_service.policy.tenants import TenantShares, Usage
from scheduler_service.policy.workers import Workers
from scheduler_service.worker_facts import WorkerFacts
from splitpoint.options.scheduler import Policy
from splitpoint.planning.plan import Objective


class PolicyQueue:
    """Waiting requests, tenants' shares, and the accounts of the workers.

    `lengths`, `objective`: see `Workers`.
    """

    def __init__(
        self,
        settings: PolicySettings,
        lengths: AnswerLengths | None = None,
        objective: Objective = Objective.LATENCY,
    ) -> None:
        self.settings = settings
        self.shares = TenantShares()
        self._order = WaitingOrder()
        self.workers = Workers(settings, lengths, objective, self._order)
        self.decision_counts = dict.fromkeys(Decision, 0)
        self._usage = Usage(self.shares)
        self._sets = BestSets(self.workers, settings, self._order, self.shares)

    # -- workers ------------------------------------------------------------------

    def add_worker(self, facts: WorkerFacts) -> None:
        """Add a worker that takes requests; nothing runs on it."""
        self.workers.add(facts)
        for waiting in self._order:
            waiting.verdicts.pop(facts.worker_id, None)
        self._sets.touch(facts.worker_id)

    def close_worker(self, worker_id: str) -> None:
        """Start nothing more on a worker; what runs there goes on."""
        account = self.workers.accounts.get(worker_id)
        if account is not None:
            account.is_closed = True
            self._sets.forget_worker(worker_id)

    def remove_worker(self, worker_id: str, now: float) -> None:
        """End everything that runs on a worker, and forget it."""
        for arrival in self._usage.on(worker_id):
            self.ended(arrival, now)
        self.workers.remove(worker_id)
        self._sets.forget_worker(worker_id)

    def touch(self, worker_id: str) -> None:
        """Note that a worker may have more room, by something that this queue does not see.

        Without it, that is found out within half a second of calls.
        """
        self._sets.touch(worker_id)

    def busy_workers(self) -> list[str]:
        """Return the open workers to which enough prefill work is bound. None under fifo."""
        if self.settings.policy is Policy.FIFO:
            return []
        accounts = self.workers.accounts
        return [worker_id for worker_id in self.workers.open if accounts[worker_id].is_full]

    # -- requests -----------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Demand]:
        """Iterate over the waiting requests in order of arrival."""
        return iter(self._order)

    def in_turn(self) -> Iterator[Demand]:
        """Iterate over the waiting requests in the order that decides, sets aside."""
        if self.settings.policy is Policy.FIFO:
            return iter(self._order)
        return fair_order(self._order, self.shares)

    def find(self, arrival: int) -> Demand | None:
        """Return the waiting request of this arrival; None if it does not wait."""
        return self._order.find(arrival)

    def push(self, waiting: Demand, now: float) -> int:
        """Queue a request. Return how many waiting ones arrived before it."""
        waiting.since = now
        self.shares.waits(waiting.tenant, waiting.weight)
        self._sets.freshen(waiting)
        return self._order.add(waiting)

    def freshen(self, arrival: int, now: float) -> None:
        """Note that a waiting request could start where it could not before: it is not paused.

        Its reader was what it waited for until now.
        """
        waiting = self._order.find(arrival)
        if waiting is not None:
            waiting.since = now
            self._sets.freshen(waiting)

    def withdraw(self, arrival: int) -> None:
        """Take a request out of the queue, if it waits."""
        waiting = self._order.find(arrival)
        if waiting is not None:
            self._leave(waiting)

    def next(self, now: float) -> Start | None:
        """Return the next request that can start, for `start`; None if there is none now.

        Call it until it returns None, after each event that may free anything.
        """
        if not len(self._order):
            return None
        workers, order, shares = self.workers, self._order, self.shares
        match self.settings.policy:
            case Policy.FIFO:
                return first_in_order(workers, order, holds=False)
            case Policy.FAIR:
                turn = prefixes_first(workers, order, shares, self.lead)
                return first_in_order(workers, turn, holds=True)
            case Policy.UTILISATION:
                return self._sets.next(now, self.lead)

    def start(self, start: Start, now: float) -> None:
        """Start a request that `next` returned: it waits no more, and its worker is charged.

        Raises ValueError if it cannot be charged. It neither waits nor runs then.
        """
        waiting, need, account = start.demand, start.need, self.workers.accounts[start.worker_id]
        self.decision_counts[start.decision] += 1
        size = need.pages * account.facts.page_bytes
        self._sets.reservations.started(now - waiting.since)
        self._usage.start(waiting.arrival, waiting.tenant, start.worker_id, size, now)
        self._leave(waiting)
        try:
            account.start(waiting, need)
        except Exception:
            self.ended(waiting.arrival, now)
            raise

    def computed(self, worker_id: str, token_count: int) -> bool:
        """Note that a step prefilled this many tokens. Return True if more may start now."""
        account = self.workers.accounts.get(worker_id)
        if account is None or not account.computed(token_count):
            return False
        self._sets.touch(worker_id)
        return bool(len(self._order)) and self.settings.policy is not Policy.FIFO

    def tokens_came(self, demand: Demand, now: float) -> bool:
        """Note tokens of a request that started. Return True if more may start now: its first
        token came, or it is no suspect any more."""
        worker_id = self._usage.worker_of(demand.arrival)
        if worker_id is None:
            return False
        account = self.workers.accounts[worker_id]
        demand.numerics_digest = account.facts.numerics_digest
        more_bytes = account.tokens_came(demand) * account.facts.page_bytes
        self._usage.runs(demand.arrival, more_bytes, now)
        is_first = account.prefilled(demand.arrival)
        is_cleared = account.trial.got_tokens(demand.arrival, is_suspect=demand.is_suspect)
        if is_first or is_cleared:
            self._sets.touch(worker_id)
        follows = bool(len(self._order)) and self.settings.policy is not Policy.FIFO
        return is_cleared or (is_first and follows)

    def ended(self, arrival: int, now: float) -> None:
        """End a request that started, and correct its tenant's charge. Unknown ones are ignored."""
        worker_id = self._usage.end(arrival, now)
        if worker_id is None:
            return
        account = self.workers.accounts[worker_id]
        frees_slots = account.end(arrival)
        self._sets.touch(worker_id)
        if frees_slots and account.facts.store_slot_count is not None:
            for each in account.store.workers:
                self._sets.touch(each.facts.worker_id)

    # -- questions ----------------------------------------------------------------

    def has_started(self, arrival: int) -> bool:
        """Return True if a request runs on a worker."""
        return self._usage.worker_of(arrival) is not None

    def service(self, now: float) -> dict[str, float]:
        """Return the byte-seconds that each tenant's requests have used until now."""
        return self._usage.service(now)

    def hold(self, arrival: int, worker_id: str, need: Need) -> Hold:
        """Return what keeps a waiting request from starting on a worker that has room for it."""
        waiting = self._order.find(arrival)
        if waiting is None or self.settings.policy is Policy.FIFO:
            return Hold.TURN
        room_hold = self.workers.accounts[worker_id].hold(need)
        if room_hold is not None:
            return room_hold
        if self.settings.policy is Policy.UTILISATION:
            return self._sets.hold(waiting, worker_id, need, self.lead)
        return Hold.SHARE if self.shares.lead_of(waiting.tenant) > 0 else Hold.TURN

    def is_reserved(self, arrival: int) -> bool:
        """Return True if memory of a worker is kept free for this request."""
        return self._sets.reservations.worker_of(arrival) is not None

    def check_integrity(self) -> list[str]:
        """Return one line per violated invariant; empty if all hold."""
        arrivals = [waiting.arrival for waiting in self._order]
        accounts = self.workers.accounts.values()
        problems = [line for account in accounts for line in account.check_integrity()]
        problems += self.shares.check_integrity()
        if arrivals != sorted(set(arrivals)):
            problems.append(f"the queue is out of order: {arrivals}")
        both = self._usage.arrivals & set(arrivals)
        if both:
            problems.append(f"{sorted(both)} wait and have started")
        charged = {arrival for account in accounts for arrival in account.running}
        if charged != self._usage.arrivals:
            problems.append(f"{sorted(charged)} are charged, others have started")
        return problems + self._sets.reservations.check_integrity()

    @property
    def lead(self) -> float:
        """Largest lead of a tenant over its share, in byte-seconds of weight 1."""
        return self.settings.lead_requests * self._usage.mean_cost

    # -- inside -------------------------------------------------------------------

    def _leave(self, waiting: Demand) -> None:
        self._order.remove(waiting)
        self._sets.forget(waiting.arrival)
        self.shares.waits_no_more(waiting.tenant)
