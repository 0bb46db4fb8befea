"""A layer of a transformers model that is the plain thing, by the kernels of our own decoder's.

Whether it is, is seen by what it computes of random rows: see `TransformersModel`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from worker_service.kernels.whole_layer import WholeLayer
from worker_service.model.layer import whole_of
from worker_service.model.own_parts import Normed, Product


class PlainLayer:
    """Norm, attention and sum; norm, MLP of any kind and sum."""

    def __init__(self, whole: WholeLayer, output: Product, norm: Normed, mlp: nn.Module) -> None:
        """`whole`: with the MLP if it is gated; `mlp` is called otherwise."""
        self.begin = whole.begin
        self._whole, self._output, self._norm, self._mlp = whole, output, norm, mlp

    def end(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return the next hidden `[N, h]` of residuals and `attended` `[N, n_q * d]`."""
        if self._whole.has_mlp:
            return self._whole.end(hidden, attended)
        middle = self._output.linear.added_to(attended, hidden)
        added: torch.Tensor = self._mlp(self._norm(middle)[None])[0]
        return middle.add_(added)


def plain_layer(layer: Any, head_dim: int, dtype: torch.dtype) -> PlainLayer | None:
    """Return what may compute a layer's rows of this type; None if it has other modules."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
    products: dict[str, Any] = {
        role: getattr(attention, name, None) for role, name in names.items()
    }
    joined = getattr(attention, "qkv_proj", None)
    if isinstance(joined, Product) and isinstance(products["output"], Product):
        width = products["output"].matrix.in_features
        kv_width = (joined.matrix.out_features - width) // 2
        products["query"] = joined.part(0, width)
        products["key"] = joined.part(width, kv_width)
        products["value"] = joined.part(width + kv_width, kv_width)
    norms: dict[str, Any] = {
        "attention_norm": getattr(layer, "input_layernorm", None),
        "mlp_norm": getattr(layer, "post_attention_layernorm", None),
        "query_norm": getattr(attention, "q_norm", None),
        "key_norm": getattr(attention, "k_norm", None),
    }
    named = {role: each for role, each in norms.items() if each is not None}
    if not all(isinstance(each, Product) for each in products.values()) or mlp is None:
        return None
    if not all(isinstance(each, Normed) for each in named.values()) or len(named) < 2:
        return None
    gated = getattr(mlp, "own_parts", None)
    activation = None
    if gated is not None:
        gate, up, down, activation = gated
        products |= {"gate": gate, "up": up, "down": down}
    linears = {role: each.linear for role, each in products.items()}
    weights = {role: each.weights for role, each in named.items()}
    whole = whole_of(linears, weights, head_dim, activation, dtype)
    if whole is None:
        return None
    return PlainLayer(whole, products["output"], norms["mlp_norm"], mlp)
