"""The breaker alone: seconds pass when the test says so."""

from __future__ import annotations

from splitpoint.discovery.redis_link import Breaker, State


def fail(breaker: Breaker, now: float) -> None:
    assert breaker.may_try(now)
    breaker.failed(now)


def opened() -> Breaker:
    """Opened at second 0, for one second."""
    breaker = Breaker()
    for _ in range(3):
        fail(breaker, 0.0)
    return breaker


def test_it_opens_after_three_failures_in_a_row() -> None:
    breaker = Breaker()
    fail(breaker, 0)
    fail(breaker, 0)
    assert breaker.may_try(0)
    breaker.succeeded()
    fail(breaker, 0)
    fail(breaker, 0)
    assert breaker.state.name == State.CLOSED.name
    fail(breaker, 0)
    assert breaker.state.name == State.OPEN.name
    assert not breaker.may_try(0.99)


def test_one_probe_when_the_time_is_over() -> None:
    breaker = opened()
    assert breaker.may_try(1.0)
    assert not breaker.may_try(1.0)
    assert breaker.state is State.HALF_OPEN
    breaker.succeeded()
    assert breaker.may_try(1.0)
    assert breaker.may_try(1.0)


def test_failed_probes_double_the_time_up_to_ten_seconds() -> None:
    breaker = opened()
    now, waits = 0.0, []
    for wait in (1, 2, 4, 8, 10, 10):
        assert not breaker.may_try(now + wait - 0.01)
        now += wait
        waits.append(wait)
        fail(breaker, now)
    breaker.may_try(now, is_heartbeat=True)
    breaker.succeeded()
    for _ in range(3):
        fail(breaker, now)
    assert not breaker.may_try(now + 0.99)
    assert breaker.may_try(now + 1)


def test_failures_that_come_late_do_not_prolong_it() -> None:
    breaker = opened()
    breaker.failed(0.9)
    assert breaker.may_try(1.0)


def test_a_heartbeat_goes_through_and_closes_it() -> None:
    breaker = opened()
    assert breaker.may_try(0.5, is_heartbeat=True)
    assert not breaker.may_try(0.5)
    breaker.succeeded()
    assert breaker.may_try(0.5)


def test_an_abandoned_probe_says_nothing() -> None:
    breaker = opened()
    assert breaker.may_try(1.0)
    breaker.gave_up(1.0)
    assert breaker.state is State.OPEN
    assert breaker.may_try(1.0)
    breaker.failed(1.0)
    assert not breaker.may_try(2.99)
    assert breaker.may_try(3.0)
