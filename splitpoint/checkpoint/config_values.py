"""Checks single values of a `config.json`; errors name the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from splitpoint.errors import InvalidArgument

# Reason of the error for a sound checkpoint that needs what this version lacks.
UNSUPPORTED_MODEL = "UNSUPPORTED_MODEL"
# Beyond any setting of a model, and a float64 still has it.
_MOST = 1 << 60


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
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _MOST:
        raise unsupported(f"{key} must be a positive number, not {shown(value)}", key)
    return float(value)


def positive_integer(value: object, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MOST:
        raise unsupported(f"{key} must be a positive integer, not {shown(value)}", key)
    return value


def shown(value: object) -> str:
    """Return a value of a `config.json` for a message: short, whatever the file holds."""
    is_plain = value is None or isinstance(value, str | int | float)
    return f"{value!r:.60}" if is_plain else f"a {type(value).__name__}"


def unsupported(message: str, field: str) -> InvalidArgument:
    return InvalidArgument(message, field=field, reason=UNSUPPORTED_MODEL)
