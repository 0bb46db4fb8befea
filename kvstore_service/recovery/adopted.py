"""Chunks of an earlier store: each is compared with its checksum before anybody may use it.

Finds those that a call is about to use, reads them back, and settles what comes
of it. Waits for nothing itself: `check` is slow and may run in any thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from kvstore_service.pool.chunk_pool import ChunkPool, WrittenChunk
from kvstore_service.pool.prefix_index import Entry
from splitpoint.arena.format import ArenaFormatError
from splitpoint.arena.mapping import Arena

_log = logging.getLogger(__name__)


class AdoptedChunks:
    """The unverified chunks of one pool. `count_damage` hears of every bad payload."""

    def __init__(self, pool: ChunkPool, count_damage: Callable[[], None]) -> None:
        self._pool = pool
        self._count_damage = count_damage

    def in_match(self, salt: bytes, token_ids: Sequence[int]) -> list[Entry]:
        """Chunks of the longest cached prefix that no payload was compared for yet.

        `match` checks them itself, slowly; whoever must not wait checks and settles
        them beforehand, again and again until there are none.
        """
        if not self._pool.unverified:
            return []
        return self._unverified(self._pool.match(salt, token_ids).entries)

    def in_seal(self, salt: bytes, chunks: Sequence[WrittenChunk]) -> list[Entry]:
        """Chunks that `seal` would name as parents or as duplicates, likewise."""
        if not self._pool.unverified:
            return []
        named: list[Entry | None] = []
        for chunk in chunks:
            contents = self._pool.contents(salt, chunk.parent_key, chunk.token_ids)
            named += [self._pool.index.get(chunk.parent_key), self._pool.index.get(contents.key)]
        return self._unverified(entry for entry in named if entry is not None)

    def some(self, limit: int) -> list[Entry]:
        """Some of those that are left."""
        return [
            entry
            for slot in islice(self._pool.unverified, limit)
            if (entry := self._pool.find(slot))
        ]

    def _unverified(self, entries: Iterable[Entry]) -> list[Entry]:
        found = {entry.slot: entry for entry in entries if entry.slot in self._pool.unverified}
        return list(found.values())

    def check(self, entries: Sequence[Entry]) -> list[ArenaFormatError | None]:
        """What is wrong with each chunk's payload; None: nothing. Slow, for any thread."""
        arena = self._pool.arena
        return [damage_of(arena, e.slot, e.token_count, e.checksum) for e in entries]

    def settle(self, entries: Sequence[Entry], damages: Sequence[ArenaFormatError | None]) -> None:
        """Serve the checked chunks from now on; the damaged ones go, with all below them."""
        for entry, damage in zip(entries, damages, strict=True):
            if not self._pool.holds(entry):
                continue  # evicted meanwhile, and its slot perhaps used anew
            if damage is None:
                self._pool.unverified.discard(entry.slot)
            elif entry.slot in self._pool.unverified:
                self._count_damage()
                lost = self._pool.discard(entry)
                _log.error("%s: it and %d chunks below it are gone", damage.message, lost - 1)


def damage_of(arena: Arena, slot: int, token_count: int, checksum: int) -> ArenaFormatError | None:
    """What is wrong with a slot's payload; None: nothing. Slow, for any thread."""
    try:
        arena.check_payload(slot, token_count, checksum)
    except ArenaFormatError as error:
        return error
    return None
