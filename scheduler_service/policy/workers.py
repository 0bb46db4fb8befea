"""The accounts of the ready workers, and what waiting requests would take of them."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

from scheduler_service.placement.account import Need, StoreAccount, WorkerAccount
from scheduler_service.placement.answer_lengths import AnswerLengths
from scheduler_service.placement.demand import Demand
from scheduler_service.placement.footprint import Fits, NeverFits, footprint_of
from scheduler_service.placement.need import need_of
from scheduler_service.placement.residency import streamed_instead
from scheduler_service.placement.routing import candidate_of, choose_worker
from scheduler_service.policy.settings import PolicySettings
from scheduler_service.worker_facts import WorkerFacts
from splitpoint.planning.plan import Objective


class Workers:
    """The workers to which requests may be bound, those that drain included.

    `lengths` predicts answers. None: each is charged for its longest possible answer, so that
    no charge ever grows. `objective`: what waiting and streaming are compared by.

    Attributes:
        accounts: by worker id.
    """

    def __init__(
        self,
        settings: PolicySettings,
        lengths: AnswerLengths | None = None,
        objective: Objective = Objective.LATENCY,
    ) -> None:
        self.accounts: dict[str, WorkerAccount] = {}
        self._settings = settings
        self._lengths = lengths
        self._objective = objective
        self._stores: dict[str, StoreAccount] = {}  # by address

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
        return need_of(account, demand, fits, self.expected_answer(demand))

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
