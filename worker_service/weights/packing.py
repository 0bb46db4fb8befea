"""The layout in which a device holds a matrix: panels, oneDNN's blocks, or `[out, in]`.

A CPU has a kernel of its own for panels (kernels/panel_gemm.py). Without a compiler it holds
oneDNN's blocks: with OPT-125M's matrices at 8 rows on 2 AVX-512 cores these read 26 GB/s of
weights in fp32, `F.linear` 11, `x @ W[in, out]` and MKL's packed form 8. The layout depends on
device, type and the host's choice of kernels only, so equal workers compute equal bits.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch

from splitpoint.checkpoint.quantized import Quantization, Stored
from splitpoint.errors import FailedPrecondition
from splitpoint.shapes import WeightFormat
from worker_service.checkpoint.quantized import Codes
from worker_service.kernels import panel_gemm
from worker_service.kernels.choice import Layout, in_use
from worker_service.kernels.panel_gemm import Kind

_LARGEST = 127
# Elements that are quantised at once: a head of 256k rows has no second copy in fp32.
_BLOCK = 1 << 22


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes, int8 `[out, in]`, and scales, fp32 `[out]`, of a matrix `[out, in]`.

    `weight[o] ~ codes[o] * scales[o]`, with scales[o] = max |weight[o]| / 127: an element is
    off by half a scale at most. A row that is not finite gets a scale that is not, either.
    """
    codes = torch.empty_like(weight, dtype=torch.int8)
    scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    count = max(1, _BLOCK // weight.shape[1])
    for first in range(0, len(weight), count):
        rows = slice(first, first + count)
        block = weight[rows].to(torch.float32)
        scales[rows] = block.abs().amax(dim=1) / _LARGEST
        block = (block / scales[rows, None]).nan_to_num_(nan=0.0).round_()
        codes[rows] = block.clamp_(-_LARGEST, _LARGEST)
    return codes, scales


# Rows that oneDNN lays the blocks out for; other counts run from the same blocks.
_PACKED_FOR_ROWS = 32


def layout_of(device: torch.device, dtype: torch.dtype) -> Layout:
    """Return the layout of weights of this type on the device."""
    if device.type != "cpu":
        return Layout.PLAIN
    chosen = in_use()
    wanted = Layout.PACKED if chosen is None else chosen.linear
    has_layout = {Layout.PANELS: panel_gemm.takes, Layout.PACKED: _has_blocks}.get(wanted)
    return wanted if has_layout is not None and has_layout(dtype) else Layout.PLAIN


def check_format(weights: WeightFormat, device: torch.device, dtype: torch.dtype) -> None:
    """Raise FailedPrecondition unless the device can multiply with weights in this format."""
    if weights is WeightFormat.INT8:
        _need_panels("int8 weights need", device, dtype)


def _need_panels(what: str, device: torch.device, dtype: torch.dtype) -> None:
    if layout_of(device, dtype) is not Layout.PANELS:
        raise FailedPrecondition(
            f"{what} a CPU worker whose kernels are linear=panels", reason="NO_INT8_KERNEL"
        )


def kind_of(quantization: Quantization) -> Kind:
    """Return what panels of a format that is held as codes are."""
    others = {Stored.INT8: Kind.INT8, Stored.MXFP4: Kind.MXFP4}
    return others.get(quantization.stored, Kind.INT4)


def kinds_of(weights: WeightFormat, quantization: Quantization | None) -> list[Kind]:
    """Return what the panels of a model hold, if its matrices are in panels."""
    kinds = {Kind.SAME}
    if weights is WeightFormat.INT8:
        kinds.add(Kind.INT8)
    if quantization is not None and quantization.holds_codes:
        kinds.add(kind_of(quantization))
    return sorted(kinds)


def _has_blocks(dtype: torch.dtype) -> bool:
    """Return True if oneDNN can lay out weights of this type."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


class Matrix:
    """The weight of a linear layer, `[out, in]`, in the layout of its device.

    Attributes:
        weight: the matrix in that layout; an opaque tensor if it is oneDNN's.
        group: inputs that share a scale, of codes of 4 bits; 0: it has none.
        size_bytes: padding to whole blocks or panels included.
    """

    group = 0

    def __init__(self, weight: torch.Tensor, *, int8_for: torch.dtype | None = None) -> None:
        """Take a checkpoint's `[out, in]` in its final type and device; not copied if plain.

        `int8_for`: quantise it for rows of this type; then `weight` is in full precision.
        """
        self.layout = layout_of(weight.device, int8_for or weight.dtype)
        self.out_features, self.in_features = weight.shape
        if int8_for is not None:
            weight = panel_gemm.packed_int8(*quantized(weight), int8_for)
        elif self.layout is Layout.PANELS:
            weight = panel_gemm.packed(weight)
        elif self.layout is Layout.PACKED:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        self.weight = weight
        # torch counts the elements of oneDNN's blocks, without their padding.
        has_blocks = weight.is_mkldnn
        self.size_bytes = int(torch.ops.mkldnn._nbytes(weight)) if has_blocks else weight.nbytes

    @classmethod
    def of(cls, codes: torch.Tensor | Codes, dtype: torch.dtype) -> Matrix:
        """Take a tensor, or codes for rows of this type.

        Raises FailedPrecondition for codes where weights are not in panels.
        """
        if isinstance(codes, torch.Tensor):
            return cls(codes)
        _need_panels("the codes of a quantised checkpoint need", codes.codes.device, dtype)
        made = cls.__new__(cls)
        made.layout = Layout.PANELS
        made.out_features, made.in_features = codes.shape
        if codes.is_int4:
            made.group = codes.group
            parts = (codes.codes, codes.scales, codes.zeros, codes.group)
            made.weight = panel_gemm.packed_in_groups(*parts, dtype)
        else:
            made.weight = panel_gemm.packed_int8(codes.codes, codes.scales[:, 0], dtype)
        made.size_bytes = made.weight.nbytes
        return made

    def part(self, first: int, count: int) -> Matrix | None:
        """Return the matrix of `count` outputs from `first` on, over the same memory.

        None unless these are whole panels, without codes.
        """
        if self.layout is not Layout.PANELS or panel_gemm.kind_of(self.weight) is not Kind.SAME:
            return None
        weight = panel_gemm.part_of(self.weight, self.out_features, first, count)
        if weight is None:
            return None
        made = Matrix.__new__(Matrix)
        made.layout, made.weight, made.size_bytes = self.layout, weight, weight.nbytes
        made.out_features, made.in_features = count, self.in_features
        return made

    def raw(self) -> torch.Tensor:
        """Return the matrix's memory as uint8 `[size_bytes]`.

        It may be overwritten with that of another matrix of the same shape, type and
        device, because layouts depend on nothing else.
        """
        if self.layout is not Layout.PACKED:
            return self.weight.view(-1).view(torch.uint8)
        # The tensor is opaque to torch, its memory is not.
        address = torch.ops.mkldnn.data_ptr(self.weight)
        memory: Any = (ctypes.c_uint8 * self.size_bytes).from_address(address)
        memory.owner = self.weight  # which frees it
        return torch.frombuffer(memory, dtype=torch.uint8)


def held_bytes(
    out_features: int,
    in_features: int,
    device: torch.device,
    dtype: torch.dtype,
    weights: WeightFormat = WeightFormat.NATIVE,
    stored: Quantization | None = None,
) -> int:
    """Return `Matrix.size_bytes` for this shape; makes one to ask oneDNN.

    `stored`: as codes, which it is made of; None: plainly.
    """
    layout = layout_of(device, dtype)
    if stored is not None and stored.stored is not Stored.INT8:
        shape = (out_features, in_features)
        return panel_gemm.packed_in_groups_bytes(
            *shape, stored.group or in_features, kind_of(stored)
        )
    if weights is WeightFormat.INT8 or stored is not None:
        return panel_gemm.packed_int8_bytes(out_features, in_features, dtype)
    if layout is Layout.PLAIN:
        return out_features * in_features * dtype.itemsize
    if layout is Layout.PANELS:
        return panel_gemm.packed_bytes(out_features, in_features, dtype)
    return _packed_bytes(out_features, in_features, dtype)


@lru_cache(maxsize=64)
def _packed_bytes(out_features: int, in_features: int, dtype: torch.dtype) -> int:
    return Matrix(torch.empty((out_features, in_features), dtype=dtype)).size_bytes
