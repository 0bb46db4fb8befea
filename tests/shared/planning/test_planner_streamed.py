"""Plans of streamed sequences: the split of each step, and what stays on the device."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from splitpoint.costs.profile import BUILT_IN_PROFILES, Profile
from splitpoint.planning.plan import (
    LOADED,
    ForcedRestore,
    PlanInput,
    Reason,
    ReasonKind,
    Residency,
    RestoreMethod,
    SplitLine,
)
from splitpoint.planning.planner import plan_batch, plan_request
from splitpoint.planning.restore_choice import StreamPlan, best_stream_plan
from splitpoint.planning.schedule import Schedule
from splitpoint.planning.split_costs import PipelineOptions, Scenario, SplitCosts
from splitpoint.shapes import BUILT_IN_SHAPES, ModelShape

A100 = BUILT_IN_PROFILES["a100-80"]
OPT = BUILT_IN_SHAPES["opt-6.7b"]
LLAMA = BUILT_IN_SHAPES["llama-3-8b"]
STREAMED = PlanInput(
    2000,
    48,
    True,
    schedule=Schedule.PIPELINED,
    residency=Residency.STREAMED,
    chunk_tokens=64,
    staging_tokens=1024,
    keeps_activations=True,
)


def step_of(
    shape: ModelShape, profile: Profile, request: PlanInput, split: int, resident: int = 0
) -> float:
    """Return the seconds of a decode step over all tokens with this split, by the formula."""
    plan = plan_request(shape, profile, request)
    costs, staging = SplitCosts.of(shape, profile), request.staging_tokens
    length = request.cached_tokens + request.new_tokens
    options = PipelineOptions(
        request.schedule,
        plan.tile_tokens,
        slots=staging // plan.tile_tokens,
        scenario=Scenario.DECODE_STEP,
        compute_seconds=profile.step_compute_seconds,
        ahead=min(1.0, staging / length),
    )
    return costs.seconds(max(split - resident, 0), length - resident, options)


def test_the_split_is_the_best_of_a_step_not_of_a_restore() -> None:
    """The decode's own work leaves less of the device for rebuilding."""
    splits = []
    request = replace(STREAMED, staging_tokens=8192)
    for step in (0.0, 0.01, 0.02, 0.05):
        profile = replace(A100, step_compute_seconds=step)
        plan = plan_request(OPT, profile, request)
        splits.append(plan.split_tokens)
        # By then the new tokens are restored, too.
        split = round(plan.split_slope * 2048 + plan.split_intercept)
        assert split % 64 == 0
        assert plan.predicted_step_seconds == pytest.approx(step_of(OPT, profile, request, split))
        least = min(step_of(OPT, profile, request, split) for split in range(0, 2049, 64))
        # Loading is preferred where rebuilding saves less than 2 %.
        assert plan.predicted_step_seconds <= least / 0.98
    assert splits == sorted(splits, reverse=True)
    assert splits[0] > splits[2] > 0
    assert splits[-1] == 0
    slow = replace(A100, step_compute_seconds=0.05)
    assert ReasonKind.DEVICE_BUSY in dict(plan_request(OPT, slow, request).reasons)
    # What does not fit the staging memory cannot come while the device computes.
    assert plan_request(OPT, slow, replace(request, staging_tokens=512)).split_tokens > 512


def test_a_prompt_that_is_not_cached_yet_has_a_line_for_its_steps() -> None:
    request = replace(STREAMED, cached_tokens=0, new_tokens=2048)
    plan = plan_request(OPT, A100, request)
    assert (plan.method, plan.split_tokens) == (RestoreMethod.NONE, 0)
    assert plan.predicted_restore_seconds == 0
    split = plan.split_slope * 2048 + plan.split_intercept
    assert 1000 < split <= plan.split_cap
    assert plan.predicted_step_seconds == pytest.approx(
        step_of(OPT, A100, request, round(split)), rel=1e-9
    )
    assert dict(plan.reasons)[ReasonKind.SPLIT] == (round(split), 2048, "pipelined")
    assert ReasonKind.AT_FIRST not in dict(plan.reasons)


@pytest.mark.parametrize(
    ("forced", "reason"),
    [
        (LOADED, Reason(ReasonKind.ASKED_SPLIT, (0, 0))),
        (ForcedRestore(640), Reason(ReasonKind.ASKED_SPLIT, (640, 640))),
    ],
)
def test_a_wish_for_what_is_not_cached_yet_is_about_the_steps(
    forced: ForcedRestore, reason: Reason
) -> None:
    request = replace(STREAMED, cached_tokens=0, new_tokens=2048, forced=forced)
    plan = plan_request(OPT, A100, request)
    assert plan.method is RestoreMethod.NONE
    asked, (kind, (step, with_loading)) = plan.reasons
    assert (asked, kind) == (reason, ReasonKind.STEP)
    assert step == plan.predicted_step_seconds > 0
    assert (step != with_loading) == (forced != LOADED)


def test_a_growing_prefix_has_two_splits_and_the_reason_tells_them_apart() -> None:
    plan = plan_request(OPT, A100, replace(STREAMED, cached_tokens=1408, new_tokens=640))
    assert dict(plan.reasons)[ReasonKind.AT_FIRST] == (plan.split_tokens, 1408)
    assert dict(plan.reasons)[ReasonKind.SPLIT][1] == 2048


def test_the_request_may_know_its_step_better_than_the_profile() -> None:
    known = replace(STREAMED, step_compute_seconds=0.05)
    slow = replace(A100, step_compute_seconds=0.05)
    assert plan_request(OPT, A100, known) == plan_request(OPT, slow, STREAMED)


def test_a_resident_plan_predicts_no_step() -> None:
    resident = replace(STREAMED, residency=Residency.RESIDENT)
    assert plan_request(OPT, A100, resident).predicted_step_seconds == 0
    assert plan_request(OPT, A100, STREAMED).predicted_step_seconds > 0.01


def test_spare_memory_keeps_the_front_on_the_device() -> None:
    profile = replace(A100, step_compute_seconds=0.012)
    spare = 700 * OPT.kv_bytes_per_token
    without = plan_request(OPT, profile, STREAMED)
    plan = plan_request(OPT, profile, replace(STREAMED, spare_bytes=spare))
    assert plan.schedule is Schedule.PIPELINED
    assert plan.resident_tokens == 640  # whole chunks
    assert plan.resident_tokens < plan.split_tokens < plan.cached_tokens
    assert plan.predicted_step_seconds < 0.8 * without.predicted_step_seconds
    assert plan.predicted_load_seconds == without.predicted_load_seconds
    assert dict(plan.reasons)[ReasonKind.KEYS_STAY] == (640, 640 * OPT.kv_bytes_per_token)
    everything = replace(STREAMED, spare_bytes=2048 * OPT.kv_bytes_per_token)
    plan = plan_request(OPT, profile, everything)
    assert (plan.resident_tokens, plan.split_tokens) == (2048, 0)
    assert plan.predicted_step_seconds == 0.012
    assert dict(plan.reasons)[ReasonKind.LOADED] == (0, 2048)


def least_step_seconds(
    shape: ModelShape,
    costs: SplitCosts,
    cached: int,
    options: PipelineOptions,
    spare: int,
    chunk: int,
) -> float:
    """The least seconds over everything that may stay, K and V or X, and every split."""
    grid = [*range(0, cached, chunk), cached]
    least = float("inf")
    for kept in grid:
        if kept * shape.kv_bytes_per_token <= spare:
            rest = cached - kept
            least = min(
                least,
                *(costs.seconds(split, rest, options) for split in [*range(0, rest, chunk), rest]),
            )
        # X lies two chunks in a page, where K and V of one chunk would be.
        pages = -(-kept // (2 * chunk))
        if shape.activations_per_page and pages * shape.page_bytes(chunk) <= spare:
            row = replace(options, schedule=Schedule.ROW)
            least = min(least, costs.seconds(kept, cached, row))
    return least


def test_what_stays_is_the_best_of_all_three_way_splits() -> None:
    rng = random.Random(2)
    rows = 0
    for _ in range(300):
        shape = rng.choice([OPT, BUILT_IN_SHAPES["gemma-2-9b"], LLAMA])
        profile = replace(A100, rebuild_flops_per_second=10 ** rng.uniform(12, 15.5))
        costs = SplitCosts.of(shape, profile)
        chunk, cached = 64, rng.randint(1, 1500)
        step = rng.choice([0.0, 0.001, 0.02])
        options = PipelineOptions(Schedule.PIPELINED, 256, 4, Scenario.DECODE_STEP, step)
        spare = int(cached * shape.kv_bytes_per_token * rng.random())
        plan = best_stream_plan(
            shape, costs, cached, options, chunk_tokens=chunk, spare_bytes=spare
        )
        least = least_step_seconds(shape, costs, cached, options, spare, chunk)
        assert plan.seconds == pytest.approx(least, rel=1e-9)
        rows += plan.schedule is Schedule.ROW
    assert rows > 5


def test_resident_keys_and_values_always_beat_resident_activations_from_rho_1_on() -> None:
    """By brute force, not by the shortcut that the planner takes."""
    rng = random.Random(4)
    shapes = [shape for shape in BUILT_IN_SHAPES.values() if shape.rho >= 1]
    for _ in range(100):
        shape = rng.choice(shapes)
        profile = replace(A100, rebuild_flops_per_second=10 ** rng.uniform(12, 16))
        costs, cached = SplitCosts.of(shape, profile), rng.randint(1, 4000)
        step = rng.choice([0.0, 0.001])
        options = PipelineOptions(
            Schedule.PIPELINED, scenario=Scenario.DECODE_STEP, compute_seconds=step
        )
        spare = int(cached * shape.kv_bytes_per_token * rng.random())
        plan = best_stream_plan(shape, costs, cached, options, spare_bytes=spare)
        assert plan.schedule is Schedule.PIPELINED
        kept = min(spare // shape.activation_bytes_per_token, cached)
        row = min(
            costs.seconds(front, cached, replace(options, schedule=Schedule.ROW))
            for front in range(0, kept + 1, max(1, kept // 20))
        )
        assert plan.seconds <= row * (1 + 1e-9)


def test_activations_stay_where_the_device_would_wait_for_the_link() -> None:
    """MHA, an idle device, and a slow link: X of twice as many tokens serves more."""
    shape = OPT
    profile = replace(A100, link_bytes_per_second=5e9, rebuild_flops_per_second=1e15)
    spare = 900 * shape.kv_bytes_per_token
    plan = plan_request(shape, profile, replace(STREAMED, spare_bytes=spare))
    assert plan.schedule is Schedule.ROW
    assert plan.resident_tokens == plan.split_tokens > 900
    assert plan.method is RestoreMethod.SPLIT
    assert ReasonKind.INPUTS_STAY in dict(plan.reasons)
    plain = replace(STREAMED, spare_bytes=spare, keeps_activations=False)
    assert plan_request(shape, profile, plain).schedule is Schedule.PIPELINED
    # The serial twin loads, rebuilds and decodes in turn: nothing waits for the link alone.
    serial = replace(STREAMED, schedule=Schedule.SERIAL, spare_bytes=spare)
    assert plan_request(shape, profile, serial).schedule is Schedule.SERIAL


def test_a_forced_split_beside_a_resident_front() -> None:
    spare = 640 * OPT.kv_bytes_per_token
    forced = replace(STREAMED, spare_bytes=spare, forced=ForcedRestore(1000))
    plan = plan_request(OPT, A100, forced)
    assert (plan.resident_tokens, plan.split_tokens) == (640, 1000)
    assert plan.predicted_step_seconds == pytest.approx(
        step_of(OPT, A100, forced, 1000, resident=640)
    )
    # What is resident anyway is not rebuilt.
    below = plan_request(OPT, A100, replace(forced, forced=ForcedRestore(600)))
    assert (below.resident_tokens, below.split_tokens) == (640, 0)


def test_nothing_spare_nothing_stays() -> None:
    costs = SplitCosts.of(OPT, A100)
    options = PipelineOptions(Schedule.PIPELINED, scenario=Scenario.DECODE_STEP)
    plan = best_stream_plan(OPT, costs, 1000, options, spare_bytes=0, has_activations=False)
    assert plan == StreamPlan(1000, 0, 0, Schedule.PIPELINED, costs.seconds(0, 1000, options))


# -- streamed sequences of one batch share its step: they are planned as one -------------

# A step that takes longer than loading one sequence, and far less than loading 64.
H200 = replace(BUILT_IN_PROFILES["h200"], step_compute_seconds=0.010)
CHUNK = 64


def line_of(lengths: list[int]) -> SplitLine:
    return plan_batch(
        OPT,
        H200,
        lengths,
        has_activations=True,
        schedule=Schedule.PIPELINED,
        chunk_tokens=CHUNK,
        staging_tokens=16 * CHUNK,
    ).line


def test_alone_nothing_needs_rebuilding_and_together_all_of_it_pays() -> None:
    assert line_of([576]).at(576, CHUNK) == 0
    assert line_of([576] * 64).at(576, CHUNK) == 576


def test_lines_of_unequal_sequences_add_up_to_the_line_of_their_sum() -> None:
    lengths = [320, 640, 1600, 960, 1280, 704, 2000, 96]
    each, together = line_of(lengths), line_of([sum(lengths)])
    total = sum(each.slope * length + each.intercept for length in lengths)
    assert total == pytest.approx(together.slope * sum(lengths) + together.intercept, rel=0.02)


def test_a_sequence_may_grow_to_its_own_context() -> None:
    assert line_of([576] * 64).cap == OPT.context_length
