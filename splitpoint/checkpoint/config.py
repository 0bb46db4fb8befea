"""A checkpoint's `config.json`, in Hugging Face form, and its checked values.

Errors name the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from splitpoint.checkpoint.files import is_there, read_object
from splitpoint.errors import InvalidArgument
from splitpoint.shapes import ModelShape

# Reason of the error for a sound checkpoint that needs what this version lacks.
UNSUPPORTED_MODEL = "UNSUPPORTED_MODEL"
# What is said of a checkpoint that also reads images or sound.
TEXT_ONLY = "text only: its parts for images or sound are left out"
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


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a `config.json` says of its text decoder.

    A wrapper for images or sound nests that in `text_config`; `model_type` stays the wrapper's.
    """
    text = config.get("text_config")
    nested = text.items() if isinstance(text, Mapping) else ()
    given = {key: value for key, value in nested if value is not None}
    return {**config, **given, "model_type": config.get("model_type")}


def reads_more_than_text(config: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint has parts for images or sound, which are not served."""
    parts = ("text_config", "vision_config", "audio_config")
    return any(isinstance(config.get(each), Mapping) for each in parts)


def read_config(folder: Path) -> dict[str, Any]:
    """Return `config.json` of a checkpoint folder. Raises InvalidArgument."""
    path = folder / "config.json"
    if not is_there(path):
        raise InvalidArgument(
            f"{folder} is no checkpoint folder: it has no config.json", field="model"
        )
    return read_object(path)
