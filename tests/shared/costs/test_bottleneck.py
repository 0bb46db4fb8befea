"""The bottleneck paper's equations: hand examples, published figures, and what follows of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from splitpoint.costs.bottleneck import Bottleneck, kappa_crit
from splitpoint.costs.profile import BUILT_IN_PROFILES
from splitpoint.shapes import BUILT_IN_SHAPES, Encoding

# FLOP and bytes per token, bytes and FLOP per second: F_pf 12, B_kv 4, BW 6, C 9.
BY_HAND = Bottleneck(12, 4, 6, 9)
# The paper's Llama-3.1-405B with the numbers of its text, on an H100 (2.3, 3.1).
LARGE = Bottleneck(810e9, 516e3, 64e9, 2e15)


def test_by_hand() -> None:
    """K = 9 and T = 3: 36 bytes take 6 s, 36 FLOP take 4 s."""
    assert BY_HAND.kappa_model == 3
    assert BY_HAND.kappa_hardware == pytest.approx(2 / 3)
    assert BY_HAND.kappa_crit == pytest.approx(2)
    assert (BY_HAND.link_seconds(9), BY_HAND.compute_seconds(3)) == (6, 4)
    assert [BY_HAND.ttft(9, 3, overlap) for overlap in (0, 0.5, 1)] == [10, 8, 6]
    assert (BY_HAND.utilisation(9, 3), BY_HAND.link_overhead(9, 3)) == (0.4, 1.5)
    assert BY_HAND.requests_at_once(120, 9, 3) == 2.5
    assert BY_HAND.scheduled_tokens(120, 9, 3) == 6
    # At kappa 3 the link brings 2 tokens' worth of work in the time of 3.
    assert BY_HAND.attainable_flops(3) == pytest.approx(6)
    assert BY_HAND.attainable_flops(1) == 9


@pytest.mark.parametrize(("cached", "new"), [(0, 1), (7, 3), (10_000, 1), (5, 5)])
def test_overhead_is_the_inverse_of_utilisation_less_one(cached: int, new: int) -> None:
    """Eq. 8; and both are equally long at kappa_crit, where U is a half."""
    inverse = 1 / BY_HAND.utilisation(cached, new)
    assert BY_HAND.link_overhead(cached, new) == pytest.approx(inverse - 1)
    critical = BY_HAND.kappa_crit * new
    assert BY_HAND.link_seconds(critical) == pytest.approx(BY_HAND.compute_seconds(new))
    assert BY_HAND.utilisation(critical, new) == pytest.approx(0.5)


def test_the_papers_case_study() -> None:
    """Sections 2.3 and 3: kappa_crit 50, 500 ms for 33 GB, 12.8 ms for 32 tokens, 1.79 requests."""
    assert LARGE.kappa_crit == pytest.approx(50, abs=0.5)
    assert replace(LARGE, link_bytes_per_second=15e9).kappa_crit == pytest.approx(12, abs=0.5)
    assert LARGE.link_seconds(65_000) == pytest.approx(0.5, abs=0.05)
    assert LARGE.compute_seconds(32) == pytest.approx(12.8e-3, rel=0.02)
    assert LARGE.requests_at_once(60e9, 65_000, 32) == pytest.approx(1.79, abs=0.005)
    # The paper schedules 1.8 requests, 57 tokens; one fits.
    assert LARGE.scheduled_tokens(60e9, 65_000, 32) == 32


@pytest.mark.parametrize("name", ["llama-3-8b", "opt-6.7b", "qwen2-7b"])
def test_at_the_critical_ratio_both_take_equally_long(name: str) -> None:
    shape, profile = BUILT_IN_SHAPES[name], BUILT_IN_PROFILES["a100-80"]
    new = 100_000
    cached = kappa_crit(shape, profile) * new
    loading = cached * shape.kv_bytes_per_token / profile.link_bytes_per_second
    computing = new * shape.prefill_flops_per_token / profile.prefill_flops_per_second
    assert loading == pytest.approx(computing)


def test_a_store_that_compresses_moves_the_limit_up() -> None:
    shape, profile = BUILT_IN_SHAPES["llama-3-8b"], BUILT_IN_PROFILES["h100"]
    native, small = kappa_crit(shape, profile), kappa_crit(shape, profile, Encoding.INT8)
    stored = shape.stored_kv_bytes_per_token(Encoding.INT8)
    assert small / native == pytest.approx(shape.kv_bytes_per_token / stored)
    assert 1.9 < small / native < 2
