"""The summary of `benchmarks.planner_cases`, and its counting of quiet runs.

Quick: no case is run.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.harness import Timed, is_quiet, median_seconds, timed
from benchmarks.planner_cases import KINDS, case_of, summary


def case(
    number: int, chosen: float, best: float, predicted: float, **fields: Any
) -> dict[str, Any]:
    return {
        "number": number,
        "split_can_pay": True,
        "chosen_seconds": chosen,
        "best_seconds": best,
        "predicted_seconds": predicted,
        "first_predicted_seconds": 2 * predicted,
        "quiet": True,
        **fields,
    }


def test_the_summary_counts_choices_and_errors_by_kind() -> None:
    found = summary(
        [
            case(0, 1.0, 1.0, 1.1),
            case(1, 1.04, 1.0, 1.04),
            case(2, 1.5, 1.0, 1.2, quiet=False),
            case(3, 2.0, 2.0, 1.0, split_can_pay=False),
        ]
    )
    assert found["all"]["within_5_percent_of_best"] == 0.75
    assert found["multi_head_restores"]["within_5_percent_of_best"] == pytest.approx(2 / 3)
    assert found["multi_head_restores"]["median_error"] == pytest.approx(0.1)
    assert found["multi_head_restores"]["worst_over_best"] == 1.5
    assert found["multi_head_restores"]["disturbed"] == 1
    assert found["grouped_query_restores"]["median_error"] == pytest.approx(0.5)
    assert found["quiet"]["cases"] == 3


def test_cases_depend_on_seed_and_number_alone() -> None:
    for number in range(len(KINDS)):
        first, again = (case_of(number, 0, 1) for _ in range(2))
        other = case_of(number, 1, 1)
        assert first == again
        assert first != other


def test_the_quieter_half_of_the_runs_counts() -> None:
    runs = [
        Timed(None, seconds, foreign) for seconds, foreign in ((9.0, 1.5), (2.0, 0.0), (1.0, 0.1))
    ]
    assert median_seconds(runs) == 1.5
    assert is_quiet(runs)
    assert not is_quiet([Timed(None, 1.0, 0.9)])


def test_a_run_is_timed_with_its_result() -> None:
    found = timed(lambda: sum(range(1000)))
    assert found.result == 499500
    assert found.seconds > 0
    assert found.foreign >= 0
