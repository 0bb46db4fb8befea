"""Rows through decoder layers, whoever they belong to and wherever their cache is.

The one loop over layers that a step of the engine and a prefill during a restore
share. Where K and V go, and what is attended to, is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from worker_service.model.layer import DecoderLayer
from worker_service.model.rope import Rotary


class Attend(Protocol):
    """Keeps a layer's new K and V (and X, if wanted), and attends over the cache.

    Takes the layer's index, itself, X `[N, h]`, q `[N, n_q, d]`, k and v
    `[N, n_kv, d]`; returns `[N, n_q * d]`.
    """

    def __call__(
        self,
        index: int,
        layer: DecoderLayer,
        inputs: torch.Tensor,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        /,
    ) -> torch.Tensor: ...


def through_layers(
    layers: Iterable[DecoderLayer], hidden: torch.Tensor, rotary: Rotary | None, attend: Attend
) -> torch.Tensor:
    """The hidden `[N, h]` after these layers, from the one before them."""
    for index, layer in enumerate(layers):
        inputs = layer.attention_input(hidden)
        queries, keys, values = layer.project(inputs, rotary)
        attended = attend(index, layer, inputs, queries, keys, values)
        hidden = layer.finish(hidden, attended)
    return hidden
