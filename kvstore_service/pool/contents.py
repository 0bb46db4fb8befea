"""What a chunk is, wherever it lies: tokens behind a parent, under a tenant's salt. Pure.

Knows neither slots nor which chunks there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore_service.pool.prefix_index import Entry, sortable
from splitpoint.arena.records import salt_tag
from splitpoint.keys import pack_tokens, packed_chunk_key, packed_fingerprint


@dataclass(frozen=True, slots=True)
class Contents:
    """Equal contents, equal chunk."""

    key: bytes
    parent_key: bytes  # empty for the first chunk of a sequence
    salt_tag: bytes
    packed_tokens: bytes  # see keys.pack_tokens
    packed: bytes  # the same for the index, see prefix_index.sortable
    fingerprint: int

    @classmethod
    def of(
        cls, layout_hash: bytes, salt: bytes, parent_key: bytes, token_ids: Sequence[int]
    ) -> Contents:
        """What a chunk of these tokens after this parent is, and its key."""
        packed_tokens = pack_tokens(token_ids)
        return cls(
            key=packed_chunk_key(layout_hash, salt, parent_key, packed_tokens),
            parent_key=parent_key,
            salt_tag=salt_tag(salt),
            packed_tokens=packed_tokens,
            packed=sortable(packed_tokens),
            fingerprint=packed_fingerprint(packed_tokens),
        )

    def are_those_of(self, entry: Entry) -> bool:
        """Whether a chunk with this key has these contents, too: keys are only hashes."""
        return (
            entry.parent_key == self.parent_key
            and entry.salt_tag == self.salt_tag
            and entry.fingerprint == self.fingerprint
            and entry.packed == self.packed
        )


def keys_behind(
    layout_hash: bytes,
    chunk_tokens: int,
    salt: bytes,
    entries: Sequence[Entry],
    token_ids: Sequence[int],
) -> list[bytes]:
    """Keys of the chunks of a sequence that its matched `entries` do not hold.

    The last one may be a partial tail. A match that ends inside a chunk does
    not hold that one.
    """
    packed_tokens = pack_tokens(token_ids)
    size = 4 * chunk_tokens
    parent = b""
    start = 0
    for entry in entries:
        if entry.packed != sortable(packed_tokens[start : start + size]):
            break
        parent, start = entry.key, start + len(entry.packed)
    keys = []
    for place in range(start, len(packed_tokens), size):
        piece = packed_tokens[place : place + size]
        parent = packed_chunk_key(layout_hash, salt, parent, piece)
        keys.append(parent)
    return keys
