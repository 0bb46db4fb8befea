"""Products of any number of rows on a GPU, each row by itself: `tile_gemm_kernel.py`.

A matrix has one kernel for all numbers of rows: the same tiles, and one order of sums over the
whole depth. Libraries choose other tiles, or split the depth, where rows are few. Not confirmed
on a GPU yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from worker_service.kernels.panel_gemm import Operation, check_beside

# Bytes to which rows are aligned for the kernel that also takes whole matrices.
_ALIGNMENT = 16
# From this many outputs on, tiles of twice the columns still give each multiprocessor work.
_WIDE = 16_384


@dataclass(frozen=True, slots=True)
class Tiles:
    """Rows and columns of a result that a program computes, and inputs that it reads at once."""

    rows: int
    columns: int
    depth: int
    warps: int = 4
    stages: int = 4


def tiles_of(out_features: int, dtype: torch.dtype) -> Tiles:
    """Return the tiles of matrices `[out, in]` of this type, for all numbers of rows.

    In half precision 64 rows are the fewest that Hopper's tensor cores take at full rate, and
    reading the weights still takes longer. Without tensor cores, 64 rows would take longer.
    """
    if dtype == torch.float32:
        return Tiles(rows=16, columns=64, depth=32)
    return Tiles(rows=64, columns=128 if out_features >= _WIDE else 64, depth=64)


def multiply(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    operation: Operation = Operation.NONE,
    other: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `[N, out]` for rows `[N, in]` and a matrix `[out, in]`.

    Sums are fp32, without TF32; the result, with bias and operation, is rounded once.
    `other`: `[N, out]`. Raises ValueError unless all are of one type and fit each other.
    """
    out_features, in_features = weight.shape
    given = [weight, *(each for each in (bias, other) if each is not None)]
    if rows.shape[1] != in_features or any(each.dtype != rows.dtype for each in given):
        raise ValueError(f"no product of rows {tuple(rows.shape)} with {tuple(weight.shape)}")
    check_beside(rows, out_features, bias, operation, other)
    outputs = rows.new_empty((len(rows), out_features))
    if not len(rows):
        return outputs
    tiles = tiles_of(out_features, rows.dtype)
    grid = -(-len(rows) // tiles.rows) * -(-out_features // tiles.columns)
    _kernel()[(grid,)](
        *(outputs, _aligned(rows), weight.contiguous()),
        outputs if bias is None else bias,
        outputs if other is None else _aligned(other),
        *(len(rows), in_features, out_features),
        has_bias=bias is not None,
        operation=int(operation),
        row_tile=tiles.rows,
        column_tile=tiles.columns,
        depth_tile=tiles.depth,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return outputs


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """Return contiguous rows whose memory is aligned, which decides the kernel."""
    rows = rows.contiguous()
    return rows.clone() if rows.data_ptr() % _ALIGNMENT else rows


def _kernel() -> Any:
    from worker_service.kernels.tile_gemm_kernel import multiply_tiles

    return multiply_tiles
