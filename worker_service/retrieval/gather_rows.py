"""Copies single rows of K and V from the arena into device pages, by index."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RowPlane:
    """Rows of `[d]` in one plane of `[slots, n_kv, C, d]`: from the store, and on the device."""

    source: torch.Tensor
    target: torch.Tensor


def gather_rows(planes: tuple[RowPlane, ...], sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy row `sources[i]` of each plane to row `targets[i]`; rows count through the plane.

    Args:
        sources, targets: int64 `[M]`: `(slot * n_kv + head) * C + row` of store and device.
    """
    for plane in planes:
        width = plane.target.shape[-1]
        rows = plane.source.view(-1, width).index_select(0, sources)
        plane.target.view(-1, width).index_copy_(0, targets, rows)
