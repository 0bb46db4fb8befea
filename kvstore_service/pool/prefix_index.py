"""Finds the longest stored prefix of a token sequence. Pure: no slots' states, no clock.

A chunk's children are kept sorted by their tokens, so the sibling that shares
the longest beginning with a query is a neighbour of the query's place among
them: one bisection, however many conversations start with the same words.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from splitpoint.arena.records import salt_tag
from splitpoint.keys import pack_tokens, packed_chunk_key, packed_fingerprint


@dataclass(frozen=True, slots=True)
class Entry:
    """A sealed chunk as the index knows it. `packed` are its tokens, see `sortable`."""

    slot: int
    generation: int
    key: bytes
    parent_key: bytes  # empty for the first chunk of a sequence
    salt_tag: bytes
    packed: bytes
    fingerprint: int
    checksum: int
    chunk_index: int

    @property
    def token_count(self) -> int:
        return len(self.packed) // 4


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """`entries` in sequence order hold `cached_tokens`; the last one perhaps only in part."""

    entries: tuple[Entry, ...]
    cached_tokens: int


def sortable(packed_tokens: bytes) -> bytes:
    """Tokens (not negative) of `keys.pack_tokens` as big-endian int32: as bytes they
    are ordered like the tokens themselves."""
    words = array("I", packed_tokens)
    words.byteswap()
    return words.tobytes()


def unpack(packed: bytes) -> list[int]:
    tokens: list[int] = np.frombuffer(packed, dtype=">i4").tolist()
    return tokens


def common_tokens(first: bytes, second: bytes) -> int:
    """How many leading tokens two packed sequences share."""
    low, high = 0, min(len(first), len(second)) // 4
    while low < high:
        middle = (low + high + 1) // 2
        if first[4 * low : 4 * middle] == second[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low


class PrefixIndex:
    """All sealed chunks of one arena, by key and below their parents."""

    def __init__(self, layout_hash: bytes, chunk_tokens: int) -> None:
        self._layout_hash = layout_hash
        self._chunk_tokens = chunk_tokens
        self._by_key: dict[bytes, Entry] = {}
        # Children of a chunk, under its key; first chunks under the tag of their
        # tenant's salt, which is shorter than any key. Sorted by tokens.
        self._children: dict[bytes, list[tuple[bytes, bytes]]] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._by_key.values())

    def get(self, key: bytes) -> Entry | None:
        return self._by_key.get(key)

    def has_children(self, key: bytes) -> bool:
        return key in self._children

    def add(self, entry: Entry) -> None:
        """Raises ValueError when the key is taken or the parent is missing."""
        if entry.key in self._by_key:
            raise ValueError("a chunk with this key is in the index")
        if entry.parent_key and entry.parent_key not in self._by_key:
            raise ValueError("the parent is not in the index")
        self._by_key[entry.key] = entry
        siblings = self._children.setdefault(entry.parent_key or entry.salt_tag, [])
        insort(siblings, (entry.packed, entry.key))

    def remove(self, key: bytes) -> Entry:
        """Raises KeyError when it is not there, ValueError while it has children."""
        if key in self._children:
            raise ValueError("a chunk with children cannot leave the index")
        entry = self._by_key.pop(key)
        branch = entry.parent_key or entry.salt_tag
        siblings = self._children[branch]
        del siblings[bisect_left(siblings, (entry.packed, entry.key))]
        if not siblings:
            del self._children[branch]
        return entry

    def subtree(self, key: bytes) -> list[Entry]:
        """The chunk and everything below it, parents first. Raises KeyError."""
        found = [self._by_key[key]]
        for entry in found:  # grows as it goes
            found += [self._by_key[child] for _, child in self._children.get(entry.key, ())]
        return found

    def match(self, salt: bytes, token_ids: Sequence[int]) -> PrefixMatch:
        """The longest prefix of `token_ids` (not negative) stored under this salt.

        Full chunks are found by key, and believed only if parent, salt tag,
        token fingerprint and tokens agree too. Behind them the sibling with the
        longest common beginning joins, be it a partial tail or a full chunk.
        """
        tag = salt_tag(salt)
        packed_tokens = pack_tokens(token_ids)
        packed = sortable(packed_tokens)
        size = 4 * self._chunk_tokens
        found: list[Entry] = []
        parent = b""
        for start in range(0, len(packed) - size + 1, size):
            piece = packed_tokens[start : start + size]
            key = packed_chunk_key(self._layout_hash, salt, parent, piece)
            entry = self._by_key.get(key)
            if entry is None or not (
                entry.parent_key == parent
                and entry.salt_tag == tag
                and entry.fingerprint == packed_fingerprint(piece)
                and entry.packed == packed[start : start + size]
            ):
                break
            found.append(entry)
            parent = key
        cached_tokens = len(found) * self._chunk_tokens
        tail, common = self._closest(parent or tag, packed[4 * cached_tokens :])
        if tail is not None:
            found.append(tail)
        return PrefixMatch(tuple(found), cached_tokens + common)

    def _closest(self, branch: bytes, packed: bytes) -> tuple[Entry | None, int]:
        """The child that shares most leading tokens with `packed`, and how many."""
        siblings = self._children.get(branch)
        if not siblings or not packed:
            return None, 0
        place = bisect_left(siblings, (packed, b""))
        best, best_common = None, 0
        # Of those sharing equally much, the one behind: it may go on as asked for.
        for index in (place, place - 1):
            if 0 <= index < len(siblings):
                common = common_tokens(siblings[index][0], packed)
                if common > best_common:
                    best, best_common = self._by_key[siblings[index][1]], common
        return best, best_common
