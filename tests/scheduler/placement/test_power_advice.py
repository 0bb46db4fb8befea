"""Test the advice on power: in the paper's range where the link is the limit, else none."""

from __future__ import annotations

import pytest

from scheduler_service.placement.power import RecentKappa, advise_power

CRIT = 3.35


def recent(cached: int, new: int, count: int = 100) -> RecentKappa:
    found = RecentKappa()
    for _ in range(count):
        found.placed(cached, new)
    return found


def test_the_papers_traces_give_the_papers_watts() -> None:
    """ShareGPT, K = 11,115 and T = 82, on cards of 700 W."""
    advice = advise_power(recent(11_115, 82), CRIT, 700)
    assert advice is not None
    assert advice.watts == 200
    assert "136 of recent requests is 40 x kappa_crit" in advice.reason


@pytest.mark.parametrize(
    ("times", "watts"), [(2.3, None), (2.4, 292), (3.0, 233), (3.6, 200), (100.0, 200)]
)
def test_the_cap_falls_with_the_link_share(times: float, watts: float | None) -> None:
    found = recent(int(1000 * times * CRIT), 1000)
    advice = advise_power(found, CRIT, 700)
    assert (advice and round(advice.watts)) == watts


def test_nothing_is_invented_without_a_card() -> None:
    assert advise_power(recent(11_115, 82), CRIT, 0.0) is None


def test_a_few_requests_say_nothing() -> None:
    assert recent(1000, 1, 19).ratio == pytest.approx(1000)
    assert advise_power(recent(1000, 1, 19), CRIT, 700) is None
    assert advise_power(recent(1000, 1, 20), CRIT, 700) is not None
    assert RecentKappa().ratio == 0


def test_advice_follows_the_requests_of_today() -> None:
    found = recent(11_115, 82, 1000)
    for _ in range(200):
        found.placed(0, 4000)
    assert advise_power(found, CRIT, 700) is None
