"""The planner's choices against brute force, and their reasons."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from splitpoint.costs.profile import BUILT_IN_PROFILES, Profile, fit_line
from splitpoint.errors import InvalidArgument
from splitpoint.planning.plan import (
    LOADED,
    RECOMPUTED,
    ForcedRestore,
    Objective,
    Plan,
    PlanInput,
    ReasonKind,
    Residency,
    RestoreMethod,
    SplitLine,
)
from splitpoint.planning.planner import plan_request
from splitpoint.planning.schedule import Schedule
from splitpoint.planning.split_costs import SplitCosts
from splitpoint.planning.token_recompute import TokenRecompute
from splitpoint.planning.words import in_words
from splitpoint.shapes import BUILT_IN_SHAPES, Encoding, ModelShape

H100 = BUILT_IN_PROFILES["h100"]
LLAMA = BUILT_IN_SHAPES["llama-3-8b"]
OPT = BUILT_IN_SHAPES["opt-6.7b"]
GEMMA = BUILT_IN_SHAPES["gemma-2-9b"]
PIPELINED = PlanInput(
    2000, 48, True, schedule=Schedule.PIPELINED, chunk_tokens=64, staging_tokens=1024
)


def random_profile(rng: random.Random) -> Profile:
    """From slow links with a fast device to the other way round."""
    return Profile(
        link_bytes_per_second=10 ** rng.uniform(8, 11),
        link_overhead_seconds=rng.choice([0.0, 10 ** rng.uniform(-6, -4)]),
        rebuild_flops_per_second=10 ** rng.uniform(11, 15),
        rebuild_overhead_seconds=rng.choice([0.0, 10 ** rng.uniform(-6, -4)]),
        prefill_flops_per_second=10 ** rng.uniform(11, 15),
        prefill_overhead_seconds=rng.choice([0.0, 10 ** rng.uniform(-4, -2)]),
        step_compute_seconds=rng.choice([0.0, 10 ** rng.uniform(-4, -1)]),
    )


@pytest.mark.parametrize("schedule", [Schedule.COLUMN, Schedule.PIPELINED])
def test_grouped_queries_load_everything_and_say_why(schedule: Schedule) -> None:
    plan = plan_request(LLAMA, H100, replace(PIPELINED, schedule=schedule))
    assert plan.split_tokens == 0
    assert plan.method is RestoreMethod.LOAD
    assert dict(plan.reasons)[ReasonKind.CANNOT_PAY] == (2.0,)
    assert plan.predicted_restore_seconds == plan.predicted_load_seconds
    if schedule is Schedule.PIPELINED:
        # Recomputing from token ids was thought of, too.
        assert {ReasonKind.TOKENS_INSTEAD, ReasonKind.FIRST_CHUNK} & dict(plan.reasons).keys()


def test_multi_head_attention_splits_on_a_fast_gpu() -> None:
    plan = plan_request(
        OPT, H100, PlanInput(2048, 64, has_activations=True, schedule=Schedule.COLUMN)
    )
    assert 0 < plan.split_tokens < 2048
    assert plan.method is RestoreMethod.SPLIT
    assert plan.predicted_restore_seconds < 0.75 * plan.predicted_load_seconds
    line = plan.split_slope * 2048 + plan.split_intercept
    assert line == pytest.approx(plan.split_tokens)


def test_the_pipeline_halves_the_restore_of_multi_head_attention() -> None:
    a100 = BUILT_IN_PROFILES["a100-80"]
    plan = plan_request(OPT, a100, PIPELINED)
    column = plan_request(OPT, a100, replace(PIPELINED, schedule=Schedule.COLUMN))
    assert plan.schedule is Schedule.PIPELINED
    assert plan.split_tokens % 64 == 0
    assert plan.tile_tokens % 64 == 0
    assert plan.predicted_restore_seconds < 0.58 * plan.predicted_load_seconds
    assert column.predicted_restore_seconds > 1.15 * plan.predicted_restore_seconds
    link, device = dict(plan.reasons)[ReasonKind.LIMIT]
    assert link == pytest.approx(device, rel=0.1)


def test_nothing_cached() -> None:
    for schedule in Schedule:
        plan = plan_request(
            BUILT_IN_SHAPES["opt-125m"],
            H100,
            PlanInput(0, 7, has_activations=True, schedule=schedule),
        )
        assert (plan.split_tokens, plan.method) == (0, RestoreMethod.NONE)
        assert plan.predicted_restore_seconds == 0
        assert plan.reasons == ()


def test_forced_split_is_capped_and_needs_activations() -> None:
    shape = BUILT_IN_SHAPES["opt-125m"]
    plan = plan_request(shape, H100, PlanInput(100, 5, True, forced=ForcedRestore(500)))
    assert plan.split_tokens == 100
    assert plan.method is RestoreMethod.RECOMPUTE
    assert dict(plan.reasons)[ReasonKind.ASKED_SPLIT] == (500, 100)
    followed = plan_request(shape, H100, PlanInput(100, 5, True, forced=ForcedRestore(64)))
    assert dict(followed.reasons)[ReasonKind.ASKED_SPLIT] == (64, 64)
    cold = plan_request(shape, H100, PlanInput(0, 5, True, forced=ForcedRestore(64)))
    assert dict(cold.reasons) == {ReasonKind.ASKED_SPLIT: (64, 0)}
    with pytest.raises(InvalidArgument, match="no activations") as caught:
        PlanInput(100, 5, has_activations=False, forced=ForcedRestore(1))
    assert caught.value.field == "split_tokens"
    assert plan_request(shape, H100, PlanInput(100, 5, False, forced=ForcedRestore(0)))


def test_a_forced_split_is_never_answered_with_token_ids() -> None:
    # A device so fast that recomputing would win.
    fast = replace(H100, prefill_flops_per_second=1e18, prefill_overhead_seconds=0.0)
    assert plan_request(LLAMA, fast, PIPELINED).method is RestoreMethod.TOKENS
    for split, method in ((0, RestoreMethod.LOAD), (100, RestoreMethod.SPLIT)):
        plan = plan_request(LLAMA, fast, replace(PIPELINED, forced=ForcedRestore(split)))
        assert (plan.method, plan.split_tokens, plan.recomputed_tokens) == (method, split, 0)


def test_row_schedule_can_split_grouped_queries() -> None:
    # With X on the device already, only the rebuild competes with the link.
    plan = plan_request(
        LLAMA, H100, PlanInput(4096, 64, has_activations=True, schedule=Schedule.ROW)
    )
    assert plan.split_tokens > 0


# -- token ids --------------------------------------------------------------------------


def recompute_of(profile: Profile, plan: PlanInput, shape: ModelShape = LLAMA) -> TokenRecompute:
    costs = SplitCosts.of(shape, profile)
    return TokenRecompute(
        shape, profile, costs, plan.cached_tokens, plan.chunk_tokens, plan.prefill_tokens
    )


def test_the_expected_meeting_point_equals_brute_force() -> None:
    rng = random.Random(3)
    inside = 0
    for _ in range(300):
        cached, chunk = rng.randint(1, 3000), rng.choice([16, 64])
        request = replace(PIPELINED, cached_tokens=cached, chunk_tokens=chunk)
        recompute = recompute_of(random_profile(rng), request)

        def slower(tokens: int, recompute: TokenRecompute = recompute) -> float:
            rest = recompute.cached - tokens
            return max(
                recompute.block_seconds(0, tokens) if tokens else 0.0,
                recompute.load_seconds(rest) if rest else 0.0,
            )

        point = recompute.expected_point()
        assert point % chunk == 0 or point == cached
        least = min(slower(tokens) for tokens in [*range(0, cached, chunk), cached])
        assert slower(point) == pytest.approx(least, rel=1e-12)
        inside += 0 < point < cached
    assert inside > 100


def test_both_ends_on_paper_take_little_more_than_they_must() -> None:
    rng = random.Random(8)
    over = []
    for _ in range(200):
        profile = replace(
            random_profile(rng), link_overhead_seconds=0.0, prefill_overhead_seconds=0.0
        )
        cached = rng.randint(500, 4000)
        request = replace(PIPELINED, cached_tokens=cached, prefill_tokens=rng.choice([0, 512]))
        recompute = recompute_of(profile, request)
        estimate = recompute.estimate()
        assert 0 <= estimate.recomputed <= cached
        assert estimate.recomputed % 64 == 0 or estimate.recomputed == cached
        assert estimate.seconds == max(estimate.link_seconds, estimate.compute_seconds)
        # All of it, once: what is not computed was loaded, the last chunk whole.
        loaded = estimate.link_seconds / (LLAMA.layer_count * recompute.costs.load)
        last = -cached % 64 if estimate.recomputed < cached else 0
        assert loaded == pytest.approx(cached + last - estimate.recomputed, abs=1e-6)
        point = recompute.expected_point()
        bound = max(recompute.block_seconds(0, point), recompute.load_seconds(cached - point))
        over.append(estimate.seconds / bound)
        serial = recompute.estimate(overlapped=False)
        assert serial.recomputed == point
        assert serial.seconds == serial.link_seconds + serial.compute_seconds
    over.sort()
    assert over[len(over) * 3 // 4] < 1.1


def test_grouped_queries_meet_in_the_middle_where_both_alone_take_equally_long() -> None:
    slow = replace(H100, link_bytes_per_second=184e6, link_overhead_seconds=1e-4)
    load = plan_request(LLAMA, slow, PIPELINED).predicted_load_seconds
    profile = replace(
        slow,
        prefill_flops_per_second=LLAMA.prefill_flops(2000) / load,
        prefill_overhead_seconds=5e-3,
    )
    plan = plan_request(LLAMA, profile, PIPELINED)
    assert plan.method is RestoreMethod.TOKENS
    assert plan.split_tokens == 0
    assert 900 < plan.recomputed_tokens < 1100
    assert plan.predicted_restore_seconds < 0.6 * load
    assert dict(plan.reasons)[ReasonKind.RECOMPUTED] == (plan.recomputed_tokens, 2000)


def test_token_ids_are_for_resident_restores_that_overlap() -> None:
    fast = replace(H100, prefill_flops_per_second=1e18, prefill_overhead_seconds=0.0)
    for request in (
        replace(PIPELINED, residency=Residency.STREAMED),
        replace(PIPELINED, schedule=Schedule.SERIAL),
    ):
        assert plan_request(LLAMA, fast, request).method is RestoreMethod.LOAD
    bare = replace(PIPELINED, has_activations=False)
    assert plan_request(OPT, fast, bare).method is RestoreMethod.TOKENS


def test_a_client_may_ask_for_token_ids_or_for_loading() -> None:
    tokens = plan_request(LLAMA, H100, replace(PIPELINED, forced=RECOMPUTED))
    assert tokens.method is RestoreMethod.TOKENS
    assert ReasonKind.ASKED_TOKENS in dict(tokens.reasons)
    load = plan_request(OPT, H100, replace(PIPELINED, forced=LOADED))
    assert (load.method, load.split_tokens) == (RestoreMethod.LOAD, 0)
    seconds = load.predicted_load_seconds
    assert dict(load.reasons) == {
        ReasonKind.ASKED_SPLIT: (0, 0),
        ReasonKind.PREDICTED: (seconds, seconds),
    }
    serial = replace(PIPELINED, schedule=Schedule.SERIAL, forced=RECOMPUTED)
    twin = plan_request(LLAMA, H100, serial)
    assert twin.method is RestoreMethod.TOKENS
    assert twin.predicted_restore_seconds > tokens.predicted_restore_seconds
    nothing = plan_request(LLAMA, H100, replace(PIPELINED, cached_tokens=0, forced=RECOMPUTED))
    assert nothing.method is RestoreMethod.NONE
    assert nothing.reasons == ()
    few = replace(PIPELINED, cached_tokens=64, forced=RECOMPUTED)
    whole = plan_request(LLAMA, replace(H100, prefill_overhead_seconds=10.0), few)
    assert whole.recomputed_tokens == 0
    assert dict(whole.reasons)[ReasonKind.RECOMPUTED] == (0, 64)
    itself, against = dict(whole.reasons)[ReasonKind.PREDICTED]
    assert itself == against
    with pytest.raises(InvalidArgument, match="load or tokens, not split"):
        ForcedRestore.of(None, RestoreMethod.SPLIT)
    with pytest.raises(InvalidArgument, match="not both"):
        ForcedRestore.of(0, RestoreMethod.LOAD)
    with pytest.raises(InvalidArgument, match="resident") as caught:
        replace(PIPELINED, forced=RECOMPUTED, residency=Residency.STREAMED)
    assert caught.value.field == "restore_method"


# -- the choice ---------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [Schedule.SERIAL, Schedule.COLUMN, Schedule.PIPELINED])
def test_no_plan_is_predicted_slower_than_loading(schedule: Schedule) -> None:
    rng = random.Random(schedule.value)
    methods = set()
    for _ in range(300):
        shape = rng.choice(list(BUILT_IN_SHAPES.values()))
        request = PlanInput(
            rng.randint(1, min(8000, shape.context_length - 100)),
            rng.randint(1, 100),
            has_activations=rng.random() < 0.8,
            schedule=schedule,
            residency=rng.choice(list(Residency)),
            objective=rng.choice(list(Objective)),
            chunk_tokens=rng.choice([16, 64]),
            staging_tokens=rng.choice([0, 1024]),
            spare_bytes=rng.choice([0, 0, 1 << 28]),
        )
        plan = plan_request(shape, random_profile(rng), request)
        if request.residency is Residency.RESIDENT:
            methods.add(plan.method)
        if request.objective is Objective.LATENCY and request.residency is Residency.RESIDENT:
            assert plan.predicted_restore_seconds <= plan.predicted_load_seconds
        if not shape.activations_can_pay and request.residency is Residency.RESIDENT:
            assert plan.split_tokens == 0
        assert plan.split_tokens % request.chunk_tokens == 0 or plan.split_tokens in (
            request.cached_tokens,
            plan.resident_tokens,
        )
        assert 0 <= plan.split_tokens <= request.cached_tokens
        line = plan.split_slope * request.cached_tokens + plan.split_intercept
        off = 1e-6 if request.residency is Residency.RESIDENT else request.chunk_tokens
        if plan.split_tokens not in (0, request.cached_tokens):
            assert plan.split_tokens == pytest.approx(min(line, plan.split_cap), abs=off)
        assert plan.reasons
        assert in_words(plan).reason
    expected = {RestoreMethod.LOAD, RestoreMethod.RECOMPUTE}
    if schedule is not Schedule.SERIAL:
        expected.add(RestoreMethod.SPLIT)
    if schedule is Schedule.PIPELINED:
        expected.add(RestoreMethod.TOKENS)
    assert methods == expected


def test_what_saves_less_than_2_percent_is_not_done() -> None:
    base = PlanInput(2000, 48, True, schedule=Schedule.COLUMN)
    seen = {RestoreMethod.LOAD: 0, RestoreMethod.SPLIT: 0}
    for rate in range(1, 200):
        profile = replace(H100, rebuild_flops_per_second=rate * 1e12)
        plan = plan_request(GEMMA, profile, base)
        ratio = plan.predicted_restore_seconds / plan.predicted_load_seconds
        assert plan.method in seen
        seen[plan.method] += 1
        assert ratio == 1 if plan.method is RestoreMethod.LOAD else ratio < 0.98
    assert min(seen.values()) > 5


@pytest.mark.parametrize(
    ("shape", "profile", "request_", "kinds"),
    [
        (
            OPT,
            H100,
            replace(PIPELINED, has_activations=False),
            [ReasonKind.RECOMPUTED, ReasonKind.NO_ACTIVATIONS],
        ),
        (
            OPT,
            replace(H100, rebuild_flops_per_second=1e12, prefill_flops_per_second=1e12),
            PIPELINED,
            [ReasonKind.REBUILD_COSTS],
        ),
        (
            OPT,
            replace(H100, link_overhead_seconds=5e-3, rebuild_overhead_seconds=5e-3),
            replace(PIPELINED, cached_tokens=100, schedule=Schedule.COLUMN),
            [ReasonKind.OVERHEADS],
        ),
        (
            OPT,
            H100,
            replace(PIPELINED, schedule=Schedule.COLUMN),
            [ReasonKind.SPLIT, ReasonKind.LIMIT],
        ),
        (
            LLAMA,
            replace(H100, prefill_flops_per_second=1e17, prefill_overhead_seconds=0.0),
            PIPELINED,
            [ReasonKind.RECOMPUTED, ReasonKind.CANNOT_PAY],
        ),
        (
            OPT,
            replace(H100, prefill_flops_per_second=1e17, prefill_overhead_seconds=0.0),
            PIPELINED,
            [ReasonKind.SPLIT_INSTEAD],
        ),
        (
            OPT,
            replace(H100, rebuild_flops_per_second=1e13),
            replace(PIPELINED, schedule=Schedule.SERIAL),
            [ReasonKind.REBUILD_COSTS, ReasonKind.TOKENS_NOT_CONSIDERED],
        ),
        (OPT, H100, PIPELINED, [ReasonKind.SPLIT]),
    ],
)  # fmt: skip
def test_reasons_say_why(
    shape: ModelShape, profile: Profile, request_: PlanInput, kinds: Sequence[ReasonKind]
) -> None:
    assert dict(plan_request(shape, profile, request_).reasons).keys() >= set(kinds)


def test_what_gains_too_little_says_how_little() -> None:
    """Three digits of both times may be the same. Here one chunk of 125 is not loaded."""
    bare = replace(PIPELINED, has_activations=False, cached_tokens=8000)
    free = replace(H100, link_overhead_seconds=0.0)
    loading = plan_request(OPT, free, bare).predicted_load_seconds
    for share, is_less in ((0.8, True), (1.0, False)):
        slow = replace(free, prefill_overhead_seconds=share * loading)
        plan = plan_request(OPT, slow, bare)
        assert plan.method is RestoreMethod.LOAD
        _, instead, chosen = dict(plan.reasons)[ReasonKind.TOKENS_INSTEAD]
        assert isinstance(instead, float)
        assert isinstance(chosen, float)
        assert 0.98 * chosen < instead
        assert (instead < chosen) == is_less


def test_smaller_bytes_on_the_link_move_the_split() -> None:
    int8 = replace(PIPELINED, encoding=Encoding.INT8)
    a100 = BUILT_IN_PROFILES["a100-80"]
    native, encoded = (plan_request(OPT, a100, request) for request in (PIPELINED, int8))
    assert encoded.predicted_load_seconds < 0.53 * native.predicted_load_seconds
    assert 0 < encoded.split_tokens < native.split_tokens
    assert encoded.predicted_restore_seconds < native.predicted_restore_seconds


# -- objectives -----------------------------------------------------------------------------


def busier(plan: Plan, shape: ModelShape, profile: Profile, request: PlanInput) -> float:
    """Return for how long the request occupies the busier of link and device."""
    costs = SplitCosts.of(shape, profile)
    prefill = plan.predicted_ttft_seconds - plan.predicted_restore_seconds
    if plan.method is RestoreMethod.TOKENS:
        estimate = recompute_of(
            profile, replace(request, cached_tokens=plan.cached_tokens), shape
        ).estimate()
        return max(estimate.link_seconds, estimate.compute_seconds + prefill)
    link = costs.link_seconds(plan.split_tokens, plan.cached_tokens, plan.tile_tokens)
    return max(link, costs.rebuild_seconds(plan.split_tokens, plan.tile_tokens) + prefill)


def test_throughput_takes_least_of_the_busier_resource_and_latency_least_time() -> None:
    rng = random.Random(11)
    differ = 0
    for _ in range(200):
        shape = rng.choice([OPT, LLAMA, GEMMA])
        profile = random_profile(rng)
        request = replace(PIPELINED, cached_tokens=rng.randint(64, 4000))
        for_all = replace(request, objective=Objective.THROUGHPUT)
        latency, throughput = (plan_request(shape, profile, each) for each in (request, for_all))
        assert throughput.objective is Objective.THROUGHPUT
        assert ReasonKind.THROUGHPUT in dict(throughput.reasons)
        # Up to the 2 % that are not worth a second way.
        assert (
            busier(throughput, shape, profile, request)
            <= busier(latency, shape, profile, request) / 0.98
        )
        assert latency.predicted_restore_seconds <= throughput.predicted_restore_seconds / 0.98
        differ += (latency.split_tokens, latency.method) != (
            throughput.split_tokens,
            throughput.method,
        )
    assert differ > 20


def test_throughput_leaves_the_device_to_the_prefill() -> None:
    """Latency rebuilds; with a long prefill of its own a request rather loads."""
    request = replace(PIPELINED, new_tokens=2000, objective=Objective.THROUGHPUT)
    a100 = BUILT_IN_PROFILES["a100-80"]
    assert plan_request(OPT, a100, request).method is RestoreMethod.LOAD
    assert plan_request(OPT, a100, replace(request, new_tokens=1)).split_tokens > 1000
    latency = replace(request, objective=Objective.LATENCY)
    assert plan_request(OPT, a100, latency).split_tokens > 1000
    assert ReasonKind.DEVICE_BUSY in dict(plan_request(OPT, a100, request).reasons)


# -- profiles -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"link_bytes_per_second": 0.0},
        {"link_bytes_per_second": float("nan")},
        {"rebuild_flops_per_second": -1.0},
        {"link_overhead_seconds": float("inf")},
    ],
)
def test_profile_refuses_impossible_costs(change: dict[str, Any]) -> None:
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


@pytest.mark.parametrize("schedule", [Schedule.SERIAL, Schedule.COLUMN, Schedule.PIPELINED])
def test_a_schedule_without_overlap_says_that_token_ids_were_not_considered(
    schedule: Schedule,
) -> None:
    gqa = BUILT_IN_SHAPES["llama-3-8b"]
    request = PlanInput(cached_tokens=2000, new_tokens=64, has_activations=False, schedule=schedule)
    reasons = dict(plan_request(gqa, BUILT_IN_PROFILES["a100-80"], request).reasons)
    said = None if schedule is Schedule.PIPELINED else (schedule.value,)
    assert reasons.get(ReasonKind.TOKENS_NOT_CONSIDERED) == said


def test_recomputing_nothing_is_never_chosen() -> None:
    """It is loading everything, which a plan must not compare with itself."""
    slow = replace(H100, operation_overhead_seconds=1e-4, restore_overhead_seconds=1e-3)
    for cached in (1, 8, 64, 200, 1000):
        plan = plan_request(LLAMA, slow, replace(PIPELINED, cached_tokens=cached))
        assert plan.method is not RestoreMethod.TOKENS or plan.recomputed_tokens > 0


def test_few_tokens_are_recomputed_where_the_overheads_of_a_load_take_longer() -> None:
    overheads = replace(H100, operation_overhead_seconds=1e-4, restore_overhead_seconds=1e-3)
    request = replace(PIPELINED, has_activations=False, cached_tokens=64)
    assert plan_request(LLAMA, overheads, request).method is RestoreMethod.LOAD
    for cached in (1, 8):
        plan = plan_request(LLAMA, overheads, replace(request, cached_tokens=cached))
        assert (plan.method, plan.recomputed_tokens) == (RestoreMethod.TOKENS, cached)
        assert plan.predicted_restore_seconds == plan.predicted_recompute_seconds
        assert plan.predicted_restore_seconds < 0.98 * plan.predicted_load_seconds
    rng = random.Random(29)
    loaded = 0
    for _ in range(300):
        request = replace(PIPELINED, cached_tokens=rng.randint(1, 100))
        plan = plan_request(rng.choice([OPT, LLAMA, GEMMA]), random_profile(rng), request)
        # Whatever was chosen: no headline names an alternative that is quicker.
        others = (plan.predicted_load_seconds, plan.predicted_recompute_seconds)
        assert 0.98 * plan.predicted_restore_seconds <= min(others)
        loaded += plan.method is RestoreMethod.LOAD
    assert 0 < loaded < 300


# -- the line that a split follows: clamped, rounded to whole chunks, never beyond the end ---


@pytest.mark.parametrize(
    ("line", "tokens", "quantum", "split"),
    [
        (SplitLine(0.5, 4.0, 1000), 79, 16, 48),
        (SplitLine(0.5, 4.0, 1000), 79, 1, 44),
        (SplitLine(0.5, 4.0, 32), 79, 16, 32),  # the cap
        (SplitLine(0.5, -40.0, 1000), 79, 16, 0),  # below 0
        (SplitLine(0.5, 0.0, 1000), 15, 16, 0),  # 7.5 are nearer to none than to a chunk
        (SplitLine(1.0, 0.0, 1000), 79, 16, 79),  # all of them, in chunks or not
        (SplitLine(1.0, -1.0, 1000), 79, 16, 79),  # 78 round to 80, of which there are 79
        (SplitLine(0.0, 37.0, 37), 500, 1, 37),  # a split that was asked for
        (SplitLine(0.0, 0.0, 0), 500, 16, 0),
    ],
)
def test_a_split_follows_its_line(line: SplitLine, tokens: int, quantum: int, split: int) -> None:
    assert line.at(tokens, quantum) == split


@pytest.mark.parametrize(
    ("slope", "intercept", "cap", "field"),
    [
        (math.nan, 0.0, 0, "split_slope"),
        (0.0, math.inf, 0, "split_intercept"),
        (0.0, 0.0, -1, "split_cap"),
    ],
)
def test_what_is_no_line_is_refused(slope: float, intercept: float, cap: int, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        SplitLine(slope, intercept, cap)
    assert caught.value.field == field
