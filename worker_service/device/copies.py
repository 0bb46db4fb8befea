"""Copies of whole slots from host memory into device pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch


def copy_runs(
    plane: torch.Tensor, target: torch.Tensor, slots: Sequence[int], pages: Sequence[int]
) -> None:
    """`target[pages[i]] = plane[slots[i]]`, one copy for each stretch without a gap.

    Copies below 64 KiB reach a tenth of a PCIe link.
    """
    for start, length in runs(slots, pages):
        slot, page = slots[start], pages[start]
        copy(target[page : page + length], plane[slot : slot + length])


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Asynchronous towards a GPU; on a CPU in this thread alone.

    torch would start a team of threads for a large copy, which then takes turns
    with the team that computes on the same cores.
    """
    if target.device.type == "cpu" and source.device.type == "cpu":
        np.copyto(_host_bytes(target), _host_bytes(source))
    else:
        target.copy_(source, non_blocking=True)


def runs(first: Sequence[int], second: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, length) of stretches where both sequences go up by one."""
    start = 0
    for index in range(1, len(first) + 1):
        if (
            index == len(first)
            or first[index] != first[index - 1] + 1
            or second[index] != second[index - 1] + 1
        ):
            yield start, index - start
            start = index


def _host_bytes(tensor: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return tensor.view(torch.uint8).numpy()
