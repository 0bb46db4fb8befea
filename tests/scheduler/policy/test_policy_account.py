"""What a policy queue tells of itself: why requests started, and what each tenant has had."""

from __future__ import annotations

import pytest
from policy_doubles import Device, Job

from scheduler_service.policy.owner import Decision
from scheduler_service.policy.settings import PolicySettings
from scheduler_service.policy.waiting import Waiting
from splitpoint.options.scheduler import Policy


def push(device: Device, arrival: int, job: Job, since: float = 0.0) -> None:
    device.queue.push(Waiting(job, arrival, job.tenant, job.weight, job.priority, since))


def start_all(device: Device, now: float) -> list[int]:
    """Start what can start; return the arrivals."""
    started = []
    while (start := device.queue.next(now)) is not None:
        device.running[start.waiting.arrival] = start.waiting.item
        started.append(start.waiting.arrival)
    return started


def end(device: Device, arrival: int, now: float) -> None:
    del device.running[arrival]
    device.queue.ended(arrival, now)


@pytest.mark.parametrize(
    ("policy", "decision"),
    [
        (Policy.FIFO, Decision.TURN),
        (Policy.FAIR, Decision.TURN),
        (Policy.UTILISATION, Decision.SET),
    ],
)
def test_starts_are_counted_by_their_reason(policy: Policy, decision: Decision) -> None:
    device = Device(10, 5, PolicySettings(policy))
    for arrival in range(4):
        push(device, arrival, Job(1, 1))
    assert len(start_all(device, 0.0)) == 4
    assert device.queue.decision_counts[decision] == 4
    assert sum(device.queue.decision_counts.values()) == 4


def test_a_start_on_kept_memory_has_its_own_reason() -> None:
    device = Device(10, 5, PolicySettings(Policy.UTILISATION, aging_seconds=1.0))
    push(device, 0, Job(5, 1))
    assert start_all(device, 0.0) == [0]
    push(device, 1, Job(8, 2))
    assert start_all(device, 5.0) == []
    push(device, 2, Job(1, 1), since=5.0)
    assert start_all(device, 5.0) == [], "memory is kept for the one that waited long"
    end(device, 0, 6.0)
    assert start_all(device, 6.0) == [1]
    assert device.queue.decision_counts[Decision.RESERVATION] == 1


@pytest.mark.parametrize("policy", list(Policy))
def test_service_is_memory_times_seconds(policy: Policy) -> None:
    """Pages of one byte. It never falls, and goes on when a tenant was idle."""
    device = Device(10, 100, PolicySettings(policy))
    push(device, 0, Job(2, 2, tenant="a"))
    push(device, 1, Job(0, 3, tenant="b"))
    assert sorted(start_all(device, 10.0)) == [0, 1]
    assert device.queue.service(12.0) == {"a": 8.0, "b": 6.0}
    end(device, 0, 13.0)
    assert device.queue.service(20.0) == {"a": 12.0, "b": 30.0}
    end(device, 1, 20.0)
    push(device, 2, Job(0, 1, tenant="a"))
    start_all(device, 100.0)
    assert device.queue.service(101.0) == {"a": 13.0, "b": 30.0}
