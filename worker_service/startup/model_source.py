"""Whose code computes a worker's model, and what is known of it before its weights are read.

Our own decoder computes the families that it has. Any other decoder-only model is computed by
transformers' code, which is imported for it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from splitpoint.checkpoint.config import with_context
from splitpoint.checkpoint.decoder import AttentionConfig, DecoderConfig, ModelBackend, support_of
from splitpoint.errors import InvalidArgument, ResourceExhausted
from splitpoint.options.store import INT8_NEEDS_OWN
from splitpoint.planning.weight_placement import NOTHING_ON_HOST, OnHost, WeightSizes
from splitpoint.progress import Ticker
from splitpoint.shapes import DataType, ModelShape, WeightFormat
from worker_service.device.cache import TORCH_TYPES
from worker_service.model.decoder import Decoder
from worker_service.model.model import Model
from worker_service.startup.options import WorkerOptions
from worker_service.weights.matrices import product_shapes, weight_sizes

if TYPE_CHECKING:
    from worker_service.model.transformers_model import Blueprint


class ModelSource(Protocol):
    """A checkpoint, read as far as its configuration."""

    @property
    def backend(self) -> ModelBackend: ...

    @property
    def config(self) -> AttentionConfig:
        """Its `shape` has the context that is served."""

    @property
    def product_shapes(self) -> set[tuple[int, int]]:
        """`(out_features, in_features)` of all matrices that rows are multiplied with."""

    def weight_sizes(self, device: torch.device, weights: WeightFormat) -> WeightSizes:
        """Return the bytes of the weights as a worker holds them."""

    def load(
        self,
        device: torch.device,
        on_host: OnHost,
        tickers: Sequence[Ticker],
        weights: WeightFormat,
    ) -> Model:
        """Read the weights. Raises InvalidArgument, FailedPrecondition, ResourceExhausted."""


def model_source(options: WorkerOptions) -> ModelSource:
    """Return what computes a worker's checkpoint. Raises InvalidArgument if nothing does."""
    return source_of(
        options.model_folder,
        options.data_type,
        options.model_backend,
        max_model_len=options.max_model_len,
    )


def source_of(
    folder: Path,
    data_type: DataType | None = None,
    backend: ModelBackend = ModelBackend.AUTO,
    *,
    max_model_len: int | None = None,
) -> ModelSource:
    """Return what computes a checkpoint: the verdict of every command and service.

    Raises InvalidArgument, with the reason, if nothing does.
    """
    support = support_of(folder, data_type, backend)
    shape = with_context(support.required_shape, max_model_len)
    if support.decoder is not None:
        return _OwnSource(folder, replace(support.decoder, shape=shape))
    return _TransformersSource(_blueprint(folder, shape, (folder / "config.json").read_bytes()))


@lru_cache(maxsize=1)
def _blueprint(folder: Path, shape: ModelShape, _config: bytes) -> Blueprint:
    """Return a checkpoint's model. The last one is kept: it takes a second to make.

    `_config`: the content of config.json; when it has changed, the model is made anew.
    """
    # Takes seconds to import, and serves only this.
    from worker_service.model.transformers_model import Blueprint

    return Blueprint.of(folder, shape)


class _OwnSource:
    backend = ModelBackend.OWN

    def __init__(self, folder: Path, config: DecoderConfig) -> None:
        self._folder = folder
        self.config = config

    @property
    def product_shapes(self) -> set[tuple[int, int]]:
        return product_shapes(self.config)

    def weight_sizes(self, device: torch.device, weights: WeightFormat) -> WeightSizes:
        dtype = TORCH_TYPES[self.config.shape.data_type]
        return weight_sizes(self.config, device, dtype, weights)

    def load(
        self,
        device: torch.device,
        on_host: OnHost,
        tickers: Sequence[Ticker],
        weights: WeightFormat,
    ) -> Model:
        if self.config.quantization is not None and self.config.quantization.holds_codes:
            _require_all_on_device(on_host, "that is quantised")
        shape = self.config.shape
        return Decoder.load(
            self._folder,
            device,
            TORCH_TYPES[shape.data_type],
            on_host,
            tickers,
            weights,
            context_length=shape.context_length,
        )


class _TransformersSource:
    backend = ModelBackend.TRANSFORMERS

    def __init__(self, blueprint: Blueprint) -> None:
        self._blueprint = blueprint
        self.config = blueprint.config

    @property
    def product_shapes(self) -> set[tuple[int, int]]:
        return self._blueprint.product_shapes

    def weight_sizes(self, device: torch.device, weights: WeightFormat) -> WeightSizes:
        """All weights are fixed: none can stay on the host. Raises InvalidArgument for int8."""
        if weights is not WeightFormat.NATIVE:
            raise InvalidArgument(INT8_NEEDS_OWN, field="weights")
        size = self._blueprint.held_bytes(device)
        return WeightSizes.held(self.config.shape.layer_count, size)

    def load(
        self,
        device: torch.device,
        on_host: OnHost,
        tickers: Sequence[Ticker],
        weights: WeightFormat,
    ) -> Model:
        _require_all_on_device(on_host, "that transformers' code computes")
        return self._blueprint.load(device, tickers)


def _require_all_on_device(on_host: OnHost, what: str) -> None:
    if on_host != NOTHING_ON_HOST:
        raise ResourceExhausted(
            f"the device memory does not hold all weights, and a model {what} can keep none on "
            "the host",
            reason="DEVICE_MEMORY",
        )
