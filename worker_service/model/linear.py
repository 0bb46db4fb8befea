"""One linear layer over a matrix in the layout of its device (weights/packing.py).

oneDNN compiles a kernel for each row count: 0.5 MiB and 2 to 5 ms for one matrix.
Rows are therefore padded to a few counts for it (`padded_count`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch.nn import functional

from splitpoint.checkpoint.decoder import Activation
from worker_service.kernels import panel_gemm, tile_gemm
from worker_service.kernels.choice import Layout, adds_in_one_order
from worker_service.kernels.panel_gemm import Operation
from worker_service.kernels.row_counts import blocks, row_counts
from worker_service.kernels.whole_layer import PanelMatrix
from worker_service.weights.packing import Matrix

# Up to this many rows the time is that of reading the weights.
_FEW_ROWS = 16
# Padded counts for each doubling: at most an eighth of the rows is padding.
_COUNTS_PER_DOUBLING = 8
_GELU_FACTOR = math.sqrt(2 / math.pi)
OPERATIONS = {
    None: Operation.NONE,
    Activation.RELU: Operation.RELU,
    Activation.SILU: Operation.SILU,
    Activation.GELU_TANH: Operation.GELU_TANH,
}


def padded_count(count: int) -> int:
    """Return the rows to compute instead of `count` (at least 1), so that few counts occur.

    A power of two up to 16; above, one of 8 counts for each doubling.
    """
    if count <= _FEW_ROWS:
        return 1 << (count - 1).bit_length()
    step = (1 << (count.bit_length() - 1)) // _COUNTS_PER_DOUBLING
    return -(-count // step) * step


def _padded(rows: torch.Tensor, count: int | None = None) -> torch.Tensor:
    """Pad `[N, n]` with zero rows to this count; None: to the padded count."""
    missing = (padded_count(len(rows)) if count is None else count) - len(rows)
    return functional.pad(rows, (0, 0, 0, missing)) if missing else rows


def _in_blocks(
    counts: Sequence[int], product: Callable[..., torch.Tensor], *tensors: torch.Tensor
) -> torch.Tensor:
    """Return `product(*tensors)`, computed in blocks of rows of these counts."""
    parts, first = [], 0
    for size, count in blocks(len(tensors[0]), counts):
        part = (_padded(each[first : first + size], count) for each in tensors)
        parts.append(product(*part)[:size])
        first += size
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def by_element(rows: torch.Tensor, activation: Activation | None) -> torch.Tensor:
    """Return the activation of each element, whatever its place in the tensor.

    torch's own SiLU and GELU compute the last elements of a thread otherwise than the others.
    """
    wide = rows.to(torch.float32)
    if activation is Activation.RELU:
        return rows.relu()
    if activation is Activation.SILU:
        return (wide / (1 + (-wide).exp_())).to(rows.dtype)
    if activation is Activation.GELU_TANH:
        inner = _GELU_FACTOR * (wide + 0.044715 * wide * wide * wide)
        return (0.5 * wide * (1 + inner.tanh_())).to(rows.dtype)
    return rows


# Elements that torch's kernels take at once, at most.
_AT_ONCE = 32


def apart(rows: torch.Tensor) -> torch.Tensor:
    """Return narrow rows `[N, n]` with space between them.

    torch computes sigmoid and the like of adjacent rows as one, and its last elements otherwise
    than the others. Rows that lie apart are computed one by one.
    """
    missing = -rows.shape[-1] % _AT_ONCE
    return functional.pad(rows, (0, missing))[..., : rows.shape[-1]] if missing else rows


class Weight(Protocol):
    """A matrix, or a stand-in for one that streams from the host."""

    @property
    def layout(self) -> Layout: ...
    @property
    def out_features(self) -> int: ...
    @property
    def group(self) -> int: ...

    @property
    def weight(self) -> torch.Tensor:
        """The tensor, to be read by the compute that is issued next."""


class Linear:
    """`x @ weight.T + bias`, optionally with the activation fused."""

    def __init__(self, matrix: Weight, bias: torch.Tensor | None = None) -> None:
        self._matrix = matrix
        self._layout = matrix.layout
        # A kernel of one order, which has all activations.
        self._is_fused = self._layout is Layout.PANELS or adds_in_one_order()
        self._bias = bias

    @property
    def in_panels(self) -> PanelMatrix | None:
        """The matrix and its bias, if it stays on a CPU in panels; else None."""
        held = self._matrix
        if self._layout is not Layout.PANELS or not isinstance(held, Matrix):
            return None
        sizes = (held.out_features, held.in_features, held.group)
        return PanelMatrix(held.weight, *sizes, self._bias)

    @property
    def has_gradients(self) -> bool:
        """True if torch knows the gradients of its products."""
        return self._layout is Layout.PLAIN and not self._is_fused

    def __call__(self, rows: torch.Tensor, activation: Activation | None = None) -> torch.Tensor:
        """Map `[N, in]` to `[N, out]`."""
        if self._is_fused:
            return self._fused(rows, OPERATIONS[activation])
        counts = row_counts(self._matrix.out_features, rows.shape[1])
        if self._layout is Layout.PACKED:
            if counts is not None:
                return _in_blocks(counts, partial(self._product, activation), rows)
            return self._product(activation, _padded(rows))[: len(rows)]
        if counts is not None:
            return by_element(_in_blocks(counts, partial(self._product, None), rows), activation)
        return self._product(activation, rows)

    def _product(self, activation: Activation | None, rows: torch.Tensor) -> torch.Tensor:
        """Return torch's product of all these rows."""
        if self._layout is Layout.PACKED:
            name = "none" if activation is None else activation.value
            algorithm = "tanh" if activation is Activation.GELU_TANH else ""
            return torch.ops.mkldnn._linear_pointwise(  # type: ignore[no-any-return]
                rows, self._matrix.weight, self._bias, name, [], algorithm
            )
        product = functional.linear(rows, self._matrix.weight, self._bias)
        if activation is Activation.RELU:
            return product.relu_()
        if activation is Activation.SILU:
            return functional.silu(product, inplace=True)
        if activation is Activation.GELU_TANH:
            return functional.gelu(product, approximate="tanh")
        return product

    def added_to(self, rows: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return `residual + self(rows)`."""
        if self._is_fused:
            return self._fused(rows, Operation.ADD, residual)
        if self._layout is Layout.PACKED:
            return self._combined(rows, residual, "add")
        return self(rows).add_(residual)

    def times(self, rows: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """Return `factor * self(rows)`, elementwise."""
        if self._is_fused:
            return self._fused(rows, Operation.MULTIPLY, factor)
        if self._layout is Layout.PACKED:
            return self._combined(rows, factor, "mul")
        return self(rows).mul_(factor)

    def _fused(
        self, rows: torch.Tensor, operation: Operation, other: torch.Tensor | None = None
    ) -> torch.Tensor:
        matrix = self._matrix
        if self._layout is not Layout.PANELS:
            return tile_gemm.multiply(rows, matrix.weight, self._bias, operation, other)
        return panel_gemm.multiply(
            rows, matrix.weight, matrix.out_features, self._bias, operation, other, matrix.group
        )

    def _combined(self, rows: torch.Tensor, other: torch.Tensor, operation: str) -> torch.Tensor:
        def product(rows: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return torch.ops.mkldnn._linear_pointwise.binary(  # type: ignore[no-any-return]
                rows, other, self._matrix.weight, self._bias, operation
            )

        counts = row_counts(self._matrix.out_features, rows.shape[1])
        if counts is not None:
            return _in_blocks(counts, product, rows, other)
        return product(_padded(rows), _padded(other))[: len(rows)]
