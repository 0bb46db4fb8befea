"""The queue that decides: which waiting request starts next, and on which worker.

    push -> next -> (the owner grants memory and starts it) -> first_token -> ended

The scheduler's admission queue and `splitpoint simulate` drive this class. What a worker's memory
holds and which worker suits a request is the owner's business (`Owner`). Times are told by the
caller, in seconds of any clock that never goes back.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Protocol, TypeVar

from scheduler_service.policy.choice import Offer, choose
from scheduler_service.policy.order import WaitingOrder
from scheduler_service.policy.rooms import WorkerLimits, WorkerRoom
from scheduler_service.policy.settings import PolicySettings
from scheduler_service.policy.tenants import TenantShares
from scheduler_service.policy.waiting import Need, R, Waiting
from splitpoint.options.scheduler import Policy

# Weight of the newest sample in the mean seconds that requests hold memory.
_NEWEST = 0.1


R_contra = TypeVar("R_contra", contravariant=True)


class Owner(Protocol[R_contra]):
    """What the queue asks about the owner's requests and workers."""

    def workers_for(self, item: R_contra) -> Iterable[str]:
        """Return the workers on which it could start, the one that it is pinned to alone.

        Of thousands of workers, a selection of those with room is enough (see `selects`).
        """

    @property
    def selects(self) -> bool:
        """True if `workers_for` returns a selection. A request that finds no room there then
        holds up every later one, under fifo and fair."""

    def need(self, item: R_contra, worker_id: str) -> Need | None:
        """Return what it would take there now. None if it could not run there even alone, is
        pinned elsewhere or paused, or if the worker takes nothing new."""

    def room(self, worker_id: str) -> tuple[int, int]:
        """Return the worker's free pages and free places in its batch."""

    def prefer(self, item: R_contra, needs: Mapping[str, Need]) -> str:
        """Return the best of these workers; it can start on each of them."""

    def instead(self, item: R_contra, needs: Mapping[str, Need]) -> Mapping[str, Need]:
        """Return other needs with which it starts at once on workers that lack memory for it.

        Empty if it had better wait. The owner remembers what it returned until the start.
        """


@dataclass(frozen=True, slots=True)
class Start(Generic[R]):
    """A request that starts now. The owner grants it the memory that `need` names."""

    waiting: Waiting[R]
    worker_id: str
    need: Need


@dataclass(slots=True)
class _Bound:
    """A request that started: what it holds, and what its tenant was charged."""

    tenant: str
    worker_id: str
    size_bytes: int
    started: float
    # Byte-seconds that were charged, and that it has used up to `counted`.
    charged: float
    used: float
    counted: float

    def use_until(self, now: float) -> float:
        self.used += self.size_bytes * max(0.0, now - self.counted)
        self.counted = max(now, self.counted)
        return self.used


class PolicyQueue(Generic[R]):
    """Waiting requests, tenants' shares, and what is bound to each worker."""

    def __init__(self, owner: Owner[R], settings: PolicySettings) -> None:
        self.settings = settings
        self.shares = TenantShares()
        self.rooms: dict[str, WorkerRoom] = {}
        self._owner = owner
        self._order: WaitingOrder[R] = WaitingOrder()
        self._bound: dict[int, _Bound] = {}
        # Mean seconds for which requests held their memory.
        self._mean_seconds = 1.0

    # -- workers ------------------------------------------------------------------

    def add_worker(self, worker_id: str, limits: WorkerLimits) -> None:
        """Add a worker that takes requests; nothing is bound to it."""
        self.rooms[worker_id] = WorkerRoom(limits)

    def remove_worker(self, worker_id: str, now: float) -> None:
        """End everything that is bound to a worker, and forget it."""
        for arrival in [a for a, each in self._bound.items() if each.worker_id == worker_id]:
            self.ended(arrival, now)
        self.rooms.pop(worker_id, None)

    # -- requests -----------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Waiting[R]]:
        """Iterate over the waiting requests in order of arrival."""
        return iter(self._order)

    def find(self, arrival: int) -> Waiting[R] | None:
        """Return the waiting request of this arrival; None if it does not wait."""
        return self._order.find(arrival)

    def push(self, waiting: Waiting[R]) -> int:
        """Queue a request. Return how many waiting ones arrived before it."""
        self.shares.waits(waiting.tenant, waiting.weight)
        return self._order.add(waiting)

    def withdraw(self, arrival: int) -> None:
        """Take a request out of the queue, if it waits."""
        waiting = self._order.find(arrival)
        if waiting is not None:
            self._order.remove(waiting)
            self.shares.waits_no_more(waiting.tenant)

    def next(self, now: float) -> Start[R] | None:
        """Return the next request that starts, which waits no more; None if there is none now.

        Call it until it returns None, after each event that may free anything.
        """
        match self.settings.policy:
            case Policy.FIFO:
                start = self._next_in_order(self._order, is_free=True)
            case Policy.FAIR:
                start = self._next_in_order(self._fair_order(), is_free=False)
            case Policy.UTILISATION:
                start = self._next_of_best_set(now)
        if start is not None:
            self._bind(start, now)
        return start

    def computed(self, worker_id: str, token_count: int) -> None:
        """Note that a worker's step prefilled so many tokens."""
        room = self.rooms.get(worker_id)
        if room is not None:
            room.computed(token_count)

    def first_token(self, arrival: int) -> bool:
        """Note the first token of a request that started. Return True if more may start now."""
        bound = self._bound.get(arrival)
        room = self.rooms.get(bound.worker_id) if bound is not None else None
        return room is not None and room.prefilled(arrival) and bool(self._order)

    def grew(self, arrival: int, size_bytes: int, now: float) -> None:
        """Note that a request that started holds so many bytes from now on."""
        bound = self._bound.get(arrival)
        if bound is not None:
            used = bound.use_until(now)
            bound.size_bytes = size_bytes
            if used > bound.charged:  # it runs for longer than was estimated
                self.shares.charge(bound.tenant, used - bound.charged)
                bound.charged = used

    def ended(self, arrival: int, now: float) -> None:
        """End a request that started, and correct its tenant's charge. Unknown ones are ignored."""
        bound = self._bound.pop(arrival, None)
        if bound is None:
            return
        room = self.rooms.get(bound.worker_id)
        if room is not None:
            room.prefilled(arrival)
        self.shares.charge(bound.tenant, bound.use_until(now) - bound.charged)
        self.shares.ends(bound.tenant)
        self._mean_seconds += _NEWEST * (now - bound.started - self._mean_seconds)

    def used(self, arrival: int, now: float) -> float:
        """Return the byte-seconds that a request which started has used until now."""
        bound = self._bound.get(arrival)
        return bound.use_until(now) if bound is not None else 0.0

    # -- in order: fifo and fair --------------------------------------------------------

    def _fair_order(self) -> Iterator[Waiting[R]]:
        for tenant in list(self.shares):
            yield from self._order.of_tenant(tenant)

    def _next_in_order(self, order: Iterable[Waiting[R]], *, is_free: bool) -> Start[R] | None:
        """Return the first request that can start. One that cannot holds up the later ones on
        every worker that could run it. `is_free`: nothing but memory holds a request back."""
        claimed: set[str] = set()
        for waiting in order:
            needs = self._needs(waiting, claimed)
            start = self._start_in(waiting, needs, is_free=is_free)
            if start is None and needs:
                others = self._owner.instead(waiting.item, needs)
                start = self._start_in(waiting, others, is_free=is_free)
            if start is not None:
                return start
            claimed |= needs.keys()
            if len(claimed) >= len(self.rooms) or (needs and self._owner.selects):
                break
        return None

    def _needs(self, waiting: Waiting[R], without: Container[str] = ()) -> dict[str, Need]:
        """Return the needs on all workers that could run it."""
        item, need_on = waiting.item, self._owner.need
        found = {}
        for worker_id in self._owner.workers_for(item):
            if worker_id not in without:
                need = need_on(item, worker_id)
                if need is not None:
                    found[worker_id] = need
        return found

    def _start_in(
        self, waiting: Waiting[R], needs: Mapping[str, Need], *, is_free: bool = False
    ) -> Start[R] | None:
        open_needs = {
            worker_id: need
            for worker_id, need in needs.items()
            if need.can_start and (is_free or self._may_bind(worker_id, need))
        }
        if not open_needs:
            return None
        worker_id = self._owner.prefer(waiting.item, open_needs)
        return Start(waiting, worker_id, open_needs[worker_id])

    # -- the best set: utilisation -----------------------------------------------------------

    def _next_of_best_set(self, now: float) -> Start[R] | None:
        by_worker: dict[str, list[tuple[Waiting[R], Need]]] = {}
        for waiting in islice(self._fair_order(), self.settings.window):
            needs = self._needs(waiting)
            open_needs = {w: n for w, n in needs.items() if n.can_start and self._may_bind(w, n)}
            if open_needs:
                worker_id = self._owner.prefer(waiting.item, open_needs)
                by_worker.setdefault(worker_id, []).append((waiting, open_needs[worker_id]))
        for worker_id, found in by_worker.items():
            pages, places = self._owner.room(worker_id)
            offers = [
                Offer(self._value(waiting, need, now), need.pages, need.new_tokens)
                for waiting, need in found
            ]
            tokens = self.rooms[worker_id].token_room(self.settings.ahead_steps)
            chosen = choose(offers, pages, max(1.0, tokens), places)
            if chosen:
                waiting, need = found[chosen[0]]
                return Start(waiting, worker_id, need)
        return None

    def _value(self, waiting: Waiting[R], need: Need, now: float) -> float:
        return need.density + self.settings.gamma * (now - waiting.since)

    # -- inside -------------------------------------------------------------------

    def _may_bind(self, worker_id: str, need: Need) -> bool:
        room, settings = self.rooms[worker_id], self.settings
        return room.may_bind(need, settings.ahead_steps, settings.restoring_share)

    def _bind(self, start: Start[R], now: float) -> None:
        waiting, need = start.waiting, start.need
        room = self.rooms[start.worker_id]
        size = need.pages * room.limits.page_bytes
        cost = size * self._mean_seconds
        self._order.remove(waiting)
        self.shares.starts(waiting.tenant, cost)
        self.shares.waits_no_more(waiting.tenant)
        room.bind(waiting.arrival, need)
        self._bound[waiting.arrival] = _Bound(
            waiting.tenant, start.worker_id, size, now, cost, 0.0, now
        )
