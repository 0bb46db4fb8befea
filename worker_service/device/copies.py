"""Copies between host memory and device pages, and host memory in huge pages.

A read that needs no new translation for every 4 KiB is faster, most of all in a virtual machine,
where each takes two walks: products with 9 MB of weights took 0.6 to 1.0 of the time on an EPYC.
Weights and the cache, which every decode step reads, therefore ask for huge pages. Only the kernel
knows whether it has any to give; without them it gives small ones.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
import torch

from splitpoint.host.huge_pages import HUGE_PAGE_BYTES


def large_zeros(size_bytes: int) -> torch.Tensor:
    """Return zeros, uint8 `[size_bytes]`, that take memory when they are first touched.

    From the size of a huge page on they begin at one's border.
    """
    if size_bytes < HUGE_PAGE_BYTES:
        return torch.zeros(size_bytes, dtype=torch.uint8)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=private)
    first = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE_PAGE_BYTES
    # Whole huge pages only: the rest would become one, too. A kernel without them refuses.
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE, first, size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
    return torch.frombuffer(memory, dtype=torch.uint8, count=size_bytes, offset=first)


def copy_runs(
    source: torch.Tensor,
    target: torch.Tensor,
    sources: Sequence[int],
    targets: Sequence[int],
    *,
    source_cut: int = 0,
    target_cut: int = 0,
) -> None:
    """Copy `source[sources[i]]` to `target[targets[i]]`, one copy for each run without a gap.

    Copies below 64 KiB reach a tenth of a PCIe link. `source_cut`, `target_cut`: see `runs`.
    """
    for start, length in runs(sources, targets, source_cut, target_cut):
        origin, place = sources[start], targets[start]
        copy(target[place : place + length], source[origin : origin + length])


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy asynchronously from or to a GPU; on a CPU in this thread alone.

    torch would start a team of threads for a large copy, which would then take turns
    with the team that computes on the same cores.
    """
    if target.device.type == "cpu" and source.device.type == "cpu":
        np.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())
    else:
        target.copy_(source, non_blocking=True)


def runs(
    first: Sequence[int], second: Sequence[int], first_cut: int = 0, second_cut: int = 0
) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of the stretches where both sequences go up by one.

    A stretch ends before each multiple of a cut, if that is not 0: a copy must not cross from
    one registration of the driver into another (`pinning.piece_slots`).
    """
    start = 0
    for index in range(1, len(first) + 1):
        if (
            index == len(first)
            or first[index] != first[index - 1] + 1
            or second[index] != second[index - 1] + 1
            or (first_cut and first[index] % first_cut == 0)
            or (second_cut and second[index] % second_cut == 0)
        ):
            yield start, index - start
            start = index


def are_pinned(plane: torch.Tensor, slots: Sequence[int], cut: int) -> bool:
    """Return True if the driver has locked these slots of `[slots, ...]`.

    Registration may end, or fail, between two steps, so the driver is asked each time: once
    for each piece of `cut` slots, which is locked as a whole or not at all.
    """
    return all(plane[slot].is_pinned() for slot in {slot // cut: slot for slot in slots}.values())


def is_one_copy_a_run(sources: Sequence[int], targets: Sequence[int]) -> bool:
    """Return True if `copy_runs` takes no more copies than `targets` has runs."""
    return sum(1 for _ in runs(sources, targets)) == sum(1 for _ in runs(targets, targets))


def sent(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return int64 `[n]` on the device. The host does not wait, as it would for pageable memory.

    torch keeps the pinned memory until the copy is done.
    """
    table = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)
