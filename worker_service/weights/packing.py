"""The layout in which a device holds a matrix: oneDNN's blocks, or `[out, in]`.

Measured on 2 AVX-512 cores with OPT-125M's matrices at 8 rows (GB/s of weights read):
fp32 `F.linear` 11, `x @ W[in, out]` 8, MKL's packed form 8, oneDNN's blocked form 26;
bf16 14, 13, -, 27. At 512 and 4,096 rows the blocked form is also the fastest, by a
tenth. A CPU therefore holds oneDNN-blocked weights if oneDNN supports their type, unless the
host was measured to be faster without (kernels/choice.py). The layout depends on device,
type and that choice only, so equal workers compute equal bits.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch

from worker_service.kernels.choice import Linear, in_use

# Rows that oneDNN lays the blocks out for; other counts run from the same blocks.
_PACKED_FOR_ROWS = 32


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if weights of this type use oneDNN's blocked layout on the device."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    chosen = in_use()
    if chosen is not None and chosen.linear is Linear.PLAIN:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


class Matrix:
    """The weight of a linear layer, `[out, in]`, in the layout of its device.

    Attributes:
        weight: the matrix in that layout; an opaque tensor if `is_packed`.
        size_bytes: oneDNN's padding to whole blocks included.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        """Take a checkpoint's `[out, in]` in its final type and device; copied only if packed."""
        self.is_packed = packs(weight.device, weight.dtype)
        self.out_features, self.in_features = weight.shape
        if self.is_packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
            self.size_bytes = int(torch.ops.mkldnn._nbytes(weight))
        else:
            self.size_bytes = weight.numel() * weight.element_size()
        self.weight = weight

    def raw(self) -> torch.Tensor:
        """Return the matrix's memory as uint8 `[size_bytes]`.

        It may be overwritten with that of another matrix of the same shape, type and
        device, because oneDNN's blocks depend on nothing else.
        """
        if not self.is_packed:
            return self.weight.view(-1).view(torch.uint8)
        # The tensor is opaque to torch, its memory is not.
        address = torch.ops.mkldnn.data_ptr(self.weight)
        memory: Any = (ctypes.c_uint8 * self.size_bytes).from_address(address)
        memory.owner = self.weight  # which frees it
        return torch.frombuffer(memory, dtype=torch.uint8)


def held_bytes(
    out_features: int, in_features: int, device: torch.device, dtype: torch.dtype
) -> int:
    """Return `Matrix.size_bytes` for this shape; makes one to ask oneDNN."""
    if not packs(device, dtype):
        return out_features * in_features * dtype.itemsize
    return _packed_bytes(out_features, in_features, dtype)


@lru_cache(maxsize=64)
def _packed_bytes(out_features: int, in_features: int, dtype: torch.dtype) -> int:
    return Matrix(torch.empty((out_features, in_features), dtype=dtype)).size_bytes
