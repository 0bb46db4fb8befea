"""The shape of any decoder-only model, from the usual keys of its `config.json`.

Services that plan and admit need the shape alone, and have no code of the model. A worker, which
has, compares it with what the model's modules really are before it serves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from splitpoint.checkpoint.config import (
    UNSUPPORTED_MODEL,
    positive_integer,
    shown,
    text_part,
    unsupported,
)
from splitpoint.errors import InvalidArgument
from splitpoint.shapes import DataType, ModelShape

# The names of each dimension; the first that a config has counts.
_KEYS = {
    "layer_count": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "query_head_count": (
        "num_attention_heads",
        "n_head",
        "n_heads",
        "num_heads",
        "attention_heads",
    ),
    "kv_head_count": ("num_key_value_heads", "num_kv_heads", "n_kv_heads"),
    "head_dim": ("head_dim", "attention_head_dim"),
    "intermediate_size": ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size"),
    "vocabulary_size": ("vocab_size",),
    "context_length": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    # Experts: of each layer, of these for one token, and the width of each; those for every token;
    # layers without experts at the front; every which layer has some.
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token"),
    "expert_width": ("moe_intermediate_size",),
    "shared_experts": ("n_shared_experts",),
    "shared_width": ("shared_expert_intermediate_size",),
    "dense_layers": ("first_k_dense_replace",),
    "sparse_step": ("decoder_sparse_step",),
    # Latent attention: what is cached is the rank of K and V, and a rotated part of each key.
    "latent_rank": ("kv_lora_rank",),
    "query_rank": ("q_lora_rank",),
    "rotated_width": ("qk_rope_head_dim",),
    "value_width": ("v_head_dim",),
}
# Upper bounds of dimensions, beyond the largest models.
_BOUNDS = {
    "layer_count": 1024,
    "hidden_size": 1 << 17,
    "query_head_count": 4096,
    "kv_head_count": 4096,
    "head_dim": 4096,
    "intermediate_size": 1 << 20,
    "vocabulary_size": 1 << 22,
    "context_length": 1 << 26,
    **dict.fromkeys(("expert_count", "experts_per_token", "shared_experts"), 1 << 12),
    **dict.fromkeys(("expert_width", "shared_width"), 1 << 17),
    **dict.fromkeys(("dense_layers", "sparse_step"), 1 << 17),
    **dict.fromkeys(("latent_rank", "query_rank", "rotated_width", "value_width"), 1 << 17),
}
# The bound of each key: checked before any loop or allocation.
MOST = {key: _BOUNDS[dimension] for dimension, keys in _KEYS.items() for key in keys}


def stored_type(config: Mapping[str, Any]) -> DataType:
    """Return the element type of a checkpoint. Raises ValueError for one that is not served.

    Where a quantised checkpoint names none, as gpt-oss, what is not quantised has 16 bits.
    """
    absent = "bfloat16" if config.get("quantization_config") else "float32"
    stored = config.get("dtype") or config.get("torch_dtype") or absent
    return DataType(str(stored).removeprefix("torch."))


def any_shape(
    config: Mapping[str, Any], *, name: str = "", data_type: DataType | None = None
) -> ModelShape:
    """Return the shape that a `config.json` of any family describes; of a wrapper, its text part.

    Raises InvalidArgument for a dimension that is missing or no number, and
    UNSUPPORTED_MODEL for a model that is no decoder alone.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or not family:
        raise InvalidArgument(
            f"model_type {shown(family)} names no model",
            field="model_type",
            reason=UNSUPPORTED_MODEL,
        )
    config = text_part(config)
    if config.get("is_encoder_decoder"):
        raise unsupported(
            f"model_type {shown(family)}: it has an encoder and a decoder", "model_type"
        )
    hidden, heads = _value(config, "hidden_size"), _value(config, "query_head_count")
    kv_heads = _found(config, "kv_head_count")
    head_dim = _found(config, "head_dim")
    if config.get("kv_lora_rank"):
        # Latent attention: keys have a part with and a part without positions, one for each query.
        parts = ("qk_nope_head_dim", "qk_rope_head_dim")
        head_dim, kv_heads = sum(positive_integer(config.get(each), each) for each in parts), heads
    elif config.get("multi_query"):
        kv_heads = 1
    try:
        held = data_type or stored_type(config)
    except ValueError as error:
        raise InvalidArgument(f"config.json: {error}", field="config") from error
    shape = ModelShape(
        name=name or family,
        family=family,
        layer_count=_value(config, "layer_count"),
        hidden_size=hidden,
        query_head_count=heads,
        kv_head_count=kv_heads or heads,
        head_dim=head_dim or max(1, hidden // heads),
        intermediate_size=_found(config, "intermediate_size") or 4 * hidden,
        vocabulary_size=_value(config, "vocabulary_size"),
        context_length=_value(config, "context_length"),
        data_type=held,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
    )
    latent = _counted(config, "latent_rank")
    if latent:
        latent += _value(config, "rotated_width")
    has_experts = _counted(config, "expert_count") and _counted(config, "experts_per_token")
    if not latent and not has_experts:
        return shape
    attention = shape.layer_count * _attention_parameters(config, shape)
    total, active = (
        _mlp_parameters(config, shape)
        if has_experts
        else (shape.layer_count * shape.mlp_parameters,) * 2
    )
    size = attention + total + shape.embedding_parameters
    return replace(
        shape,
        active_parameters=attention + active,
        held_weight_bytes=size * shape.data_type.size,
        latent_width=latent or None,
    )


def _attention_parameters(config: Mapping[str, Any], shape: ModelShape) -> int:
    """Return the elements of the matrices of one layer's attention."""
    hidden, heads, rank = shape.hidden_size, shape.query_head_count, _counted(config, "latent_rank")
    if not rank:
        return 2 * hidden * (shape.query_width + shape.kv_width)
    rotated, queries = _value(config, "rotated_width"), _counted(config, "query_rank")
    plain = shape.head_dim - rotated
    value = _counted(config, "value_width") or plain
    width = shape.query_width
    query = queries * (hidden + width) if queries else hidden * width
    return query + hidden * (rank + rotated) + heads * (rank * (plain + value) + value * hidden)


def _mlp_parameters(config: Mapping[str, Any], shape: ModelShape) -> tuple[int, int]:
    """Return the elements of all layers' MLPs: of all experts, and of those that see one token."""
    count = _value(config, "expert_count")
    width = _counted(config, "expert_width") or shape.intermediate_size
    plain = config.get("mlp_only_layers")
    without = {each for each in plain if type(each) is int} if isinstance(plain, list) else set()
    first, step = _counted(config, "dense_layers"), _counted(config, "sparse_step") or 1
    layers = range(first, shape.layer_count)
    sparse = sum(layer not in without and not (layer + 1) % step for layer in layers)
    dense = (shape.layer_count - sparse) * shape.mlp_parameters
    shared = _counted(config, "shared_experts") * width + _counted(config, "shared_width")
    router = sparse * count * shape.hidden_size
    expert = 3 * sparse * shape.hidden_size
    total, active = (
        dense + router + expert * (number * width + shared)
        for number in (count, _value(config, "experts_per_token"))
    )
    return total, active


def _counted(config: Mapping[str, Any], dimension: str) -> int:
    """Return a dimension; 0 if the config has none of its names, or a 0."""
    given = {key: value for key, value in config.items() if value not in (0, False)}
    return _found(given, dimension) or 0


def _found(config: Mapping[str, Any], dimension: str) -> int | None:
    """Return a dimension; None if the config has none of its names."""
    for key in _KEYS[dimension]:
        if config.get(key) is not None:
            given = config[key]
            # Some families give one for each layer.
            every = given if given and isinstance(given, list) else [given]
            value = max(positive_integer(each, key) for each in every)
            if value > MOST[key]:
                raise unsupported(f"{key} = {value} is more than {MOST[key]:,}", key)
            return value
    return None


def _value(config: Mapping[str, Any], dimension: str) -> int:
    value = _found(config, dimension)
    if value is None:
        key = _KEYS[dimension][0]
        if isinstance(config.get("text_config"), Mapping):
            # Services that plan have no classes whose defaults these are.
            raise unsupported(
                f"model_type {shown(config['model_type'])}: no {key} in its text_config; write the "
                "defaults out: transformers' AutoConfig.from_pretrained(DIR).save_pretrained(DIR)",
                "text_config",
            )
        raise unsupported(f"model_type {shown(config['model_type'])}: no {key}", key)
    return value


def _published(name: str, family: str, sizes: tuple[int, ...], **config: int) -> ModelShape:
    """Return a shape from layers, h, heads, vocabulary, context and inner width, and more keys."""
    keys = (
        *("num_hidden_layers", "hidden_size", "num_attention_heads"),
        *("vocab_size", "max_position_embeddings", "intermediate_size"),
    )
    given = dict(zip(keys, sizes, strict=True)) | config
    types = {"model_type": family, "dtype": "bfloat16"}
    return any_shape({**given, **types}, name=name)


_LATENT = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

# Models with experts or latent attention by name, for planning without a checkpoint: our own
# decoder has none of them.
SPARSE_SHAPES: dict[str, ModelShape] = {
    shape.name.lower(): shape
    for shape in (
        _published(
            "DeepSeek-V2-Lite",
            "deepseek_v2",
            (27, 2048, 16, 102400, 163840, 10944),
            **_LATENT,
            n_routed_experts=64,
            num_experts_per_tok=6,
            moe_intermediate_size=1408,
            n_shared_experts=2,
            first_k_dense_replace=1,
        ),
        _published(
            "DeepSeek-V2",
            "deepseek_v2",
            (60, 5120, 128, 102400, 163840, 12288),
            **_LATENT,
            q_lora_rank=1536,
            n_routed_experts=160,
            num_experts_per_tok=6,
            moe_intermediate_size=1536,
            n_shared_experts=2,
            first_k_dense_replace=1,
        ),
        _published(
            "DeepSeek-V3",
            "deepseek_v3",
            (61, 7168, 128, 129280, 163840, 18432),
            **_LATENT,
            q_lora_rank=1536,
            n_routed_experts=256,
            num_experts_per_tok=8,
            moe_intermediate_size=2048,
            n_shared_experts=1,
            first_k_dense_replace=3,
        ),
        _published(
            "Mixtral-8x7B",
            "mixtral",
            (32, 4096, 32, 32000, 32768, 14336),
            num_key_value_heads=8,
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
        _published(
            "Qwen3-30B-A3B",
            "qwen3_moe",
            (48, 2048, 32, 151936, 40960, 6144),
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
        ),
        _published(
            "Qwen3-235B-A22B",
            "qwen3_moe",
            (94, 4096, 64, 151936, 40960, 12288),
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=1536,
        ),
        _published(
            "gpt-oss-20b",
            "gpt_oss",
            (24, 2880, 64, 201088, 131072, 2880),
            num_key_value_heads=8,
            head_dim=64,
            num_local_experts=32,
            num_experts_per_tok=4,
        ),
    )
}
