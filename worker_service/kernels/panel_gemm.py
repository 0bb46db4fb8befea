"""Products with matrices in panels, and experts of them, on a CPU: `panel_gemm.cpp`.

Measured on 2 AVX-512 cores with OPT-125M's matrices beside oneDNN's blocks: 0.5 to 0.8 of the
time at 1 to 8 rows, 1.0 at 512. An output depends on its own row alone, to the last bit.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch.nn import functional

from splitpoint.checkpoint.quantized import GROUP_BYTES, INT4_IN_WORD, MXFP4_GROUP_BYTES
from worker_service.device.copies import large_zeros
from worker_service.kernels.compiled import ELEMENTS, LANES, content, load

_POINTERS = (
    *("rows", "places", "weights", "scales", "bias", "other", "outputs", "packed", "group_sums"),
)
_COUNTS = (
    *("row_stride", "other_stride", "output_stride"),
    *("row_count", "in_features", "out_features", "group"),
)


class Kind(IntEnum):
    """What the panels hold: elements of the rows' type, or codes with scales."""

    SAME = 0
    INT8 = 1
    INT4 = 2
    MXFP4 = 3


# The types of panels tell them.
_KINDS = {torch.int8: Kind.INT8, torch.uint8: Kind.INT4, torch.float4_e2m1fn_x2: Kind.MXFP4}


def kind_of(panels: torch.Tensor) -> Kind:
    """Return what panels hold."""
    return _KINDS.get(panels.dtype, Kind.SAME)


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
        *((name, ctypes.c_float) for name in ("alpha", "limit", "offset")),
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
    `panels`: of `packed`, `packed_int8`, or `packed_in_groups` with its `group`.
    Raises ValueError unless all else is of one type, and as many elements as the shapes say.
    """
    kind = kind_of(panels)
    given = [rows, *(each for each in (bias, other) if each is not None)]
    if kind is Kind.SAME:
        given.append(panels)
    size = _bytes_of(kind, (out_features, rows.shape[1]), group, rows.dtype)
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
    scales = scales_address(panels, out_features, in_features, rows.dtype)
    call = _Call(
        *(rows.data_ptr(), None, panels.data_ptr(), scales),
        *(None if each is None else each.data_ptr() for each in (bias, other)),
        *(outputs.data_ptr(), None, None),
        *(rows.stride(0), 0 if other is None else other.stride(0), out_features),
        *(count, in_features, out_features, group, operation, torch.get_num_threads()),
    )
    if library(rows.dtype, kind).multiply(ctypes.byref(call)):
        raise MemoryError(NO_MEMORY)
    return outputs


@dataclass(frozen=True, slots=True)
class Gating:
    """What is multiplied with an expert's last matrix, of its products `gate` and `up`.

    `operation(gate) * up`; without a gate `operation(up)`. SILU may be clamped: with gate at most
    `limit`, and up within it, `gate / (1 + e^(-alpha gate)) * (up + offset)`.
    """

    operation: Operation
    alpha: float = 1.0
    limit: float = math.inf
    offset: float = 0.0

    @property
    def operations(self) -> tuple[int, int]:
        """The kernel's numbers of what is done with gate, or without one with up; and with up."""
        if (self.alpha, self.limit, self.offset) == (1.0, math.inf, 0.0):
            return self.operation, Operation.MULTIPLY
        return _CLAMPED_SILU, _CLAMPED_MULTIPLY


@dataclass(frozen=True, slots=True, eq=False)
class PanelTable:
    """The panels of one matrix `[out, in]` of each expert.

    Attributes:
        dtype: of rows.
        addresses: of the panels, int64 `[experts]`.
        bias: `[experts, out]`; None: none.
    """

    dtype: torch.dtype
    kind: Kind
    shape: tuple[int, int]
    group: int
    panels: tuple[torch.Tensor, ...]
    addresses: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    def of(
        cls,
        panels: Sequence[torch.Tensor],
        shape: tuple[int, int],
        group: int,
        dtype: torch.dtype,
        bias: torch.Tensor | None,
    ) -> PanelTable:
        """Take panels for rows of this type. Raises ValueError unless all are of this shape."""
        kind = kind_of(panels[0])
        held = dtype if kind is Kind.SAME else panels[0].dtype
        size = _bytes_of(kind, shape, group, dtype)
        if {(each.dtype, each.nbytes) for each in panels} != {(held, size)}:
            raise ValueError(f"the panels of experts are not all of {shape}")
        if bias is not None and (bias.dtype != dtype or bias.shape != (len(panels), shape[0])):
            raise ValueError(f"a bias {tuple(bias.shape)} is not one of {len(panels)} experts")
        bias = None if bias is None else bias.contiguous()
        addresses = torch.tensor([each.data_ptr() for each in panels])
        return cls(dtype, kind, shape, group, tuple(panels), addresses, bias)

    def __deepcopy__(self, memo: dict[int, Any]) -> PanelTable:
        """Return a table with the addresses of copied panels."""
        panels, bias = deepcopy((self.panels, self.bias), memo)
        return PanelTable.of(panels, self.shape, self.group, self.dtype, bias)


class _ExpertsCall(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "chosen", "shares")),
        *((name, ctypes.c_void_p) for name in ("gates", "ups", "downs")),
        *((name, ctypes.c_void_p) for name in ("gate_bias", "up_bias", "down_bias", "outputs")),
        *((name, ctypes.c_int64) for name in ("row_stride", "row_count", "each", "experts")),
        *((name, ctypes.c_int64) for name in ("in_features", "inner_features")),
        *((name, ctypes.c_int64) for name in ("group", "inner_group")),
        *((name, ctypes.c_int32) for name in ("first_operation", "second_operation", "threads")),
        *((name, ctypes.c_float) for name in ("alpha", "limit", "offset")),
    )


def experts(
    rows: torch.Tensor,
    chosen: torch.Tensor,
    shares: torch.Tensor,
    gating: Gating,
    gates: PanelTable | None,
    ups: PanelTable,
    downs: PanelTable,
) -> torch.Tensor:
    """Return the sum `[N, h]` of what each row's experts make of it, in one call.

    A chosen expert's weights are read once. Sums are fp32; what the first operation, the gating and
    an expert return is rounded to the rows' type. Results times `shares` are added in the row's
    order of experts, in fp32. `chosen`, `shares`: `[N, k]`. Raises IndexError (no such expert).
    """
    count, in_features = rows.shape
    tables = [each for each in (gates, ups, downs) if each is not None]
    inner = ups.shape[0]
    wanted = [(inner, in_features)] * (len(tables) - 1) + [(in_features, inner)]
    kinds = {(each.kind, each.dtype) for each in tables}
    has_groups = gates is None or gates.group == ups.group
    is_fit = [each.shape for each in tables] == wanted and kinds == {(ups.kind, rows.dtype)}
    if not is_fit or not has_groups:
        raise ValueError(f"the matrices of experts do not fit rows {tuple(rows.shape)}")
    if chosen.shape != shares.shape or len(chosen) != count:
        raise ValueError(f"{tuple(chosen.shape)} experts do not go with {count} rows")
    outputs = torch.empty_like(rows, memory_format=torch.contiguous_format)
    if not chosen.numel():
        return outputs.zero_()
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    chosen, shares = chosen.to(torch.int64).contiguous(), shares.to(torch.float32).contiguous()
    call = _ExpertsCall(
        *(each.data_ptr() for each in (rows, chosen, shares)),
        *(None if each is None else each.addresses.data_ptr() for each in (gates, ups, downs)),
        *(
            None if each is None or each.bias is None else each.bias.data_ptr()
            for each in (gates, ups, downs)
        ),
        *(outputs.data_ptr(), rows.stride(0), count, chosen.shape[1], len(ups.addresses)),
        *(in_features, inner, ups.group, downs.group, *gating.operations),
        *(torch.get_num_threads(), gating.alpha, gating.limit, gating.offset),
    )
    failed = library(rows.dtype, ups.kind).experts(ctypes.byref(call))
    if failed == _NO_EXPERT:
        raise IndexError(f"there are {len(ups.addresses)} experts, and another one is chosen")
    if failed:
        raise MemoryError(NO_MEMORY)
    return outputs


# Operations of experts alone. What the kernel returns, and what else it may lack.
_CLAMPED_SILU, _CLAMPED_MULTIPLY = 6, 7
_NO_EXPERT = 2
NO_MEMORY = "there is no memory for what a product needs beside its results"


def packed(weight: torch.Tensor) -> torch.Tensor:
    """Return the panels of a matrix `[out, in]`: flat, padded to whole vectors of columns."""
    columns, pair = _panel(weight.dtype)
    rows, depth = _padded(weight.shape[0], weight.shape[1], pair)
    panels = large_zeros(rows * depth * weight.itemsize).view(weight.dtype)
    _fill(panels, weight, columns, pair)
    return panels


def part_of(panels: torch.Tensor, out_features: int, first: int, count: int) -> torch.Tensor | None:
    """Return the panels of `count` outputs from `first` on, over the memory of `packed` ones.

    None unless they are whole panels.
    """
    columns, _ = _panel(panels.dtype)
    if first % columns or (count % columns and first + count != out_features):
        return None
    depth = len(panels) // _padded(out_features, 1, 1)[0]
    return panels[first * depth : (first + _padded(count, 1, 1)[0]) * depth]


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


def packed_in_groups(
    words: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the panels of `scales * (codes - zeros)`, for rows of this type: flat bytes.

    Codes are from 0 to 15, those of 8 inputs in each of `words`, int32 `[out, in / 8]`, the
    first in the lowest bits. Scales, fp32, and zeros, int8, are `[out, groups]`: each group has
    `group` inputs, a multiple of 8, and the last one the rest. Without zeros it is MXFP4, and
    scales are the bytes of the format.
    """
    kind = Kind.MXFP4 if zeros is None else Kind.INT4
    columns, _ = _panel(dtype, kind)
    rows, width = _padded(len(words), 1, 1)[0], words.shape[1] * INT4_IN_WORD
    column_bytes = packed_in_groups_bytes(1, width, group, kind) // LANES
    panels = large_zeros(rows * column_bytes)
    parts = [scales, *(() if zeros is None else (zeros,))]
    words, *parts = (functional.pad(each, (0, 0, 0, rows - len(each))) for each in (words, *parts))
    whole = rows // columns * columns
    for first, last, side in ((0, whole, columns), (whole, rows, rows - whole)):
        if first == last:
            continue
        target = panels[first * column_bytes : last * column_bytes].view(-1, side * column_bytes)
        at, count = 0, group // INT4_IN_WORD
        for place in range(scales.shape[1]):
            own = words[first:last, place * count : (place + 1) * count]
            for held in (*(each[first:last, place, None] for each in parts), own):
                part = held.reshape(len(target), side, -1).transpose(1, 2).contiguous()
                part = part.view(len(target), -1).view(torch.uint8)
                target[:, at : at + part.shape[1]] = part
                at += part.shape[1]
    return panels if zeros is not None else panels.view(torch.float4_e2m1fn_x2)


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


def packed_in_groups_bytes(
    out_features: int, in_features: int, group: int, kind: Kind = Kind.INT4
) -> int:
    """Return the bytes of `packed_in_groups` for this shape."""
    groups = -(-in_features // group)
    scales = groups * (GROUP_BYTES if kind is Kind.INT4 else MXFP4_GROUP_BYTES)
    return _padded(out_features, 1, 1)[0] * (scales + in_features // 2)


def _bytes_of(kind: Kind, shape: tuple[int, int], group: int, dtype: torch.dtype) -> int:
    if kind in (Kind.INT4, Kind.MXFP4):
        return packed_in_groups_bytes(*shape, group, kind)
    return (packed_int8_bytes if kind is Kind.INT8 else packed_bytes)(*shape, dtype)


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


def scales_address(
    panels: torch.Tensor, out_features: int, in_features: int, dtype: torch.dtype
) -> int | None:
    """Return where the scales of int8 panels lie for rows of this type; None: those of others."""
    if panels.dtype != torch.int8:
        return None
    pair = _panel(dtype, Kind.INT8)[1]
    return panels.data_ptr() + prod(_padded(out_features, in_features, pair))


def takes(dtype: torch.dtype) -> bool:
    """Return True if there is a kernel for this type."""
    return dtype in ELEMENTS


def prepare(dtype: torch.dtype, kind: Kind = Kind.SAME) -> None:
    """Compile and load the kernel for rows, and weights, of this type. Raises NoKernels."""
    library(dtype, kind)


def library_digest(dtype: torch.dtype, kind: Kind = Kind.SAME) -> str:
    """Return `compiled.content` of what `prepare` loads. Raises NoKernels."""
    return content(library(dtype, kind))


def _padded(out_features: int, in_features: int, pair: int) -> tuple[int, int]:
    return -(-out_features // LANES) * LANES, -(-in_features // pair) * pair


@lru_cache
def _panel(dtype: torch.dtype, kind: Kind = Kind.SAME) -> tuple[int, int]:
    """Return a panel's columns, and the inputs whose weights lie side by side."""
    loaded = library(dtype, kind)
    return int(loaded.panel_columns()), int(loaded.panel_pair())


@lru_cache
def library(dtype: torch.dtype, kind: Kind = Kind.SAME) -> ctypes.CDLL:
    """Return the kernels for rows, and weights, of this type; those of row_wise.py among them."""
    loaded = load("panel_gemm.cpp", {"ELEMENT": ELEMENTS[dtype], "WEIGHT": int(kind)})
    for name in ("multiply", "experts", "begin_layer", "end_layer"):
        function = getattr(loaded, name)
        function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_int32
    for name in ("turn", "write_rows"):
        function = getattr(loaded, name)
        function.argtypes, function.restype = [ctypes.c_void_p], None
    return loaded
