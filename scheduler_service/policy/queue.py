"""The queue that decides: which waiting request starts next, and on which worker.

    push -> next -> (the owner grants memory and starts it) -> tokens_came -> ended

The scheduler's admission queue and `splitpoint simulate` drive this class. What a worker's memory
holds and which worker suits a request is the owner's business (`Owner`). Times are told by the
caller, in seconds of any clock that never goes back.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic

from scheduler_service.policy.best_sets import BestSets
from scheduler_service.policy.hold import Hold
from scheduler_service.policy.order import WaitingOrder, fair_order, first_in_order, prefixes_first
from scheduler_service.policy.owner import Decision, Owner, Start
from scheduler_service.policy.rooms import WorkerLimits, WorkerRooms
from scheduler_service.policy.settings import PolicySettings
from scheduler_service.policy.tenants import TenantShares, Usage
from scheduler_service.policy.waiting import Need, R, Waiting
from splitpoint.options.scheduler import Policy


class PolicyQueue(Generic[R]):
    """Waiting requests, tenants' shares, and what is bound to each worker."""

    def __init__(self, owner: Owner[R], settings: PolicySettings) -> None:
        self.settings = settings
        self.shares = TenantShares()
        self.rooms = WorkerRooms(settings)
        self.decision_counts = dict.fromkeys(Decision, 0)
        self._owner = owner
        self._order: WaitingOrder[R] = WaitingOrder()
        self._usage = Usage(self.shares)
        self._sets = BestSets(owner, settings, self._order, self.shares, self.rooms)

    # -- workers ------------------------------------------------------------------

    def add_worker(self, worker_id: str, limits: WorkerLimits) -> None:
        """Add a worker that takes requests; nothing is bound to it."""
        self.rooms.add(worker_id, limits)
        self._sets.touch(worker_id)

    def close_worker(self, worker_id: str) -> None:
        """Bind nothing more to a worker."""
        self.rooms.close(worker_id)
        self._sets.forget_worker(worker_id)

    def remove_worker(self, worker_id: str, now: float) -> None:
        """End everything that is bound to a worker, and forget it."""
        for arrival in self._usage.on(worker_id):
            self.ended(arrival, now)
        self.rooms.remove(worker_id)
        self._sets.forget_worker(worker_id)

    def touch(self, worker_id: str) -> None:
        """Note that a worker may have more room, by something that this queue does not see.

        Without it, that is found out within half a second of calls.
        """
        self._sets.touch(worker_id)

    def busy_workers(self) -> list[str]:
        """Return the workers to which enough prefill work is bound. None under fifo."""
        return self.rooms.busy() if self.settings.policy is not Policy.FIFO else []

    # -- requests -----------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Waiting[R]]:
        """Iterate over the waiting requests in order of arrival."""
        return iter(self._order)

    def in_turn(self) -> Iterator[Waiting[R]]:
        """Iterate over the waiting requests in the order that decides, sets aside."""
        if self.settings.policy is Policy.FIFO:
            return iter(self._order)
        return fair_order(self._order, self.shares)

    def find(self, arrival: int) -> Waiting[R] | None:
        """Return the waiting request of this arrival; None if it does not wait."""
        return self._order.find(arrival)

    def push(self, waiting: Waiting[R]) -> int:
        """Queue a request. Return how many waiting ones arrived before it."""
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

    def next(self, now: float) -> Start[R] | None:
        """Return the next request that starts, which waits no more; None if there is none now.

        Call it until it returns None, after each event that may free anything.
        """
        if not len(self._order):
            return None
        owner, order, shares = self._owner, self._order, self.shares
        match self.settings.policy:
            case Policy.FIFO:
                start = first_in_order(owner, order, None, self.rooms.open_count)
            case Policy.FAIR:
                turn = prefixes_first(owner, order, shares, self.lead)
                start = first_in_order(owner, turn, self.rooms, self.rooms.open_count)
            case Policy.UTILISATION:
                start = self._sets.next(now, self.lead)
        if start is not None:
            self._bind(start, now)
        return start

    def computed(self, worker_id: str, token_count: int) -> bool:
        """Note that a step prefilled so many tokens. Return True if more may start now."""
        if not self.rooms.computed(worker_id, token_count):
            return False
        self._sets.touch(worker_id)
        return bool(len(self._order)) and self.settings.policy is not Policy.FIFO

    def tokens_came(self, arrival: int, more_bytes: int, now: float) -> bool:
        """Note tokens of a request that started, and bytes that it holds more from now on.

        Return True if more may start now, since its first token came.
        """
        self._usage.runs(arrival, more_bytes, now)
        if not self.rooms.is_prefilling(arrival):
            return False
        worker_id = self._usage.worker_of(arrival)
        if worker_id is None:
            return False
        self.rooms.prefilled(arrival)
        self._sets.touch(worker_id)
        return bool(len(self._order)) and self.settings.policy is not Policy.FIFO

    def ended(self, arrival: int, now: float) -> None:
        """End a request that started, and correct its tenant's charge. Unknown ones are ignored."""
        worker_id = self._usage.end(arrival, now)
        if worker_id is not None:
            self.rooms.ended(worker_id, arrival)
            self._sets.touch(worker_id)

    # -- questions ----------------------------------------------------------------

    def started(self) -> set[int]:
        """Return the requests that started and have not ended, by arrival."""
        return self._usage.arrivals

    def service(self, now: float) -> dict[str, float]:
        """Return the byte-seconds that each tenant's requests have used until now."""
        return self._usage.service(now)

    def hold(self, arrival: int, worker_id: str, need: Need) -> Hold:
        """Return what keeps a waiting request from starting on a worker that has room for it."""
        waiting = self._order.find(arrival)
        if waiting is None or self.settings.policy is Policy.FIFO:
            return Hold.TURN
        room_hold = self.rooms.hold(worker_id, need)
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
        problems = self.rooms.check_integrity() + self.shares.check_integrity()
        if arrivals != sorted(set(arrivals)):
            problems.append(f"the queue is out of order: {arrivals}")
        both = self._usage.arrivals & set(arrivals)
        if both:
            problems.append(f"{sorted(both)} wait and have started")
        return problems + self._sets.reservations.check_integrity()

    @property
    def lead(self) -> float:
        """Largest lead of a tenant over its share, in byte-seconds of weight 1."""
        return self.settings.lead_requests * self._usage.mean_cost

    # -- inside -------------------------------------------------------------------

    def _leave(self, waiting: Waiting[R]) -> None:
        self._order.remove(waiting)
        self._sets.forget(waiting.arrival)
        self.shares.waits_no_more(waiting.tenant)

    def _bind(self, start: Start[R], now: float) -> None:
        waiting, need, worker_id = start.waiting, start.need, start.worker_id
        self.decision_counts[start.decision] += 1
        size = need.pages * self.rooms.limits(worker_id).page_bytes
        self._sets.reservations.started(now - waiting.since)
        self._usage.start(waiting.arrival, waiting.tenant, worker_id, size, now)
        self.rooms.bind(worker_id, waiting.arrival, need)
        self._leave(waiting)
