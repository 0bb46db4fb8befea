"""The Triton kernel of products of one order; imported only where Triton is wanted."""

from __future__ import annotations

import triton
import triton.language as tl


# A compiled kernel must not depend on the number of rows: another one could add otherwise.
@triton.jit(do_not_specialize=["row_count"])
def multiply_tiles(
    outputs,
    rows,
    weights,
    bias,
    other,
    row_count,
    in_features,
    out_features,
    has_bias: tl.constexpr,
    operation: tl.constexpr,
    row_tile: tl.constexpr,
    column_tile: tl.constexpr,
    depth_tile: tl.constexpr,
):
    """Do `outputs = operation(rows @ weights.T + bias, other)`, rounded once.

    Each program computes one tile over the whole depth, in ascending steps of `depth_tile`: no
    two programs share a sum. The tiles of the same columns are neighbours, which read the same
    weights. Operations are those of panel_gemm.Operation.
    """
    number = tl.program_id(0)
    row_tiles = tl.cdiv(row_count, row_tile)
    row = (number % row_tiles * row_tile + tl.arange(0, row_tile)).to(tl.int64)
    column = (number // row_tiles * column_tile + tl.arange(0, column_tile)).to(tl.int64)
    is_row, is_column = row < row_count, column < out_features
    sums = tl.zeros([row_tile, column_tile], tl.float32)
    for first in range(0, in_features, depth_tile):
        depth = first + tl.arange(0, depth_tile)
        inside = depth < in_features
        part = tl.load(
            rows + row[:, None] * in_features + depth[None, :],
            mask=is_row[:, None] & inside[None, :],
            other=0.0,
        )
        weight = tl.load(
            weights + column[None, :] * in_features + depth[:, None],
            mask=is_column[None, :] & inside[:, None],
            other=0.0,
        )
        sums = tl.dot(part, weight, sums, input_precision="ieee")
    if has_bias:
        sums += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    place = row[:, None] * out_features + column[None, :]
    wanted = is_row[:, None] & is_column[None, :]
    if operation == 1:  # a comparison keeps NaN
        sums = tl.where(sums < 0.0, 0.0, sums)
    elif operation == 2:
        sums = sums / (1.0 + tl.exp(-sums))
    elif operation == 3:
        inner = 0.7978845608028654 * (sums + 0.044715 * sums * sums * sums)
        sums = sums * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0))
    elif operation == 4:
        sums += tl.load(other + place, mask=wanted, other=0.0).to(tl.float32)
    elif operation == 5:
        sums *= tl.load(other + place, mask=wanted, other=0.0).to(tl.float32)
    tl.store(outputs + place, sums, mask=wanted)
