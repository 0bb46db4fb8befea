"""A decoder-only transformer as plain tensors, configured by data.

It computes; where keys and values live, which requests its rows belong to and
what is done with the logits is decided elsewhere.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch.nn import functional

from splitpoint.shapes import DataType
from worker_service.model.config import DecoderConfig, Norm
from worker_service.model.layer import DecoderLayer
from worker_service.model.linear import Linear, packs
from worker_service.model.norms import NormWeights
from worker_service.model.rope import Rotary, RotaryTable
from worker_service.weights import NAMES, Checkpoint, RandomTensors, TensorSource

__all__ = ["Decoder", "DecoderConfig", "DecoderLayer", "Rotary"]

_DATA_TYPES = {
    torch.float32: DataType.FLOAT32,
    torch.bfloat16: DataType.BFLOAT16,
    torch.float16: DataType.FLOAT16,
}


class Decoder:
    """Embedding, layers and output head.

    A step is: `hidden = embed(ids, positions)`; for each layer X =
    `attention_input(hidden)`, `project(X, rotary)`, attention over the cache,
    `hidden = finish(hidden, attended)`; then `logits(hidden[rows])`.

    Attributes:
        config, shape: what it was built from; `shape.data_type` is `dtype`.
        layers: in order.
        weight_bytes: bytes of all weights as held (a CPU holds tied embeddings
            twice: as the table and as the head's packed matrix).
    """

    def __init__(
        self, config: DecoderConfig, source: TensorSource, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.config = config
        self.shape = config.shape
        self.device = device
        self.dtype = dtype
        self.weight_bytes = 0
        self._source = source
        names = NAMES[config.shape.family]
        root = names.root
        self._embedding = self._tensor(f"{root}{names.embedding}.weight")
        self._positions = (
            None
            if config.position_offset is None
            else self._tensor(f"{root}{names.positions}.weight")
        )
        self._project_in: Linear | None = None
        self._project_out: Linear | None = None
        if config.embedding_size != config.shape.hidden_size:
            self._project_in = self._linear([root + names.project_in], bias=False)
            self._project_out = self._linear([root + names.project_out], bias=False)
        self._rotary = (
            None
            if config.rope is None
            else RotaryTable(config.rope, config.shape.head_dim, device, dtype)
        )
        self.layers = [self._layer(index) for index in range(config.shape.layer_count)]
        self._final_norm = self._norm(root + names.final_norm) if config.final_norm else None
        self._head = self._make_head()
        del self._source

    @classmethod
    def load(cls, folder: Path, device: torch.device, dtype: torch.dtype | None = None) -> Decoder:
        """From a checkpoint folder; dtype None: the checkpoint's own.

        Raises InvalidArgument for an unsupported config or bad weight files.
        """
        data_type = None if dtype is None else _DATA_TYPES[dtype]
        config = DecoderConfig.read(folder, data_type)
        dtype = torch_type(config.shape.data_type)
        with Checkpoint(folder, config, device, dtype) as source:
            return cls(config, source, device, dtype)

    @classmethod
    def random(
        cls, config: DecoderConfig, seed: int, device: torch.device, dtype: torch.dtype
    ) -> Decoder:
        """With weights drawn from a seed: for measurements and tests."""
        shape = replace(config.shape, data_type=_DATA_TYPES[dtype])
        config = replace(config, shape=shape)
        return cls(config, RandomTensors(config, seed, device, dtype), device, dtype)

    # -- computing ----------------------------------------------------------------

    def embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Ids and positions, int64 `[N]`, to the first hidden `[N, h]`."""
        hidden = functional.embedding(token_ids, self._embedding)
        if self._project_in is not None:
            hidden = self._project_in(hidden)
        if self._positions is not None:
            offset = self.config.position_offset or 0
            hidden = hidden + functional.embedding(positions + offset, self._positions)
        return hidden

    def rotary(self, positions: torch.Tensor) -> Rotary | None:
        """Angles for int64 `[N]` positions, for all layers; None: the model has none."""
        return None if self._rotary is None else self._rotary.at(positions)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Last hidden `[M, h]` to fp32 logits `[M, vocabulary]`."""
        if self._final_norm is not None:
            hidden = self._final_norm(hidden)
        if self._project_out is not None:
            hidden = self._project_out(hidden)
        return self._head(hidden).to(torch.float32)

    # -- building -----------------------------------------------------------------

    def _layer(self, index: int) -> DecoderLayer:
        config, shape, names = self.config, self.shape, NAMES[self.shape.family]
        prefix = f"{names.root}layers.{index}."
        return DecoderLayer(
            head_dim=shape.head_dim,
            scale=shape.head_dim**-0.5,
            window=config.windows[index],
            norm_before=config.norm_before,
            activation=config.activation,
            query=self._linear([prefix + names.query], bias=config.qkv_bias),
            key_value=self._linear(
                [prefix + names.key, prefix + names.value], bias=config.qkv_bias
            ),
            output=self._linear([prefix + names.output], bias=config.output_bias),
            gate=(
                self._linear([prefix + names.gate], bias=config.mlp_bias)
                if shape.gated_mlp
                else None
            ),
            up=self._linear([prefix + names.up], bias=config.mlp_bias),
            down=self._linear([prefix + names.down], bias=config.mlp_bias),
            attention_norm=self._norm(prefix + names.attention_norm),
            mlp_norm=self._norm(prefix + names.mlp_norm),
            query_norm=self._head_norm(prefix + names.query_norm),
            key_norm=self._head_norm(prefix + names.key_norm),
        )

    def _make_head(self) -> Linear:
        if not self.shape.tied_embeddings:
            return self._linear(["lm_head"], bias=False)
        head = Linear(self._embedding)
        if packs(self.device, self.dtype):
            self.weight_bytes += head.weight_bytes
        return head

    def _linear(self, names: list[str], *, bias: bool) -> Linear:
        """One matrix, or several over the same input stacked into one."""
        weights = [self._source.get(f"{name}.weight") for name in names]
        biases = [self._source.get(f"{name}.bias") for name in names] if bias else []
        linear = Linear(
            weights[0] if len(weights) == 1 else torch.cat(weights),
            torch.cat(biases) if biases else None,
        )
        self.weight_bytes += linear.weight_bytes
        return linear

    def _norm(self, name: str) -> NormWeights:
        weight = self._tensor(f"{name}.weight")
        bias = self._tensor(f"{name}.bias") if self.config.norm is Norm.LAYER else None
        return NormWeights(self.config.norm, weight, bias, self.config.norm_epsilon)

    def _head_norm(self, name: str) -> NormWeights | None:
        if not self.config.query_key_norm:
            return None
        return NormWeights(Norm.RMS, self._tensor(f"{name}.weight"), None, self.config.norm_epsilon)

    def _tensor(self, name: str) -> torch.Tensor:
        tensor = self._source.get(name)
        self.weight_bytes += tensor.numel() * tensor.element_size()
        return tensor


def torch_type(data_type: DataType) -> torch.dtype:
    """The torch type of a DataType."""
    return next(known for known, name in _DATA_TYPES.items() if name is data_type)
