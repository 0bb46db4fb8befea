"""Test the closed form of a first token's time, against the planner and on its own."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitpoint.costs.first_token import IDLE, Backlog, FirstToken
from splitpoint.costs.profile import BUILT_IN_PROFILES, Profile
from splitpoint.planning.plan import PlanInput, Residency
from splitpoint.planning.planner import plan_request
from splitpoint.planning.schedule import Schedule
from splitpoint.shapes import BUILT_IN_SHAPES, ModelShape

PIECE = 8192
PROFILE = BUILT_IN_PROFILES["h100"]
SHAPE = BUILT_IN_SHAPES["llama-3-8b"]
# Multi-head: X is half as large as K and V, so that a split pays.
WIDE = BUILT_IN_SHAPES["llama-2-7b"]


def costs(shape: ModelShape, profile: Profile, schedule: Schedule, *, has_x: bool) -> FirstToken:
    return FirstToken.of(
        shape,
        profile,
        has_activations=has_x,
        overlaps=schedule is Schedule.PIPELINED,
        piece_tokens=PIECE,
    )


def planned(
    shape: ModelShape, profile: Profile, schedule: Schedule, cached: int, new: int, *, has_x: bool
) -> float:
    request = PlanInput(
        cached_tokens=cached,
        new_tokens=new,
        has_activations=has_x,
        schedule=schedule,
        residency=Residency.RESIDENT,
        chunk_tokens=64,
        staging_tokens=4096,
        prefill_tokens=PIECE,
    )
    return plan_request(shape, profile, request).predicted_ttft_seconds


def test_it_ranks_workers_as_the_planner_does() -> None:
    """The oracle: 300 seeded pairs of unlike workers, over all built-in models."""
    rng = random.Random(1)
    ratios, regrets = [], []
    for _ in range(300):
        shape = replace(rng.choice(list(BUILT_IN_SHAPES.values())), context_length=10**6)
        schedule = rng.choice([Schedule.PIPELINED, Schedule.PIPELINED, Schedule.SERIAL])
        has_x = rng.random() < 0.5
        cached, new = int(10 ** rng.uniform(1.5, 4.8)), int(10 ** rng.uniform(0, 3.8))
        both = []
        for _ in range(2):
            given_profile = rng.choice(list(BUILT_IN_PROFILES.values()))
            profile = replace(
                given_profile,
                link_bytes_per_second=given_profile.link_bytes_per_second * 2 ** rng.uniform(-3, 3),
                prefill_flops_per_second=given_profile.prefill_flops_per_second
                * 2 ** rng.uniform(-3, 3),
            )
            short = costs(shape, profile, schedule, has_x=has_x).seconds(cached, new)
            long = planned(shape, profile, schedule, cached, new, has_x=has_x)
            both.append((short, long))
            ratios.append(short / long)
        regrets.append(min(both)[1] / min(long for _, long in both))
    assert max(ratios) < 1.1, "almost a lower bound: it leaves out tiles, chunks and delays"
    assert statistics.median(ratios) > 0.95
    assert statistics.mean(regrets) < 1.01, "the worker that it prefers is as good"
    assert sum(regret > 1.02 for regret in regrets) <= len(regrets) / 25


COUNTS = st.integers(0, 100_000)
FACTORS = st.floats(1.0, 50.0)


@given(
    cached=COUNTS,
    new=st.integers(1, 50_000),
    on_device=COUNTS,
    tokens=COUNTS,
    size=st.integers(0, 10**11),
    factor=FACTORS,
    has_x=st.booleans(),
    overlaps=st.booleans(),
    shape=st.sampled_from([SHAPE, WIDE]),
)
def test_it_shrinks_with_link_and_compute_and_grows_with_what_is_queued(
    cached: int,
    new: int,
    on_device: int,
    tokens: int,
    size: int,
    factor: float,
    has_x: bool,
    overlaps: bool,
    shape: ModelShape,
) -> None:
    schedule = Schedule.PIPELINED if overlaps else Schedule.SERIAL
    device = min(cached, on_device)
    backlog = Backlog(tokens, size)

    def seconds(profile: Profile, cached: int = cached, queued: Backlog = backlog) -> float:
        return costs(shape, profile, schedule, has_x=has_x).seconds(
            cached, new, device=device, backlog=queued
        )

    now = seconds(PROFILE) * (1 + 1e-9)
    faster_link = PROFILE.link_bytes_per_second * factor
    assert seconds(replace(PROFILE, link_bytes_per_second=faster_link)) <= now
    faster = {
        name: getattr(PROFILE, name) * factor
        for name in ("prefill_flops_per_second", "rebuild_flops_per_second")
    }
    assert seconds(replace(PROFILE, **faster)) <= now
    assert now >= seconds(PROFILE, queued=IDLE)
    assert now <= seconds(PROFILE, queued=Backlog(tokens + 1000, size)) * (1 + 1e-9)
    assert now <= seconds(PROFILE, queued=Backlog(tokens, size + 10**9)) * (1 + 1e-9)


def test_a_long_prefix_follows_the_link_and_a_short_one_the_device() -> None:
    fast_link = replace(PROFILE, link_bytes_per_second=4 * PROFILE.link_bytes_per_second)
    fast_device = replace(PROFILE, prefill_flops_per_second=4 * PROFILE.prefill_flops_per_second)
    by_link = costs(SHAPE, fast_link, Schedule.PIPELINED, has_x=False)
    by_device = costs(SHAPE, fast_device, Schedule.PIPELINED, has_x=False)
    assert by_link.seconds(32_000, 64) < by_device.seconds(32_000, 64)
    assert by_device.seconds(500, 2000) < by_link.seconds(500, 2000)


def test_what_the_device_holds_needs_no_link() -> None:
    here = costs(SHAPE, PROFILE, Schedule.PIPELINED, has_x=False)
    assert here.seconds(8000, 64, device=8000) == here.prefill(64, 8000)
    # The link's queue does not matter then.
    assert here.seconds(8000, 64, device=8000, backlog=Backlog(0, 10**12)) == here.prefill(64, 8000)
    assert here.seconds(8000, 64, device=4000) < here.seconds(8000, 64)


def test_a_split_is_taken_where_it_pays() -> None:
    loads = costs(WIDE, PROFILE, Schedule.SERIAL, has_x=False).restore(8000)
    splits = costs(WIDE, PROFILE, Schedule.SERIAL, has_x=True).restore(8000)
    assert splits < 0.9 * loads
    grouped = costs(SHAPE, PROFILE, Schedule.SERIAL, has_x=True).restore(8000)
    assert grouped == pytest.approx(
        costs(SHAPE, PROFILE, Schedule.SERIAL, has_x=False).restore(8000)
    ), "X is larger than K and V of grouped queries"
