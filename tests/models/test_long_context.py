"""Scaled rotary positions at 32k, by either way, are those of transformers.

A few tokens at positions far apart show the angles at all distances between them; a whole prompt of
32k tokens is a long run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from any_models import VOCABULARY, clear_prompt, small_model, write
from engine_runner import CPU, admission, make_engine, run_all

from splitpoint.planning.weight_placement import NOTHING_ON_HOST
from splitpoint.shapes import WeightFormat
from worker_service.engine.sampling import Sampling
from worker_service.model.attention import prefill_alone
from worker_service.model.model import Layer, Model
from worker_service.startup.model_source import source_of

CONTEXT = 1 << 15
ORIGINAL = 1 << 12
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": ORIGINAL,
}
# Served up to its original context.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 7.0, 9.0, 9.5],
    "long_factor": [16.0] * 8,
    "original_max_position_embeddings": CONTEXT,
}
# By the family and the code that computes it. With mscale, YaRN also scales scores.
SCALED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama 3": ("llama", "own", LLAMA3),
    "Llama 3 by transformers": ("granite", "transformers", LLAMA3),
    "YaRN": ("qwen3", "transformers", YARN),
    "YaRN of latent attention": (
        *("deepseek_v3", "transformers"),
        {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "LongRoPE": ("phi3", "transformers", LONGROPE),
}
# Starts, the original context and its end, and the end of the context.
POSITIONS = (0, 1, 2, 700, ORIGINAL - 1, ORIGINAL, 12_345, CONTEXT - 3, CONTEXT - 2, CONTEXT - 1)

pytestmark = pytest.mark.usefixtures("one_thread")


def scaled_model(name: str, layers: int, folder: Path) -> tuple[Any, Model]:
    """Return a small model by transformers, and as a worker computes it."""
    family, backend, rope = SCALED[name]
    # torch attends in linear memory where values are as wide as keys.
    changes = {"original_max_position_embeddings": CONTEXT} if family == "phi3" else {}
    changes |= {"v_head_dim": 32} if family == "deepseek_v3" else {}
    made = small_model(
        family,
        rope_parameters=rope,
        max_position_embeddings=CONTEXT,
        num_hidden_layers=layers,
        sliding_window=None,
        **changes,
    )
    source = source_of(write(made, folder))
    assert source.backend.value == backend
    assert source.config.shape.context_length == CONTEXT
    return made, source.load(CPU, NOTHING_ON_HOST, (), WeightFormat.NATIVE)


def logits_of(model: Model, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the logits of tokens that see those before them, at any positions."""

    def attend(_index: int, layer: Layer, _inputs: torch.Tensor, *heads: torch.Tensor) -> Any:
        return prefill_alone(*heads, window=layer.window, scale=layer.scale, cap=layer.cap)

    return model.logits(model.run(ids, positions, attend))


@pytest.mark.parametrize("name", SCALED)
@torch.inference_mode()
def test_tokens_far_apart(name: str, tmp_path: Path) -> None:
    reference, model = scaled_model(name, 2, tmp_path)
    positions = torch.tensor(POSITIONS)
    ids = torch.randint(VOCABULARY, positions.shape, generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)[None]
    wanted = reference(
        input_ids=ids[None], position_ids=positions[None], attention_mask=mask, use_cache=False
    ).logits[0]
    found = logits_of(model, ids, positions)
    torch.testing.assert_close(found, wanted, atol=2e-3, rtol=0)
    # The distances matter: the same tokens side by side give others.
    near = logits_of(model, ids, torch.arange(len(ids)))
    assert (near - wanted).abs().max() > 0.1


@pytest.mark.parametrize("name", SCALED)
def test_the_scaling_matters(name: str, tmp_path: Path) -> None:
    """Without it a worker computes other logits from the same weights."""
    _, model = scaled_model(name, 2, tmp_path)
    path = tmp_path / "config.json"
    rope = {"rope_type": "default", "rope_theta": SCALED[name][2]["rope_theta"]}
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_parameters": rope}))
    plain = source_of(tmp_path).load(CPU, NOTHING_ON_HOST, (), WeightFormat.NATIVE)
    positions = torch.tensor(POSITIONS)
    with torch.inference_mode():
        scaled, unscaled = (logits_of(each, positions % 97, positions) for each in (model, plain))
    assert (scaled - unscaled).abs().max() > 0.1


@pytest.mark.chaos
@pytest.mark.parametrize("name", SCALED)
def test_a_prompt_of_32k_tokens(name: str, tmp_path: Path) -> None:
    reference, model = scaled_model(name, 1, tmp_path)
    count = 4
    prompt, wanted = clear_prompt(reference, CONTEXT - count, count)
    engine = make_engine(model, device_memory_bytes=1 << 29, max_batched_tokens=2048)
    sampling = Sampling(max_tokens=count, ignore_eos=True)
    assert run_all(engine, [admission("a", prompt, sampling)]).tokens["a"] == wanted
