"""Which chunks eviction must leave: leased ones, those about to get children, and their parents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from kvstore_service.pool.leases import LeaseTable
from kvstore_service.pool.prefix_index import Entry, PrefixIndex


class Protection:
    """Protects chunks of one pool.

    Args:
        chunks: the sealed chunks by slot, as they are now.
        on_end: called with the slot of a chunk that a guard protected no longer.
    """

    def __init__(
        self,
        index: PrefixIndex,
        leases: LeaseTable,
        chunks: Mapping[int, Entry],
        on_end: Callable[[int], None],
    ) -> None:
        self._index = index
        self._leases = leases
        self._chunks = chunks
        self._on_end = on_end
        self._guarded: Counter[bytes] = Counter()  # keys of chunks about to get children

    @contextmanager
    def guard(self, keys: Iterable[bytes]) -> Iterator[None]:
        """Protect chunks from eviction inside the block, by their keys."""
        guarded = [key for key in keys if self._index.get(key) is not None]
        self._guarded.update(guarded)
        try:
            yield
        finally:
            self._guarded.subtract(guarded)
            for key in guarded:
                if self._guarded[key] <= 0:
                    del self._guarded[key]
                entry = self._index.get(key)
                if entry is not None:
                    self._on_end(entry.slot)

    def has(self, entry: Entry) -> bool:
        """Return True if a chunk is protected itself, whatever continues it."""
        return self._leases.is_leased(entry.slot) or entry.key in self._guarded

    def is_evictable(self, slot: int) -> bool:
        """Return True if the chunk in a slot may be removed now: nothing continues it, either."""
        entry = self._chunks.get(slot)
        return entry is not None and not self.has(entry) and not self._index.has_children(entry.key)

    def kept(self) -> set[int]:
        """Return the slots of chunks that eviction cannot remove, whatever else it removes."""
        kept: set[int] = set()
        guarded = (self._index.get(key) for key in self._guarded)
        slots = [*self._leases.leased_slots, *(entry.slot for entry in guarded if entry)]
        for slot in slots:
            entry = self._chunks.get(slot)  # None if damaged
            while entry is not None and entry.slot not in kept:
                kept.add(entry.slot)
                entry = self._index.get(entry.parent_key)
        return kept
