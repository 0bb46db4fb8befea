"""What a policy queue tells of itself: why requests started, and what each tenant has had."""

from __future__ import annotations

import pytest
from policy_doubles import Devices, Job

from scheduler_service.policy.order import Decision
from scheduler_service.policy.settings import PolicySettings
from splitpoint.options.scheduler import Policy


def start_all(devices: Devices, now: float) -> list[int]:
    """Start what can start; return the arrivals."""
    devices.now = now
    return devices.start()


def end(devices: Devices, arrival: int, now: float) -> None:
    del devices.running["0"][arrival]
    devices.queue.ended(arrival, now)


@pytest.mark.parametrize(
    ("policy", "decision"),
    [
        (Policy.FIFO, Decision.TURN),
        (Policy.FAIR, Decision.TURN),
        (Policy.UTILISATION, Decision.SET),
    ],
)
def test_starts_are_counted_by_their_reason(policy: Policy, decision: Decision) -> None:
    devices = Devices(PolicySettings(policy), pages=10, step_tokens=5)
    for _ in range(4):
        devices.push(Job(1, 1))
    assert len(start_all(devices, 0.0)) == 4
    assert devices.queue.decision_counts[decision] == 4
    assert sum(devices.queue.decision_counts.values()) == 4


def test_a_start_on_kept_memory_has_its_own_reason() -> None:
    devices = Devices(
        PolicySettings(Policy.UTILISATION, aging_seconds=1.0), pages=10, step_tokens=5
    )
    devices.push(Job(5, 1))
    assert start_all(devices, 0.0) == [0]
    devices.push(Job(8, 2))
    assert start_all(devices, 5.0) == []
    devices.push(Job(1, 1))
    assert start_all(devices, 5.0) == [], "memory is kept for the one that waited long"
    end(devices, 0, 6.0)
    assert start_all(devices, 6.0) == [1]
    assert devices.queue.decision_counts[Decision.RESERVATION] == 1


@pytest.mark.parametrize("policy", list(Policy))
def test_service_is_memory_times_seconds(policy: Policy) -> None:
    """Pages of one byte. It never falls, and goes on when a tenant was idle."""
    devices = Devices(PolicySettings(policy), pages=10, step_tokens=100)
    devices.push(Job(2, 2, tenant="a"))
    devices.push(Job(0, 3, tenant="b"))
    assert sorted(start_all(devices, 10.0)) == [0, 1]
    assert devices.queue.service(12.0) == {"a": 8.0, "b": 6.0}
    end(devices, 0, 13.0)
    assert devices.queue.service(20.0) == {"a": 12.0, "b": 30.0}
    end(devices, 1, 20.0)
    devices.push(Job(0, 1, tenant="a"))
    start_all(devices, 100.0)
    assert devices.queue.service(101.0) == {"a": 13.0, "b": 30.0}
