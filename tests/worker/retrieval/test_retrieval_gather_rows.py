"""Rows come by index: on the host, and by the kernel under Triton's interpreter."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from worker_service.retrieval import gather_rows as rooms
from worker_service.retrieval.gather_rows import PROGRAMS, ROWS, RowPlane, gather_rows, launch

MODULE = "worker_service.pipeline.gather_kernels"


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The kernel, read by Triton's interpreter: the same source, carried out by numpy."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    sys.modules.pop(MODULE, None)
    rooms.load_kernel.cache_clear()
    yield rooms.load_kernel()
    sys.modules.pop(MODULE, None)
    rooms.load_kernel.cache_clear()


def drawn(
    count: int, width: int, dtype: torch.dtype, seed: int
) -> tuple[RowPlane, torch.Tensor, torch.Tensor]:
    """Return planes, and distinct targets of which some are not wanted."""
    random = torch.Generator().manual_seed(seed)
    source = torch.randn(9, 3, 16, width, generator=random).to(dtype)
    target = torch.full((50, 3, 16, width), 7.0, dtype=dtype)
    sources = torch.randint(0, 9 * 3 * 16, (count,), generator=random)
    targets = torch.randperm(50 * 3 * 16, generator=random)[:count]
    targets[torch.rand(count, generator=random) < 0.4] = -1
    return RowPlane(source, target), sources, targets


def expected(plane: RowPlane, sources: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    rows = plane.target.clone().flatten(0, 2)
    for origin, place in zip(sources.tolist(), targets.tolist(), strict=True):
        if place >= 0:
            rows[place] = plane.source.flatten(0, 2)[origin]
    return rows.view_as(plane.target)


@pytest.mark.parametrize("count", [0, 1, ROWS, ROWS * 3 + 5])
@pytest.mark.parametrize("width", [64, 20, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_host_copies_what_is_wanted(count: int, width: int, dtype: torch.dtype) -> None:
    plane, sources, targets = drawn(count, width, dtype, seed=count)
    wanted = expected(plane, sources, targets)
    # The host knows what is wanted: it passes nothing else.
    gather_rows([plane], sources[targets >= 0], targets[targets >= 0], [0])
    assert torch.equal(plane.target, wanted)


@pytest.mark.parametrize(("width", "dtype"), [(64, torch.bfloat16), (20, torch.float32)])
def test_the_kernel_equals_the_host(kernel: Any, width: int, dtype: torch.dtype) -> None:
    """Part of a group, whole ones, and more groups than programs; rows that are no power of 2."""
    for count in (1, ROWS, ROWS * 2 + 5, ROWS * (PROGRAMS + 3)):
        plane, sources, targets = drawn(min(count, 2400), width, dtype, seed=count)
        wanted = expected(plane, sources, targets)
        launch(kernel, plane, sources, targets)
        assert torch.equal(plane.target, wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_gpu_gathers_like_the_host(is_pinned: bool) -> None:
    """By the kernel from pinned memory, through pinned memory from any other."""
    assert rooms.load_kernel() is not None
    for count in (1, ROWS * 3 + 5, 2000):
        plane, sources, targets = drawn(count, 64, torch.bfloat16, seed=count)
        wanted = expected(plane, sources, targets)
        source = plane.source.pin_memory() if is_pinned else plane.source
        on_device = RowPlane(source, plane.target.cuda())
        gather_rows([on_device], sources.cuda(), targets.cuda(), range(9))
        assert torch.equal(on_device.target.cpu(), wanted)


def test_without_triton_the_host_gathers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    rooms.load_kernel.cache_clear()
    try:
        assert rooms.load_kernel() is None
        assert "selected rows are gathered by the host" in caplog.text
    finally:
        rooms.load_kernel.cache_clear()
