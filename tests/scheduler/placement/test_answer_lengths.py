"""The expected length of an answer. Well under a second."""

from __future__ import annotations

import random

import pytest

from scheduler_service.placement.answer_lengths import LEAST_SAMPLES, AnswerLengths, quantile_of


def test_a_few_answers_say_nothing() -> None:
    lengths = AnswerLengths()
    for _ in range(LEAST_SAMPLES - 1):
        lengths.note("t", 5)
    assert lengths.expected("t", 300) == 300
    lengths.note("t", 5)
    assert lengths.expected("t", 300) == 5


def test_a_tenants_own_answers_count_first() -> None:
    lengths = AnswerLengths()
    for _ in range(LEAST_SAMPLES):
        lengths.note("short", 10)
        lengths.note("long", 200)
    assert lengths.expected("short", 300) == 10
    assert lengths.expected("long", 300) == 200
    assert lengths.expected("new", 300) == 200  # of all, three quarters are at most as long
    assert lengths.expected("long", 64) == 64


def test_old_answers_and_old_tenants_are_forgotten() -> None:
    lengths = AnswerLengths()
    for length in (200, 10):
        for _ in range(300):
            lengths.note("t", length)
    assert lengths.expected("t", 300) == 10
    for n in range(300):
        lengths.note(f"tenant {n}", 40)
    for _ in range(300):
        lengths.note("last", 70)
    assert lengths.expected("t", 300) == 70


@pytest.mark.parametrize("seed", range(20))
def test_the_quantile_leaves_its_share_at_or_below(seed: int) -> None:
    rng = random.Random(seed)
    samples = [rng.randrange(1, 50) for _ in range(rng.randint(1, 40))]
    share = rng.choice((0.25, 0.5, 0.75, 1.0))
    found = quantile_of(samples, share)
    assert found in samples
    assert sum(sample <= found for sample in samples) >= share * len(samples)
    assert sum(sample < found for sample in samples) < share * len(samples)
