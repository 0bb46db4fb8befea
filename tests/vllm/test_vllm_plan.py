"""The plan of the vLLM connector: load a found prefix, or let the engine compute it."""

from __future__ import annotations

import pytest

from splitpoint_vllm.plan import REMEASURE_SECONDS, LoadPlanner, Reason

MIB = 1 << 20


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def planner_of(clock: Clock, *, load_rate: float, token_rate: float) -> LoadPlanner:
    """A planner that measured loads of this many bytes per second and prefills of tokens."""
    planner = LoadPlanner(clock)
    for mebibytes in (1, 4, 16):
        planner.measured_load(mebibytes * MIB, mebibytes * MIB / load_rate)
    for tokens in (128, 512, 2048):
        planner.measured_step(tokens, 0.01 + tokens / token_rate)
    return planner


def test_a_prefix_is_loaded_before_anything_was_measured(clock: Clock) -> None:
    plan = LoadPlanner(clock).plan(1920, 128, 30 * MIB)
    assert (plan.tokens, plan.reason) == (1920, Reason.LOADED)
    assert plan.load_seconds is None
    assert plan.compute_seconds is None


def test_a_prefix_is_loaded_while_only_one_side_is_known(clock: Clock) -> None:
    loads, steps = LoadPlanner(clock), LoadPlanner(clock)
    loads.measured_load(MIB, 10.0)
    steps.measured_step(2048, 1e-3)
    assert loads.plan(128, 128, MIB).reason is Reason.LOADED
    assert steps.plan(128, 128, MIB).reason is Reason.LOADED


def test_the_faster_way_is_taken_with_its_predictions(clock: Clock) -> None:
    fast = planner_of(clock, load_rate=1e9, token_rate=1000).plan(1000, 100, 10**8)
    assert (fast.tokens, fast.reason) == (1000, Reason.LOADED)
    assert fast.load_seconds == pytest.approx(0.1, rel=0.05)
    # The overhead of a step is not the request's.
    assert fast.compute_seconds == pytest.approx(1.0, rel=0.05)
    slow = planner_of(clock, load_rate=1e7, token_rate=1000).plan(1000, 100, 10**8)
    assert (slow.tokens, slow.reason) == (0, Reason.SLOWER)
    assert slow.load_seconds == pytest.approx(10.0, rel=0.05)


@pytest.mark.parametrize("found", [100, 1000, 10_000])
def test_the_decision_changes_where_both_take_equally_long(clock: Clock, found: int) -> None:
    # 1,000 tokens/s against 1e6 bytes/s: equal at 1,000 bytes a token.
    planner = planner_of(clock, load_rate=1e6, token_rate=1000)
    assert planner.plan(found, 100, found * 900).reason is Reason.LOADED
    assert planner.plan(found, 100, found * 1100).reason is Reason.SLOWER


def test_loads_that_wait_before_it_count(clock: Clock) -> None:
    planner = planner_of(clock, load_rate=1e6, token_rate=1000)
    assert planner.plan(1000, 100, 500_000).reason is Reason.LOADED
    assert planner.plan(1000, 100, 500_000, waiting_bytes=600_000).reason is Reason.SLOWER


def test_a_link_that_became_faster_is_noticed(clock: Clock) -> None:
    planner = planner_of(clock, load_rate=1e6, token_rate=1000)
    assert planner.plan(1000, 100, 10**7).reason is Reason.SLOWER
    clock.seconds += REMEASURE_SECONDS
    again = planner.plan(1000, 100, 10**7)
    assert (again.tokens, again.reason) == (100, Reason.REMEASURED)
    # One request pays for the measurement, not those beside it.
    assert planner.plan(1000, 100, 10**7).reason is Reason.SLOWER
    planner.measured_load(10**6, 10**6 / 1e9)
    assert planner.plan(1000, 100, 10**7).reason is Reason.LOADED


def test_a_load_of_less_than_a_chunk_is_not_made_larger(clock: Clock) -> None:
    planner = planner_of(clock, load_rate=1e3, token_rate=1000)
    clock.seconds += REMEASURE_SECONDS
    assert planner.plan(60, 100, 10**6).tokens == 60


def test_slow_loads_end_in_refusals_and_nothing_else(clock: Clock) -> None:
    planner = planner_of(clock, load_rate=1e9, token_rate=1000)
    assert planner.plan(1000, 100, 10**7).reason is Reason.LOADED
    for _ in range(10):
        planner.measured_load(10**7, 100.0)
    assert planner.plan(1000, 100, 10**7).reason is Reason.SLOWER
