"""Copies of whole slots from host memory into device pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch


def copy_runs(
    plane: torch.Tensor, target: torch.Tensor, slots: Sequence[int], pages: Sequence[int]
) -> None:
    """Copy `plane[slots[i]]` to `target[pages[i]]`, one copy for each run without a gap.

    Copies below 64 KiB reach a tenth of a PCIe link.
    """
    for start, length in runs(slots, pages):
        slot, page = slots[start], pages[start]
        copy(target[page : page + length], plane[slot : slot + length])


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy asynchronously to a GPU; on a CPU in this thread alone.

    torch would start a team of threads for a large copy, which would then take turns
    with the team that computes on the same cores.
    """
    if target.device.type == "cpu" and source.device.type == "cpu":
        np.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())
    else:
        target.copy_(source, non_blocking=True)


def runs(first: Sequence[int], second: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of the stretches where both sequences go up by one."""
    start = 0
    for index in range(1, len(first) + 1):
        if (
            index == len(first)
            or first[index] != first[index - 1] + 1
            or second[index] != second[index - 1] + 1
        ):
            yield start, index - start
            start = index
