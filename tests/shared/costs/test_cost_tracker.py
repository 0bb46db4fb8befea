"""Refitted costs: they follow a change within some steps, and nothing else moves them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from splitpoint.costs.profile import BUILT_IN_PROFILES, Line, Profile
from splitpoint.costs.tracker import CostTracker, LineTracker, Observation

START = replace(
    BUILT_IN_PROFILES["a100-80"],
    link_bytes_per_second=200e6,
    link_overhead_seconds=1e-4,
    step_compute_seconds=0.02,
)


def copies(rng: random.Random, line: Line, sizes: list[float], noise: float) -> list[Observation]:
    return [
        Observation(size, (line.overhead + size / line.rate) * (1 + rng.uniform(-noise, noise)))
        for size in sizes
    ]


@pytest.mark.parametrize("sizes", [[4e6] * 8, [1e6, 2e6, 4e6, 8e6]])
@pytest.mark.parametrize("factor", [0.02, 0.125, 0.5, 2.0, 8.0])
def test_a_link_of_another_speed_is_known_after_twenty_steps(
    sizes: list[float], factor: float
) -> None:
    rng = random.Random(1)
    tracker = LineTracker(Line(1e-4, 200e6))
    for _ in range(50):
        tracker.observe(copies(rng, Line(1e-4, 200e6), sizes, 0.05))
    changed = Line(1e-4, factor * 200e6)
    for _ in range(20):
        tracker.observe(copies(rng, changed, sizes, 0.05))
    truth = changed.overhead + 4e6 / changed.rate
    assert tracker.seconds(4e6) == pytest.approx(truth, rel=0.15)


def test_an_exact_line_is_found_from_exact_measurements() -> None:
    tracker = LineTracker(Line(5.0, 1.0))
    truth = Line(0.25, 40.0)
    tracker.observe(copies(random.Random(0), truth, [1, 10, 100], 0.0))
    assert tracker.line.overhead == pytest.approx(0.25)
    assert tracker.line.rate == pytest.approx(40.0)


def test_one_size_says_nothing_about_the_overhead() -> None:
    tracker = LineTracker(Line(0.1, 10.0))
    tracker.observe([Observation(10.0, 2.1)])
    assert tracker.line.overhead == 0.1
    assert tracker.seconds(10.0) == pytest.approx(2.1)
    # Faster than the overhead alone: it cannot have been that much.
    tracker = LineTracker(Line(0.1, 10.0))
    tracker.observe([Observation(10.0, 0.01)])
    assert 0 <= tracker.line.overhead < 0.01
    assert tracker.seconds(10.0) == pytest.approx(0.01)


def test_fits_stay_finite_and_above_zero_whatever_is_measured() -> None:
    rng = random.Random(3)
    for _ in range(300):
        tracker = LineTracker(Line(rng.choice([0.0, 1e-5, 1.0]), 10 ** rng.uniform(0, 12)))
        for _ in range(rng.randrange(1, 30)):
            tracker.observe(
                [
                    Observation(
                        rng.choice([0.0, 10 ** rng.uniform(-3, 12)]),
                        rng.choice([0.0, 10 ** rng.uniform(-9, 3)]),
                    )
                    for _ in range(rng.randrange(5))
                ]
            )
        assert 0 < tracker.line.rate < float("inf")
        assert 0 <= tracker.line.overhead < float("inf")


def test_noise_changes_no_profile_and_a_change_does_once_it_is_sure() -> None:
    rng = random.Random(2)
    tracker = CostTracker(START)
    slow = Line(1e-4, 100e6)
    changes: list[Profile] = []
    for step in range(120):
        line = Line(1e-4, 200e6) if step < 60 else slow
        tracker.link.observe(copies(rng, line, [4e6] * 8, 0.05))
        tracker.step_compute.observe(0.02 * (1 + rng.uniform(-0.05, 0.05)))
        if tracker.settle():
            assert step >= 60, "noise changed the profile"
            changes.append(tracker.profile)
    # On the way to the new rate, not for ever.
    assert 1 <= len(changes) <= 8
    assert changes[-1].link_bytes_per_second == pytest.approx(100e6, rel=0.15)
    # What nothing was measured of stays.
    assert changes[-1].rebuild_flops_per_second == START.rebuild_flops_per_second
    assert changes[-1].prefill_flops_per_second == START.prefill_flops_per_second


def test_what_restores_take_beside_their_operations_is_told_apart() -> None:
    """Once per restore and for each operation, from restores of different sizes."""
    rng = random.Random(3)
    tracker = CostTracker(START)
    assert tracker.profile.restore_overhead_seconds == 0
    assert not tracker.settle()
    for _ in range(40):
        operations = rng.choice([8, 16, 48])
        seconds = (3e-4 + 4e-5 * operations) * (1 + rng.uniform(-0.05, 0.05))
        tracker.restore.observe([Observation(operations, seconds)])
    assert tracker.settle()
    learned = tracker.profile
    for operations in (8, 48):
        predicted = (
            learned.restore_overhead_seconds + operations * learned.operation_overhead_seconds
        )
        assert predicted == pytest.approx(3e-4 + 4e-5 * operations, rel=0.1)
    # Nothing else was measured.
    assert learned.link_bytes_per_second == START.link_bytes_per_second
    assert learned.rebuild_overhead_seconds == START.rebuild_overhead_seconds
