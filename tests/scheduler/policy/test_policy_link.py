"""The link is kept busy beside compute: a link-bound restore overlaps other requests."""

from __future__ import annotations

from policy_doubles import Devices, Job

from scheduler_service.policy.settings import PolicySettings
from splitpoint.options.scheduler import Policy

DOCUMENT = Job(50, 1, steps=5)
SHORT = Job(0, 10, steps=3)


def started(devices: Devices) -> list[Job]:
    """Start what can start; return the jobs that run then."""
    devices.start()
    return [job for job, _ in devices.running["0"].values()]


def devices_with(*jobs: Job, pages: int = 100) -> Devices:
    devices = Devices(PolicySettings(Policy.UTILISATION), pages=pages)
    for job in jobs:
        devices.push(job)
    return devices


def test_one_restore_runs_beside_requests_that_fill_the_device_better() -> None:
    running = started(devices_with(*[SHORT] * 20, DOCUMENT, DOCUMENT))
    assert running.count(DOCUMENT) == 1
    assert running.count(SHORT) == 4, "all that fits beside it"


def test_a_second_restore_does_not_come_before_them() -> None:
    running = started(devices_with(DOCUMENT, *[SHORT] * 20, DOCUMENT, pages=200))
    assert running.count(DOCUMENT) == 1
    assert running.count(SHORT) == 14


def test_without_other_requests_all_that_fits_is_restored() -> None:
    assert started(devices_with(DOCUMENT, DOCUMENT, pages=204)) == [DOCUMENT, DOCUMENT]


def test_the_next_restore_begins_when_the_link_is_free() -> None:
    devices = devices_with(*[SHORT] * 40, DOCUMENT, DOCUMENT)
    first = {arrival for arrival in devices.step() if arrival >= 40}
    for _ in range(4):
        devices.step()
    # The first one has ended, and 51 pages are free at once.
    assert {arrival for arrival in devices.step() if arrival >= 40} == {40, 41} - first
