"""Starts the set with the most prompt tokens to compute, within the tenants' shares (utilisation).

Requests of the tenants within the lead are compared, by priority within each tenant. A set is
chosen for each worker that has room; a request is a candidate only for the worker that suits it
best. Memory is reserved for requests that have waited long: without that, small ones would take it
for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from scheduler_service.placement.account import Hold, Need
from scheduler_service.placement.demand import Demand
from scheduler_service.policy.knapsack import Budget, Offer, choose
from scheduler_service.policy.order import Decision, Start, WaitingOrder, streamed_in
from scheduler_service.policy.reservations import Reservations
from scheduler_service.policy.settings import PolicySettings
from scheduler_service.policy.tenants import TenantShares
from scheduler_service.policy.workers import Workers

# Seconds after which every worker is looked at again, whatever is known to have changed.
_FULL_LOOK_SECONDS = 0.5
# Requests that came and are compared beyond the window. If more came, all workers are looked at.
_MOST_FRESH = 16


@dataclass(frozen=True, slots=True)
class _Chosen:
    """A member of a set that has not started yet."""

    waiting: Demand
    worker_id: str
    # False if no tenant within the lead could use the worker.
    is_within_lead: bool


@dataclass(slots=True)
class _Found:
    """What one look found: budgets of workers, candidates for them, and what lacks memory."""

    # None: the worker has nothing for these requests.
    budgets: dict[str, Budget | None]
    candidates: dict[str, list[tuple[Demand, Need]]]
    # Workers that a request waits for that would be resident there, as far as it was looked up.
    residents: dict[str, bool]
    lacking: list[tuple[Demand, dict[str, Need]]]


class BestSets:
    """Chooses among the waiting requests. Remembers what has changed since nothing could start."""

    def __init__(
        self,
        workers: Workers,
        settings: PolicySettings,
        order: WaitingOrder,
        shares: TenantShares,
    ) -> None:
        self.reservations = Reservations(workers, settings)
        self._workers = workers
        self._settings = settings
        self._order = order
        self._shares = shares
        self._chosen: deque[_Chosen] = deque()
        # Workers with news, requests that came with their tenants, and the tenants within the
        # lead, since the last time that nothing could start. In order, so that a run can be
        # repeated.
        self._touched: dict[str, None] = {}
        self._fresh: dict[int, str] = {}
        self._eligible: list[str] = []
        self._looked = -_FULL_LOOK_SECONDS
        self._now = 0.0
        # Workers where streamed requests gave way to others.
        self._given_way: dict[str, None] = {}

    # -- events -------------------------------------------------------------------

    def touch(self, worker_id: str) -> None:
        """Note that a worker may have room."""
        self._touched[worker_id] = None

    def freshen(self, waiting: Demand) -> None:
        """Note that a request may start on any worker."""
        self._fresh[waiting.arrival] = waiting.tenant

    def forget(self, arrival: int) -> None:
        """Note that a request left the queue."""
        self._fresh.pop(arrival, None)
        self._touched.update(self._given_way)
        self._given_way.clear()
        worker_id = self.reservations.end(arrival)
        if worker_id is not None:
            self._touched[worker_id] = None

    def forget_worker(self, worker_id: str) -> None:
        """Note that a worker takes nothing more."""
        self._touched.pop(worker_id, None)
        self.reservations.end_on(worker_id)

    # -- the decision -------------------------------------------------------------------

    def next(self, now: float, lead: float) -> Start | None:
        """Return a member of a best set that can start; None if none can."""
        self._now = now
        start = self._next_chosen(lead)
        if start is not None:
            return start
        if len(self._fresh) > _MOST_FRESH:
            self._fresh = dict(islice(self._fresh.items(), _MOST_FRESH))
            self._touched.update(dict.fromkeys(self._workers.open))
        eligible = self._look(now, lead)
        if not self._touched and not self._fresh:
            return None
        window = list(self._window(eligible))
        self.reservations.renew(self._oldest(eligible, window), now)
        start = self._next_reserved() or self._next_of(window, now, lead)
        if start is None and len(eligible) < len(self._shares):
            ahead = [name for name in self._shares if name not in set(eligible)]
            start = self._next_of(self._window(ahead), now, lead, before=eligible)
        if start is None:
            self._touched.clear()
            self._fresh.clear()
        return start

    def hold(self, waiting: Demand, worker_id: str, need: Need, lead: float) -> Hold:
        """Return what keeps a request from a worker that has room for it."""
        reserved = self.reservations.of(worker_id)
        if reserved is not None and reserved is not waiting:
            return Hold.RESERVATION
        if need.can_start and self._gives_way(waiting, need, worker_id, {}):
            return Hold.RESIDENTS
        return Hold.SHARE if self._shares.lead_of(waiting.tenant) > lead else Hold.TURN

    # -- inside -------------------------------------------------------------------

    def _look(self, now: float, lead: float) -> list[str]:
        """Return the tenants within the lead. Touch all workers if those are others than before,
        and now and then."""
        eligible = self._shares.within(lead)
        is_due = now - self._looked >= _FULL_LOOK_SECONDS
        if is_due or set(eligible) - set(self._eligible):
            self._looked = now
            self._touched.update(dict.fromkeys(self._workers.open))
        self._eligible = eligible
        self._touched = {name: None for name in self._touched if self._has_room(name)}
        return eligible

    def _has_room(self, worker_id: str) -> bool:
        """Return True if a worker may have room for any request."""
        account = self._workers.accounts.get(worker_id)
        if account is None or account.is_closed or account.is_full:
            return False
        return account.free_pages >= 0 and account.free_places > 0

    def _window(self, tenants: Sequence[str]) -> Iterator[tuple[Demand, dict[str, Need]]]:
        """Iterate over the requests that are compared, with what they need of the workers.

        They are this many of each tenant for each worker with news, of those that could run there,
        and those that came.
        """
        each = max(1, self._settings.window // max(1, len(tenants)))
        for tenant in tenants:
            came = dict.fromkeys(arrival for arrival, name in self._fresh.items() if name == tenant)
            left = dict.fromkeys(self._touched, each)
            for waiting in self._order.of_tenant(tenant):
                if not left:
                    break
                workers = dict.fromkeys(left)
                if waiting.arrival in came:
                    del came[waiting.arrival]
                    workers.update(dict.fromkeys(self._open_to(waiting)))
                needs = self._needs(waiting, workers)
                for worker_id in left.keys() & needs.keys():
                    left[worker_id] -= 1
                    if not left[worker_id]:
                        del left[worker_id]
                if needs:
                    yield waiting, needs
            for arrival in came:
                fresh = self._order.find(arrival)
                if fresh is not None:
                    needs = self._needs(fresh, self._open_to(fresh))
                    if needs:
                        yield fresh, needs

    def _gives_way(
        self, waiting: Demand, need: Need, worker_id: str, residents: dict[str, bool]
    ) -> bool:
        """Return True if a streamed request lets resident ones go first for a while.

        It holds few pages, so that it would always fit, but it takes the link from all others.
        `residents`: whether one waits for a worker, as far as it was looked up.
        """
        if not need.is_streamed or not self._workers.accounts[worker_id].running_count:
            return False
        if self.reservations.gamma * (self._now - waiting.since) >= 1:
            return False
        if worker_id not in residents:
            needs = (self._workers.need(each, worker_id) for each in self._order)
            residents[worker_id] = any(each and not each.is_streamed for each in needs)
        if residents[worker_id]:
            self._given_way[worker_id] = None
        return residents[worker_id]

    def _needs(self, waiting: Demand, workers: Iterable[str]) -> dict[str, Need]:
        """Return what a request needs of those of these workers on which it could run."""
        return {
            worker_id: need
            for worker_id in workers
            if (need := self._workers.need(waiting, worker_id)) is not None
        }

    def _oldest(
        self, tenants: Iterable[str], window: Iterable[tuple[Demand, object]]
    ) -> list[tuple[Demand, int]]:
        """Return the window and the first request of each priority of these tenants, each with
        the number of higher priorities that its tenant's requests have."""
        heads = [(name, self._order.heads(name)) for name in tenants]
        levels = {
            (name, waiting.priority): level
            for name, found in heads
            for level, waiting in enumerate(found)
        }
        return [
            (waiting, levels[waiting.tenant, waiting.priority])
            for waiting in [*(w for _, found in heads for w in found), *(w for w, _ in window)]
        ]

    def _next_chosen(self, lead: float) -> Start | None:
        """Return the next member of the chosen sets that can still start."""
        while self._chosen:
            chosen = self._chosen.popleft()
            waiting, worker_id = chosen.waiting, chosen.worker_id
            if self._order.find(waiting.arrival) is not waiting:
                continue
            if chosen.is_within_lead and self._shares.lead_of(waiting.tenant) > lead:
                self._chosen.clear()  # the tenants within the lead have changed
                break
            need = self._workers.need(waiting, worker_id)
            if need is not None and self._is_open(worker_id, need):
                decision = Decision.SET if chosen.is_within_lead else Decision.SPARE
                return Start(waiting, worker_id, need, decision)
        return None

    def _next_reserved(self) -> Start | None:
        """Return the start of a request on the worker that is reserved for it."""
        for worker_id, waiting in self.reservations.items():
            need = self._workers.need(waiting, worker_id)
            if need is None:  # it could not run there any more
                self.forget(waiting.arrival)
            elif self._is_open(worker_id, need):
                return Start(waiting, worker_id, need, Decision.RESERVATION)
        return None

    def _next_of(
        self,
        window: Iterable[tuple[Demand, dict[str, Need]]],
        now: float,
        lead: float,
        before: Sequence[str] = (),
    ) -> Start | None:
        """Choose sets of these, on workers that no request of the tenants `before` could use."""
        found = _Found({}, {}, {}, [])
        for waiting, needs in window:
            self._collect(waiting, needs, found, before)
        for worker_id, candidates in found.candidates.items():
            budget = found.budgets[worker_id]
            if budget is not None:
                for waiting in self._best_set(worker_id, candidates, budget, now):
                    self._chosen.append(_Chosen(waiting, worker_id, not before))
        return self._next_chosen(lead) or self._streamed(found)

    def _collect(
        self,
        waiting: Demand,
        needs: Mapping[str, Need],
        found: _Found,
        before: Sequence[str],
    ) -> None:
        """Add a request to the candidates of the worker that suits it best."""
        possible: dict[str, Need] = {}
        lacking: dict[str, Need] = {}
        for worker_id, need in needs.items():
            if worker_id not in found.budgets:
                found.budgets[worker_id] = self._budget(worker_id, before)
            budget = found.budgets[worker_id]
            if budget is None or self._workers.accounts[worker_id].hold(need) is not None:
                continue
            if not need.can_start:
                if self.reservations.of(worker_id) in (None, waiting):
                    lacking[worker_id] = need
            elif need.pages <= budget.pages and not self._gives_way(
                waiting, need, worker_id, found.residents
            ):
                possible[worker_id] = need
        if possible:
            worker_id = self._workers.best(waiting, possible)
            found.candidates.setdefault(worker_id, []).append((waiting, possible[worker_id]))
        elif lacking and not found.lacking:  # the first in turn may be streamed instead
            found.lacking.append((waiting, lacking))

    def _is_open(self, worker_id: str, need: Need) -> bool:
        return need.can_start and self._workers.accounts[worker_id].hold(need) is None

    def _open_to(self, waiting: Demand) -> Iterator[str]:
        return (account.facts.worker_id for account in self._workers.open_to(waiting))

    def _budget(self, worker_id: str, before: Sequence[str]) -> Budget | None:
        """Return what a worker has for a set; None if nothing, or if others could use it."""
        account = self._workers.accounts[worker_id]
        if account.is_full or self._is_wanted(worker_id, before):
            return None
        pages, places = account.free_pages, account.free_places
        reserved = self.reservations.of(worker_id)
        need = self._workers.need(reserved, worker_id) if reserved is not None else None
        if need is not None:
            pages, places = pages - need.pages, places - 1
        if pages < 0 or places < 1:
            return None
        return Budget(pages, account.token_room, places)

    def _is_wanted(self, worker_id: str, tenants: Iterable[str]) -> bool:
        """Return True if a waiting request of these tenants could run on a worker, now or later."""
        return any(
            self._workers.need(waiting, worker_id) is not None
            for tenant in tenants
            for waiting in self._order.of_tenant(tenant)
        )

    def _best_set(
        self,
        worker_id: str,
        candidates: Sequence[tuple[Demand, Need]],
        budget: Budget,
        now: float,
    ) -> list[Demand]:
        """Return the best set: of each tenant's highest priorities first, then of the next ones.

        While the worker restores nothing, the link-bound request that has waited longest comes
        before all of them: its restore overlaps their compute.
        """
        offers = self._offers(worker_id, candidates, now)
        levels = self._levels(candidates)
        chosen: list[Demand] = []
        pages, tokens, places = budget.pages, budget.tokens, budget.places
        first = None
        if not self._workers.accounts[worker_id].restoring_bytes:
            over_link = [i for i, (_, need) in enumerate(candidates) if need.is_link_bound]
            over_link = [i for i in over_link if not levels[i]]
            first = min(over_link, key=lambda i: candidates[i][0].since, default=None)
        if first is not None:
            waiting, need = candidates[first]
            chosen.append(waiting)
            pages, tokens, places = pages - need.pages, tokens - need.new_tokens, places - 1
        for level in sorted(set(levels)):
            indices = [i for i, each in enumerate(levels) if each == level and i != first]
            left = Budget(pages, tokens, places)
            for index in choose([offers[index] for index in indices], left):
                waiting, need = candidates[indices[index]]
                chosen.append(waiting)
                pages -= need.pages
                tokens -= need.new_tokens
                places -= 1
        return chosen

    def _offers(
        self, worker_id: str, candidates: Sequence[tuple[Demand, Need]], now: float
    ) -> list[Offer]:
        """Return what each is worth.

        Waiting counts within a tenant: each tenant's oldest counts as much as the oldest of all,
        since it is the shares that decide between tenants. It counts by the memory that a request
        takes, so that once gamma times the wait is 1, nothing uses these pages better.
        """
        oldest: dict[str, float] = {}
        for waiting, _ in candidates:
            oldest[waiting.tenant] = min(waiting.since, oldest.get(waiting.tenant, now))
        first = min(oldest.values())
        gamma = self.reservations.gamma * self._workers.accounts[worker_id].facts.chunk_tokens
        return [
            Offer(
                tokens=need.new_tokens,
                age=gamma * need.pages * (now - waiting.since + oldest[waiting.tenant] - first),
                pages=need.pages,
            )
            for waiting, need in candidates
        ]

    def _levels(self, candidates: Sequence[tuple[Demand, Need]]) -> list[int]:
        """Return how many higher priorities of its tenant each has among the candidates."""
        priorities: dict[str, set[int]] = {}
        for waiting, _ in candidates:
            priorities.setdefault(waiting.tenant, set()).add(waiting.priority)
        return [
            sum(priority > waiting.priority for priority in priorities[waiting.tenant])
            for waiting, _ in candidates
        ]

    def _streamed(self, found: _Found) -> Start | None:
        """Return the start of a request that had better be streamed than wait for memory."""
        for waiting, lacking in found.lacking:
            start = streamed_in(self._workers, waiting, lacking, holds=True)
            if start is not None:
                return start
        return None
