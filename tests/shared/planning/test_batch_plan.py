"""Streamed sequences of one batch share its step: they are planned as one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from splitpoint.costs.profile import BUILT_IN_PROFILES
from splitpoint.planning.plan import SplitLine
from splitpoint.planning.planner import plan_batch
from splitpoint.planning.schedule import Schedule
from splitpoint.shapes import BUILT_IN_SHAPES

OPT = BUILT_IN_SHAPES["opt-6.7b"]
# A step that takes longer than loading one sequence, and far less than loading 64.
H200 = replace(BUILT_IN_PROFILES["h200-pcie5"], step_compute_seconds=0.010)
CHUNK = 64


def line_of(lengths: list[int]) -> SplitLine:
    return plan_batch(
        OPT,
        H200,
        lengths,
        has_activations=True,
        schedule=Schedule.PIPELINED,
        chunk_tokens=CHUNK,
        staging_tokens=16 * CHUNK,
    ).line


def test_alone_nothing_needs_rebuilding_and_together_all_of_it_pays() -> None:
    assert line_of([576]).at(576, CHUNK) == 0
    assert line_of([576] * 64).at(576, CHUNK) == 576


def test_lines_of_unequal_sequences_add_up_to_the_line_of_their_sum() -> None:
    lengths = [320, 640, 1600, 960, 1280, 704, 2000, 96]
    each, together = line_of(lengths), line_of([sum(lengths)])
    total = sum(each.slope * length + each.intercept for length in lengths)
    assert total == pytest.approx(together.slope * sum(lengths) + together.intercept, rel=0.02)


def test_a_sequence_may_grow_to_its_own_context() -> None:
    assert line_of([576] * 64).cap == OPT.context_length
