"""The gather kernel under Triton's interpreter equals plain copies; the faster way is chosen."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from splitpoint.costs.profile import Line
from worker_service.device.copies import copy_runs
from worker_service.pipeline import gather
from worker_service.pipeline.gather import (
    BLOCK_WORDS,
    PROGRAMS,
    GatherCosts,
    Gatherer,
    gatherer_of,
    launch,
)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The kernel, read by Triton's interpreter: the same source, carried out by numpy."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    sys.modules.pop("worker_service.pipeline.gather_kernels", None)
    yield gather.load_kernel()
    sys.modules.pop("worker_service.pipeline.gather_kernels", None)


@pytest.mark.parametrize("slot_shape", [(2, 16, 20), (1, 3, BLOCK_WORDS), (2, 4, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_equals_copies(
    kernel: Any, slot_shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Slots of less than a block, of several, and of a part; more blocks than programs."""
    rng = random.Random(0)
    plane = torch.randn(PROGRAMS * 3, *slot_shape).to(dtype)
    for count in (1, 2, PROGRAMS + 9):
        slots = rng.sample(range(len(plane)), count)
        pages = rng.sample(range(64), count)
        by_copy = torch.full((64, *slot_shape), 7.0, dtype=dtype)
        by_kernel = by_copy.clone()
        copy_runs(plane, by_copy, slots, pages)
        launch(kernel, by_kernel, plane, torch.tensor(slots), torch.tensor(pages))
        assert torch.equal(by_copy, by_kernel)


def test_the_crossover_follows_from_the_lines() -> None:
    """10 µs a copy, 35 µs a launch, both at 50 GB/s: from four copies on the launch wins."""
    costs = GatherCosts(copy=Line(10e-6, 50e9), kernel=Line(35e-6, 50e9))
    chosen = [costs.prefers_kernel(count, 1 << 20) for count in (1, 3, 4, 100)]
    assert chosen == [False, False, True, True]
    # A kernel that reads at half the rate: never for large runs, always for tiny ones.
    slow = GatherCosts(copy=Line(10e-6, 50e9), kernel=Line(30e-6, 25e9))
    assert not slow.prefers_kernel(100, 100 << 20)
    assert slow.prefers_kernel(100, 100 << 10)


def test_memory_that_is_not_pinned_is_never_given_to_the_kernel() -> None:
    costs = GatherCosts(copy=Line(1.0, 1e9), kernel=Line(0.0, 1e12))
    gatherer = Gatherer(torch.device("cuda:0"), None, costs)
    source, target = torch.zeros(8, 64), torch.zeros(8, 64)
    assert costs.prefers_kernel(8, 8 * 256)
    assert not gatherer.is_faster([(source, target)], 8, range(8))


def test_a_cpu_has_no_gatherer() -> None:
    assert gatherer_of(torch.device("cpu")) is None
