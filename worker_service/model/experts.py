"""Experts and their routers in modules of transformers, computed by our products.

transformers' library has one interface for modules of experts: all matrices of a kind are one
tensor, and a function computes the rows of each chosen expert. Here an expert's matrix is one of
ours, so a step reads the chosen experts only, and a row's bits depend on no other row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from worker_service.model.linear import Linear, apart
from worker_service.weights.packing import Matrix


def expert_tensors(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the matrices of a module of experts by name, `[experts, ...]`; empty for any other."""
    if not hasattr(module, "is_transposed"):  # transformers' use_experts_implementation sets it
        return {}
    return {name: each for name, each in module.named_parameters(recurse=False) if each.dim() == 3}


def expert_shape(module: Any, tensor: torch.Tensor) -> tuple[int, int]:
    """Return `(out_features, in_features)` of one expert's matrix."""
    rows, columns = tensor.shape[1:]
    return (columns, rows) if module.is_transposed else (rows, columns)


class ExpertMatrices(nn.Module):
    """The matrices of one kind of all experts of a layer.

    Attributes:
        matrices: one of each expert.
        bias: `[experts, out]`; None: none.
    """

    def __init__(self, matrices: Iterable[Matrix], bias: torch.Tensor | None) -> None:
        super().__init__()
        self.matrices = tuple(matrices)
        self.bias = bias
        biases = [None] * len(self.matrices) if bias is None else bias
        self._linears = [*map(Linear, self.matrices, biases)]

    def forward(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Map `[N, in]` to `[N, out]`; rows lie in the order of experts, `counts` of each."""
        found, first = [], 0
        for linear, count in zip(self._linears, counts, strict=True):
            if count:
                found.append(linear(rows[first : first + count]))
                first += count
        if not found:
            return rows.new_zeros(0, self.matrices[0].out_features)
        return found[0] if len(found) == 1 else torch.cat(found)


class Experts:
    """The forward of a module of experts, of which it takes the weights."""

    def __init__(self, module: Any) -> None:
        self._module = module
        for name, tensor in expert_tensors(module).items():
            delattr(module, name)
            biases = getattr(module, f"{name}_bias", None)
            matrices = _matrices(tensor.data, is_transposed=module.is_transposed)
            setattr(module, name, ExpertMatrices(matrices, None if biases is None else biases.data))

    def __call__(
        self, rows: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum `[N, h]` of each row's experts.

        Args:
            rows: `[N, h]`.
            chosen: `[N, k]`, the experts of each row.
            shares: `[N, k]`, their factors.
        """
        module, each = self._module, chosen.shape[1]
        experts = chosen.flatten()
        order = experts.argsort(stable=True)
        counts = experts.bincount(minlength=module.num_experts).tolist()
        inner = rows[order // each]
        if module.has_gate:
            inner = module._apply_gate(module.gate_up_proj(inner, counts))
        else:
            inner = module.act_fn(module.up_proj(inner, counts))
        found = module.down_proj(inner, counts)
        if module.has_post_expert_norm:
            found = module.post_expert_norm(found)
        parts = torch.empty(found.shape, dtype=torch.float32, device=found.device)
        parts[order] = found.to(torch.float32) * shares.flatten()[order, None]
        # One after the other in the row's own order, whatever is beside it.
        total, *others = parts.view(*chosen.shape, -1).unbind(1)
        for part in others:
            total = total + part
        return total.to(rows.dtype)


def _matrices(stacked: torch.Tensor, *, is_transposed: bool) -> Iterator[Matrix]:
    for each in stacked:
        yield Matrix(each.T.contiguous() if is_transposed else each)


class RouterWeight(torch.Tensor):
    """The matrix `[experts, h]` of a router that calls `linear` itself: that product is ours.

    It is computed in fp32 whatever type the router asks for: one packed copy serves both.

    Attributes:
        matrix: in fp32.
    """

    matrix: Matrix
    _product: Linear
    # The tensor that has the values; and what stands for it in fp32, if not the tensor itself.
    _source: torch.Tensor
    _wide: RouterWeight | None

    @classmethod
    def of(cls, weight: torch.Tensor) -> RouterWeight:
        made = weight.as_subclass(cls)
        made.matrix = Matrix(weight.to(torch.float32))
        made._product = Linear(made.matrix)
        made._source, made._wide = weight, None
        if weight.dtype != torch.float32:
            # Not a number where it would be read nevertheless: no model is served with it.
            unread = torch.full((), torch.nan, dtype=torch.float32, device=weight.device)
            wide = unread.expand(weight.shape).as_subclass(cls)
            wide.__dict__.update(made.__dict__)
            made._wide = wide
        return made

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        more: dict[str, Any] | None = None,
    ) -> Any:
        """See torch: stands for functions that are called with this tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            if function is functional.linear and not more and isinstance(args[1], RouterWeight):
                return args[1]._multiplied(*args)
            if function in _CONVERSIONS and isinstance(args[0], RouterWeight):
                like = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
                if function(like, *args[1:], **(more or {})).dtype == torch.float32:
                    return args[0] if args[0]._wide is None else args[0]._wide
            named = {name: _with_values(each) for name, each in (more or {}).items()}
            return function(*map(_with_values, args), **named)

    def _multiplied(
        self, rows: torch.Tensor, _weight: RouterWeight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return `[..., experts]` for rows `[..., h]`."""
        found = self._product(rows.reshape(-1, rows.shape[-1]).to(torch.float32)).to(self.dtype)
        found = apart(found).view(*rows.shape[:-1], self.matrix.out_features)
        return found if bias is None else found + bias


def _with_values(argument: Any) -> Any:
    if isinstance(argument, RouterWeight) and argument._source.dtype != argument.dtype:
        return argument._source.to(argument.dtype)
    return argument


_CONVERSIONS = (torch.Tensor.type, torch.Tensor.to, torch.Tensor.float)


def routers_of(model: nn.Module) -> list[Any]:
    """Return the modules beside experts that multiply with a matrix of their own, `weight`."""
    found: dict[nn.Module, None] = {}
    for parent in model.modules():
        counts = {each.num_experts for each in parent.children() if expert_tensors(each)}
        for each in parent.modules() if counts else ():
            weight = each._parameters.get("weight")
            if weight is None or isinstance(each, nn.Linear | nn.Embedding):
                continue
            if weight.dim() == 2 and len(weight) in counts:
                found[each] = None
    return [*found]


def use_own_experts(model: nn.Module) -> None:
    """Let our products compute the experts of a model, and the products of their routers."""
    for router in routers_of(model):
        weight = router.weight.data
        del router.weight
        router.register_buffer("weight", RouterWeight.of(weight))
    for module in model.modules():
        if expert_tensors(module):
            module.forward = Experts(module)
