"""Rows come by index, and decoded: on the host, and by kernels under Triton's interpreter."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from splitpoint.shapes import Encoding
from worker_service.retrieval import gather_rows as rooms
from worker_service.retrieval.gather_rows import PROGRAMS, ROWS, RowPlane, gather_rows, launch
from worker_service.store.quantization import decode, encode

MODULE = "worker_service.pipeline.gather_kernels"


LOSSY = [Encoding.INT8, Encoding.INT4]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The kernels, read by Triton's interpreter: the same source, carried out by numpy."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    sys.modules.pop(MODULE, None)
    rooms.load_kernels.cache_clear()
    loaded = rooms.load_kernels()
    assert loaded is not None
    yield loaded
    sys.modules.pop(MODULE, None)
    rooms.load_kernels.cache_clear()


def drawn(
    count: int,
    width: int,
    dtype: torch.dtype,
    seed: int,
    encoding: Encoding = Encoding.NATIVE,
) -> tuple[RowPlane, torch.Tensor, torch.Tensor]:
    """Return planes, and distinct targets of which some are not wanted."""
    random = torch.Generator().manual_seed(seed)
    source = torch.randn(9, 3, 16, width, generator=random).to(dtype)
    if encoding is not Encoding.NATIVE:
        # Every row has a scale of its own, and none of its means is 0.
        source *= torch.rand(9, 3, 16, 1, generator=random).to(dtype) * 9
        source = encode(source - 2, encoding)
    target = torch.full((50, 3, 16, width), 7.0, dtype=dtype)
    sources = torch.randint(0, 9 * 3 * 16, (count,), generator=random)
    targets = torch.randperm(50 * 3 * 16, generator=random)[:count]
    targets[torch.rand(count, generator=random) < 0.4] = -1
    return RowPlane(source, target, encoding), sources, targets


def expected(plane: RowPlane, sources: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    rows, stored = plane.target.clone().flatten(0, 2), plane.source
    if plane.encoding is not Encoding.NATIVE:
        # As whole chunks are decoded.
        stored = plane.target.new_empty((*stored.shape[:-1], rows.shape[-1]))
        decode(plane.source, plane.encoding, stored)
    for origin, place in zip(sources.tolist(), targets.tolist(), strict=True):
        if place >= 0:
            rows[place] = stored.flatten(0, 2)[origin]
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


@pytest.mark.parametrize("count", [0, 1, 2000])
@pytest.mark.parametrize("width", [64, 128, 80, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("encoding", LOSSY)
def test_the_host_decodes_rows_as_whole_chunks_are(
    encoding: Encoding, dtype: torch.dtype, width: int, count: int
) -> None:
    """Bit for bit; the last group of a row may be a part, and the last byte half a one."""
    plane, sources, targets = drawn(count, width, dtype, count, encoding)
    wanted = expected(plane, sources, targets)
    gather_rows([plane], sources[targets >= 0], targets[targets >= 0], [0])
    assert torch.equal(plane.target, wanted)


def test_the_host_starts_no_team_of_threads_to_decode() -> None:
    """In a thread that has no team yet: the first operation on many elements would start one."""
    plane, _, _ = drawn(0, 128, torch.float32, 0, Encoding.INT8)
    rows = torch.arange(9 * 3 * 16)
    team, found = torch.get_num_threads(), []

    def gather() -> None:
        torch.set_num_threads(4)
        before = len(os.listdir("/proc/self/task"))
        gather_rows([plane], rows, rows, [0])
        found.append(len(os.listdir("/proc/self/task")) - before)
        torch.zeros(1 << 20).mul_(2)
        found.append(len(os.listdir("/proc/self/task")) - before)

    try:
        thread = threading.Thread(target=gather)
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(team)
    assert found == [0, 3]


@pytest.mark.parametrize(("width", "dtype"), [(64, torch.bfloat16), (20, torch.float32)])
def test_the_kernel_equals_the_host(kernels: ModuleType, width: int, dtype: torch.dtype) -> None:
    """Part of a group, whole ones, and more groups than programs; rows that are no power of 2."""
    for count in (1, ROWS, ROWS * 2 + 5, ROWS * (PROGRAMS + 3)):
        plane, sources, targets = drawn(min(count, 2400), width, dtype, seed=count)
        wanted = expected(plane, sources, targets)
        launch(kernels, plane, sources, targets)
        assert torch.equal(plane.target, wanted)


@pytest.mark.parametrize(
    ("encoding", "width", "dtype", "count"),
    [
        (Encoding.INT8, 64, torch.float16, ROWS * 2 + 5),
        (Encoding.INT8, 135, torch.float32, 1),
        (Encoding.INT8, 20, torch.float32, ROWS * (PROGRAMS + 3)),
        (Encoding.INT4, 64, torch.float32, ROWS * 2 + 5),
        (Encoding.INT4, 135, torch.float16, ROWS * 2 + 5),
    ],
)
def test_the_decoding_kernel_equals_the_host(
    kernels: ModuleType, encoding: Encoding, width: int, dtype: torch.dtype, count: int
) -> None:
    """Bit for bit; one group, a part of one, and two with a part and half a byte.

    Not in bfloat16, to which the interpreter truncates instead of rounding.
    """
    plane, sources, targets = drawn(count, width, dtype, count, encoding)
    wanted = expected(plane, sources, targets)
    launch(kernels, plane, sources, targets)
    assert torch.equal(plane.target, wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("is_pinned", [True, False])
@pytest.mark.parametrize("encoding", list(Encoding))
def test_a_gpu_gathers_like_the_host(encoding: Encoding, is_pinned: bool) -> None:
    """By the kernel from pinned memory, through pinned memory from any other."""
    assert rooms.load_kernels() is not None
    for count in (1, ROWS * 3 + 5, 2000):
        plane, sources, targets = drawn(count, 64, torch.bfloat16, count, encoding)
        wanted = expected(plane, sources, targets)
        source = plane.source.pin_memory() if is_pinned else plane.source
        on_device = RowPlane(source, plane.target.cuda(), encoding)
        gather_rows([on_device], sources.cuda(), targets.cuda(), range(9))
        assert torch.equal(on_device.target.cpu(), wanted)


def test_without_triton_the_host_gathers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    rooms.load_kernels.cache_clear()
    try:
        assert rooms.load_kernels() is None
        assert "selected rows are gathered by the host" in caplog.text
    finally:
        rooms.load_kernels.cache_clear()
