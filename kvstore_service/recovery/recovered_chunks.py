"""Chunks of an earlier store: the payload of each is verified before its first use.

Callers find the chunks that they are about to use with `in_match` or `in_seal`, `check` their
payloads, and `settle` the result. Only `check` is slow; it may run in any thread.
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


class RecoveredChunks:
    """The unverified chunks of one pool. Calls `count_damage` for every damaged payload."""

    def __init__(self, pool: ChunkPool, count_damage: Callable[[], None]) -> None:
        self._pool = pool
        self._count_damage = count_damage

    def in_match(self, salt: bytes, token_ids: Sequence[int]) -> list[Entry]:
        """Return the unverified chunks of the longest cached prefix.

        `KvStore.match` checks them itself, slowly. Callers that must not wait check and settle
        them before, until none is left.
        """
        if not self._pool.unverified:
            return []
        return self._unverified(self._pool.match(salt, token_ids).entries)

    def in_seal(self, salt: bytes, chunks: Sequence[WrittenChunk]) -> list[Entry]:
        """Return the unverified chunks that `KvStore.seal` would use as parents or duplicates."""
        if not self._pool.unverified:
            return []
        named: list[Entry | None] = []
        for chunk in chunks:
            identity = self._pool.identify(salt, chunk.parent_key, chunk.token_ids)
            named += [self._pool.index.get(chunk.parent_key), self._pool.index.get(identity.key)]
        return self._unverified(entry for entry in named if entry is not None)

    def some(self, limit: int) -> list[Entry]:
        """Return up to `limit` unverified chunks."""
        return [
            entry
            for slot in islice(self._pool.unverified, limit)
            if (entry := self._pool.find(slot))
        ]

    def _unverified(self, entries: Iterable[Entry]) -> list[Entry]:
        found = {entry.slot: entry for entry in entries if entry.slot in self._pool.unverified}
        return list(found.values())

    def check(self, entries: Sequence[Entry]) -> list[ArenaFormatError | None]:
        """Compare each payload with its checksum. Return None for an intact one.

        Slow; any thread may call it.
        """
        arena = self._pool.arena
        return [damage_of(arena, e.slot, e.token_count, e.checksum) for e in entries]

    def settle(self, entries: Sequence[Entry], damages: Sequence[ArenaFormatError | None]) -> None:
        """Serve the intact chunks from now on; drop the damaged ones with all below them."""
        for entry, damage in zip(entries, damages, strict=True):
            if not self._pool.holds(entry):
                continue  # evicted meanwhile; its slot may be in use again
            if damage is None:
                self._pool.unverified.discard(entry.slot)
            elif entry.slot in self._pool.unverified:
                self._count_damage()
                lost = self._pool.discard(entry)
                _log.error("%s: the chunk and %d below it are dropped", damage.message, lost - 1)


def damage_of(arena: Arena, slot: int, token_count: int, checksum: int) -> ArenaFormatError | None:
    """Compare a slot's payload with its checksum. Return None if it is intact.

    Slow; any thread may call it.
    """
    try:
        arena.check_payload(slot, token_count, checksum)
    except ArenaFormatError as error:
        return error
    return None
