"""The identity of a chunk: its tokens, the chunk before it, and the tenant's salt.

Pure: knows neither slots nor which chunks are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore_service.pool.prefix_index import Entry, sortable
from splitpoint.arena.records import salt_tag
from splitpoint.keys import pack_tokens, packed_chunk_key, packed_fingerprint


@dataclass(frozen=True, slots=True)
class ChunkIdentity:
    """What makes two chunks the same chunk. `parent_key` is empty for a first chunk."""

    key: bytes
    parent_key: bytes
    salt_tag: bytes
    packed_tokens: bytes  # see keys.pack_tokens
    packed: bytes  # the same for the index, see prefix_index.sortable
    fingerprint: int

    @classmethod
    def of(
        cls, layout_hash: bytes, salt: bytes, parent_key: bytes, token_ids: Sequence[int]
    ) -> ChunkIdentity:
        packed_tokens = pack_tokens(token_ids)
        return cls(
            key=packed_chunk_key(layout_hash, salt, parent_key, packed_tokens),
            parent_key=parent_key,
            salt_tag=salt_tag(salt),
            packed_tokens=packed_tokens,
            packed=sortable(packed_tokens),
            fingerprint=packed_fingerprint(packed_tokens),
        )

    def is_that_of(self, entry: Entry) -> bool:
        """Compare everything but the key with an entry's: keys are hashes and may collide."""
        return (
            entry.parent_key == self.parent_key
            and entry.salt_tag == self.salt_tag
            and entry.fingerprint == self.fingerprint
            and entry.packed == self.packed
        )
