"""Allocates contiguous runs of slots: as few as possible, longest first.

Pure: knows slot numbers only, no arena and no states.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """Slots [first, first + count)."""

    first: int
    count: int

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.first + self.count))


class RunAllocator:
    """Free slots of [0, slot_count) as maximal runs.

    At first all slots are free, or only `free_slots`, in ascending order.
    """

    def __init__(self, slot_count: int, free_slots: Sequence[int] | None = None) -> None:
        self.slot_count = slot_count
        self.free_count = 0
        self._count_at: dict[int, int] = {}  # first slot -> length
        self._first_before: dict[int, int] = {}  # one past the last slot -> first slot
        self._by_size: list[tuple[int, int]] = []  # (length, first slot), sorted
        self._is_free = bytearray(slot_count)
        for run in [Run(0, slot_count)] if free_slots is None else _runs_of(free_slots):
            self._is_free[run.first : run.first + run.count] = b"\1" * run.count
            self._add(run.first, run.count)

    def allocate(self, count: int) -> list[Run]:
        """Allocate `count` slots in the fewest possible runs, longest first.

        A run that holds all of them is chosen by best fit, so that long runs stay long.
        Otherwise the longest runs are used up, which gives the fewest runs. Raises ValueError
        unless 0 < count <= free_count: the caller evicts first.
        """
        if not 0 < count <= self.free_count:
            raise ValueError(f"{count} slots of {self.free_count} free ones")
        granted = []
        while count:
            index = bisect_left(self._by_size, (count, 0))
            size, first = self._by_size[min(index, len(self._by_size) - 1)]
            self._remove(size, first)
            taken = min(size, count)
            if taken < size:
                self._add(first + taken, size - taken)
            self._is_free[first : first + taken] = bytes(taken)
            granted.append(Run(first, taken))
            count -= taken
        return granted

    def free(self, slot: int) -> None:
        """Free one slot and join it with free neighbours.

        Raises ValueError if it is free or out of range.
        """
        if not 0 <= slot < self.slot_count or self.is_free(slot):
            raise ValueError(f"slot {slot} is not in use")
        self._is_free[slot] = 1
        first, count = slot, 1
        before = self._first_before.get(slot)
        if before is not None:
            self._remove(slot - before, before)
            first, count = before, slot - before + 1
        after = self._count_at.get(slot + 1)
        if after is not None:
            self._remove(after, slot + 1)
            count += after
        self._add(first, count)

    def is_free(self, slot: int) -> bool:
        return self._is_free[slot] == 1

    def runs(self) -> list[Run]:
        """Return the free runs by position."""
        return [Run(first, count) for first, count in sorted(self._count_at.items())]

    def _add(self, first: int, count: int) -> None:
        self._count_at[first] = count
        self._first_before[first + count] = first
        insort(self._by_size, (count, first))
        self.free_count += count

    def _remove(self, count: int, first: int) -> None:
        del self._count_at[first]
        del self._first_before[first + count]
        del self._by_size[bisect_left(self._by_size, (count, first))]
        self.free_count -= count


def _runs_of(slots: Sequence[int]) -> Iterator[Run]:
    """Yield the maximal runs of ascending slot numbers."""
    start = 0
    for index in range(1, len(slots) + 1):
        if index == len(slots) or slots[index] != slots[index - 1] + 1:
            yield Run(slots[start], index - start)
            start = index
