"""An owner of a policy queue: devices of which each step ends all requests that it prefilled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scheduler_service.policy.queue import PolicyQueue
from scheduler_service.policy.rooms import WorkerLimits
from scheduler_service.policy.settings import PolicySettings
from scheduler_service.policy.waiting import Need, Waiting


@dataclass(frozen=True, slots=True)
class Job:
    """A request of K cached and T new tokens, which holds a page for each, for some steps."""

    cached: int
    new: int
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    steps: int = 1
    is_link_bound: bool = False
    worker_id: str = ""

    @property
    def pages(self) -> int:
        return self.cached + self.new


class Devices:
    """Workers that compute in steps of one second. A job ends after so many steps."""

    def __init__(
        self,
        settings: PolicySettings,
        *,
        pages: int,
        step_tokens: int = 0,
        places: int = 1000,
        workers: int = 1,
    ) -> None:
        self.pages, self.places = pages, places
        self.queue: PolicyQueue[Job] = PolicyQueue(self, settings)
        self.now = 0.0
        self.arrivals = 0
        # Jobs that run, with the steps that are left, by worker and arrival.
        self.running: dict[str, dict[int, tuple[Job, int]]] = {}
        self.waited: dict[int, float] = {}
        for number in range(workers):
            self.queue.add_worker(str(number), WorkerLimits(pages, 1, step_tokens))
            self.running[str(number)] = {}

    def workers_for(self, item: Job) -> Iterable[str]:
        return [item.worker_id] if item.worker_id else list(self.running)

    def need(self, item: Job, worker_id: str) -> Need | None:
        if item.pages > self.pages or item.worker_id not in ("", worker_id):
            return None
        pages, places = self.room(worker_id)
        return Need(
            item.pages,
            item.cached,
            item.new,
            link_bytes=item.cached,
            is_link_bound=item.is_link_bound,
            can_start=item.pages <= pages and places > 0,
        )

    def room(self, worker_id: str) -> tuple[int, int]:
        jobs = self.running[worker_id].values()
        return self.pages - sum(job.pages for job, _ in jobs), self.places - len(jobs)

    def prefer(self, item: Job, needs: Mapping[str, Need]) -> str:
        return max(needs, key=lambda worker_id: (self.room(worker_id)[0], worker_id))

    def instead(self, item: Job, needs: Mapping[str, Need]) -> Mapping[str, Need]:
        return {}

    def push(self, job: Job) -> int:
        """Queue a job. Return its arrival."""
        arrival = self.arrivals
        self.arrivals += 1
        self.queue.push(Waiting(job, arrival, job.tenant, job.weight, job.priority, since=self.now))
        return arrival

    def start(self) -> list[int]:
        """Start what may start now. Return the arrivals."""
        started = []
        while (start := self.queue.next(self.now)) is not None:
            waiting = start.waiting
            pages, places = self.room(start.worker_id)
            assert start.need.pages <= pages
            assert places > 0
            job = waiting.item
            self.running[start.worker_id][waiting.arrival] = job, job.steps
            self.waited[waiting.arrival] = self.now - waiting.since
            started.append(waiting.arrival)
        assert self.queue.check_integrity() == []
        return started

    def step(self) -> list[int]:
        """Start what may start, and compute a step: all that runs is prefilled after it.

        Return the arrivals that ran.
        """
        self.start()
        self.now += 1.0
        ran = []
        for jobs in self.running.values():
            for arrival, (job, left) in list(jobs.items()):
                ran.append(arrival)
                self.queue.tokens_came(arrival, 0, self.now)
                jobs[arrival] = job, left - 1
                if left == 1:
                    del jobs[arrival]
                    self.queue.ended(arrival, self.now)
        return ran


def drain(devices: Devices) -> list[list[int]]:
    """Compute until nothing waits or runs. Return the arrivals of each step."""
    steps = []
    while len(devices.queue) or any(devices.running.values()):
        steps.append(devices.step())
        assert steps[-1]
    return steps
