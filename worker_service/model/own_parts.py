"""Our products, norms and activations in the place of those of a transformers model.

What is replaced is the plain thing: known by its class, or by what it computes of random rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from splitpoint.checkpoint.decoder import Activation, Norm
from worker_service.checkpoint.quantized import Codes
from worker_service.kernels.choice import Layout
from worker_service.kernels.panel_gemm import Gating
from worker_service.model.experts import ExpertMatrices, in_one_call, use_own_experts
from worker_service.model.layer import NormWeights
from worker_service.model.linear import OPERATIONS, Linear, apart, by_element
from worker_service.weights.packing import Matrix


class Product(nn.Module):
    """A linear layer's product by our kernels, in the place of transformers' module.

    Attributes:
        is_skipped: the result does not matter now; it is zeros.
    """

    def __init__(self, matrix: Matrix, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.matrix = matrix
        self.bias = bias
        self._dtype = dtype
        self.linear = Linear(matrix, bias)
        self.is_skipped = False

    @property
    def weight(self) -> torch.Tensor:
        """For code that asks for its type or device."""
        held = self.matrix.weight
        return held if held.dtype == self._dtype else held.new_empty(0, dtype=self._dtype)

    def part(self, first: int, count: int) -> Product | None:
        """Return the product of `count` outputs from `first` on; None if there is none alone."""
        matrix = self.matrix.part(first, count)
        if matrix is None:
            return None
        bias = None if self.bias is None else self.bias[first : first + count]
        return Product(matrix, bias, self._dtype)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map `[..., in]` to `[..., out]`."""
        shape = (*rows.shape[:-1], self.matrix.out_features)
        if self.is_skipped or not rows.numel():
            return rows.new_zeros(shape)
        found = self.linear(rows.reshape(-1, rows.shape[-1]))
        return (apart(found) if shape[-1] < _NARROW else found).view(shape)


# Gates of heads and of experts have fewer outputs.
_NARROW = 256


class Activated(nn.Module):
    """An activation of each element, whatever its place in the tensor."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return by_element(rows, self.activation)


class Normed(nn.Module):
    """A norm over the last dimension."""

    def __init__(self, weights: NormWeights) -> None:
        super().__init__()
        self.weights = weights

    @property
    def weight(self) -> torch.Tensor:
        """For code that asks for its type or device."""
        return self.weights.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.weights(rows)


def use_own_parts(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Replace experts, and one by one the products, norms and activations that are plain."""
    use_own_experts(model)
    # By name: a list of all modules would keep what was replaced.
    parents = [name for name, each in model.named_modules() if any(True for _ in each.children())]
    for parent in parents:
        module = model.get_submodule(parent)
        for name in [name for name, _ in module.named_children()]:
            own = _own_part(module.get_submodule(name), dtype)
            if own is not None:
                setattr(module, name, own)
    for module in model.modules():
        own_forward = _own_gated(module)
        if own_forward is not None:
            module.forward = own_forward


def _own_part(module: Any, dtype: torch.dtype) -> nn.Module | None:
    """Return our part that does the same; None if this is not the plain thing."""
    if type(module) in (nn.Linear, Conv1D):
        weight = module.weight.data
        if weight.dtype != dtype:  # a router that is kept in fp32
            return None
        matrix = Matrix(weight.T.contiguous() if type(module) is Conv1D else weight)
        return Product(matrix, None if module.bias is None else module.bias.data, dtype)
    codes = getattr(module, "codes", None)
    if isinstance(codes, Codes):  # a linear layer whose matrix is stored quantised
        bias = None if module.bias is None else module.bias.data
        return Product(Matrix.of(codes, dtype), bias, dtype)
    if type(module).__name__ in _ACTIVATIONS:
        return Activated(_ACTIVATIONS[type(module).__name__])
    if type(module).__name__.endswith("RMSNorm"):
        return _own_norm(module)
    return None


_ACTIVATIONS = {
    "SiLUActivation": Activation.SILU,
    "SiLU": Activation.SILU,
    "ReLU": Activation.RELU,
    "GELUTanh": Activation.GELU_TANH,
    "NewGELUActivation": Activation.GELU_TANH,
}


def _own_gated(module: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return `down(activation(gate(rows)) * up(rows))` with fused operations.

    None if the module computes anything else of random rows. Gate and up may be one product. The
    module is told its `own_parts`: gate, up, down and the activation.
    """
    parts = [each for each in module.children() if not isinstance(each, nn.Dropout | nn.Identity)]
    plain = [each for each in parts if isinstance(each, Product)]
    activated = [each for each in parts if isinstance(each, Activated)]
    products = _apart(plain) if len(plain) == 2 else plain
    if len(parts) != len(plain) + 1 or len(products) != 3 or len(activated) != 1:
        return None
    weight = products[0].weight
    generator = torch.Generator().manual_seed(_SEED)
    rows = torch.randn(_TRIED_ROWS, products[0].matrix.in_features, generator=generator)
    # Large ones, too: some modules clamp.
    rows = torch.stack((rows, 1e3 * rows)).to(weight.device, weight.dtype)
    for gate, up, down in itertools.permutations(products):
        forward = partial(_gated, gate, up, down, activated[0].activation)
        try:
            wanted, found = module(rows), forward(rows)
        except Exception:  # of any family's code; or these matrices do not fit each other
            continue
        is_finite = wanted.isfinite().all(dim=-1, keepdim=True)
        wanted, found = (torch.where(is_finite, each, 0).flatten(1) for each in (wanted, found))
        off, largest = (each.abs().amax(dim=1) for each in (found - wanted, wanted))
        if (off <= _CLOSE[weight.dtype] * largest).all():
            module.own_parts = (gate, up, down, activated[0].activation)
            return _at_once(gate, up, down, activated[0].activation) or forward
    return None


def _apart(products: list[Product]) -> list[Product]:
    """Return gate, up and down of the two products of which one is gate and up; else none."""
    down, both = sorted(products, key=lambda each: each.matrix.out_features)
    inner = down.matrix.in_features
    if both.matrix.out_features != 2 * inner:
        return []
    halves = [both.part(0, inner), both.part(inner, inner)]
    return [*(each for each in halves if each is not None), down]


def _gated(
    gate: Product, up: Product, down: Product, activation: Activation, rows: torch.Tensor
) -> torch.Tensor:
    flat = rows.reshape(-1, rows.shape[-1])
    inner = up.linear.times(flat, gate.linear(flat, activation))
    return down.linear(inner).view(*rows.shape[:-1], -1)


def _at_once(
    gate: Product, up: Product, down: Product, activation: Activation
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return the same by one call, as an expert that every row has; None where there is none."""
    products = (gate, up, down)
    matrices = [each.matrix for each in products]
    is_in_panels = all(each.layout is Layout.PANELS for each in matrices)
    if not is_in_panels or len({each.weight.dtype for each in matrices}) > 1:
        return None
    if down.matrix.out_features != up.matrix.in_features:
        return None
    gates, ups, downs = (
        ExpertMatrices((each.matrix,), None if each.bias is None else each.bias[None])
        for each in products
    )
    call = in_one_call(Gating(OPERATIONS[activation]), gates, ups, downs, gate.weight.dtype)

    def forward(rows: torch.Tensor) -> torch.Tensor:
        flat = rows.reshape(-1, rows.shape[-1])
        chosen = torch.zeros(len(flat), 1, dtype=torch.int64)
        return call(flat, chosen, torch.ones(len(flat), 1)).view(rows.shape)

    return forward


def _own_norm(module: Any) -> nn.Module | None:
    """Return our norm if it computes the same of random rows; None if it does not."""
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or not isinstance(epsilon, float) or weight.dim() != 1:
        return None
    weight = weight.data
    generator = torch.Generator().manual_seed(_SEED)
    rows = torch.randn(_TRIED_ROWS, len(weight), generator=generator)
    rows = rows.to(weight.device, weight.dtype)
    wanted = module(rows)
    for kind, scale in (
        (Norm.RMS, weight),
        (Norm.RMS_PLUS_ONE, weight.to(torch.float32) + 1),
    ):
        own = NormWeights(kind, scale, None, epsilon)
        if torch.allclose(own(rows), wanted, rtol=_CLOSE[weight.dtype], atol=1e-6):
            return Normed(own)
    return None


# Largest relative difference of two ways to round the same.
_CLOSE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
_SEED = 17
_TRIED_ROWS = 3
