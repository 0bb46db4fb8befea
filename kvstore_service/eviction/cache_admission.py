"""Store-on-second-use: keeps chunks out that nobody asked for twice. Pure, no clock.

One-shot prompts then take no slots from those that come again. The price is
that a prefix is computed twice before it is found.
"""

from __future__ import annotations

from collections.abc import Sequence

# What --admission knows.
ADMISSIONS = ("always", "second-use")

# Of a chunk's key, a SHA-256: enough to tell millions of keys apart.
_MARK_BYTES = 8
LEAST_MARKS = 1 << 16
_MARKS_PER_SLOT = 4


class SecondUseFilter:
    """Remembers which chunks were asked for, in two generations of marks.

    A mark is 8 bytes of a key. When the young generation is full it becomes the
    old one, and the old one is forgotten: a chunk is remembered for at least
    `capacity` and at most `2 * capacity` other chunks that were asked for since.
    Memory is bounded by `2 * capacity` marks, about 100 bytes each in CPython.
    Two keys with equal marks let a chunk in too early; nothing worse.

    Attributes:
        kept_out_total: chunks that were asked for and not admitted.
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
        """A filter that remembers several times what the arena holds."""
        return cls(max(LEAST_MARKS, _MARKS_PER_SLOT * slot_count))

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def admit(self, keys: Sequence[bytes]) -> int:
        """How many leading chunks of a sequence may be stored; remembers them all.

        A chunk cannot be stored without those before it, so the first one that is
        new keeps out all behind it.
        """
        marks = [key[:_MARK_BYTES] for key in keys]
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
