"""Chunk keys of a sequence, and marks: short names of chunks for comparing what devices hold.

Both are bounded: the chunks after the first 4,096 are neither looked up nor shared in the
scheduler's accounts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import overload

from splitpoint.keys import MARK_BYTES, chunk_keys

MOST_KEYS = 4096
# Longer sequences are hashed in a thread, which keeps the event loop free.
_SHORT_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class LayoutName:
    """What chunk keys depend on besides tokens and salt."""

    layout_hash: bytes
    chunk_tokens: int


class ChunkMarks(Sequence[bytes]):
    """The marks of the chunks of a sequence, in order; packed, since there may be thousands.

    A mark is the first MARK_BYTES of a key. A wrong one costs a wrong charge, not a wrong answer.
    """

    __slots__ = ("packed",)

    def __init__(self, packed: bytes = b"") -> None:
        self.packed = packed

    @classmethod
    def of(cls, keys: Sequence[bytes]) -> ChunkMarks:
        return cls(b"".join(key[:MARK_BYTES] for key in keys))

    def __len__(self) -> int:
        return len(self.packed) // MARK_BYTES

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> ChunkMarks: ...

    def __getitem__(self, index: int | slice) -> bytes | ChunkMarks:
        if isinstance(index, slice):
            return ChunkMarks(b"".join(list(self)[index]))
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.packed[index * MARK_BYTES : (index + 1) * MARK_BYTES]

    def __iter__(self) -> Iterator[bytes]:
        packed = self.packed
        return (packed[n : n + MARK_BYTES] for n in range(0, len(packed), MARK_BYTES))


async def hash_chunks(
    layouts: Collection[LayoutName], tenant_salt: bytes, token_ids: Sequence[int]
) -> dict[bytes, list[bytes]]:
    """Return `keys_by_layout`, without blocking the event loop for a long sequence."""
    if len(token_ids) > _SHORT_TOKENS:
        return await asyncio.to_thread(keys_by_layout, layouts, tenant_salt, token_ids)
    return keys_by_layout(layouts, tenant_salt, token_ids)


def keys_by_layout(
    layouts: Collection[LayoutName], tenant_salt: bytes, token_ids: Sequence[int]
) -> dict[bytes, list[bytes]]:
    """Return the keys of a sequence's full chunks by layout hash, at most MOST_KEYS of each."""
    return {
        layout.layout_hash: list(
            islice(
                chunk_keys(layout.layout_hash, tenant_salt, token_ids, layout.chunk_tokens),
                MOST_KEYS,
            )
        )
        for layout in layouts
    }
