"""Messages between a store and its engine's process: JSON, one a line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

# Longest line: some ten thousands of chunks.
LINE_BYTES = 16 << 20

Message = dict[str, Any]


class BadMessage(Exception):
    """The other end sent what is no message."""


def encode(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Raises BadMessage."""
    try:
        message = json.loads(line)
    except ValueError as error:
        raise BadMessage("no JSON") from error
    if not isinstance(message, dict):
        raise BadMessage("no JSON object")
    return message


def names(keys: Sequence[bytes]) -> list[str]:
    return [key.hex() for key in keys]


def keys_of(names: Sequence[str]) -> list[bytes]:
    return [bytes.fromhex(name) for name in names]
