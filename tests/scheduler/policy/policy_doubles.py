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
    """A request of K cached and T new tokens, which holds a page for each."""

    cached: int
    new: int
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0

    @property
    def pages(self) -> int:
        return self.cached + self.new


class Device:
    """One worker, in steps: what starts before a step has ended after it."""

    selects = False

    def __init__(
        self, pages: int, step_tokens: int, settings: PolicySettings, places: int = 1000
    ) -> None:
        self.pages, self.places = pages, places
        self.queue: PolicyQueue[Job] = PolicyQueue(self, settings)
        self.queue.add_worker("0", WorkerLimits(pages, 1, step_tokens))
        self.running: dict[int, Job] = {}

    def workers_for(self, item: Job) -> Iterable[str]:
        return ("0",)

    def need(self, item: Job, worker_id: str) -> Need | None:
        pages, places = self.room(worker_id)
        if item.pages > self.pages:
            return None
        can_start = item.pages <= pages and places > 0
        return Need(item.pages, item.cached, item.new, can_start=can_start)

    def room(self, worker_id: str) -> tuple[int, int]:
        used = sum(job.pages for job in self.running.values())
        return self.pages - used, self.places - len(self.running)

    def prefer(self, item: Job, needs: Mapping[str, Need]) -> str:
        return "0"

    def instead(self, item: Job, needs: Mapping[str, Need]) -> Mapping[str, Need]:
        return {}

    def push(self, arrival: int, job: Job, now: float) -> None:
        self.queue.push(Waiting(job, arrival, job.tenant, job.weight, job.priority, since=now))

    def step(self, now: float, seconds: float = 1.0) -> list[int]:
        """Start what may start now, and end it after so many seconds. Return the arrivals."""
        while (start := self.queue.next(now)) is not None:
            self.running[start.waiting.arrival] = start.waiting.item
        ran = list(self.running)
        for arrival in ran:
            del self.running[arrival]
            self.queue.ended(arrival, now + seconds)
        return ran


def drive(device: Device, jobs: Iterable[Job]) -> list[list[int]]:
    """Queue all jobs at once and run steps until all have run. Return the arrivals of each."""
    for arrival, job in enumerate(jobs):
        device.push(arrival, job, 0.0)
    steps: list[list[int]] = []
    while len(device.queue):
        steps.append(device.step(float(len(steps))))
        assert steps[-1]
    return steps
