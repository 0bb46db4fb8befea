"""Totals of counters that wrap and are reset: nothing lost, nothing made up."""

from __future__ import annotations

import random

from worker_service.hardware.counters import CounterTotal, growth

RATE = 60e9
WRAP = 1 << 32


def test_growth() -> None:
    assert growth(10, 15, WRAP, 100) == 5
    assert growth(WRAP - 5, 7, WRAP, 100) == 12
    assert growth(10, 10, WRAP, 0) == 0
    assert growth(0, 1000, WRAP, 100) is None  # a jump
    assert growth(1000, 0, WRAP, 100) is None  # a reset
    assert growth(1 << 50, 3, 1 << 64, 1e12) is None


def test_a_counter_of_32_bits_read_often_enough_loses_nothing() -> None:
    """The true traffic, through random wraps, in a type of 32 and of 64 bits."""
    for bits in (32, 64):
        generator = random.Random(bits)
        true, now, total = generator.randrange(WRAP), 0.0, CounterTotal()
        total.see_bits(true % WRAP, bits, now, RATE)
        began = true
        for _ in range(2000):
            seconds = generator.uniform(0.001, 0.06)
            now += seconds
            true += int(generator.uniform(0, 0.95) * RATE * seconds)
            total.see_bits(true % WRAP, bits, now, RATE)
            assert total.total == true - began
        assert total.total > 20 * WRAP
        assert (total.is_narrow, total.resets, total.gaps) == (True, 0, 0)


def test_what_has_shown_more_than_32_bits_has_64_from_then_on() -> None:
    total = CounterTotal()
    total.see_bits(WRAP - 10, 64, 0.0, RATE)
    total.see_bits(WRAP + 10, 64, 1.0, RATE)
    assert total.total == 20
    assert not total.is_narrow
    # Now a smaller value is a reset, not a wrap, and nothing is counted of it.
    total.see_bits(5, 64, 2.0, RATE)
    assert (total.total, total.resets) == (20, 1)
    total.see_bits(105, 64, 3.0, RATE)
    assert total.total == 120


def test_a_wrap_at_64_bits_is_a_wrap() -> None:
    total = CounterTotal()
    total.see_bits((1 << 64) - 30, 64, 0.0, RATE)
    total.see_bits(12, 64, 1.0, RATE)
    assert (total.total, total.resets) == (42, 0)


def test_a_reset_and_a_jump_count_for_nothing_and_never_shrink_the_total() -> None:
    total = CounterTotal()
    total.see_bits(1 << 40, 64, 0.0, RATE)
    total.see_bits((1 << 40) + 1000, 64, 0.1, RATE)
    total.see_bits(3, 64, 0.2, RATE)
    assert (total.total, total.resets) == (1000, 1)
    total.see_bits(1 << 60, 64, 0.3, RATE)
    assert (total.total, total.resets) == (1000, 2)
    total.see_bits((1 << 60) + 7, 64, 0.4, RATE)
    assert total.total == 1007


def test_what_was_read_too_late_is_the_least_it_can_be() -> None:
    total = CounterTotal()
    total.see_bits(100, 32, 0.0, RATE)
    total.see_bits(200, 32, 10.0, RATE)  # 140 wraps would fit in between
    assert (total.total, total.gaps) == (100, 1)


def test_nothing_is_counted_over_what_was_forgotten() -> None:
    total = CounterTotal()
    total.see_bits(100, 32, 0.0, RATE)
    total.forget()
    total.see_bits(5000, 32, 9.0, RATE)
    total.see_bits(5001, 32, 9.01, RATE)
    assert (total.total, total.resets, total.gaps) == (1, 0, 0)
