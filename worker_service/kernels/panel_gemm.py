"""Products with matrices in panels, of any number of rows, on a CPU: `panel_gemm.cpp`.

Measured on 2 AVX-512 cores with OPT-125M's matrices beside oneDNN's blocks: 0.5 to 0.8 of the
time at 1 to 8 rows, 1.0 at 512. An output depends on its own row alone, to the last bit.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum
from functools import lru_cache
from math import prod

import torch
from torch.nn import functional

from splitpoint.checkpoint.quantized import GROUP_BYTES, INT4_IN_WORD
from worker_service.device.copies import large_zeros
from worker_service.kernels.compiled import ELEMENTS, LANES, content, load

_POINTERS = ("rows", "weights", "scales", "bias", "other", "outputs", "packed", "group_sums")
_COUNTS = ("row_stride", "other_stride", "row_count", "in_features", "out_features", "group")


class Kind(IntEnum):
    """What the panels hold: elements of the rows' type, or codes with scales."""

    SAME = 0
    INT8 = 1
    INT4 = 2


_KINDS = {torch.int8: Kind.INT8, torch.uint8: Kind.INT4}


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
    group: int = 0,
) -> torch.Tensor:
    """Return `[N, out]` for rows `[N, in]` and the panels of a matrix `[out, in]`.

    Sums are fp32; the result, with bias and operation, is rounded once. `other`: `[N, out]`.
    `panels`: of `packed`, `packed_int8`, or `packed_int4` with its `group`.
    Raises ValueError unless all else is of one type, and as many elements as the shapes say.
    """
    kind = _KINDS.get(panels.dtype, Kind.SAME)
    given = [rows, *(each for each in (bias, other) if each is not None)]
    if kind is Kind.SAME:
        given.append(panels)
    shape = (out_features, rows.shape[1])
    if kind is Kind.INT4:
        size = packed_int4_bytes(*shape, group)
    else:
        size = (packed_int8_bytes if kind is Kind.INT8 else packed_bytes)(*shape, rows.dtype)
    if len({each.dtype for each in given}) > 1 or panels.nbytes != size:
        raise ValueError(f"panels of {panels.dtype} are not those of rows {tuple(rows.shape)}")
    check_beside(rows, out_features, bias, operation, other)
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
    scales = sums = None
    if kind is Kind.INT4:
        sums = torch.empty((count, -(-in_features // group)), dtype=torch.float32)
    if kind is Kind.INT8:
        pair = _panel(rows.dtype, kind)[1]
        scales = panels.data_ptr() + prod(_padded(out_features, in_features, pair))
    call = _Call(
        *(rows.data_ptr(), panels.data_ptr(), scales),
        *(None if each is None else each.data_ptr() for each in (bias, other)),
        *(outputs.data_ptr(), packed.data_ptr(), None if sums is None else sums.data_ptr()),
        *(rows.stride(0), 0 if other is None else other.stride(0)),
        *(count, in_features, out_features, group, operation, torch.get_num_threads()),
    )
    if _library(rows.dtype, kind).multiply(ctypes.byref(call)):
        raise MemoryError("there is no memory for the weights that a thread unpacks")
    return outputs


def packed(weight: torch.Tensor) -> torch.Tensor:
    """Return the panels of a matrix `[out, in]`: flat, padded to whole vectors of columns."""
    columns, pair = _panel(weight.dtype)
    rows, depth = _padded(weight.shape[0], weight.shape[1], pair)
    panels = large_zeros(rows * depth * weight.itemsize).view(weight.dtype)
    _fill(panels, weight, columns, pair)
    return panels


def packed_int8(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the panels of `codes * scales`, for rows of this type: int8, flat.

    Codes are int8 `[out, in]`, scales fp32 `[out]`; behind the panels lie the bytes of the
    scales, padded like columns.
    """
    columns, pair = _panel(dtype, Kind.INT8)
    rows, depth = _padded(codes.shape[0], codes.shape[1], pair)
    size = packed_int8_bytes(codes.shape[0], codes.shape[1], dtype)
    panels = large_zeros(size).view(torch.int8)
    _fill(panels[: rows * depth], codes, columns, pair)
    panels[rows * depth :].view(torch.float32).copy_(
        functional.pad(scales, (0, rows - len(scales)))
    )
    return panels


def packed_int4(
    words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the panels of `scales * (codes - zeros)`, for rows of this type: uint8, flat.

    Codes are from 0 to 15, those of 8 inputs in each of `words`, int32 `[out, in / 8]`, the
    first in the lowest bits. Scales, fp32, and zeros, int8, are `[out, groups]`: each group has
    `group` inputs, a multiple of 8, and the last one the rest.
    """
    columns, _ = _panel(dtype, Kind.INT4)
    rows, width = _padded(len(words), 1, 1)[0], words.shape[1] * INT4_IN_WORD
    column_bytes = packed_int4_bytes(1, width, group) // LANES
    panels = large_zeros(rows * column_bytes)
    missing = (0, 0, 0, rows - len(words))
    words, scales, zeros = (functional.pad(each, missing) for each in (words, scales, zeros))
    whole = rows // columns * columns
    for first, last, side in ((0, whole, columns), (whole, rows, rows - whole)):
        if first == last:
            continue
        target = panels[first * column_bytes : last * column_bytes].view(-1, side * column_bytes)
        at, count = 0, group // INT4_IN_WORD
        for place in range(scales.shape[1]):
            own = words[first:last, place * count : (place + 1) * count]
            for held in (scales[first:last, place, None], zeros[first:last, place, None], own):
                part = held.reshape(len(target), side, -1).transpose(1, 2).contiguous()
                part = part.view(len(target), -1).view(torch.uint8)
                target[:, at : at + part.shape[1]] = part
                at += part.shape[1]
    return panels


def _fill(panels: torch.Tensor, weight: torch.Tensor, columns: int, pair: int) -> None:
    rows, depth = _padded(weight.shape[0], weight.shape[1], pair)
    weight = functional.pad(weight, (0, depth - weight.shape[1], 0, rows - weight.shape[0]))
    whole = rows // columns * columns
    for first, last, width in ((0, whole, columns), (whole, rows, rows - whole)):
        if first < last:
            part = weight[first:last].view(-1, width, depth // pair, pair).transpose(1, 2)
            panels[first * depth : last * depth].view(part.shape).copy_(part)


def packed_bytes(out_features: int, in_features: int, dtype: torch.dtype) -> int:
    """Return the bytes of `packed` for this shape."""
    rows, depth = _padded(out_features, in_features, _panel(dtype)[1])
    return rows * depth * dtype.itemsize


def packed_int8_bytes(out_features: int, in_features: int, dtype: torch.dtype) -> int:
    """Return the bytes of `packed_int8` for this shape and rows of this type."""
    rows, depth = _padded(out_features, in_features, _panel(dtype, Kind.INT8)[1])
    return rows * (depth + torch.float32.itemsize)


def packed_int4_bytes(out_features: int, in_features: int, group: int) -> int:
    """Return the bytes of `packed_int4` for this shape."""
    groups = -(-in_features // group)
    return _padded(out_features, 1, 1)[0] * (groups * GROUP_BYTES + in_features // 2)


def check_beside(
    rows: torch.Tensor,
    out_features: int,
    bias: torch.Tensor | None,
    operation: Operation,
    other: torch.Tensor | None,
) -> None:
    """Raise ValueError if what goes with the product has another shape; the kernel reads it all."""
    if bias is not None and (bias.shape != (out_features,) or not bias.is_contiguous()):
        raise ValueError(f"a bias {tuple(bias.shape)} is not one of {out_features} outputs")
    takes_other = operation in (Operation.ADD, Operation.MULTIPLY)
    if takes_other is (other is None):
        raise ValueError(f"{operation.name} {'needs' if takes_other else 'takes no'} other tensor")
    if other is not None and other.shape != (len(rows), out_features):
        raise ValueError(f"{tuple(other.shape)} does not go with {len(rows)} x {out_features}")


def takes(dtype: torch.dtype) -> bool:
    """Return True if there is a kernel for this type."""
    return dtype in ELEMENTS


def prepare(dtype: torch.dtype, kind: Kind = Kind.SAME) -> None:
    """Compile and load the kernel for rows, and weights, of this type. Raises NoKernels."""
    _library(dtype, kind)


def library_digest(dtype: torch.dtype, kind: Kind = Kind.SAME) -> str:
    """Return `compiled.content` of what `prepare` loads. Raises NoKernels."""
    return content(_library(dtype, kind))


def _padded(out_features: int, in_features: int, pair: int) -> tuple[int, int]:
    return -(-out_features // LANES) * LANES, -(-in_features // pair) * pair


@lru_cache
def _panel(dtype: torch.dtype, kind: Kind = Kind.SAME) -> tuple[int, int]:
    """Return a panel's columns, and the inputs whose weights lie side by side."""
    library = _library(dtype, kind)
    return int(library.panel_columns()), int(library.panel_pair())


@lru_cache
def _library(dtype: torch.dtype, kind: Kind = Kind.SAME) -> ctypes.CDLL:
    library = load("panel_gemm.cpp", {"ELEMENT": ELEMENTS[dtype], "WEIGHT": int(kind)})
    library.multiply.argtypes = [ctypes.POINTER(_Call)]
    library.multiply.restype = ctypes.c_int32
    return library
