"""Cache admission: stores a chunk only after its second request. Pure, no clock.

So prompts that come once take no slots from repeated ones. The price is that a prefix is
computed twice before it is found.
"""

from __future__ import annotations

from collections.abc import Sequence

from splitpoint.keys import MARK_BYTES

LEAST_MARKS = 1 << 16
_MARKS_PER_SLOT = 4


class SecondUseFilter:
    """Remembers which chunks were requested, in two generations of marks.

    A mark is 8 bytes of a key. When the young generation is full it replaces the old one, which
    is dropped. So a chunk is remembered for at least `capacity` and at most `2 * capacity` other
    requested chunks. Memory is bounded by `2 * capacity` marks of about 100 bytes in CPython.
    If two keys have equal marks a chunk is admitted too early, which does no harm.

    Attributes:
        kept_out_total: chunks that were requested and not admitted.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError("a filter remembers at least one chunk")
        self.kept_out_total = 0
        self._capacity = capacity
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()

    @classmethod
    def for_slots(cls, slot_count: int) -> SecondUseFilter:
        """Return a filter that remembers several times the chunks of an arena."""
        return cls(max(LEAST_MARKS, _MARKS_PER_SLOT * slot_count))

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def admit(self, keys: Sequence[bytes]) -> int:
        """Return how many leading chunks of a sequence may be stored. Remember them all.

        A chunk cannot be stored without its parent, so the first new chunk keeps out all
        chunks after it.
        """
        marks = [key[:MARK_BYTES] for key in keys]
        admitted = 0
        for mark in marks:
            if mark not in self._young and mark not in self._old:
                break
            admitted += 1
        for mark in marks:
            self._remember(mark)
        self.kept_out_total += len(keys) - admitted
        return admitted

    def _remember(self, mark: bytes) -> None:
        if mark in self._young:
            return
        if len(self._young) >= self._capacity:
            self._old, self._young = self._young, set()
        self._old.discard(mark)
        self._young.add(mark)
