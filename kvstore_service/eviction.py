"""Chooses which chunk goes when room is needed. Pure policy: slots in, a slot out.

The store says which slots may go (sealed, unleased, no children); a policy
only orders them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol


class EvictionPolicy(Protocol):
    """Told about every use of a slot; asked for a victim when room is needed."""

    def use(self, slot: int) -> None:
        """The slot's chunk was sealed, or a sequence was matched that holds it."""

    def offer(self, slot: int) -> None:
        """The slot may be evicted from now on, until a use or a refusal says otherwise."""

    def forget(self, slot: int) -> None:
        """The slot's chunk is gone."""

    def choose(self, is_evictable: Callable[[int], bool]) -> int | None:
        """The best victim among offered slots that are still evictable; None: none is.

        A slot that is offered but refused by `is_evictable` must be offered again.
        """


class LeastRecentlyUsed:
    """The chunk goes whose last use is longest ago.

    A heap with lazy deletion: every operation is O(log n) amortised, and using
    a slot costs one counter.
    """

    def __init__(self) -> None:
        self._uses = 0
        self._last_use: dict[int, int] = {}
        self._offered: list[tuple[int, int]] = []  # (last use when offered, slot)
        self._in_heap: set[int] = set()

    def use(self, slot: int) -> None:
        self._uses += 1
        self._last_use[slot] = self._uses

    def offer(self, slot: int) -> None:
        # One heap entry a slot at most; a stale one is corrected when it comes up.
        if slot not in self._in_heap:
            self._in_heap.add(slot)
            heapq.heappush(self._offered, (self._last_use[slot], slot))

    def forget(self, slot: int) -> None:
        del self._last_use[slot]

    def choose(self, is_evictable: Callable[[int], bool]) -> int | None:
        while self._offered:
            used, slot = heapq.heappop(self._offered)
            last_use = self._last_use.get(slot)
            if last_use is None or not is_evictable(slot):
                self._in_heap.discard(slot)
            elif last_use != used:
                heapq.heappush(self._offered, (last_use, slot))
            else:
                self._in_heap.discard(slot)
                return slot
        return None
