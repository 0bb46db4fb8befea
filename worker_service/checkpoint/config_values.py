"""Checks single values of a `config.json`; errors name the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from splitpoint.errors import InvalidArgument


def refuse(
    config: Mapping[str, Any], key: str, *, allowed: tuple[Any, ...], path: str = ""
) -> None:
    value = config.get(key)
    if value not in allowed:
        raise unsupported(f"{path}{key} = {value!r} is not supported", f"{path}{key}")


def boolean(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise unsupported(f"{key} must be true or false, not {value!r}", key)
    return value


def positive(value: object, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise unsupported(f"{key} must be a positive number, not {value!r}", key)
    return float(value)


def positive_integer(value: object, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise unsupported(f"{key} must be a positive integer, not {value!r}", key)
    return value


def unsupported(message: str, field: str) -> InvalidArgument:
    return InvalidArgument(message, field=field, reason="UNSUPPORTED_MODEL")
