"""Layers of transformers' models that are the plain thing are computed by our own kernels."""

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
from worker_service.model.transformers_model import TransformersModel
from worker_service.startup.model_source import source_of

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")

PLAIN = ("llama", "qwen2", "qwen3", "qwen3_moe", "gemma", "phi3")
# A factor of residuals; one of queries from some position on; norms behind attention and MLP;
# attention beside the MLP.
OTHERS: dict[str, dict[str, Any]] = {
    "granite": {"residual_multiplier": 0.97},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.5,
            "original_max_position_embeddings": 64,
        }
    },
    "olmo2": {},
    "cohere": {},
}


def load(family: str, data_type: DataType, folder: Path, **changes: Any) -> TransformersModel:
    use(by_flags(torch.float32, []).parsed("linear=panels"))
    folder = write(small_model(family, **changes), folder)
    source = source_of(folder, data_type, ModelBackend.TRANSFORMERS)
    model = source.load(CPU, NOTHING_ON_HOST, (), WeightFormat.NATIVE)
    assert isinstance(model, TransformersModel)
    return model


@pytest.mark.parametrize("data_type", [DataType.FLOAT32, DataType.BFLOAT16])
@pytest.mark.parametrize("family", PLAIN)
def test_a_plain_layer_has_the_bits_of_its_own_code_before_attention(
    family: str, data_type: DataType, tmp_path: Path
) -> None:
    """And what it rebuilds from X, by its own code, has the bits of what its kernels made."""
    model = load(family, data_type, tmp_path)
    divided = model._divided
    positions = torch.arange(9) % 7
    arguments = model.rotary(positions)
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(9, model.shape.hidden_size, generator=generator).to(model.dtype)
    assert [*divided.own] == [each.index for each in model.layers]
    for layer in model.layers:
        asked, worked = divided.ask(layer.index, hidden, arguments), layer.work(hidden, arguments)
        for found, each in zip(layer.project_kv(asked[0], arguments), asked[2:], strict=True):
            assert torch.equal(found, each)
        divided.use_own(layer.index, None)
        for found, each in zip(asked, divided.ask(layer.index, hidden, arguments), strict=True):
            assert torch.equal(found, each)
        near = 1e-5 if data_type is DataType.FLOAT32 else 2e-2
        wanted = layer.work(hidden, arguments)
        assert (worked - wanted).abs().max() <= near * wanted.abs().max()


@pytest.mark.parametrize("data_type", [DataType.FLOAT32, DataType.BFLOAT16])
@pytest.mark.parametrize("family", OTHERS)
def test_a_layer_that_computes_otherwise_keeps_its_own_code(
    family: str, data_type: DataType, tmp_path: Path
) -> None:
    model = load(family, data_type, tmp_path, **OTHERS[family])
    assert not model._divided.own
