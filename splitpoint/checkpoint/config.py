"""A checkpoint's `config.json`, in Hugging Face form: its checked values, and its shape.

Errors name the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from splitpoint.checkpoint.files import is_there, read_object
from splitpoint.errors import InvalidArgument
from splitpoint.shapes import DataType, ModelShape

# Reason of the error for a sound checkpoint that needs what this version lacks.
UNSUPPORTED_MODEL = "UNSUPPORTED_MODEL"
# Beyond any setting of a model, and a float64 still has it.
_MOST_NUMBER = 1 << 60


def refuse(
    config: Mapping[str, Any], key: str, *, allowed: tuple[Any, ...], path: str = ""
) -> None:
    value = config.get(key)
    if value not in allowed:
        raise unsupported(f"{path}{key} = {shown(value)} is not supported", f"{path}{key}")


def boolean(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise unsupported(f"{key} must be true or false, not {shown(value)}", key)
    return value


def positive(value: object, key: str) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 < value <= _MOST_NUMBER
    ):
        raise unsupported(f"{key} must be a positive number, not {shown(value)}", key)
    return float(value)


def positive_integer(value: object, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MOST_NUMBER:
        raise unsupported(f"{key} must be a positive integer, not {shown(value)}", key)
    return value


def shown(value: object) -> str:
    """Return a value of a `config.json` for a message: short, whatever the file holds."""
    is_plain = value is None or isinstance(value, str | int | float)
    return f"{value!r:.60}" if is_plain else f"a {type(value).__name__}"


def unsupported(message: str, field: str) -> InvalidArgument:
    return InvalidArgument(message, field=field, reason=UNSUPPORTED_MODEL)


FAMILIES = ("opt", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
GEMMA_FAMILIES = ("gemma2", "gemma3_text")
# Keys that configs of Gemma 3 leave out, with the defaults of transformers' class.
_GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
}
# Upper bounds, beyond the largest models: checked before any loop or allocation.
_MOST = {
    "num_hidden_layers": 1024,
    "hidden_size": 1 << 17,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "head_dim": 4096,
    "intermediate_size": 1 << 20,
    "ffn_dim": 1 << 20,
    "vocab_size": 1 << 22,
    "max_position_embeddings": 1 << 26,
}


def model_name(folder: Path) -> str:
    """Return the hub name of a cached download, else the folder's name."""
    folder = folder.resolve()
    if folder.parent.name == "snapshots" and folder.parents[1].name.startswith("models--"):
        return folder.parents[1].name.removeprefix("models--").replace("--", "/")
    return folder.name


def with_context(shape: ModelShape, max_model_len: int | None) -> ModelShape:
    """Return a shape whose context is lowered to this many tokens; None: as it is.

    Raises InvalidArgument if the model's context is shorter.
    """
    if max_model_len is None:
        return shape
    if max_model_len > shape.context_length:
        raise InvalidArgument(
            f"--max-model-len: {max_model_len:,} tokens are more than the context of {shape.name}, "
            f"{shape.context_length:,}",
            field="max_model_len",
        )
    return replace(shape, context_length=max_model_len)


def read_config(folder: Path) -> dict[str, Any]:
    """Return `config.json` of a checkpoint folder. Raises InvalidArgument."""
    path = folder / "config.json"
    if not is_there(path):
        raise InvalidArgument(
            f"{folder} is no checkpoint folder: it has no config.json", field="model"
        )
    return read_object(path)


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a `config.json` about the text decoder, with defaults of Gemma 3.

    Only a Gemma 3 that also reads images has a `text_config`; other configs are returned
    unchanged.
    """
    family = config.get("model_type")
    if family == "gemma3":
        text = config.get("text_config")
        if not isinstance(text, dict):
            raise InvalidArgument("config.json has no text_config", field="text_config")
        whole = {key: value for key, value in config.items() if not key.endswith("_config")}
        quantized = {"quantization_config": config.get("quantization_config")}
        config = {**whole, **quantized, **text, "model_type": "gemma3_text"}
    elif family != "gemma3_text":
        return dict(config)
    return {**_GEMMA3_DEFAULTS, **config}


def shape_from_config(
    config: Mapping[str, Any], *, name: str = "", data_type: DataType | None = None
) -> ModelShape:
    """Return the shape that a `config.json` describes.

    Raises InvalidArgument for an architecture outside FAMILIES, a missing key, or a value
    out of bounds.
    """
    config = text_config(config)
    family = str(config.get("model_type", ""))
    if family not in FAMILIES:
        raise InvalidArgument(
            f"model_type {shown(family)} is not supported (supported: {', '.join(FAMILIES)})",
            field="model_type",
            reason=UNSUPPORTED_MODEL,
        )
    try:
        hidden = _integer(config, "hidden_size")
        query_heads = _integer(config, "num_attention_heads")
        is_opt = family == "opt"
        stored = config.get("dtype") or config.get("torch_dtype") or "float32"
        return ModelShape(
            name=name or str(config.get("_name_or_path") or family),
            family=family,
            layer_count=_integer(config, "num_hidden_layers"),
            hidden_size=hidden,
            query_head_count=query_heads,
            kv_head_count=_integer(config, "num_key_value_heads", query_heads),
            head_dim=_integer(config, "head_dim", hidden // query_heads),
            intermediate_size=_integer(config, "ffn_dim" if is_opt else "intermediate_size"),
            vocabulary_size=_integer(config, "vocab_size"),
            context_length=_integer(config, "max_position_embeddings"),
            data_type=data_type or DataType(str(stored).removeprefix("torch.")),
            gated_mlp=not is_opt,
            tied_embeddings=bool(
                config.get("tie_word_embeddings", is_opt or family in GEMMA_FAMILIES)
            ),
        )
    except KeyError as error:
        raise InvalidArgument(f"config.json has no {error.args[0]}", field="config") from error
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"config.json: {error}", field="config") from error


def _integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a whole number within its bounds; the default if it is absent, null or 0."""
    value = config[key] if default is None else config.get(key) or default
    if type(value) is not int or not 1 <= value <= _MOST[key]:
        shown = repr(value) if isinstance(value, int | float) else f"a {type(value).__name__}"
        raise InvalidArgument(
            f"config.json: {key} must be a whole number from 1 to {_MOST[key]:,}, not {shown:.40}",
            field="config",
        )
    return value
