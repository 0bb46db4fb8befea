"""Shapes of any family, from the names that its configuration uses."""

from __future__ import annotations

from typing import Any

import pytest

from splitpoint.checkpoint.any_decoder import SPARSE_SHAPES, any_shape
from splitpoint.errors import InvalidArgument
from splitpoint.shapes import DataType

USUAL: dict[str, Any] = {
    "model_type": "some_family",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "dtype": "bfloat16",
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_layer": 4,
    "n_embd": 64,
    "n_head": 4,
    "vocab_size": 512,
    "n_positions": 1024,
}


def test_usual_names() -> None:
    shape = any_shape(USUAL, name="it")
    assert (shape.name, shape.family, shape.layer_count) == ("it", "some_family", 4)
    assert (shape.query_head_count, shape.kv_head_count, shape.head_dim) == (4, 2, 16)
    assert (shape.context_length, shape.data_type) == (1024, DataType.BFLOAT16)
    assert any_shape(USUAL, data_type=DataType.FLOAT32).data_type is DataType.FLOAT32


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        (GPT2, (4, 4, 16)),
        ({**GPT2, "multi_query": True}, (4, 1, 16)),
        ({**USUAL, "head_dim": 24}, (4, 2, 24)),
        # Latent attention: one key for each query head, in two parts.
        (
            {**USUAL, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8},
            (4, 4, 24),
        ),
    ],
)
def test_heads(config: dict[str, Any], heads: tuple[int, int, int]) -> None:
    shape = any_shape(config)
    assert (shape.query_head_count, shape.kv_head_count, shape.head_dim) == heads


def test_what_a_wrapper_leaves_to_defaults_is_to_be_written_out() -> None:
    with pytest.raises(InvalidArgument, match=r"no hidden_size in its text_config; write the def"):
        any_shape({"model_type": "a_wrapper", "text_config": {"model_type": "some_text"}})


def test_the_text_part_of_a_wrapper() -> None:
    text = {**USUAL, "model_type": "some_text", "head_dim": 24, "torch_dtype": None}
    wrapper = {"model_type": "a_wrapper", "vision_config": USUAL, "text_config": text}
    shape = any_shape({**wrapper, "torch_dtype": "bfloat16"})
    assert (shape.family, shape.head_dim) == ("a_wrapper", 24)
    assert shape.data_type is DataType.BFLOAT16


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": None}, "model_type None names no model"),
        ({"num_hidden_layers": None}, "model_type 'some_family': no num_hidden_layers"),
        ({"is_encoder_decoder": True}, "an encoder and a decoder"),
        ({"text_config": {"num_hidden_layers": "many"}}, "num_hidden_layers must be a positive"),
        ({"hidden_size": 1 << 40}, "hidden_size = 1099511627776 is more than 131,072"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers must be a positive integer"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3 KV heads"),
        ({"kv_lora_rank": 32}, "qk_nope_head_dim must be a positive integer, not None"),
        ({"dtype": "int3"}, "'int3'"),
    ],
)
def test_what_is_no_decoder_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        any_shape({**USUAL, **changes})
    assert text in caught.value.message


@pytest.mark.parametrize(
    ("name", "billions", "active", "kv_bytes"),
    [
        ("deepseek-v2-lite", 15.7, 2.66, 27 * 576 * 2),
        ("deepseek-v2", 236, 21.4, 60 * 576 * 2),
        ("deepseek-v3", 671, 37.6, 70_272),
        ("mixtral-8x7b", 46.7, 12.9, 131_072),
        ("qwen3-30b-a3b", 30.5, 3.35, 98_304),
        ("qwen3-235b-a22b", 235, 22.2, 192_512),
        ("gpt-oss-20b", 20.9, 4.19, 49_152),
    ],
)
def test_published_models_with_experts_and_latent_attention(
    name: str, billions: float, active: float, kv_bytes: int
) -> None:
    """Model cards have the same numbers; gpt-oss's 3.6 B leave one of its two tables out."""
    shape = SPARSE_SHAPES[name]
    assert shape.weight_bytes / 2e9 == pytest.approx(billions, rel=0.005)
    assert shape.active_parameters is not None
    found = shape.active_parameters + shape.embedding_parameters
    assert found / 1e9 == pytest.approx(active, rel=0.005)
    assert shape.prefill_flops_per_token == 2 * shape.active_parameters
    assert shape.least_kv_bytes_per_token == kv_bytes


def test_experts_by_hand() -> None:
    """Layers 1 and 3 of 4 have 6 experts, of which 2 see a token, and one that sees all."""
    keys = {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 10,
        "shared_expert_intermediate_size": 7,
        "first_k_dense_replace": 1,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [2],
    }
    shape = any_shape({**USUAL, **keys})
    attention = 4 * 2 * 64 * (64 + 32)
    dense, router = 2 * 3 * 64 * 96, 2 * 6 * 64
    experts = {number: 2 * 3 * 64 * (10 * number + 7) for number in (2, 6)}
    assert shape.active_parameters == attention + dense + router + experts[2]
    embeddings = 2 * 512 * 64
    assert shape.weight_bytes == 2 * (attention + dense + router + experts[6] + embeddings)
    # Without experts for a token, as some configs without any write it, all is dense.
    assert any_shape({**USUAL, **keys, "num_experts": 0}).active_parameters is None


def test_latent_attention_by_hand() -> None:
    keys = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
    layer = 64 * (32 + 8) + 4 * (32 * (16 + 12) + 12 * 64) + 3 * 64 * 96
    plain = any_shape({**USUAL, **keys})
    assert plain.latent_width == 40
    assert plain.active_parameters == 4 * (layer + 64 * 4 * 24)
    low_rank = any_shape({**USUAL, **keys, "q_lora_rank": 20})
    assert low_rank.active_parameters == 4 * (layer + 20 * (64 + 4 * 24))
