"""Experts and their routers in modules of transformers, computed by our products.

transformers' library has one interface for modules of experts: all matrices of a kind are one
tensor, and a function computes the rows of each chosen expert. Here an expert's matrix is one of
ours, so a step reads the chosen experts only, and a row's bits depend on no other row. Where our
kernel has all that the experts of a layer compute, that is one call of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from splitpoint.checkpoint.decoder import Activation
from worker_service.checkpoint.quantized import Codes
from worker_service.kernels import panel_gemm
from worker_service.kernels.choice import Layout
from worker_service.kernels.panel_gemm import Gating, Operation, PanelTable
from worker_service.model.linear import OPERATIONS, Linear, apart, by_element
from worker_service.weights.packing import Matrix, layout_of


class StoredExperts(nn.Module):
    """The matrices of one kind of a layer's experts, stored quantised, in the place of a tensor.

    Attributes:
        size: `(out_features, in_features)` of each.
        matrices: `[out, in]` of each; empty: not yet read.
    """

    def __init__(self, module: Any, stacked: torch.Tensor | StoredExperts) -> None:
        super().__init__()
        self.size = expert_shape(module, stacked)
        self.matrices: list[torch.Tensor | Codes] = []
        self.dtype: torch.dtype = stacked.dtype
        self._count, self._is_transposed = len(stacked), bool(module.is_transposed)

    def __len__(self) -> int:
        return self._count

    @property
    def device(self) -> torch.device:
        first = self.matrices[0]
        return first.codes.device if isinstance(first, Codes) else first.device

    def __getitem__(self, expert: torch.Tensor | int) -> torch.Tensor:
        """Return a matrix, made anew, as transformers' own code multiplies with it."""
        matrix = self.matrices[int(expert)]
        made = (matrix.dequantized() if isinstance(matrix, Codes) else matrix).to(self.dtype)
        return made.T if self._is_transposed else made

    def dequantized(self) -> nn.Parameter | None:
        """Return the tensor in whose place this is; None if any matrix is held as codes."""
        if any(isinstance(each, Codes) for each in self.matrices):
            return None
        return nn.Parameter(torch.stack([self[each] for each in range(len(self))]))


def expert_tensors(module: nn.Module) -> dict[str, torch.Tensor | StoredExperts]:
    """Return the matrices of a module of experts by name, `[experts, ...]`; empty for any other."""
    if not hasattr(module, "is_transposed"):  # transformers' use_experts_implementation sets it
        return {}
    stacked = module.named_parameters(recurse=False)
    stored = module.named_children()
    return {
        **{name: each for name, each in stacked if each.dim() == 3},
        **{name: each for name, each in stored if isinstance(each, StoredExperts)},
    }


def expert_shape(module: Any, stacked: torch.Tensor | StoredExperts) -> tuple[int, int]:
    """Return `(out_features, in_features)` of one expert's matrix."""
    if isinstance(stacked, StoredExperts):
        return stacked.size
    rows, columns = stacked.shape[1:]
    return (columns, rows) if module.is_transposed else (rows, columns)


def held_shapes(
    module: Any, layout: Layout
) -> list[tuple[torch.Tensor | StoredExperts, tuple[int, int]]]:
    """Return `(out_features, in_features)` of what is held of each expert, and of which tensor."""
    kinds = expert_tensors(module)
    is_divided = bool(kinds) and layout is Layout.PANELS and gating_of(module) is not None
    found = []
    for name, stacked in kinds.items():
        rows, columns = expert_shape(module, stacked)
        parts = 2 if is_divided and name == "gate_up_proj" else 1
        found += [(stacked, (rows // parts, columns))] * parts
    return found


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

    def forward(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Map `[N, in]` to `[N, out]`; rows lie in the order of experts, `counts` of each."""
        found, first = [], 0
        for expert, count in enumerate(counts):
            if count:
                bias = None if self.bias is None else self.bias[expert]
                linear = Linear(self.matrices[expert], bias)
                found.append(linear(rows[first : first + count]))
                first += count
        if not found:
            return rows.new_zeros(0, self.matrices[0].out_features)
        return found[0] if len(found) == 1 else torch.cat(found)

    def table(self, dtype: torch.dtype) -> PanelTable:
        """Return what the kernel for rows of this type takes."""
        first = self.matrices[0]
        shape, panels = (first.out_features, first.in_features), [e.weight for e in self.matrices]
        return PanelTable.of(panels, shape, first.group, dtype, self.bias)


class _Taken:
    """The matrices of one kind that were taken from a module of experts, with their bias."""

    def __init__(self, module: Any, name: str) -> None:
        held = expert_tensors(module)[name]
        delattr(module, name)
        self._dtype = held.dtype
        self._bias: torch.Tensor | None = None
        if getattr(module, f"{name}_bias", None) is not None:
            self._bias = getattr(module, f"{name}_bias").data
            delattr(module, f"{name}_bias")
        self._matrices: Sequence[torch.Tensor | Codes]
        if isinstance(held, StoredExperts):
            self._matrices = held.matrices
        else:
            self._matrices = [each.T if module.is_transposed else each for each in held.data]

    def of_outputs(self, which: slice) -> ExpertMatrices:
        """Return the matrices of some outputs."""
        made = (
            Matrix.of(each.of_outputs(which), self._dtype)
            if isinstance(each, Codes)
            else Matrix(each[which].contiguous())
            for each in self._matrices
        )
        bias = None if self._bias is None else self._bias[:, which].contiguous()
        return ExpertMatrices(made, bias)


def _own_forward(module: Any) -> Callable[..., torch.Tensor]:
    """Return our forward of a module of experts, of which it takes the weights."""
    kinds = expert_tensors(module)
    one = kinds["down_proj"]
    dtype, width = one.dtype, expert_shape(module, one)[1]
    is_held_alike = len({type(each) for each in kinds.values()}) == 1
    is_in_panels = layout_of(one.device, dtype) is Layout.PANELS
    form = gating_of(module) if is_in_panels and is_held_alike else None
    taken = {name: _Taken(module, name) for name in kinds}
    del kinds, one
    if form is None:
        for name, each in taken.items():
            setattr(module, name, each.of_outputs(slice(None)))
        return partial(_by_products, module)
    gating, is_interleaved = form
    gates, ups = slice(width), slice(width, None)
    if is_interleaved:
        gates, ups = slice(None, None, 2), slice(1, None, 2)
    parts = {"down_proj": taken["down_proj"].of_outputs(slice(None))}
    if module.has_gate:
        parts["gate_proj"] = taken["gate_up_proj"].of_outputs(gates)
        parts["up_proj"] = taken["gate_up_proj"].of_outputs(ups)
    else:
        parts["up_proj"] = taken["up_proj"].of_outputs(slice(None))
    for name, part in parts.items():
        setattr(module, name, part)
    return in_one_call(gating, parts.get("gate_proj"), parts["up_proj"], parts["down_proj"], dtype)


def in_one_call(
    gating: Gating,
    gates: ExpertMatrices | None,
    ups: ExpertMatrices,
    downs: ExpertMatrices,
    dtype: torch.dtype,
) -> Callable[..., torch.Tensor]:
    """Return what computes rows of this type by experts in panels; see `panel_gemm.experts`."""
    return partial(
        panel_gemm.experts,
        gating=gating,
        gates=None if gates is None else gates.table(dtype),
        ups=ups.table(dtype),
        downs=downs.table(dtype),
    )


def _by_products(
    module: Any, rows: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """Return the sum `[N, h]` of each row's experts, by a product for each expert and kind.

    Args:
        rows: `[N, h]`.
        chosen: `[N, k]`, the experts of each row.
        shares: `[N, k]`, their factors.
    """
    each = chosen.shape[1]
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


def gating_of(module: Any) -> tuple[Gating, bool] | None:
    """Return what experts do between their products, and whether gate and up take turns.

    Known by what it makes of random numbers; None if our kernel has nothing that does the same.
    """
    if module.has_post_expert_norm:
        return None
    generator = torch.Generator().manual_seed(_SEED)
    rows = torch.randn(_TRIED_ROWS, 2 * _TRIED_WIDTH, generator=generator)
    # Large ones, too: some clamp.
    rows = torch.cat((rows, 1e3 * rows))
    wanted = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)

    def is_same(found: torch.Tensor) -> bool:
        off, largest = (each.abs().amax(dim=1) for each in (found - wanted, wanted))
        return bool((off <= _CLOSE * largest).all())

    numbers = {name: each for name, each in vars(module).items() if isinstance(each, float | int)}
    limits = [math.inf, *(each for name, each in numbers.items() if name.endswith("limit"))]
    alphas = [1.0, *(each for name, each in numbers.items() if name.endswith("alpha"))]
    if not module.has_gate:
        plain = (each for each in Activation if is_same(by_element(rows, each)))
        return next(((Gating(OPERATIONS[each]), False) for each in plain), None)
    for is_interleaved in (False, True):
        if is_interleaved:
            gate, up = rows[:, ::2], rows[:, 1::2]
        else:
            gate, up = rows.chunk(2, dim=1)
        for activation in Activation:
            if is_same(by_element(gate, activation) * up):
                return Gating(OPERATIONS[activation]), is_interleaved
        for alpha, limit, offset in itertools.product(alphas, limits, (0.0, 1.0)):
            clamped = gate.clamp(max=limit)
            found = clamped * (alpha * clamped).sigmoid() * (up.clamp(-limit, limit) + offset)
            if is_same(found):
                return Gating(Operation.SILU, alpha, limit, offset), is_interleaved
    return None


_CLOSE = 1e-5
_SEED = 17
_TRIED_ROWS, _TRIED_WIDTH = 3, 32


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
            module.forward = _own_forward(module)
