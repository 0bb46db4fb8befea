"""The loop over our own decoder's layers, for a step of the engine and a prefill in a restore."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from splitpoint.planning.weight_schedule import WeightPiece
from worker_service.model.layer import DecoderLayer
from worker_service.model.model import Attend, CarryOut, Enter, at_once
from worker_service.model.rope import Rotary


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
        project = partial(layer.begin, hidden, rotary)
        inputs, queries, keys, values = carry_out("project", index, project)
        attended = attend(index, layer, inputs, queries, keys, values)
        if layer.whole is not None:
            hidden = carry_out("finish", index, partial(layer.finish, hidden, attended))
            continue
        layer.await_weights(WeightPiece.OUTPUT)
        hidden = carry_out("output", index, partial(layer.add_attention, hidden, attended))
        layer.await_weights(WeightPiece.MLP)
        hidden = carry_out("finish", index, partial(layer.add_mlp, hidden))
    return hidden
