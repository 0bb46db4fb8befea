"""Runs of slots are conserved, maximal, as few as possible, and longest first."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_service.pool.slot_grants import Run, RunAllocator


def runs_of(free: set[int]) -> list[Run]:
    """Compute the maximal runs of a set."""
    runs: list[Run] = []
    for slot in sorted(free):
        if runs and runs[-1].first + runs[-1].count == slot:
            runs[-1] = Run(runs[-1].first, runs[-1].count + 1)
        else:
            runs.append(Run(slot, 1))
    return runs


def fewest_runs(free: set[int], count: int) -> int:
    sizes = sorted((run.count for run in runs_of(free)), reverse=True)
    used = 0
    while count > 0:
        count -= sizes[used]
        used += 1
    return used


@settings(max_examples=200)
@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 1000)), max_size=60))
def test_against_a_set(slot_count: int, steps: list[tuple[bool, int]]) -> None:
    allocator = RunAllocator(slot_count)
    free = set(range(slot_count))
    for wants, number in steps:
        if wants and free:
            count = number % len(free) + 1
            fewest = fewest_runs(free, count)
            granted = allocator.allocate(count)
            assert len(granted) == fewest
            assert [run.count for run in granted] == sorted(
                (run.count for run in granted), reverse=True
            )
            slots = [slot for run in granted for slot in run]
            assert len(slots) == len(set(slots)) == count
            assert set(slots) <= free
            free -= set(slots)
        elif len(free) < slot_count:
            used = sorted(set(range(slot_count)) - free)
            slot = used[number % len(used)]
            allocator.free(slot)
            free.add(slot)
        assert allocator.free_count == len(free)
        assert allocator.runs() == runs_of(free)
        assert [s for s in range(slot_count) if allocator.is_free(s)] == sorted(free)


def test_best_fit_keeps_the_long_run_whole() -> None:
    allocator = RunAllocator(20)
    allocator.allocate(20)
    for slot in (*range(10), *range(12, 15)):
        allocator.free(slot)
    assert allocator.allocate(3) == [Run(12, 3)]
    assert allocator.allocate(10) == [Run(0, 10)]


def test_what_cannot_be_is_refused() -> None:
    allocator = RunAllocator(4)
    with pytest.raises(ValueError, match="5 slots of 4"):
        allocator.allocate(5)
    with pytest.raises(ValueError, match="0 slots"):
        allocator.allocate(0)
    with pytest.raises(ValueError, match="not in use"):
        allocator.free(1)
    with pytest.raises(ValueError, match="not in use"):
        allocator.free(4)
