"""The loop over decoder layers, for a step of the engine and a prefill during a restore.

The caller decides where K and V go, and what is attended to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol, TypeVar

import torch

from splitpoint.planning.weight_schedule import WeightPiece
from worker_service.model.layer import DecoderLayer
from worker_service.model.rope import Rotary

Result = TypeVar("Result")


# Stores a layer's new K and V (and X, if wanted), and attends over the cache. Takes the layer's
# index, the layer, X `[N, h]`, q `[N, n_q, d]`, k and v `[N, n_kv, d]`; returns `[N, n_q * d]`.
Attend = Callable[
    [int, DecoderLayer, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]


# Is given the index of a layer and the residual `[N, h]` that enters it, before it computes.
Enter = Callable[[int, torch.Tensor], None]


class CarryOut(Protocol):
    """Calls a named part of the layer with this index, and returns its result."""

    def __call__(self, name: str, index: int, call: Callable[[], Result], /) -> Result: ...


def at_once(_name: str, _index: int, call: Callable[[], Result], /) -> Result:
    """Call the part directly, without a lane."""
    return call()


def through_layers(
    layers: Iterable[DecoderLayer],
    hidden: torch.Tensor,
    rotary: Rotary | None,
    attend: Attend,
    carry_out: CarryOut = at_once,
    enter: Enter | None = None,
) -> torch.Tensor:
    """Return the hidden `[N, h]` after these layers."""
    for index, layer in enumerate(layers):
        if enter is not None:
            enter(index, hidden)
        layer.await_weights(WeightPiece.KEY_VALUE, WeightPiece.QUERY)
        project = partial(_project, layer, hidden, rotary)
        inputs, queries, keys, values = carry_out("project", index, project)
        attended = attend(index, layer, inputs, queries, keys, values)
        layer.await_weights(WeightPiece.OUTPUT)
        hidden = carry_out("output", index, partial(layer.add_attention, hidden, attended))
        layer.await_weights(WeightPiece.MLP)
        hidden = carry_out("finish", index, partial(layer.add_mlp, hidden))
    return hidden


def _project(
    layer: DecoderLayer, hidden: torch.Tensor, rotary: Rotary | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return X, queries, keys and values."""
    inputs = layer.attention_input(hidden)
    return inputs, *layer.project(inputs, rotary)
