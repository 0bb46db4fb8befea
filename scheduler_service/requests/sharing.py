"""Shares workers with other schedulers.

Each worker passes on what the schedulers of its Run streams charge and want there. Nothing is sent
to a worker that no other scheduler uses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from scheduler_service.cluster.registry import Registry
from scheduler_service.placement.account import OthersHold, WorkerAccount
from scheduler_service.requests.admission import AdmissionQueue
from splitpoint.v1 import worker_pb2

# Shortest time between two reports, but for ticks: the queue is looked through for each.
_LEAST_SECONDS = 0.02


@dataclass(slots=True)
class _Shared:
    """A worker with other schedulers.

    Attributes:
        waiting_since: when their first request began to wait.
        told: what the worker was told last.
        start_count, started_at: starts on the worker so far, and when the last one was seen.
    """

    others: OthersHold
    waiting_since: float
    told: worker_pb2.Charges = field(default_factory=worker_pb2.Charges)
    start_count: int = 0
    started_at: float = 0.0


class Sharing:
    """What other schedulers hold on each worker. `clock`: in seconds."""

    def __init__(
        self, registry: Registry, admission: AdmissionQueue, clock: Callable[[], float]
    ) -> None:
        self._registry = registry
        self._admission = admission
        self._clock = clock
        self._workers: dict[str, _Shared] = {}
        self._told_at = -_LEAST_SECONDS

    def heard(self, worker_id: str, message: worker_pb2.OtherStreams) -> None:
        """Note what a worker says of its other Run streams."""
        account = self._admission.account(worker_id)
        if account is None:
            return
        if not message.stream_count:
            self.forget(worker_id)
            self._admission.set_others(worker_id, OthersHold())
            return
        others, since = _held(message, account), self._clock() - message.charges.waited_seconds
        known = self._workers.setdefault(worker_id, _Shared(others, since))
        known.others, known.waiting_since = others, since
        self._admission.set_others(worker_id, self._workers[worker_id].others)
        self.changed()

    def forget(self, worker_id: str) -> None:
        """Drop a worker that is lost, or that no other scheduler uses."""
        self._workers.pop(worker_id, None)

    def tick(self) -> bool:
        """Let time pass. Return True if requests of others may have kept one of ours waiting."""
        now = self._clock()
        for worker_id, shared in self._workers.items():
            account = self._admission.account(worker_id)
            if account is not None:
                waited = max(0.0, now - shared.waiting_since)
                account.tick()
                others = replace(shared.others, waited_seconds=waited)
                self._admission.set_others(worker_id, others)
        self._tell()
        return bool(self._workers)

    def changed(self) -> None:
        """Tell the workers that are shared what has changed here, now or with the next tick."""
        if self._workers and self._clock() - self._told_at >= _LEAST_SECONDS:
            self._tell()

    def _tell(self) -> None:
        self._told_at = self._clock()
        for worker_id, shared in self._workers.items():
            connection = self._registry.find(worker_id)
            charges = self._charges(worker_id, shared)
            if connection is None or connection.ready is None or charges is None:
                continue
            waited, charges.waited_seconds = charges.waited_seconds, 0.0
            if charges != shared.told:
                shared.told = charges
                told = worker_pb2.Charges(waited_seconds=waited)
                told.MergeFrom(charges)
                connection.ready.stream.charge(told)

    def _charges(self, worker_id: str, shared: _Shared) -> worker_pb2.Charges | None:
        """Return what is charged and wanted on a worker; None if it is not there."""
        account = self._admission.account(worker_id)
        if account is None:
            return None
        charges = worker_pb2.Charges(
            cache_bytes=account.charged_bytes,
            request_count=account.running_count,
            slot_count=account.store.promised_to(account.running),
        )
        waiting = self._admission.first_waiting(worker_id)
        if waiting is not None:
            request, pages = waiting
            charges.wanted_bytes = max(1, pages) * account.facts.page_bytes
            if account.start_count != shared.start_count:
                shared.start_count, shared.started_at = account.start_count, self._clock()
            began = max(shared.started_at, request.since)
            charges.waited_seconds = max(0.0, self._clock() - began)
        account.waited_seconds = charges.waited_seconds
        return charges


def _held(message: worker_pb2.OtherStreams, account: WorkerAccount) -> OthersHold:
    charges, page_bytes = message.charges, account.facts.page_bytes
    return OthersHold(
        pages=-(-charges.cache_bytes // page_bytes),
        request_count=charges.request_count,
        slot_count=charges.slot_count,
        busy_count=message.busy_count,
        wanted_pages=-(-charges.wanted_bytes // page_bytes),
        waited_seconds=charges.waited_seconds,
    )
