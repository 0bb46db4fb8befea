"""Plans with weights on the host, against the simulated lanes."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest
from test_planner_costs import near_balance, task_seconds

from splitpoint.costs.profile import BUILT_IN_PROFILES, Profile
from splitpoint.errors import InvalidArgument
from splitpoint.planning.plan import PlanInput, ReasonKind, Residency, RestoreMethod
from splitpoint.planning.planner import plan_request
from splitpoint.planning.schedule import (
    RestoreWork,
    Schedule,
    Task,
    TaskKind,
    restore_tasks,
    simulate,
)
from splitpoint.planning.split_costs import PipelineOptions, Scenario, SplitCosts
from splitpoint.planning.split_search import best_split
from splitpoint.planning.weight_placement import WeightSizes, place_weights
from splitpoint.planning.weight_schedule import (
    PassCosts,
    PassKind,
    PassWork,
    WeightPiece,
    simulate_pass,
)
from splitpoint.planning.weight_step import (
    prefill_tokens_beside_weights,
    weight_step,
    with_weights,
)
from splitpoint.shapes import BUILT_IN_SHAPES

OPT = BUILT_IN_SHAPES["opt-6.7b"]
A100 = BUILT_IN_PROFILES["a100-80"]
SIZES = WeightSizes.of(OPT)
# All layers on the host.
STREAMED = replace(
    A100,
    host_weight_bytes=OPT.layer_count * SIZES.layer,
    host_kv_weight_bytes=OPT.layer_count * SIZES.pieces[WeightPiece.KEY_VALUE],
    step_compute_seconds=0.01,
)


def weighted(rng: random.Random, layers: int, cached: int) -> SplitCosts:
    costs = near_balance(rng, layers)
    weights = layers * costs.load * cached * rng.uniform(0, 1.5)
    return replace(costs, kv_weights=weights, weights=6 * weights)


def test_a_restore_takes_what_the_lanes_take() -> None:
    """Most predictions are within 3 %, nearly all within 15 %."""
    rng, chunk, errors = random.Random(5), 16, []
    for _ in range(200):
        layers, cached = rng.choice((4, 8, 32)), rng.randrange(4, 40) * chunk
        costs = weighted(rng, layers, cached)
        options = PipelineOptions(
            Schedule.PIPELINED, chunk * rng.randrange(1, 4), rng.choice((2, 4))
        )
        split = rng.randrange(1, cached // chunk) * chunk
        work = RestoreWork(
            layers,
            0,
            split,
            cached,
            chunk,
            options.tile_tokens,
            options.slots,
            embeds=costs.embeds,
            host_layers=frozenset(range(layers)),
        )

        def seconds(task: Task, costs: SplitCosts = costs) -> float:
            if task.kind is TaskKind.WEIGHTS:
                return costs.kv_weights / costs.layer_count
            return task_seconds(costs, task)

        expected = simulate(restore_tasks(work, options.schedule), seconds).seconds
        errors.append(abs(costs.seconds(split, cached, options) / expected - 1))
    errors.sort()
    assert errors[len(errors) // 2] < 0.03
    assert errors[len(errors) * 9 // 10] < 0.15


def test_a_step_takes_what_its_pieces_take_in_the_best_order() -> None:
    rng = random.Random(6)
    for _ in range(200):
        layers, cached = rng.choice((4, 8, 32)), rng.randrange(4, 40) * 16
        costs = weighted(rng, layers, cached)
        beside = layers * costs.load * cached * rng.uniform(0, 2)
        share, compute = costs.weights / layers / 12, beside / layers / 8
        pieces = PassCosts(
            {
                WeightPiece.KEY_VALUE: 2 * share,
                WeightPiece.QUERY: share,
                WeightPiece.OUTPUT: share,
                WeightPiece.MLP: 8 * share,
            },
            {
                PassKind.LOAD: costs.copy_overhead + costs.load * cached,
                PassKind.PROJECT: 2 * compute,
                PassKind.ATTEND: 2 * compute,
                PassKind.OUTPUT: compute,
                PassKind.MLP: 3 * compute,
            },
        )
        work = PassWork(layers, frozenset(range(layers)), loads=True)
        expected = simulate_pass(work, pieces).seconds
        predicted = costs.seconds(
            0,
            cached,
            PipelineOptions(
                Schedule.PIPELINED, scenario=Scenario.DECODE_STEP, compute_seconds=beside
            ),
        )
        assert 1 - 1e-9 <= predicted / expected < 1.2


def test_the_best_split_is_the_best_of_all() -> None:
    rng = random.Random(7)
    for _ in range(100):
        cached = rng.randrange(2, 300)
        costs = weighted(rng, rng.choice((2, 12)), cached)
        for scenario in (Scenario.RESTORE, Scenario.DECODE_STEP):
            options = PipelineOptions(
                rng.choice([Schedule.SERIAL, Schedule.COLUMN, Schedule.PIPELINED]),
                rng.choice((0, 16)),
                2,
                scenario,
                compute_seconds=rng.choice((0.0, 100 * costs.load)),
            )
            least = min(costs.seconds(split, cached, options) for split in range(cached + 1))
            found = costs.seconds(best_split(costs, cached, options), cached, options)
            assert found == pytest.approx(least, rel=1e-9)


def test_rebuilding_must_pay_for_its_weights_too() -> None:
    """With two layers on the host a long prefix is worth their W_K and W_V, a short one is
    not; with all of them none is, within the model's context."""
    two = replace(STREAMED, host_kv_weight_bytes=2 * SIZES.pieces[WeightPiece.KEY_VALUE])

    def plan(cached: int, profile: Profile) -> RestoreMethod:
        request = PlanInput(
            cached_tokens=cached,
            new_tokens=10,
            has_activations=True,
            schedule=Schedule.PIPELINED,
            chunk_tokens=64,
        )
        return plan_request(OPT, profile, request).method

    rebuilding = (RestoreMethod.SPLIT, RestoreMethod.RECOMPUTE)
    assert plan(256, A100) in rebuilding
    assert plan(256, two) is RestoreMethod.LOAD
    assert plan(2000, two) in rebuilding
    assert plan(2000, STREAMED) is RestoreMethod.LOAD


def test_every_piece_of_a_prefill_brings_the_weights() -> None:
    request = PlanInput(cached_tokens=0, new_tokens=1000, has_activations=False, prefill_tokens=100)
    resident = plan_request(OPT, A100, request).predicted_ttft_seconds
    streamed = plan_request(OPT, STREAMED, request).predicted_ttft_seconds
    assert streamed == pytest.approx(10 * STREAMED.weight_seconds)
    assert streamed > 5 * resident


def test_a_streamed_step_has_weights_and_cache_on_one_link() -> None:
    request = PlanInput(
        cached_tokens=4096,
        new_tokens=1,
        has_activations=False,
        schedule=Schedule.PIPELINED,
        residency=Residency.STREAMED,
        chunk_tokens=64,
    )
    plain = replace(A100, step_compute_seconds=0.01)
    step = plan_request(OPT, STREAMED, request).predicted_step_seconds
    without = plan_request(OPT, plain, request).predicted_step_seconds
    assert step == pytest.approx(without + STREAMED.weight_seconds, rel=0.02)


def test_a_step_by_its_tasks_is_about_the_step_of_the_plan() -> None:
    """And in the worker's order never slower than with whole layers first."""
    placement = place_weights(
        SIZES, free_bytes=3 << 30, least_cache_bytes=1 << 29, most_cache_bytes=1 << 40
    )
    profile = with_weights(A100, SIZES, placement)
    assert profile.host_weight_bytes == placement.streamed_bytes
    assert profile.host_kv_weight_bytes == STREAMED.host_kv_weight_bytes
    for cached, compute in product((0, 512, 2000), (0.0, 0.05, 0.5)):
        for has_activations in (False, True):
            request = PlanInput(
                cached_tokens=cached,
                new_tokens=1,
                has_activations=has_activations,
                schedule=Schedule.PIPELINED,
                residency=Residency.STREAMED,
                chunk_tokens=64,
                step_compute_seconds=compute,
            )
            plan = plan_request(OPT, profile, request)
            step = weight_step(OPT, profile, SIZES, placement, plan, compute)
            assert step.link * (1 - 1e-9) <= step.fine <= step.coarse * (1 + 1e-9)
            assert step.fine >= compute
            assert step.fine == pytest.approx(plan.predicted_step_seconds, rel=0.15)


def test_bytes_below_zero_are_no_profile() -> None:
    with pytest.raises(InvalidArgument, match="host_weight_bytes"):
        replace(A100, host_weight_bytes=-1)


@pytest.mark.parametrize("residency", Residency)
@pytest.mark.parametrize("cached", [0, 512])
def test_every_reason_names_what_weights_from_the_host_take(
    residency: Residency, cached: int
) -> None:
    request = PlanInput(
        cached_tokens=cached,
        new_tokens=64,
        has_activations=True,
        schedule=Schedule.PIPELINED,
        residency=residency,
    )
    plan = plan_request(OPT, STREAMED, request)
    # 12.9 GB of layers at 25 GB/s.
    seconds, size = dict(plan.reasons)[ReasonKind.HOST_WEIGHTS]
    assert seconds == pytest.approx(STREAMED.weight_seconds)
    assert size == STREAMED.host_weight_bytes
    assert ReasonKind.HOST_WEIGHTS not in dict(plan_request(OPT, A100, request).reasons)


def test_a_steps_link_counts_its_weights() -> None:
    """Where they are most of a step, the link is its limit; without them the device is."""
    request = PlanInput(
        cached_tokens=512,
        new_tokens=64,
        has_activations=True,
        schedule=Schedule.PIPELINED,
        residency=Residency.STREAMED,
    )
    busy = replace(STREAMED, step_compute_seconds=0.1)
    assert ReasonKind.DEVICE_BUSY not in dict(plan_request(OPT, busy, request).reasons)
    without = replace(busy, host_weight_bytes=0, host_kv_weight_bytes=0)
    assert ReasonKind.DEVICE_BUSY in dict(plan_request(OPT, without, request).reasons)


def test_prefill_beside_weights_takes_as_long_as_the_weights() -> None:
    tokens = prefill_tokens_beside_weights(OPT, STREAMED, STREAMED.step_compute_seconds)
    assert tokens > 1000
    flops = tokens * OPT.prefill_flops_per_token
    busy = flops / A100.prefill_flops_per_second + A100.prefill_overhead_seconds + 0.01
    assert busy == pytest.approx(STREAMED.weight_seconds, rel=1e-3)
    # Half as many bytes leave time for less than half as many tokens.
    half = replace(STREAMED, host_weight_bytes=STREAMED.host_weight_bytes // 2)
    assert prefill_tokens_beside_weights(OPT, half, 0.01) < tokens / 2
    assert prefill_tokens_beside_weights(OPT, A100, 0.0) == 0
    assert prefill_tokens_beside_weights(OPT, STREAMED, 10.0) == 0
