"""Reads sealed chunks back while the store runs, and drops those that changed.

A chunk is intact if its commit word, its record with the token row, and its payload are what
the store committed. Only `inspect` is slow; it may run in any thread.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Sequence

from kvstore_service.pool.chunk_pool import ChunkPool
from kvstore_service.pool.prefix_index import Entry, sortable
from kvstore_service.recovery import damage_of
from splitpoint.arena.format import ArenaFormatError
from splitpoint.arena.mapping import Arena
from splitpoint.arena.records import (
    NO_PARENT,
    SlotRecord,
    SlotState,
    commit_word,
)

_log = logging.getLogger(__name__)


class BadCommitWord(ArenaFormatError):
    """A commit word differs from the one that the store wrote."""


class Finder(enum.StrEnum):
    """What found a damaged chunk."""

    SCRUB = "scrub"
    REPORT = "report"


class Inspection:
    """The inspections of one pool.

    Attributes:
        damaged: number of chunks found damaged since start, by finder.
        mended_words: commit words of slots without a chunk that were written again.
    """

    def __init__(self, pool: ChunkPool, clock: Callable[[], float]) -> None:
        self.damaged = dict.fromkeys(Finder, 0)
        self.mended_words = 0
        self._pool = pool
        self._clock = clock
        self._last_found_at: float | None = None

    @property
    def damaged_count(self) -> int:
        return sum(self.damaged.values())

    def seconds_since_damage(self) -> float | None:
        """Return the seconds since a damaged chunk was found. None if there was none."""
        at = self._last_found_at
        return None if at is None else self._clock() - at

    def inspect(self, entries: Sequence[Entry]) -> list[ArenaFormatError | None]:
        """Compare each chunk with what the store committed. Return None for an intact one.

        Slow; any thread may call it. The chunks must be protected from eviction meanwhile.
        """
        return [self._damage_of(entry) for entry in entries]

    def _damage_of(self, entry: Entry) -> ArenaFormatError | None:
        arena = self._pool.arena
        word = arena.commit_word(entry.slot)
        if word != commit_word(entry.generation, SlotState.SEALED):
            return BadCommitWord(f"slot {entry.slot} has the commit word {word:#x}")
        try:
            check_record(arena, entry)
        except ArenaFormatError as error:
            error.message = f"slot {entry.slot}: {error.message}"
            return error
        return damage_of(arena, entry.slot, entry.token_count, entry.checksum)

    def settle(
        self,
        entries: Sequence[Entry],
        damages: Sequence[ArenaFormatError | None],
        finder: Finder,
    ) -> None:
        """Drop the damaged chunks with all below them.

        A leased chunk stays in its slot until its leases end, and is not served again.
        """
        for entry, damage in zip(entries, damages, strict=True):
            # It may have been dropped meanwhile, for example with its damaged parent.
            if damage is None or not self._pool.holds(entry):
                continue
            self.damaged[finder] += 1
            self._last_found_at = self._clock()
            dropped = self._pool.discard(entry)
            _log.error(
                "%s (found by %s): the chunk and %d below it are dropped",
                damage.message,
                finder.value,
                dropped - 1,
            )

    def check_words(self) -> None:
        """Compare all commit words with the slot table's.

        A chunk with a wrong word is dropped. The word of any other slot is written again.
        """
        pool = self._pool
        for slot in pool.slots.differing():
            entry = pool.find(slot)
            if entry is None:
                _log.error("slot %d had another commit word than the store's", slot)
                pool.slots.write_again(slot)
                self.mended_words += 1
            else:
                self.settle(
                    [entry], [BadCommitWord(f"slot {slot} has another commit word")], Finder.SCRUB
                )


def check_record(arena: Arena, entry: Entry) -> None:
    """Raise ArenaFormatError if the record in the arena differs from the index."""
    token_row = arena.token_row(entry.slot)
    chunk = SlotRecord.decode(arena.record(entry.slot), token_row, arena.layout).chunk
    if chunk is None:
        raise ArenaFormatError("the record is not sealed")
    recorded = (
        chunk.generation,
        chunk.key,
        chunk.parent_key,
        chunk.salt_tag,
        chunk.fingerprint,
        chunk.checksum,
        chunk.chunk_index,
        sortable(token_row[: 4 * chunk.token_count]),
    )
    indexed = (
        entry.generation,
        entry.key,
        entry.parent_key or NO_PARENT,
        entry.salt_tag,
        entry.fingerprint,
        entry.checksum,
        entry.chunk_index,
        entry.packed,
    )
    if recorded != indexed:
        raise ArenaFormatError("the record and the index disagree")
