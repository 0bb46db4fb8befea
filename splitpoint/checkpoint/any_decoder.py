"""The shape of any decoder-only model, from the usual keys of its `config.json`.

Services that plan and admit need the shape alone, and have no code of the model. A worker, which
has, compares it with what the model's modules really are before it serves.
"""

from __future__ import annotations

from collections.abc import Mapping
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
}
# The bound of each key: checked before any loop or allocation.
MOST = {key: _BOUNDS[dimension] for dimension, keys in _KEYS.items() for key in keys}


def stored_type(config: Mapping[str, Any]) -> DataType:
    """Return the element type of a checkpoint. Raises ValueError for one that is not served."""
    stored = config.get("dtype") or config.get("torch_dtype") or "float32"
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
    return ModelShape(
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
