"""A small random checkpoint of any family of transformers' causal language models.

Sizes are made small by the names that configurations use; what they depend on is left alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)
from transformers.utils import logging

FAMILIES = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
# What reads images or sound, and has no class for its text alone.
WRAPPERS = tuple(
    sorted(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.keys() - MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys())
)
VOCABULARY = 512
CONTEXT = 1024
WINDOW = 24
# A choice of a token whose lead is smaller may go either way in fp32.
_CLEAR_LEAD = 1e-3
_MOST_PARAMETERS = 40e6
_SMALL: dict[str, int] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "sliding_window": WINDOW,
    "n_positions": CONTEXT,
    "n_inner": 128,
    "d_model": 64,
    "ffn_dim": 128,
    "rotary_dim": 16,
    "word_embed_proj_dim": 64,
    "query_pre_attn_scalar": 16,
    "attention_chunk_size": 64,
    # Experts.
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # Latent attention.
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    # What reads images or sound.
    "depth": 2,
    "embed_dim": 64,
    "num_heads": 4,
    "out_hidden_size": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
}


# What is computed from other values, and what is of other layers.
_DERIVED = (
    *("layer_types", "per_layer_config", "model_type", "transformers_version", "qk_head_dim"),
)
# Sizes that a default configuration leaves out, and a checkpoint has.
_OFTEN_ABSENT = ("head_dim", "num_key_value_heads", "num_experts_per_tok")

_STATES = {"mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_heads": 8}
_LINEAR_THEN_FULL = ["linear_attention", "full_attention"] * 2
_VISION = {"intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
# More tokens than a test has.
_MANY = 256
# Where a family has other names for its sizes, or sizes that depend on each other. What makes a
# checkpoint of it what it is stays: layers that differ, and what its default leaves open.
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "bamba": {**_STATES, "attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        }
    },
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 4,
        "max_seq_len": CONTEXT,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4},
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 64,
        "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 32,
        "swa_qk_nope_head_dim": 48,
        "swa_v_head_dim": 32,
    },
    "emu3": {"vocabulary_map": {"<image>": 500, "<|extra_200|>": 501}},
    "emu3_vqgan": {"codebook_size": 64, "base_channels": 32, "channel_multiplier": [1, 2]},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "intermediate_size": 128,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": None,
    },
    "gemma4_text": {
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 16,
        "per_layer_config": {"03": {"head_dim": 32}},
    },
    "gemma4_unified_text": {"per_layer_config": {"03": {"head_dim": 32}}},
    "fun_asr_nano": {"adaptor_config": {"hidden_size": 64, "intermediate_size": 16}},
    "git": {"vision_config": {**_VISION, "hidden_size": 32, "image_size": 16, "patch_size": 8}},
    "gpt_neo": {
        "num_layers": 4,
        "num_heads": 4,
        "window_size": WINDOW,
        "attention_types": [[["global", "local"], 2]],
    },
    "granitemoehybrid": {**_STATES, "layer_types": ["mamba", "attention"] * 2},
    "janus_vqgan": {"base_channels": 32, "channel_multiplier": [1, 2], "num_embeddings": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {
        "num_layers": 2,
        "ffn_hidden_size": 128,
        "expert_ffn_hidden_size": 64,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    # Their caches keep as many tokens as they have positions, or a chunk of attention.
    "llama4_text": {"attention_chunk_size": _MANY, "floor_scale": 16},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16},
    "molmo2_adapter": {"vision_feature_layer": [1, 0], "text_hidden_size": 64},
    "mistral4": {"head_dim": 32},
    "moshi": {"sliding_window": _MANY},
    "muse_spark_audio": {"hidden_sizes": [16] * 4},
    "phi4_multimodal": {
        "vision_config": {**_VISION, "hidden_size": 32},
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 32,
            "nemo_conv_channels": 32,
        },
    },
    "plbart": {"decoder_attention_heads": 4, "encoder_attention_heads": 4},
    "qwen4_exp_text": {
        "layer_types": _LINEAR_THEN_FULL,
        "hc_lowrank": 16,
        "ple_embed_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    # Their checkpoints have it, and `generate` asks for it.
    "qwen2_5_omni_thinker": {"vision_start_token_id": 500},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 500},
    "reformer": {
        "is_decoder": True,
        "attention_head_size": 16,
        "feed_forward_size": 128,
        "axial_pos_shape": [32, 32],
        "axial_pos_embds_dim": [32, 32],
        "attn_layers": ["local", "lsh"] * 2,
    },
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2, "depths": [1] * 7},
    "whisper": {"decoder_attention_heads": 4, "encoder_attention_heads": 4},
    "xglm": {"num_layers": 4, "attention_heads": 4},
    "xlnet": {"d_head": 16, "d_inner": 128, "n_head": 4, "n_layer": 2},
    "zamba": {
        "n_mamba_heads": 2,
        "mamba_dt_rank": 8,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "layers_block_type": ["linear_attention"] * 2 + ["hybrid"] * 2,
    },
    "zamba2": {
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "mamba_d_state": 16,
        "use_mamba_kernels": False,
        "kv_channels": 16,
        "num_query_groups": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 32},
}


# What a default configuration lacks to be valid.
_WITHOUT_EXTRA = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
_NEEDED: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", **_WITHOUT_EXTRA}},
}


class NotMade(Exception):
    """No small checkpoint of the family is made from its default configuration."""


def usual_config(family: str) -> PreTrainedConfig:
    """Return the family's default configuration, in its usual sizes. Raises NotMade."""
    try:
        return CONFIG_MAPPING[family](**_NEEDED.get(family, {}))
    except Exception as error:  # of any family's code
        raise NotMade(f"{error!s:.120}") from error


def small_config(family: str, **changes: Any) -> PreTrainedConfig:
    """Return the family's configuration with small sizes. Raises NotMade."""
    try:
        return _small(usual_config(family), **changes)
    except Exception as error:  # of any family's code
        raise NotMade(f"{error!s:.120}") from error


def _small(usual: PreTrainedConfig, **changes: Any) -> PreTrainedConfig:
    kind = type(usual)
    values = usual.to_dict()
    layers = values.get("num_hidden_layers", getattr(usual, "num_hidden_layers", None))
    by_layer = [
        name for name, each in values.items() if isinstance(each, list) and len(each) == layers
    ]
    # Lists for another number of layers, and what depends on other values.
    for name in (*by_layer, *_DERIVED):
        values.pop(name, None)
    for name, size in _SMALL.items():
        try:
            given = getattr(usual, name, None)
        except RuntimeError:  # it may differ between layers
            given = values[name]
        is_plain = given is not None and not isinstance(given, list | dict)
        if (is_plain or name in _OFTEN_ABSENT) and (name in values or name in kind.attribute_map):
            values[name] = size
    if "kv_lora_rank" in values:
        values["num_key_value_heads"] = values["num_attention_heads"]
    rope = values.get("rope_parameters") or {}
    if kind.__name__.endswith("TextConfig") and "rope_theta" in rope:
        # Angles of text, height and width: the code's defaults are for larger heads.
        half = int(_SMALL["head_dim"] * rope.get("partial_rotary_factor", 1)) // 2
        rope["mrope_section"] = [half // 4, half // 4, half // 2]
    for name in kind.sub_configs:
        if isinstance(part := getattr(usual, name, None), PreTrainedConfig):
            values[name] = _small(part).to_dict()
    padding = None if values.get("pad_token_id") is None else 0
    values |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": padding}
    return kind(**{**values, **_OF_FAMILY.get(kind.model_type, {}), **changes})


def small_model(family: str, **changes: Any) -> PreTrainedModel:
    """Return a random model in fp32, whose tokens depend on what it sees. Raises NotMade."""
    config = small_config(family, **changes)
    is_wrapper = type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING
    make: Any = AutoModelForMultimodalLM if is_wrapper else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            size = sum(each.numel() for each in make.from_config(config).parameters())
        if size > _MOST_PARAMETERS:
            raise NotMade(f"{size / 1e6:.0f} million parameters")
        torch.manual_seed(1)
        model: PreTrainedModel = make.from_config(config).float()
    except NotMade:
        raise
    except Exception as error:  # of any family's code
        raise NotMade(f"{error!s:.120}") from error
    with torch.no_grad():
        for each in model.parameters():
            if each.dim() > 1:
                each.mul_(3)
    model.train(mode=False)
    return model


def write(model: PreTrainedModel, folder: Path) -> Path:
    """Write the checkpoint as one downloads it; return its folder."""
    quiet: Any = logging
    quiet.disable_progress_bar()
    model.save_pretrained(folder)
    return folder


def clear_prompt(
    model: PreTrainedModel, length: int, count: int, *, before: Sequence[int] = ()
) -> tuple[list[int], list[int]]:
    """Return a random prompt after `before`, and its greedy tokens, none of them near a tie."""
    generate: Any = model.generate
    for attempt in range(20):
        rng = random.Random(31 * length + attempt)
        prompt = [*before, *(rng.randrange(3, VOCABULARY) for _ in range(length))]
        with torch.inference_mode():
            found = generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        best = torch.stack(found.logits)[:, 0].topk(2, dim=-1).values
        if float((best[:, 0] - best[:, 1]).min()) > _CLEAR_LEAD:
            return prompt, found.sequences[0, len(prompt) :].tolist()
    raise AssertionError(f"no prompt of {length} tokens with {count} clear greedy choices")
