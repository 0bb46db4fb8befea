"""The accounts of the ready workers, and what waiting requests would take of them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

from scheduler_service.placement.account import Charge, Need, StoreAccount, WorkerAccount
from scheduler_service.placement.answer_lengths import AnswerLengths
from scheduler_service.placement.demand import Demand
from scheduler_service.placement.footprint import (
    Fits,
    Grant,
    NeverFits,
    footprint_of,
    grant_of,
)
from scheduler_service.placement.residency import (
    FullBatches,
    streamed_in_full_batch,
    streamed_instead,
)
from scheduler_service.placement.routing import candidate_of, choose_worker
from scheduler_service.policy.settings import PolicySettings
from scheduler_service.worker_facts import WorkerFacts
from splitpoint.planning.plan import Objective, Reason, ReasonKind, Residency
from splitpoint.shapes import chunks_of


class Workers:
    """The workers to which requests may be bound, those that drain included.

    `lengths` predicts answers. None: each is charged for its longest possible answer, so that
    no charge ever grows. `objective`: what residency is chosen by.
    `waiting`: the requests that wait.

    Attributes:
        accounts: by worker id.
    """

    def __init__(
        self,
        settings: PolicySettings,
        lengths: AnswerLengths | None = None,
        objective: Objective = Objective.LATENCY,
        waiting: Iterable[Demand] = (),
    ) -> None:
        self.accounts: dict[str, WorkerAccount] = {}
        self._settings = settings
        self._lengths = lengths
        self._objective = objective
        self._waiting = waiting
        self._stores: dict[str, StoreAccount] = {}  # by address
        self._batches = FullBatches()

    # -- workers ------------------------------------------------------------------

    def add(self, facts: WorkerFacts) -> WorkerAccount:
        """Add a worker on which nothing runs, or replace one of this name."""
        self.remove(facts.worker_id)
        account = self.accounts[facts.worker_id] = WorkerAccount(
            facts,
            self._stores.setdefault(facts.kvstore_address, StoreAccount()),
            ahead_steps=self._settings.ahead_steps,
            restoring_share=self._settings.restoring_share,
        )
        return account

    def remove(self, worker_id: str) -> None:
        """Forget a worker."""
        account = self.accounts.pop(worker_id, None)
        if account is not None:
            account.store.workers.remove(account)

    @property
    def open(self) -> list[str]:
        """The workers that take new requests."""
        return [name for name, account in self.accounts.items() if not account.is_closed]

    def is_open(self, worker_id: str) -> bool:
        """Return True if a worker takes new requests."""
        account = self.accounts.get(worker_id)
        return account is not None and not account.is_closed

    # -- what a request would take ----------------------------------------------------------

    def open_to(self, demand: Demand) -> Iterator[WorkerAccount]:
        """Iterate over the workers that take new requests and where this one may run."""
        for account in self.accounts.values():
            if _is_open_to(demand, account):
                yield account

    def verdict(self, demand: Demand, account: WorkerAccount) -> Fits | NeverFits:
        """Return the footprint of a request on an empty worker."""
        worker = account.facts
        verdict = demand.verdicts.get(worker.worker_id)
        if verdict is None:
            verdict = demand.verdicts[worker.worker_id] = footprint_of(
                demand.token_count, demand.residency, worker, worker.followed(demand.selection)
            )
        return verdict

    def need_on(self, demand: Demand, account: WorkerAccount) -> Need | None:
        """Return what a request would take of a worker now, paused or not; None if it could not
        run there even alone."""
        fits = self.verdict(demand, account)
        if not isinstance(fits, Fits):
            return None
        answer = self.expected_answer(demand)
        need = need_of(account, demand, fits, answer)
        if self._objective is Objective.THROUGHPUT:
            waiting = partial(self._waiting_for, account)
            streamed = streamed_in_full_batch(demand, account, need, waiting, self._batches)
            if streamed is not None:
                other = need_of(account, demand, streamed, answer)
                # The store may lack slots where the device has pages.
                return need if need.can_start and not other.can_start else other
        return need

    def _waiting_for(self, account: WorkerAccount) -> int:
        """Return how many of the waiting requests this worker can expect, at most its free places.

        They are shared with the other workers that take new requests.
        """
        sharers = max(1, sum(not each.is_closed for each in self.accounts.values()))
        able = (
            demand
            for demand in self._waiting
            if not demand.is_paused and _is_open_to(demand, account)
        )
        count = sum(1 for _ in islice(able, sharers * max(0, account.free_places)))
        return -(-count // sharers)

    def need(self, demand: Demand, worker_id: str) -> Need | None:
        """Return what a request would take of a worker now.

        None if it could not run there even alone, is pinned elsewhere or paused, or if the worker
        takes nothing new.
        """
        account = self.accounts.get(worker_id)
        if account is None or demand.is_paused or not _is_open_to(demand, account):
            return None
        return self.need_on(demand, account)

    def needs(self, demand: Demand, without: Container[str] = ()) -> dict[str, Need]:
        """Return what a request would take of each worker that could run it."""
        return {
            worker_id: need
            for worker_id in self.accounts
            if worker_id not in without and (need := self.need(demand, worker_id)) is not None
        }

    def expected_answer(self, demand: Demand) -> int:
        """Return the expected length of a request's answer."""
        most = demand.most_generated
        if self._lengths is None or demand.runs_to_its_limit:
            return most
        expected = self._lengths.expected(demand.tenant, most)
        return min(most, max(expected, demand.least_generated))

    def completed(self, demand: Demand) -> None:
        """Learn from the length of an answer that ended."""
        if self._lengths is not None and not demand.runs_to_its_limit:
            self._lengths.note(demand.tenant, demand.generated_count)

    # -- where it starts ----------------------------------------------------------------

    def best(self, demand: Demand, needs: Mapping[str, Need]) -> str:
        """Return the best of these workers; the request can start on each of them."""
        if len(needs) == 1:
            return next(iter(needs))
        return choose_worker(
            candidate_of(demand, self.accounts[worker_id], need)
            for worker_id, need in needs.items()
        ).worker_id

    def streamed(self, demand: Demand, needs: Mapping[str, Need]) -> dict[str, Need]:
        """Return what a request takes that is streamed at once, of those workers that lack memory
        for it. Empty if it had better wait."""
        found: dict[str, Need] = {}
        for worker_id, need in needs.items():
            account = self.accounts[worker_id]
            fits = streamed_instead(demand, account, need, self.expected_answer, self._objective)
            if fits is not None:
                found[worker_id] = need_of(account, demand, fits, self.expected_answer(demand))
        return found


def _is_open_to(demand: Demand, account: WorkerAccount) -> bool:
    """Return True if a worker takes new requests, and this one may run there."""
    if account.is_closed or demand.worker_id not in ("", account.facts.worker_id):
        return False
    return account.facts.has_structured_output or not demand.is_structured


def need_of(account: WorkerAccount, demand: Demand, fits: Fits, answer: int) -> Need:
    """Return what a request would take of a worker now. `answer`: its expected length."""
    worker, known = account.facts, demand.known_count
    if fits.residency is Residency.STREAMED:
        charge = Charge((), fits.size_bytes // worker.page_bytes)
        shared = device = 0
    else:
        marks = _marks(demand, account)
        pages = chunks_of(max(known, demand.prompt_count + answer), worker.chunk_tokens)
        charge = Charge(marks, pages - len(marks))
        shared = account.shared_count(marks)
        device = account.device_count(marks, shared) * worker.chunk_tokens
    cached = demand.cached_tokens(worker.worker_id, device)
    restored = max(0, cached - device)
    pages = len(charge.marks) - shared + charge.own_pages
    return Need(
        fits,
        charge,
        pages=pages,
        cached_tokens=cached,
        new_tokens=known - cached,
        shared_tokens=shared * worker.chunk_tokens,
        device_tokens=device,
        link_bytes=restored * account.stored_bytes_per_token,
        is_link_bound=restored > account.kappa_crit * (known - cached) > 0,
        can_start=account.trial.may_start(is_suspect=demand.is_suspect)
        and account.has_room_for(pages)
        and account.store.has_room(fits.slot_count, worker.store_slot_count),
    )


def grant_for(
    account: WorkerAccount, demand: Demand, need: Need, answer: int, *, spares: bool
) -> Grant:
    """Return what a request gets that has just started, and charge it for spare memory.

    `answer`: its expected length. `spares`: a streamed request may get a part of what is free.
    """
    fits, page_bytes = need.fits, account.facts.page_bytes
    if need.is_streamed:
        free_bytes = fits.size_bytes + account.free_bytes if spares else 0
        grant = grant_of(fits, free_bytes, page_bytes)
        account.grow(demand.arrival, grant.size_bytes // page_bytes)
        return grant
    reasons = list(fits.reasons)
    if answer < demand.most_generated:
        reasons.append(Reason(ReasonKind.EXPECTED_ANSWER, (answer, demand.most_generated)))
    shared = need.shared_tokens // account.facts.chunk_tokens
    if shared:
        reasons.append(Reason(ReasonKind.SHARED_PAGES, (shared,)))
    size = need.pages * page_bytes
    return Grant(fits.residency, size, tuple(reasons), device_tokens=need.device_tokens)


def _marks(demand: Demand, account: WorkerAccount) -> Sequence[bytes]:
    """Return the marks of the request's leading full chunks.

    Empty if they are not known, or if the worker shares no pages.
    """
    if not account.facts.shares_pages:
        return ()
    return demand.cached.marks.get(account.facts.key_space, ())
