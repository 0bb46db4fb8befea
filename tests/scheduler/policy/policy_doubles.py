"""Devices of a policy queue, of which each step ends all requests that it prefilled."""

from __future__ import annotations

from dataclasses import dataclass, replace

from scheduler_doubles import worker_facts

from scheduler_service.placement.account import Need
from scheduler_service.placement.demand import Demand
from scheduler_service.policy.queue import PolicyQueue
from scheduler_service.policy.settings import PolicySettings
from scheduler_service.prefixes.lookup import CachedPrefix

# Cached over new tokens beyond which a job is link-bound.
KAPPA_CRIT = 20.0


@dataclass(frozen=True, slots=True)
class Job:
    """A request of K cached and T new tokens, which holds a page for each, for some steps."""

    cached: int
    new: int
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    steps: int = 1
    worker_id: str = ""

    @property
    def pages(self) -> int:
        return self.cached + self.new


@dataclass(slots=True, eq=False, kw_only=True)
class QueuedJob(Demand):
    """A job that was pushed. Its answer takes no memory."""

    job: Job

    @property
    def prompt_count(self) -> int:
        return self.job.pages

    @property
    def generated_count(self) -> int:
        return 0

    @property
    def most_generated(self) -> int:
        return 0


class Devices:
    """Workers that compute in steps of one second. A job ends after its number of steps."""

    def __init__(
        self,
        settings: PolicySettings,
        *,
        pages: int,
        step_tokens: int = 0,
        places: int = 1000,
        workers: int = 1,
    ) -> None:
        self.queue = PolicyQueue(settings)
        self.now = 0.0
        self.arrivals = 0
        self.pushed: dict[int, QueuedJob] = {}
        # Jobs that run, with the steps that are left, by worker and arrival.
        self.running: dict[str, dict[int, tuple[Job, int]]] = {}
        self.waited: dict[int, float] = {}
        # Pages of one token and one byte.
        facts = replace(
            worker_facts(pages, places, chunk_tokens=1, page_bytes=1),
            cache_capacity_bytes=pages,
            max_batched_tokens=step_tokens,
        )
        for name in map(str, range(workers)):
            self.queue.add_worker(replace(facts, worker_id=name))
            account = self.queue.workers.accounts[name]
            account.stored_bytes_per_token, account.kappa_crit = 1, KAPPA_CRIT
            self.running[name] = {}

    def need(self, arrival: int) -> Need:
        """Return what a job that waits would take of the first worker."""
        need = self.queue.workers.need(self.pushed[arrival], "0")
        assert need is not None
        return need

    def push(self, job: Job) -> int:
        """Queue a job. Return its arrival."""
        arrival = self.arrivals
        self.arrivals += 1
        queued = self.pushed[arrival] = QueuedJob(
            job=job,
            arrival=arrival,
            tenant=job.tenant,
            weight=job.weight,
            priority=job.priority,
            worker_id=job.worker_id,
            cached=CachedPrefix(dict.fromkeys(self.running, job.cached)),
        )
        self.queue.push(queued, self.now)
        return arrival

    def start(self) -> list[int]:
        """Start what may start now. Return the arrivals."""
        started = []
        while (start := self.queue.next(self.now)) is not None:
            waiting = start.demand
            assert isinstance(waiting, QueuedJob)
            assert start.need.pages == waiting.job.pages
            self.queue.start(start, self.now)
            self.running[start.worker_id][waiting.arrival] = waiting.job, waiting.job.steps
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
                self.queue.tokens_came(self.pushed[arrival], self.now)
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
