"""oneDNN compiles a kernel for each shape; how many of them a worker keeps is bounded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from splitpoint.host.processor import CAPACITIES, KERNELS
from worker_service.model.linear import Linear, padded_count
from worker_service.weights.packing import Matrix

# Multiplies by ever other counts of rows, below what pads them, and prints how much its
# memory grew from when the caches were full.
_MANY_SHAPES = """
import sys
import worker_service
import torch
from benchmarks.harness import memory_of

torch.set_num_threads(1)
weight = torch.ops.mkldnn._reorder_linear_weight(torch.randn(128, 128), 32)
def multiply(counts):
    with torch.inference_mode():
        for count in counts:
            rows = torch.randn(count, 128)
            torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")
full = int(sys.argv[1])
multiply(range(1, full))
before = memory_of("self").anonymous
multiply(range(full, 2 * full))
print(memory_of("self").anonymous - before)
"""


def test_shapes_beyond_the_bound_take_no_more_memory() -> None:
    """Each kernel takes half a MiB: unbounded, 280 of them are 140."""
    environment = {name: text for name, text in os.environ.items() if name not in CAPACITIES}
    ended = subprocess.run(
        [sys.executable, "-c", _MANY_SHAPES, str(280)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(ended.stdout) < 56 << 20


@pytest.mark.parametrize("name", CAPACITIES)
def test_the_users_bound_stays(name: str) -> None:
    command = f"import worker_service, os; print(os.environ[{name!r}])"
    for given, wanted in ({}, str(KERNELS)), ({name: "7"}, "7"):
        environment = {each: text for each, text in os.environ.items() if each not in CAPACITIES}
        ended = subprocess.run(
            [sys.executable, "-c", command],
            env={**environment, **given},
            capture_output=True,
            text=True,
            check=True,
        )
        assert ended.stdout.strip() == wanted


def test_few_counts_of_rows_reach_the_kernels() -> None:
    counts = [padded_count(count) for count in range(1, 4097)]
    assert len(set(counts)) == 5 + 8 * 8
    for count, padded in enumerate(counts, start=1):
        assert count <= padded
        assert padded <= 1.125 * count or padded <= 16
        assert padded_count(padded) == padded


@pytest.mark.parametrize("count", [1, 3, 17, 70, 513])
def test_padding_changes_no_row(count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, rows, other = (
        torch.randn(size, generator=generator) for size in ((24, 40), (count, 40), (count, 24))
    )
    linear = Linear(Matrix(weight.clone()))
    product = rows @ weight.T
    for got, wanted in (
        (linear(rows), product),
        (linear.added_to(rows, other), product + other),
        (linear.times(rows, other), product * other),
    ):
        assert got.shape == wanted.shape
        assert got.is_contiguous()
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-5)
