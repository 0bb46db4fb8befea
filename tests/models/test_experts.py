"""Experts, their routers and gated layers of transformers' code, computed by our products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from any_models import small_model, write
from engine_runner import CPU

from splitpoint.checkpoint.decoder import ModelBackend
from splitpoint.host.processor import compiler
from splitpoint.planning.weight_placement import NOTHING_ON_HOST
from splitpoint.shapes import DataType, WeightFormat
from worker_service.kernels.choice import by_flags, use
from worker_service.model.experts import use_own_experts
from worker_service.numerics.self_check import dependence
from worker_service.startup.model_source import source_of

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
    # No weight is held twice.
    planned = source.weight_sizes(CPU, WeightFormat.NATIVE).total
    assert planned <= model.weight_bytes <= 1.01 * planned


@pytest.mark.parametrize("layout", ["plain", "packed"])
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
