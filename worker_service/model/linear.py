"""One linear layer, its weights held in the layout that is fastest on the device.

Layouts, measured on 2 AVX-512 cores with OPT-125M's matrices at 8 rows (GB/s of
weights read): fp32 `F.linear` 11, `x @ W[in, out]` 8, MKL's packed form 8,
oneDNN's blocked form 26; bf16 14, 13, -, 27. At 512 and 4,096 rows the blocked
form is also the fastest by a tenth. So a CPU holds oneDNN-blocked weights where
oneDNN takes the type, everything else holds `[out, in]`. The choice depends on
device and type only, so that equal workers compute equal bits.

oneDNN compiles a kernel for each count of rows: 0.5 MiB and 2 to 5 ms for one
matrix. So rows are padded to a few counts (`padded_count`).
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch.nn import functional

from worker_service.model.config import Activation

# Rows that oneDNN lays the blocks out for; other counts run from the same blocks.
_PACKED_FOR_ROWS = 32
# Up to here reading the weights takes the time, whatever the count of rows.
_FEW_ROWS = 16
# Counts between a power of two and the next: at most an eighth of the rows is padding.
_COUNTS_PER_DOUBLING = 8


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether weights of this type are held in oneDNN's blocked layout."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def padded_count(count: int) -> int:
    """Rows that oneDNN is given instead of `count` (at least 1), so that few counts occur.

    A power of two up to 16; from there on 8 counts for each doubling.
    """
    if count <= _FEW_ROWS:
        return 1 << (count - 1).bit_length()
    step = (1 << (count.bit_length() - 1)) // _COUNTS_PER_DOUBLING
    return -(-count // step) * step


def _padded(rows: torch.Tensor) -> torch.Tensor:
    """`[N, n]` with zero rows up to the padded count."""
    missing = padded_count(len(rows)) - len(rows)
    return functional.pad(rows, (0, 0, 0, missing)) if missing else rows


class Matrix:
    """The weight of a linear layer, `[out, in]`, in the layout of its device.

    Attributes:
        weight: that layout; for `torch` an opaque tensor if `is_packed`.
        size_bytes: as held, oneDNN's padding to whole blocks included.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        """From a checkpoint's `[out, in]`, on its final device and type; kept, unless packed."""
        self.is_packed = packs(weight.device, weight.dtype)
        self.out_features, self.in_features = weight.shape
        if self.is_packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
            self.size_bytes = int(torch.ops.mkldnn._nbytes(weight))
        else:
            self.size_bytes = weight.numel() * weight.element_size()
        self.weight = weight

    def raw(self) -> torch.Tensor:
        """Its memory as uint8 `[size_bytes]`, to be copied from or over.

        A copy of another matrix's bytes of the same shape, type and device is that
        matrix: the blocks of oneDNN depend on nothing else.
        """
        if not self.is_packed:
            return self.weight.view(-1).view(torch.uint8)
        # The tensor is opaque to torch, its memory is not.
        address = torch.ops.mkldnn.data_ptr(self.weight)
        memory: Any = (ctypes.c_uint8 * self.size_bytes).from_address(address)
        memory.owner = self.weight  # which frees it
        return torch.frombuffer(memory, dtype=torch.uint8)


@lru_cache(maxsize=64)
def held_bytes(
    out_features: int, in_features: int, device: torch.device, dtype: torch.dtype
) -> int:
    """`Matrix.size_bytes` of a matrix of this shape; asks oneDNN by making one."""
    if not packs(device, dtype):
        return out_features * in_features * dtype.itemsize
    return Matrix(torch.empty((out_features, in_features), dtype=dtype)).size_bytes


class Weight(Protocol):
    """A matrix, or what stands for one that is somewhere else until it is read."""

    @property
    def is_packed(self) -> bool: ...

    @property
    def weight(self) -> torch.Tensor:
        """To be read by what compute is given next."""


class Linear:
    """`x @ weight.T + bias`, optionally with the activation fused."""

    def __init__(self, matrix: Weight, bias: torch.Tensor | None = None) -> None:
        self._matrix = matrix
        self._packed = matrix.is_packed
        self._bias = bias

    def __call__(self, rows: torch.Tensor, activation: Activation | None = None) -> torch.Tensor:
        """`[N, in]` to `[N, out]`."""
        if self._packed:
            name = "none" if activation is None else activation.value
            algorithm = "tanh" if activation is Activation.GELU_TANH else ""
            product = torch.ops.mkldnn._linear_pointwise(
                _padded(rows), self._matrix.weight, self._bias, name, [], algorithm
            )
            return product[: len(rows)]  # type: ignore[no-any-return]
        product = functional.linear(rows, self._matrix.weight, self._bias)
        if activation is Activation.RELU:
            return product.relu_()
        if activation is Activation.SILU:
            return functional.silu(product, inplace=True)
        if activation is Activation.GELU_TANH:
            return functional.gelu(product, approximate="tanh")
        return product

    def added_to(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """`residual + self(rows)`."""
        if self._packed:
            return self._combined(rows, residual, "add")
        return self(rows).add_(residual)

    def times(self, rows: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """`factor * self(rows)`, elementwise."""
        if self._packed:
            return self._combined(rows, factor, "mul")
        return self(rows).mul_(factor)

    def _combined(self, rows: torch.Tensor, other: torch.Tensor, operation: str) -> torch.Tensor:
        product = torch.ops.mkldnn._linear_pointwise.binary(
            _padded(rows), _padded(other), self._matrix.weight, self._bias, operation
        )
        return product[: len(rows)]  # type: ignore[no-any-return]
