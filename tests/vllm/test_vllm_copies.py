"""Copies of blocks: the right bytes and no others, whatever the layout of the cache."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from splitpoint_vllm import copies
from splitpoint_vllm.copies import Copier, HostCopier, MoveCopier, Part, Parts, copier_for

SLOT_BYTES = 200


def tensors() -> list[torch.Tensor]:
    """Two caches of 9 blocks: rows of 80 bytes, and of 64 in a larger allocation."""
    generator = torch.Generator().manual_seed(1)
    plain, wide = (
        torch.randint(-128, 127, (9, width), dtype=torch.int8, generator=generator)
        for width in (80, 96)
    )
    return [plain, wide[:, 16:80]]


def parts_of(caches: list[torch.Tensor]) -> Parts:
    """Two groups: one in both caches, and one that overlays the first, with padding."""
    return Parts([[Part(caches[0], 80), Part(caches[1], 64)], [Part(caches[0], 48)]])


@pytest.mark.parametrize("copier", [HostCopier(), MoveCopier()])
@pytest.mark.parametrize("call_parts", [2, 1024])
def test_blocks_go_to_slots_and_back(
    copier: Copier, call_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "_CALL_PARTS", call_parts)
    caches = tensors()
    parts = parts_of(caches)
    assert parts.page_bytes == [144, 48]
    arena = np.zeros((5, SLOT_BYTES), dtype=np.uint8)
    groups, blocks = np.array([0, 1, 0]), np.array([7, 3, 2], dtype=np.int32)
    slots = np.array([4, 0, 1])
    addresses = arena.ctypes.data + slots * SLOT_BYTES
    in_cache, in_arena, sizes = parts.pieces(groups, blocks, addresses)
    copier.copy(in_arena, in_cache, sizes, copier.mark())

    expected = np.zeros_like(arena)
    for group, block, slot in zip(groups, blocks, slots, strict=True):
        rows = caches[0][block].numpy().view(np.uint8), caches[1][block].numpy().view(np.uint8)
        payload = rows[0][:48] if group else np.concatenate(rows)
        expected[slot, : len(payload)] = payload
    assert (arena == expected).all()

    before = [cache.clone() for cache in caches]
    targets = np.array([0, 1, 8], dtype=np.int32)
    in_cache, in_arena, sizes = parts.pieces(groups, targets, addresses)
    copier.copy(in_cache, in_arena, sizes, copier.mark())
    before[0][0], before[1][0] = before[0][7].clone(), before[1][7].clone()
    before[0][1, :48] = before[0][3, :48]
    before[0][8], before[1][8] = before[0][2].clone(), before[1][2].clone()
    assert all(torch.equal(cache, want) for cache, want in zip(caches, before, strict=True))


def test_many_bytes_are_divided_into_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_CALL_BYTES", 100)
    source, to = np.arange(250, dtype=np.uint8), np.zeros(250, dtype=np.uint8)
    sizes = np.array([90, 5, 120, 1, 34])  # one part is larger than a call should be
    starts = np.cumsum(sizes) - sizes
    HostCopier().copy(to.ctypes.data + starts, source.ctypes.data + starts, sizes, None)
    assert (to == source).all()


def test_memory_whose_file_was_truncated_is_an_error(tmp_path: Path) -> None:
    """A plain copy would be a signal that ends the process."""
    path = tmp_path / "file"
    path.write_bytes(bytes(4 * mmap.PAGESIZE))
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 4 * mmap.PAGESIZE)
    view = np.frombuffer(mapped, dtype=np.uint8)
    os.truncate(path, mmap.PAGESIZE)
    to = np.zeros(mmap.PAGESIZE, dtype=np.uint8)
    where = np.array([to.ctypes.data])
    whole = np.array([mmap.PAGESIZE])
    HostCopier().copy(where, np.array([view.ctypes.data]), whole, None)
    with pytest.raises(OSError, match="copied 0 of"):
        HostCopier().copy(where, np.array([view.ctypes.data + 2 * mmap.PAGESIZE]), whole, None)


def test_this_kernel_takes_lists_of_ranges() -> None:
    assert isinstance(copier_for(torch.device("cpu")), HostCopier)
