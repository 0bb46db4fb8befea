"""The line that a split follows: clamped, rounded to whole chunks, never beyond the end."""

from __future__ import annotations

import math

import pytest

from splitpoint.errors import InvalidArgument
from splitpoint.planning.plan import SplitLine


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
