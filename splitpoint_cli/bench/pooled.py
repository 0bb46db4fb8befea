"""Grouped-query variants of a multi-head checkpoint, for measurements only.

K and V heads are averaged in groups (the first step of Ainslie et al. 2023, without the
training that follows there), so the texts of such a model are worse than the original's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from splitpoint.checkpoint.decoder import read_decoder
from splitpoint.errors import InvalidArgument
from splitpoint.shapes import DataType, ModelShape
from worker_service.checkpoint.tensors import Checkpoint
from worker_service.device.cache import TORCH_TYPES
from worker_service.model.decoder import Decoder

_POOLED = ("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias")


class Source(Protocol):
    """Tensors by their checkpoint names."""

    def get(self, name: str) -> torch.Tensor: ...


def pooled_shape(shape: ModelShape, kv_head_count: int) -> ModelShape:
    """Return the shape with fewer KV heads. Raises InvalidArgument unless they divide evenly."""
    if not 1 <= kv_head_count <= shape.kv_head_count or shape.kv_head_count % kv_head_count:
        raise InvalidArgument(
            f"{shape.name} has {shape.kv_head_count} KV heads: {kv_head_count} groups of equal "
            "size cannot be made of them",
            field="kv_heads",
        )
    return replace(shape, kv_head_count=kv_head_count)


class PooledHeads:
    """A checkpoint whose K and V heads are averaged in equal groups of neighbours."""

    def __init__(self, source: Source, shape: ModelShape, kv_head_count: int) -> None:
        """`shape`: the checkpoint's own."""
        self._source = source
        self._head_dim = shape.head_dim
        self._kv_head_count = kv_head_count

    def get(self, name: str) -> torch.Tensor:
        tensor = self._source.get(name)
        if not name.endswith(_POOLED):
            return tensor
        heads = tensor.view(self._kv_head_count, -1, self._head_dim, *tensor.shape[1:])
        return heads.to(torch.float32).mean(dim=1).flatten(0, 1).to(tensor.dtype)

    def read_into(self, name: str, target: torch.Tensor) -> None:
        target.copy_(self.get(name))


def load_pooled(
    folder: Path, kv_head_count: int | None, device: torch.device, data_type: DataType
) -> Decoder:
    """Load a checkpoint, with as many KV heads as wanted; None: with its own.

    Raises InvalidArgument as `pooled_shape` and `Decoder.load` do.
    """
    config, dtype = read_decoder(folder, data_type), TORCH_TYPES[data_type]
    with Checkpoint(folder, config, device, dtype) as source:
        if kv_head_count is None:
            return Decoder(config, source, device, dtype)
        pooled = replace(config, shape=pooled_shape(config.shape, kv_head_count))
        return Decoder(pooled, PooledHeads(source, config.shape, kv_head_count), device, dtype)
