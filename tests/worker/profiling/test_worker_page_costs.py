"""Costs of a page: the fit, and a measurement of the real attention. About two seconds."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from splitpoint.shapes import BUILT_IN_SHAPES
from worker_service.profiling.page_costs import fit_costs, measure_page_costs

SHAPE = replace(BUILT_IN_SHAPES["opt-125m"], layer_count=3)


@pytest.mark.parametrize("seed", range(20))
def test_costs_are_found_again(seed: int) -> None:
    draw = random.Random(seed)
    costs = [draw.uniform(0, 1) for _ in range(3)]
    amounts = [tuple(draw.uniform(0, 10) for _ in costs) for _ in range(12)]
    seconds = [sum(a * c for a, c in zip(row, costs, strict=True)) for row in amounts]
    assert fit_costs(amounts, seconds) == pytest.approx(costs, abs=1e-9)


def test_no_cost_is_negative() -> None:
    """Longer takes less here: only the constant is left, and it fits as well as one can."""
    step, row = fit_costs([(1, 1), (1, 2), (1, 3)], [3.0, 2.0, 1.9])
    assert row == 0
    assert 1.9 <= step <= 3.0


def test_the_workers_attention_is_measured() -> None:
    costs = measure_page_costs(
        SHAPE, batch=2, lengths=(64, 512), page_sizes=(8, 128), device=torch.device("cpu")
    )
    assert costs.row_seconds > 0
    assert min(costs.step_seconds, costs.page_seconds) >= 0
    # Small pages of equal rows cost more, on any machine: 8 a page are 16 times the pages.
    assert costs.page_seconds >= costs.row_seconds


def test_all_layers_of_the_shape_count() -> None:
    """Only two layers are attended; the seconds are those of all."""
    few, many = (
        measure_page_costs(
            replace(SHAPE, layer_count=layers),
            batch=2,
            lengths=(256, 1024),
            page_sizes=(16, 64),
            device=torch.device("cpu"),
        )
        for layers in (4, 400)
    )
    assert 1024 * many.row_seconds + 16 * many.page_seconds > 5 * (
        1024 * few.row_seconds + 16 * few.page_seconds
    )
