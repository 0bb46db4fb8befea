"""Memory in huge pages: zeros, at a border, touched late, and given back."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from splitpoint.host.huge_pages import HUGE_PAGE_BYTES
from worker_service.device.copies import large_zeros

MIB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("size", [0, 1, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, 5 * MIB + 3])
def test_it_is_zeros_that_can_be_written(size: int) -> None:
    memory = large_zeros(size)
    assert (memory.shape, memory.dtype) == ((size,), torch.uint8)
    assert memory.untyped_storage().nbytes() == size
    assert not memory.any()
    memory.fill_(7)
    assert int(memory.sum(dtype=torch.int64)) == 7 * size
    if size >= HUGE_PAGE_BYTES:
        assert memory.data_ptr() % HUGE_PAGE_BYTES == 0


def test_it_takes_memory_when_touched_and_gives_it_back() -> None:
    before = resident_bytes()
    memory = large_zeros(256 * MIB)
    assert resident_bytes() - before < 16 * MIB
    memory[: 128 * MIB].fill_(1)
    # Pages are of 2 MiB at most.
    assert 120 * MIB < resident_bytes() - before < 144 * MIB
    del memory
    assert resident_bytes() - before < 16 * MIB


def test_many_take_no_more_than_they_are() -> None:
    """The rest of a size that is no multiple of a huge page does not become one."""
    size, before = 2 * MIB + 300_000, resident_bytes()
    memories = [large_zeros(size).fill_(1) for _ in range(40)]
    assert resident_bytes() - before < 40 * size + 16 * MIB
    del memories


def test_a_kernel_without_huge_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345)  # EINVAL, as such a kernel says
    assert not large_zeros(3 * MIB).any()
