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


class NotMade(Exception):
    """No small checkpoint of the family is made from its default configuration."""


def small_config(family: str, **changes: Any) -> PreTrainedConfig:
    """Return the family's configuration with small sizes. Raises NotMade."""
    try:
        return _small(CONFIG_MAPPING[family](), **changes)
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
    values |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": padding, **changes}
    return kind(**values)


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
