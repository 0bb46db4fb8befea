"""Requests in the order of a trie of their prompts, walked depth first, within bounded memory.

Sorting prompts by their token ids is that walk: prompts with a common prefix come one after the
other, so a prefix is computed once and used while it is cached, however small the cache is.
"""

from __future__ import annotations

import heapq
import struct
import sys
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import BinaryIO

# Tokens of a prompt that count. Prompts that are equal so far keep the file's order.
MOST_TOKENS = 4096
# Bytes of keys in memory; more of them are sorted in parts, which are merged from temporary files.
MEMORY_BYTES = 64 << 20
# What one key costs in memory besides its bytes.
_OVERHEAD_BYTES = 120
_HEAD = struct.Struct("<IQ")


def prefix_key(model: str, salt: bytes, token_ids: Sequence[int]) -> bytes:
    """Return bytes that sort as the prompt does: prefixes are shared within model and salt."""
    tokens = array("I", token_ids[:MOST_TOKENS])
    if sys.byteorder == "little":
        tokens.byteswap()  # the largest byte first, so that bytes sort as numbers
    name = model.encode("utf-8", "surrogatepass")
    return name + b"\0" + bytes([len(salt)]) + salt + tokens.tobytes()


class PrefixOrder:
    """`add` every request, then read `positions` once. Close it, or use `with`."""

    def __init__(self, memory_bytes: int = MEMORY_BYTES) -> None:
        self._memory_bytes = memory_bytes
        self._keys: list[tuple[bytes, int]] = []
        self._bytes = 0
        self._parts: list[BinaryIO] = []
        self._files = ExitStack()

    def add(self, key: bytes, position: int) -> None:
        self._keys.append((key, position))
        self._bytes += len(key) + _OVERHEAD_BYTES
        if self._bytes >= self._memory_bytes:
            self._spill()

    def positions(self) -> array[int]:
        """Return the positions in order."""
        self._keys.sort()
        parts: list[Iterable[tuple[bytes, int]]] = [_read(part) for part in self._parts]
        return array("Q", (position for _, position in heapq.merge(*parts, self._keys)))

    def close(self) -> None:
        self._files.close()
        self._keys.clear()

    def __enter__(self) -> PrefixOrder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _spill(self) -> None:
        # Without a name: nothing is left of it, however this process ends.
        part = tempfile.TemporaryFile()  # noqa: SIM115
        self._files.callback(part.close)
        self._keys.sort()
        for key, position in self._keys:
            part.write(_HEAD.pack(len(key), position))
            part.write(key)
        self._parts.append(part)
        self._keys, self._bytes = [], 0


def _read(part: BinaryIO) -> Iterator[tuple[bytes, int]]:
    part.seek(0)
    while head := part.read(_HEAD.size):
        size, position = _HEAD.unpack(head)
        yield part.read(size), position
