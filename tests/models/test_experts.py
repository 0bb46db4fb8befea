"""Experts, their routers and gated layers of transformers' code, computed by our products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from any_models import small_model, write
from engine_runner import CPU
from live_bytes import held_bytes
from torch import nn

from splitpoint.checkpoint.decoder import ModelBackend
from splitpoint.host.processor import compiler
from splitpoint.planning.weight_placement import NOTHING_ON_HOST
from splitpoint.shapes import DataType, WeightFormat
from worker_service.kernels.choice import by_flags, use
from worker_service.kernels.panel_gemm import Gating, Operation
from worker_service.model.experts import ExpertMatrices, RouterWeight, gating_of, use_own_experts
from worker_service.model.own_parts import use_own_parts
from worker_service.numerics.self_check import dependence
from worker_service.startup.model_source import source_of
from worker_service.weights.packing import Matrix

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("data_type", [DataType.FLOAT32, DataType.BFLOAT16])
@pytest.mark.parametrize(
    "family",
    [
        # A softmax, and a sigmoid in fp32; a gate of shared experts; matrices the other way round.
        *("qwen3_moe", "deepseek_v3"),
        *(
            pytest.param(each, marks=pytest.mark.chaos)
            for each in ("qwen2_moe", "gpt_oss", "mixtral", "olmoe", "phimoe", "granitemoe")
        ),
    ],
)
def test_experts_are_invariant(family: str, data_type: DataType, tmp_path: Path) -> None:
    dtype = torch.float32 if data_type is DataType.FLOAT32 else torch.bfloat16
    use(by_flags(dtype, []).parsed("decode=fused,prefill=fused,linear=panels"))
    source = source_of(write(small_model(family), tmp_path), data_type, ModelBackend.TRANSFORMERS)
    model = source.load(CPU, NOTHING_ON_HOST, (), WeightFormat.NATIVE)
    assert dependence(model, 16) is None
    planned = source.weight_sizes(CPU, WeightFormat.NATIVE).total
    assert planned <= model.weight_bytes <= 1.01 * planned
    # Nothing is held that is not counted: no weight twice, unless its router needs it in fp32.
    del source
    assert 0 <= held_bytes(model) - model.weight_bytes <= 512


NO_COMPILER = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")


@pytest.mark.parametrize("layout", ["plain", "packed", pytest.param("panels", marks=NO_COMPILER)])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_only_chosen_experts_are_read(family: str, layout: str) -> None:
    """With gates and without, with biases, transposed: as transformers computes it."""
    use(by_flags(torch.float32, []).parsed(f"linear={layout}"))
    model = small_model(family)
    names = [name for name, each in model.named_modules() if hasattr(each, "is_transposed")]
    experts: Any = model.get_submodule(names[0])
    rows = torch.randn(5, 64)
    chosen = torch.tensor([[3, 1], [1, 3], [3, 0], [0, 1], [3, 1]])
    shares = torch.rand(5, 2)
    with torch.inference_mode():
        wanted = experts(rows, chosen, shares)
        for each in experts.parameters(recurse=False):
            each.data[2] = torch.nan
        use_own_experts(model)
        found = experts(rows, chosen, shares)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "known"),
    [
        ("qwen3_moe", (Gating(Operation.SILU), False)),
        ("gpt_oss", (Gating(Operation.SILU, 1.702, 7.0, 1.0), True)),
        ("minimax_m3_vl_text", (Gating(Operation.SILU, 1.702, 7.0, 1.0), False)),
        ("nemotron_h", None),  # a square, which our kernel has not
    ],
)
def test_what_experts_do_between_products_is_known(family: str, known: object) -> None:
    modules = small_model(family).modules()
    assert gating_of(next(each for each in modules if hasattr(each, "is_transposed"))) == known


def test_an_error_between_products_is_not_hidden() -> None:
    modules = small_model("qwen3_moe").modules()
    experts: Any = next(each for each in modules if hasattr(each, "is_transposed"))
    experts.act_fn = None
    with pytest.raises(TypeError, match="not callable"):
        gating_of(experts)


def test_a_router_is_computed_in_the_type_it_asks_for() -> None:
    weight, rows = torch.randn(4, 64).to(torch.bfloat16), torch.randn(5, 64).to(torch.bfloat16)
    router: Any = RouterWeight.of(weight)
    linear = nn.functional.linear
    with torch.inference_mode():
        torch.testing.assert_close(linear(rows, router, None), linear(rows, weight))
        found = linear(rows.float(), router.float(), torch.ones(4))
        torch.testing.assert_close(found, linear(rows.float(), weight.float()) + 1)
        # Any other function has its values.
        assert torch.equal(
            rows.float() @ router.to(torch.float32).T, rows.float() @ weight.float().T
        )
        assert torch.equal(torch.mul(input=router.float(), other=2), 2 * weight.float())


def test_experts_take_no_rows() -> None:
    experts = ExpertMatrices([Matrix(torch.randn(3, 8)) for _ in range(2)], None)
    assert experts(torch.empty(0, 8), [0, 0]).shape == (0, 3)


class Gated(nn.Module):
    def __init__(self, limit: float, factor: float) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(64, 128), nn.Linear(64, 128), nn.Linear(128, 64)
        self.activation = nn.SiLU()
        self.limit, self.factor = limit, factor

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        gate = self.activation(self.gate(rows).clamp(max=self.limit))
        found = self.down(gate * self.up(rows).clamp(-self.limit, self.limit))
        return torch.mul(found, self.factor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("limit", "factor", "is_plain"),
    [(torch.inf, 1.0, True), (16.0, 1, False), (torch.inf, 0.96, False)],
)
def test_only_plain_gated_layers_are_fused(
    limit: float, factor: float, is_plain: bool, dtype: torch.dtype
) -> None:
    """One that clamps, as some families have, is computed by its own code."""
    model: Any = nn.Sequential(Gated(limit, factor)).to(dtype)
    rows = 100 * torch.randn(1, 5, 64).to(dtype)
    with torch.inference_mode():
        wanted = model(rows)
        use_own_parts(model, dtype)
        assert ("forward" in vars(model[0])) is is_plain
        off = (model(rows) - wanted).abs().amax() / wanted.abs().amax()
    assert off <= 0.01
