"""Whatever of vLLM's configuration changes the bytes of a page makes another namespace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from splitpoint_vllm.namespace import namespace_of
from splitpoint_vllm.spec import engine_facts

SPEC = FullAttentionSpec(block_size=128, num_kv_heads=1, head_size=64, dtype=torch.float32)


@pytest.fixture(scope="module")
def configuration(models: Path) -> Any:
    """vLLM's own configuration of the small Llama."""
    return EngineArgs(model=str(models / "llama"), dtype="float32").create_engine_config()


def namespace(
    configuration: Any,
    environment: dict[str, str] | None = None,
    layers: tuple[str, ...] = ("model.layers.0.attn",),
    spec: FullAttentionSpec = SPEC,
    **changes: Any,
) -> bytes:
    """Return the namespace of a configuration with changes such as `model_config__dtype`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changes.items():
            part, _, field = name.partition("__")
            patch.setattr(getattr(configuration, part), field, value)
        cache = KVCacheConfig(1, [], [KVCacheGroupSpec([*layers], spec)])
        return namespace_of(engine_facts(configuration, cache, environment or {}))


def test_equal_configurations_share_pages(configuration: Any) -> None:
    assert namespace(configuration) == namespace(configuration)
    # How long texts may be does not matter to plain RoPE.
    longer = namespace(configuration, model_config__max_model_len=1024)
    assert longer == namespace(configuration)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_config__dtype": torch.bfloat16},
        {"model_config__quantization": "fp8"},
        {"cache_config__cache_dtype": "fp8"},
        {"cache_config__kv_cache_dtype_skip_layers": ["0"]},
        {"cache_config__mamba_cache_dtype": "float32"},
        {"cache_config__mamba_ssm_cache_dtype": "float32"},
        {"cache_config__mamba_cache_mode": "align"},
        {"cache_config__prefix_caching_hash_algo": "sha256_cbor"},
        {"parallel_config__tensor_parallel_size": 2},
        {"parallel_config__cp_kv_cache_interleave_size": 2},
        {"environment": {"VLLM_PP_LAYER_PARTITION": "1,2"}},
        {"environment": {"PYTHONHASHSEED": "7"}},
        {"layers": ("model.layers.1.attn",)},
        # The same bytes in a block, padded or not.
        {"spec": replace(SPEC, dtype=torch.bfloat16, num_kv_heads=2)},
        {"spec": replace(SPEC, sliding_window=256)},
    ],
    ids=str,
)
def test_each_difference_makes_another_namespace(
    configuration: Any, changes: dict[str, Any]
) -> None:
    assert namespace(configuration, **changes) != namespace(configuration)


def test_the_longest_text_chooses_the_factors_of_longrope(configuration: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(configuration.model_config.hf_config, "rope_scaling", {"type": "longrope"})
        short = namespace(configuration, model_config__max_model_len=1024)
        assert short != namespace(configuration, model_config__max_model_len=8192)
