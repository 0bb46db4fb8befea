"""Weights on the host, in the layout of a device's slot.

A unit fills one slot: a layer's matrices, or some rows of the head. Its memory is one
mapping with its matrices in the order of the pieces, so copies are as large as the
matrices. Weights are read straight into it; there is never a second copy of the model.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from splitpoint.planning.weight_schedule import WeightPiece
from splitpoint.shapes import WeightFormat
from worker_service.checkpoint.tensors import TensorSource
from worker_service.kernels.choice import Layout
from worker_service.weights.matrices import MatrixShape
from worker_service.weights.packing import Matrix, held_bytes, layout_of

Parts = Mapping[WeightPiece, Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class HostUnit:
    """One unit's bytes on the host.

    Attributes:
        parts: the matrices of each piece as uint8 `[size]`, in order.
        memory: the mapping of the parts, which other units may share.
    """

    parts: Parts
    memory: torch.Tensor


@dataclass(frozen=True, slots=True)
class Slot:
    """Device memory for one unit: its matrices by role, and their bytes by piece."""

    matrices: Mapping[str, Matrix]
    parts: Parts

    @classmethod
    def empty(
        cls,
        shapes: Sequence[MatrixShape],
        device: torch.device,
        dtype: torch.dtype,
        weights: WeightFormat = WeightFormat.NATIVE,
    ) -> Slot:
        int8_for = dtype if weights is WeightFormat.INT8 else None
        matrices = {
            shape.role: Matrix(
                torch.zeros((shape.out_features, shape.in_features), dtype=dtype, device=device),
                int8_for=int8_for,
            )
            for shape in shapes
        }
        return cls(matrices, _by_piece(shapes, [each.raw() for each in matrices.values()]))

    @property
    def size_bytes(self) -> int:
        return sum(matrix.size_bytes for matrix in self.matrices.values())


def read_unit(
    source: TensorSource,
    shapes: Sequence[MatrixShape],
    device: torch.device,
    dtype: torch.dtype,
    weights: WeightFormat = WeightFormat.NATIVE,
) -> HostUnit:
    """Read a unit from a checkpoint into new host memory, in the layout of `device`."""
    sizes = [
        held_bytes(each.out_features, each.in_features, device, dtype, weights) for each in shapes
    ]
    memory = host_memory(sum(sizes))
    parts = torch.split(memory, sizes)
    for shape, part in zip(shapes, parts, strict=True):
        size = (shape.out_features, shape.in_features)
        if weights is WeightFormat.INT8:
            exact = torch.empty(size, dtype=torch.float32)
            shape.read(source, exact)
            part.copy_(Matrix(exact, int8_for=dtype).raw())
        elif layout_of(device, dtype) is not Layout.PLAIN:
            plain = torch.empty(size, dtype=dtype)
            shape.read(source, plain)
            part.copy_(Matrix(plain).raw())
        else:
            shape.read(source, part.view(dtype).view(size))
    return HostUnit(_by_piece(shapes, parts), memory)


def read_tensor(
    source: TensorSource, name: str, size: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Read a table of this size from a checkpoint into new host memory."""
    target = host_memory(prod(size) * dtype.itemsize).view(dtype).view(*size)
    source.read_into(name, target)
    return target


def units_of_rows(
    weight: torch.Tensor,
    pieces: Iterable[range],
    device: torch.device,
    int8_for: torch.dtype | None = None,
) -> list[HostUnit]:
    """Cut the head, `[out, in]` on the host, into units of some rows each.

    The units are views of it, unless the device needs another layout. `int8_for`: as in Matrix.
    """
    units = []
    whole = weight.view(-1).view(torch.uint8)
    for rows in pieces:
        part = weight[rows.start : rows.stop]
        if layout_of(device, weight.dtype) is not Layout.PLAIN:
            matrix = Matrix(part, int8_for=int8_for)
            memory = host_memory(matrix.size_bytes)
            memory.copy_(matrix.raw())
            units.append(HostUnit({WeightPiece.HEAD: [memory]}, memory))
        else:
            units.append(HostUnit({WeightPiece.HEAD: [part.view(-1).view(torch.uint8)]}, whole))
    return units


def host_memory(size_bytes: int) -> torch.Tensor:
    """Return uint8 `[size_bytes]` on memory pages of its own, which a driver can lock."""
    return torch.frombuffer(mmap.mmap(-1, size_bytes), dtype=torch.uint8)


def _by_piece(shapes: Sequence[MatrixShape], parts: Sequence[torch.Tensor]) -> Parts:
    grouped: dict[WeightPiece, list[torch.Tensor]] = {}
    for shape, part in zip(shapes, parts, strict=True):
        grouped.setdefault(shape.piece, []).append(part)
    return grouped
