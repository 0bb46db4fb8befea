"""Products with matrices in panels, of any number of rows, on a CPU: `panel_gemm.cpp`.

Measured on 2 AVX-512 cores with OPT-125M's matrices beside oneDNN's blocks: 0.5 to 0.8 of the
time at 1 to 8 rows, 1.0 at 512. An output depends on its own row alone, to the last bit.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from functools import lru_cache

import torch
from torch.nn import functional

from worker_service.device.large_memory import large_zeros
from worker_service.kernels.compiled import load

_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_LANES = 16
_POINTERS = ("rows", "weights", "scales", "bias", "other", "outputs", "packed")
_COUNTS = ("row_stride", "other_stride", "row_count", "in_features", "out_features")


class Operation(IntEnum):
    """What follows the product: an activation, or a tensor that is added or multiplied."""

    NONE = 0
    RELU = 1
    SILU = 2
    GELU_TANH = 3
    ADD = 4
    MULTIPLY = 5


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _COUNTS),
        *((name, ctypes.c_int32) for name in ("operation", "threads")),
    )


def multiply(
    rows: torch.Tensor,
    panels: torch.Tensor,
    out_features: int,
    bias: torch.Tensor | None = None,
    operation: Operation = Operation.NONE,
    other: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `[N, out]` for rows `[N, in]` and the panels of a matrix `[out, in]` (`packed`).

    Sums are fp32; the result, with bias and operation, is rounded once. `other`: `[N, out]`.
    Raises ValueError unless all have one type, and as many elements as the shapes say.
    """
    given = [rows, *(each for each in (panels, bias, other) if each is not None)]
    if len({each.dtype for each in given}) > 1 or panels.nbytes != packed_bytes(
        out_features, rows.shape[1], rows.dtype
    ):
        raise ValueError(f"panels of {panels.dtype} are not those of rows {tuple(rows.shape)}")
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    if other is not None and other.stride(-1) != 1:
        other = other.contiguous()
    count, in_features = rows.shape
    outputs = rows.new_empty((count, out_features))
    if not count:
        return outputs
    # Each input of a row takes 4 bytes: a float, or two of bfloat16.
    packed = torch.empty((count, in_features), dtype=torch.float32)
    call = _Call(
        *(rows.data_ptr(), panels.data_ptr(), None),
        *(None if each is None else each.data_ptr() for each in (bias, other)),
        *(outputs.data_ptr(), packed.data_ptr(), rows.stride(0)),
        *(0 if other is None else other.stride(0), count, in_features, out_features),
        *(operation, torch.get_num_threads()),
    )
    _library(rows.dtype).multiply(ctypes.byref(call))
    return outputs


def packed(weight: torch.Tensor) -> torch.Tensor:
    """Return the panels of a matrix `[out, in]`: flat, padded to whole vectors of columns."""
    columns, pair = _panel(weight.dtype)
    rows, depth = _padded(weight.shape[0], weight.shape[1], pair)
    weight = functional.pad(weight, (0, depth - weight.shape[1], 0, rows - weight.shape[0]))
    panels = large_zeros(rows * depth * weight.itemsize).view(weight.dtype)
    whole = rows // columns * columns
    for first, last, width in ((0, whole, columns), (whole, rows, rows - whole)):
        if first < last:
            part = weight[first:last].view(-1, width, depth // pair, pair).transpose(1, 2)
            panels[first * depth : last * depth].view(part.shape).copy_(part)
    return panels


def packed_bytes(out_features: int, in_features: int, dtype: torch.dtype) -> int:
    """Return the bytes of `packed` for this shape."""
    rows, depth = _padded(out_features, in_features, _panel(dtype)[1])
    return rows * depth * dtype.itemsize


def takes(dtype: torch.dtype) -> bool:
    """Return True if there is a kernel for this type."""
    return dtype in _ELEMENTS


def prepare(dtype: torch.dtype) -> None:
    """Compile and load the kernel for this type. Raises NoKernels."""
    _library(dtype)


def _padded(out_features: int, in_features: int, pair: int) -> tuple[int, int]:
    return -(-out_features // _LANES) * _LANES, -(-in_features // pair) * pair


@lru_cache
def _panel(dtype: torch.dtype) -> tuple[int, int]:
    """Return a panel's columns, and the inputs whose weights lie side by side."""
    library = _library(dtype)
    return int(library.panel_columns()), int(library.panel_pair())


@lru_cache
def _library(dtype: torch.dtype) -> ctypes.CDLL:
    library = load("panel_gemm.cpp", {"ELEMENT": _ELEMENTS[dtype], "WEIGHT": 0})
    library.multiply.argtypes = [ctypes.POINTER(_Call)]
    library.multiply.restype = None
    return library
