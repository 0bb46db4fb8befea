"""Tiny random checkpoints of every supported family, written by transformers itself.

`write_tiny(case, folder)` gives a folder as one downloads it: config.json,
generation_config.json and safetensors. Weights are seeded and wide enough that
greedy choices are clear. Used by every test that compares with transformers.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import reference_cache
import torch
from reference_cache import Greedy
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging

VOCABULARY = 128
CONTEXT = 512
EOS = 2


def _sizes(**changes: Any) -> dict[str, Any]:
    """Return the common tiny dimensions of the rotary families."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "pad_token_id": None,
        "initializer_range": 0.1,
        **changes,
    }


def _opt(**changes: Any) -> PreTrainedModel:
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": EOS,
        "eos_token_id": EOS,
        "pad_token_id": 1,
        "init_std": 0.1,
    }
    return OPTForCausalLM(OPTConfig(**{**sizes, **changes}))


def _llama(**changes: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**_sizes(**changes)))


LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

_BUILDERS: dict[str, Callable[..., PreTrainedModel]] = {
    # Biases, learned positions, tied embeddings.
    "opt": _opt,
    # As OPT-350M: norms after the sums, narrow embeddings; and no biases.
    "opt-post-norm": lambda **more: _opt(
        do_layer_norm_before=False, word_embed_proj_dim=32, **more
    ),
    "opt-no-bias": lambda **more: _opt(enable_bias=False, _remove_final_layer_norm=True, **more),
    # MHA, untied.
    "llama": lambda **more: _llama(**{"num_key_value_heads": 4, **more}),
    # GQA, tied, several shards, Llama 3.1's rope scaling.
    "llama-3": lambda **more: _llama(
        rope_parameters=LLAMA3_SCALING, tie_word_embeddings=True, **more
    ),
    "llama-linear": lambda **more: _llama(
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}, **more
    ),
    "llama-dynamic": lambda **more: _llama(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}, **more
    ),
    "llama-biases": lambda **more: _llama(attention_bias=True, mlp_bias=True, head_dim=32, **more),
    # A sliding window shorter than the sequences.
    "mistral": lambda **more: MistralForCausalLM(
        MistralConfig(**_sizes(sliding_window=24, rope_parameters={"rope_theta": 1e6}, **more))
    ),
    "mistral-full": lambda **more: MistralForCausalLM(
        MistralConfig(**_sizes(sliding_window=None, **more))
    ),
    # Biases on q, k and v.
    "qwen2": lambda **more: Qwen2ForCausalLM(
        Qwen2Config(**_sizes(tie_word_embeddings=True, **more))
    ),
    # Windows in the upper layers only.
    "qwen2-windows": lambda **more: Qwen2ForCausalLM(
        Qwen2Config(
            **_sizes(use_sliding_window=True, sliding_window=20, max_window_layers=1, **more),
        )
    ),
    # Norms on q and k, head_dim is not hidden / heads.
    "qwen3": lambda **more: Qwen3ForCausalLM(Qwen3Config(**_sizes(**{"head_dim": 24, **more}))),
    # Every other layer with a window, soft caps, norms before and behind, odd score scale.
    "gemma2": lambda **more: Gemma2ForCausalLM(
        Gemma2Config(
            **_sizes(
                sliding_window=24,
                query_pre_attn_scalar=20,
                attn_logit_softcapping=2.0,
                final_logit_softcapping=10.0,
                **{"num_hidden_layers": 4, "head_dim": 32, **more},
            )
        )
    ),
    # Windows in all layers but every third, each kind with its own rope; norms on q and k.
    "gemma3": lambda **more: Gemma3ForCausalLM(
        Gemma3TextConfig(
            **_sizes(
                head_dim=32,
                sliding_window_pattern=3,
                sliding_window=20,
                query_pre_attn_scalar=24,
                rope_parameters=GEMMA3_ROPE,
                **{"num_hidden_layers": 4, **more},
            )
        )
    ),
}
CASES = tuple(_BUILDERS)
# One case per family, together: GQA, sharded, tied, biases, q/k norm, odd head_dim.
FAMILY_CASES = ("opt", "llama-3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3")
_SHARDED = ("llama-3", "qwen3")


def build_tiny(case: str, seed: int = 0, **changes: int) -> PreTrainedModel:
    """Return the transformers model of a case, fp32, in evaluation mode, its config changed."""
    torch.manual_seed(seed)
    model = _BUILDERS[case](**changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Wide layers, so that what a token sees decides the next one: with the
            # usual small ones the greedy text soon repeats a single token.
            if name.endswith(("proj.weight", "fc1.weight", "fc2.weight")):
                parameter.normal_(0.0, 0.3)
            # transformers initializes biases to 0 and norms to 1, which would hide errors.
            elif name.endswith(".bias"):
                parameter.normal_(0.0, 0.1)
            elif "norm" in name:
                # Gemma scales by 1 + weight.
                parameter.normal_(0.0 if case.startswith("gemma") else 1.0, 0.1)
    # SDPA, which transformers takes by itself, ignores Gemma 2's cap of scores.
    if case == "gemma2":
        model.set_attn_implementation("eager")
    model.train(False)
    return model


def write_tiny(case: str, folder: Path, seed: int = 0, **changes: int) -> Path:
    """Write the case's checkpoint into `folder` (made if needed) and return it."""
    model = build_tiny(case, seed, **changes)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model.save_pretrained(folder, max_shard_size="100KB" if case in _SHARDED else "1GB")
    return folder


# A choice whose lead over the next best is smaller than this may go either way
# in fp32: the order of additions differs between any two implementations.
CLEAR_LEAD = 1e-3


def clear_prompt(
    model: PreTrainedModel, length: int, count: int, *, before: Sequence[int] = (), seed: int = 0
) -> tuple[list[int], list[int]]:
    """Return a random prompt after `before` and its greedy tokens, none of them near a tie."""
    for attempt in range(20):
        rng = random.Random(1000 * seed + 31 * length + attempt)
        prompt = [*before, *(rng.randrange(3, VOCABULARY) for _ in range(length))]
        found = _greedy(model, prompt, count)
        if min(found.leads) > CLEAR_LEAD:
            return prompt, found.tokens
    raise AssertionError(f"no prompt of {length} tokens with {count} clear greedy choices")


def _greedy(model: PreTrainedModel, prompt: Sequence[int], count: int) -> Greedy:
    """Return greedy tokens, computed once in a test session for equal models and prompts."""
    key = _digest(model, prompt)
    found = reference_cache.find(key, count)
    if found is None:
        found = _computed(model, prompt, count)
        reference_cache.keep(key, found)
    return found


def _digest(model: PreTrainedModel, prompt: Sequence[int]) -> str:
    """Return a digest of all that greedy tokens depend on."""
    facts: Any = model.config
    digest = hashlib.sha256(f"{facts.to_json_string()} {facts._attn_implementation}".encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {parameter.dtype}".encode())
        digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    digest.update(str(list(prompt)).encode())
    return digest.hexdigest()


def _computed(model: PreTrainedModel, prompt: Sequence[int], count: int) -> Greedy:
    """Return the best token of each step; `generate` takes half as long again for the same."""
    forward: Any = model
    tokens: list[int] = []
    rows: list[torch.Tensor] = []
    with torch.inference_mode():
        output = forward(torch.tensor([list(prompt)]), use_cache=True, logits_to_keep=1)
        while True:
            rows.append(output.logits[0, -1])
            tokens.append(int(rows[-1].argmax()))
            if len(tokens) == count:
                break
            output = forward(
                torch.tensor([tokens[-1:]]), past_key_values=output.past_key_values, use_cache=True
            )
        best = torch.stack(rows).topk(2, dim=-1).values
        return Greedy(tokens, (best[:, 0] - best[:, 1]).tolist())
