"""Keeps memory of a worker free for a request that has waited long, until it fits there."""

from __future__ import annotations

import math
from collections.abc import Iterable

from scheduler_service.placement.account import Need
from scheduler_service.placement.demand import Demand
from scheduler_service.policy.settings import PolicySettings
from scheduler_service.policy.workers import Workers

# A request has waited long that waited this many times as long as others usually do, since in a
# deep queue all of them are old. Weight of the newest wait in what is usual.
_TIMES_USUAL = 2.0
_NEWEST = 0.1
# Part of the workers that are reserved at most, and requests that are looked at for one.
_MOST_WORKERS = 0.5
_LOOKED_AT = 4


class Reservations:
    """At most one request for each worker, and one worker for each request."""

    def __init__(self, workers: Workers, settings: PolicySettings) -> None:
        self._workers = workers
        self._settings = settings
        self._by_worker: dict[str, Demand] = {}
        self._reserved: dict[int, str] = {}
        self._usual_wait = 0.0

    def items(self) -> list[tuple[str, Demand]]:
        """Return each reserved worker with its request."""
        return list(self._by_worker.items())

    def worker_of(self, arrival: int) -> str | None:
        """Return the worker that is reserved for a request; None if none is."""
        return self._reserved.get(arrival)

    def of(self, worker_id: str) -> Demand | None:
        """Return the request for which a worker is reserved; None if it is not."""
        return self._by_worker.get(worker_id)

    @property
    def gamma(self) -> float:
        """What a second of waiting is worth: 1 is as much as the best use of the memory.

        1 / aging_seconds; less where requests usually wait longer than that.
        """
        aging = self._settings.aging_seconds
        return 1.0 / max(aging, self._usual_wait) if aging else 0.0

    def started(self, waited_seconds: float) -> None:
        """Learn how long requests usually wait."""
        self._usual_wait += _NEWEST * (waited_seconds - self._usual_wait)

    @property
    def _long_seconds(self) -> float:
        """Seconds of waiting after which memory is reserved; infinite if it never is."""
        aging = self._settings.aging_seconds
        return max(aging, _TIMES_USUAL * self._usual_wait) if aging else math.inf

    def renew(self, candidates: Iterable[tuple[Demand, int]], now: float) -> None:
        """Reserve workers for the candidates that waited longest.

        Each comes with the number of higher priorities that its tenant's requests have: it
        must have waited as many times longer.
        """
        most = max(1, int(_MOST_WORKERS * len(self._workers.open)))
        if len(self._by_worker) >= most:
            return
        period = self._long_seconds
        due = {
            waiting.arrival: (waiting.since + level * period, waiting)
            for waiting, level in candidates
            if waiting.arrival not in self._reserved and now - waiting.since >= (level + 1) * period
        }
        first = sorted(due.values(), key=lambda entry: (entry[0], entry[1].arrival))
        for _, waiting in first[:_LOOKED_AT]:
            if len(self._by_worker) < most:
                self._reserve(waiting)

    def end(self, arrival: int) -> str | None:
        """End a request's reservation. Return its worker; None if it had none."""
        worker_id = self._reserved.pop(arrival, None)
        if worker_id is not None:
            del self._by_worker[worker_id]
        return worker_id

    def end_on(self, worker_id: str) -> None:
        """End the reservation of a worker, if it has one."""
        waiting = self._by_worker.pop(worker_id, None)
        if waiting is not None:
            del self._reserved[waiting.arrival]

    def check_integrity(self) -> list[str]:
        """Return one line per violated invariant."""
        named = {waiting.arrival: name for name, waiting in self._by_worker.items()}
        return [] if named == self._reserved else ["reservations are miscounted"]

    def _reserve(self, waiting: Demand) -> None:
        """Reserve the worker that lacks least for it: where it can start, if there is one."""
        needs = self._workers.needs(waiting, self._by_worker)

        def missing(entry: tuple[str, Need]) -> tuple[bool, int]:
            worker_id, need = entry
            return not need.can_start, need.pages - self._workers.accounts[worker_id].free_pages

        if needs:
            worker_id = min(needs.items(), key=missing)[0]
            self._by_worker[worker_id] = waiting
            self._reserved[waiting.arrival] = worker_id
