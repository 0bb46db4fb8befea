"""Reports of a long operation's progress."""

from __future__ import annotations

import pytest

from splitpoint.progress import Counter, Progress, Ticker, read_progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_lines_are_read_back() -> None:
    progress = Progress("loading", 123, 456)
    assert progress.line == "PROGRESS loading 123 456"
    assert read_progress(progress.line) == progress


@pytest.mark.parametrize(
    "line",
    ["", "READY x", "PROGRESS", "PROGRESS loading 1", "PROGRESS loading -1 2", "PROGRESS a b c d"],
)
def test_other_lines_are_not_progress(line: str) -> None:
    assert read_progress(line) is None


def test_what_is_soon_over_is_never_told() -> None:
    told: list[Progress] = []
    clock = Clock()
    counter = Counter("loading", 10, [Ticker(told.append, 2.0, clock)])
    for _ in range(10):
        clock.now += 0.1
        counter.add(1)
    assert told == []


def test_what_takes_long_is_told_at_intervals_and_at_its_end() -> None:
    told: list[Progress] = []
    clock = Clock()
    counter = Counter("loading", 10, [Ticker(told.append, 2.0, clock)])
    for _ in range(10):
        clock.now += 0.5
        counter.add(1)
    assert [progress.done_bytes for progress in told] == [4, 8, 10]
    assert told[-1].is_complete


def test_what_is_read_twice_counts_once() -> None:
    told: list[Progress] = []
    clock = Clock()
    counter = Counter("loading", 10, [Ticker(told.append, 1.0, clock)])
    for _ in range(4):
        clock.now += 1
        counter.add(4)
    assert [progress.done_bytes for progress in told] == [4, 8, 10]
