"""The operators of a loaded model, from token ids to logits, without attention.

The model computes the rows by its own code: what is compared is what serves requests. Of equal
matrices, by shape and purpose, one is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from worker_service.model.decoder import Decoder
from worker_service.model.layer import DecoderLayer
from worker_service.numerics.operators import MOST_ROWS, Operator, Result

# Rows of the output head, which computes few in a step, and is the largest matrix by far.
_HEAD_ROWS = 65
_SEED = 14

Apply = Callable[..., Result]


def model_operators(model: Decoder) -> Iterator[Operator]:
    """Yield the operators in the order of a step; on a CPU all layers have the same threads."""
    rows = _Rows(model)
    positions = torch.randint(model.shape.context_length, (MOST_ROWS,), generator=rows.generator)
    positions = positions.to(model.device)
    ids = torch.randint(model.shape.vocabulary_size, (MOST_ROWS,), generator=rows.generator)
    yield Operator("the embedding", (ids.to(model.device), positions), model.embed)
    if model.rotary(positions[:1]) is not None:
        yield Operator("the rotary angles", (positions,), _angles(model))
    seen: set[tuple[object, ...]] = set()
    for index, layer in enumerate(model.visit()):
        kind = _kind_of(layer)
        if kind not in seen:
            seen.add(kind)
            yield from _layer_operators(model, rows, index, layer, positions)
    hidden = rows.of(model.shape.hidden_size, _HEAD_ROWS)
    yield Operator("the output head", (hidden,), model.logits, most_calls=1)


class _Rows:
    """Random rows of the model's type, the same at every start."""

    def __init__(self, model: Decoder) -> None:
        self.generator = torch.Generator().manual_seed(_SEED)
        self._device, self._dtype = model.device, model.dtype

    def of(self, width: int, count: int = MOST_ROWS) -> torch.Tensor:
        """Return `[count, width]`, normally distributed."""
        values = torch.randn(count, width, generator=self.generator)
        return values.to(self._device, self._dtype)


def _kind_of(layer: DecoderLayer) -> tuple[object, ...]:
    """Return what distinguishes layers whose operators may differ: not the weights' values."""
    return (layer.window, layer.scale, layer.head_dim)


def _layer_operators(
    model: Decoder, rows: _Rows, index: int, layer: DecoderLayer, positions: torch.Tensor
) -> Iterator[Operator]:
    """Yield a layer's operators; the parts of a whole before the whole, for a precise name."""
    shape = model.shape
    hidden, inputs = rows.of(shape.hidden_size), rows.of(shape.hidden_size)
    attended, inner = rows.of(shape.query_width), rows.of(shape.intermediate_size)

    def named(part: str, sizes: str = "") -> str:
        return f"layer {index}: {part}{sizes}"

    def linear(role: str, out_features: int, in_features: int) -> str:
        return named(f"the product {role}", f" [{out_features}, {in_features}]")

    yield Operator(named("the attention norm"), (hidden,), layer.attention_norm)
    yield Operator(named("the MLP norm"), (hidden,), layer.mlp_norm)
    width = shape.hidden_size
    yield Operator(linear("key_value", 2 * shape.kv_width, width), (inputs,), layer.key_value)
    yield Operator(linear("query", shape.query_width, width), (inputs,), layer.query)

    def project(inputs: torch.Tensor, positions: torch.Tensor) -> Result:
        return layer.project(inputs, model.rotary(positions))

    yield Operator(named("queries, keys and values"), (inputs, positions), project)
    output = linear("output", width, shape.query_width)
    yield Operator(output, (hidden, attended), layer.add_attention)
    activation = layer.activation
    if layer.gate is not None:
        gate = layer.gate
        name = linear("gate", shape.intermediate_size, width)
        yield Operator(name, (inputs,), lambda inputs: gate(inputs, activation))
        name = linear("up", shape.intermediate_size, width)
        yield Operator(name, (inputs, inner), layer.up.times)
    else:
        name = linear("up", shape.intermediate_size, width)
        yield Operator(name, (inputs,), lambda inputs: layer.up(inputs, activation))
    down = linear("down", width, shape.intermediate_size)
    yield Operator(down, (inner, hidden), layer.down.added_to)
    yield Operator(named("the MLP"), (hidden,), layer.add_mlp)


def _angles(model: Decoder) -> Apply:
    def angles(positions: torch.Tensor) -> Result:
        rotary = model.rotary(positions)
        if rotary is None:
            raise RuntimeError("the model has no rotary positions")
        found = [rotary, *([rotary.local] if rotary.local is not None else [])]
        return tuple(part for each in found for part in (each.cosine, each.sine))

    return angles
