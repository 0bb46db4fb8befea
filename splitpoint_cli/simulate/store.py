"""The KV store of one cell: which prefixes its host memory holds, least recently used first out."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class SimulatedStore:
    """A store of `slot_count` chunks.

    Chunks that only one request has are kept as one entry: nothing asks for them again, but they
    take room until they are evicted.
    """

    def __init__(self, slot_count: int) -> None:
        self.slot_count = slot_count
        self.used_count = 0
        # Chunks of each entry, by name, the least recently used first.
        self._entries: OrderedDict[bytes | int, int] = OrderedDict()

    def held_count(self, marks: Sequence[bytes]) -> int:
        """Return how many of these leading chunks it holds."""
        entries = self._entries
        count = 0
        for mark in marks:
            if mark not in entries:
                break
            count += 1
        return count

    def touch(self, marks: Sequence[bytes]) -> None:
        """Note that these held chunks were read, the last one first: it goes before its parents."""
        for mark in reversed(marks):
            self._entries.move_to_end(mark)

    def seal(self, marks: Sequence[bytes], number: int, own_count: int) -> None:
        """Store a request's chunks: its shared ones, and `own_count` that it alone has."""
        if own_count:
            self._put(-1 - number, own_count)
        for mark in reversed(marks):
            self._put(mark, 1)
        while self.used_count > self.slot_count:
            _, count = self._entries.popitem(last=False)
            self.used_count -= count

    def _put(self, name: bytes | int, count: int) -> None:
        if name in self._entries:
            self._entries.move_to_end(name)
        else:
            self._entries[name] = count
            self.used_count += count
