"""The closed form against brute force, and what the planner says."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from splitpoint.costs import BUILT_IN_PROFILES, Profile, fit_line
from splitpoint.errors import InvalidArgument
from splitpoint.planner import (
    PlanInput,
    RestoreMethod,
    SplitCosts,
    best_split,
    plan_request,
)
from splitpoint.schedule import Schedule
from splitpoint.shapes import BUILT_IN_SHAPES

H100 = BUILT_IN_PROFILES["h100-pcie5"]


def random_costs(rng: random.Random) -> SplitCosts:
    """Six decades of balance between link and compute, overheads present or not."""

    def overhead() -> float:
        return rng.choice([0.0, 10 ** rng.uniform(-7, -3)])

    return SplitCosts(
        activation=10 ** rng.uniform(-8, -5),
        load=10 ** rng.uniform(-8, -5),
        rebuild=10 ** rng.uniform(-9, -4),
        copy_overhead=overhead(),
        rebuild_overhead=overhead(),
    )


@pytest.mark.parametrize("schedule", list(Schedule))
def test_closed_form_equals_brute_force_on_2000_random_profiles(schedule: Schedule) -> None:
    rng = random.Random(20_251_121)
    interior = 0
    for _ in range(2000):
        costs = random_costs(rng)
        cached = rng.randint(0, 400)
        best = min(costs.layer_seconds(split, cached, schedule) for split in range(cached + 1))
        split = best_split(costs, cached, schedule)
        assert costs.layer_seconds(split, cached, schedule) == pytest.approx(best, rel=1e-12)
        interior += 0 < split < cached
    if schedule is not Schedule.SERIAL:
        # Without overlap the cost is a straight line: only its ends can win.
        assert interior > 200


def test_serial_schedule_never_splits_inside() -> None:
    rng = random.Random(1)
    for _ in range(300):
        split = best_split(random_costs(rng), 100, Schedule.SERIAL)
        assert split in (0, 100)


def test_grouped_queries_load_everything_and_say_why() -> None:
    plan = plan_request(
        BUILT_IN_SHAPES["llama-3-8b"],
        H100,
        PlanInput(2048, 64, has_activations=True, schedule=Schedule.COLUMN),
    )
    assert plan.split_tokens == 0
    assert plan.method is RestoreMethod.LOAD
    assert "rho >= 1" in plan.reason
    assert plan.predicted_restore_seconds == plan.predicted_load_seconds


def test_multi_head_attention_splits_on_a_fast_gpu() -> None:
    plan = plan_request(
        BUILT_IN_SHAPES["opt-6.7b"],
        H100,
        PlanInput(2048, 64, has_activations=True, schedule=Schedule.COLUMN),
    )
    assert 0 < plan.split_tokens < 2048
    assert plan.method is RestoreMethod.SPLIT
    assert plan.predicted_restore_seconds < 0.75 * plan.predicted_load_seconds
    line = plan.split_slope * 2048 + plan.split_intercept
    assert abs(line - plan.split_tokens) <= 1


def test_nothing_cached() -> None:
    plan = plan_request(BUILT_IN_SHAPES["opt-125m"], H100, PlanInput(0, 7, has_activations=True))
    assert (plan.split_tokens, plan.method) == (0, RestoreMethod.NONE)
    assert plan.predicted_restore_seconds == 0
    assert "nothing is cached" in plan.reason


def test_forced_split_is_capped_and_needs_activations() -> None:
    shape = BUILT_IN_SHAPES["opt-125m"]
    plan = plan_request(shape, H100, PlanInput(100, 5, True, forced_split_tokens=500))
    assert plan.split_tokens == 100
    assert plan.method is RestoreMethod.RECOMPUTE
    assert "was asked for" in plan.reason
    with pytest.raises(InvalidArgument, match="no activations") as caught:
        PlanInput(100, 5, has_activations=False, forced_split_tokens=1)
    assert caught.value.field == "split_tokens"
    assert plan_request(shape, H100, PlanInput(100, 5, False, forced_split_tokens=0))


def test_row_schedule_can_split_grouped_queries() -> None:
    # With X on the device already, only the rebuild competes with the link.
    plan = plan_request(
        BUILT_IN_SHAPES["llama-3-8b"],
        H100,
        PlanInput(4096, 64, has_activations=True, schedule=Schedule.ROW),
    )
    assert plan.split_tokens > 0


@pytest.mark.parametrize(
    "change",
    [
        {"link_bytes_per_second": 0.0},
        {"link_bytes_per_second": float("nan")},
        {"rebuild_flops_per_second": -1.0},
        {"link_overhead_seconds": float("inf")},
    ],
)
def test_profile_refuses_impossible_costs(change: dict[str, float]) -> None:
    with pytest.raises(InvalidArgument):
        replace(H100, **change)


def test_profile_round_trip_and_errors() -> None:
    assert Profile.from_json(H100.to_json()) == H100
    for text in ("[]", "{", '{"unknown": 1}', "{}"):
        with pytest.raises(InvalidArgument):
            Profile.from_json(text)


def test_fit_recovers_a_line_and_clamps_the_intercept() -> None:
    sizes = [1e4, 1e5, 1e6, 1e7]
    line = fit_line(sizes, [2e-5 + size / 5e9 for size in sizes])
    assert line.overhead == pytest.approx(2e-5, rel=1e-6)
    assert line.rate == pytest.approx(5e9, rel=1e-6)
    through_origin = fit_line(sizes, [size / 5e9 * (1 + size / 1e8) for size in sizes])
    assert through_origin.overhead >= 0
    with pytest.raises(ValueError, match="two different"):
        fit_line([1.0, 1.0], [1.0, 1.1])
