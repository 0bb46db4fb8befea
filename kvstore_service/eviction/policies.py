"""Eviction policies: choose the chunk to evict. Pure: slots in, a slot out.

The pool decides which slots are evictable (sealed, unleased, no children). A policy only orders
them. After a restart chunks count as used once, in the order of their sealing. A policy's
statistics, whose clock is injected, help to choose one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Protocol

# The last class has 2**30 uses and more.
_MOST_CLASSES = 32


class InstrumentedPolicy:
    """Wraps a policy and counts the chunks that it chooses for eviction.

    Attributes:
        by_use_count: chunks evicted after 0, 1, 2 to 3, 4 to 7, ... uses after they were sealed
            or recovered.
        age_seconds_sum: seconds from sealing (or recovery) to eviction, summed over them.
    """

    def __init__(self, policy: EvictionPolicy, clock: Callable[[], float]) -> None:
        self.by_use_count: list[int] = []
        self.age_seconds_sum = 0.0
        self._policy = policy
        self._clock = clock
        self._uses: dict[int, int] = {}  # after the first
        self._since: dict[int, float] = {}

    def use(self, slot: int) -> None:
        if slot in self._uses:
            self._uses[slot] += 1
        else:
            self._uses[slot] = 0
            self._since[slot] = self._clock()
        self._policy.use(slot)

    def offer(self, slot: int) -> None:
        self._policy.offer(slot)

    def forget(self, slot: int) -> None:
        del self._uses[slot], self._since[slot]
        self._policy.forget(slot)

    def choose(self, is_evictable: Callable[[int], bool]) -> int | None:
        slot = self._policy.choose(is_evictable)
        if slot is not None:
            self._count(self._uses[slot], self._clock() - self._since[slot])
        return slot

    def upcoming(
        self,
        limit: int,
        is_next: Callable[[int], bool],
        leave: Callable[[int], int | None],
    ) -> list[int]:
        """Return up to `limit` slots in the order in which `choose` would return them.

        `is_next` judges a slot as if those passed to `leave` were evicted. `leave` returns the
        slot that becomes a candidate then. Nothing changes and nothing is counted.
        """
        slots: list[int] = []
        while len(slots) < limit and (slot := self._policy.choose(is_next)) is not None:
            slots.append(slot)
            candidate = leave(slot)
            if candidate is not None:
                self._policy.offer(candidate)
        for slot in slots:
            self._policy.offer(slot)
        return slots

    def _count(self, uses: int, age_seconds: float) -> None:
        place = min(uses.bit_length(), _MOST_CLASSES - 1)
        self.by_use_count += [0] * (place + 1 - len(self.by_use_count))
        self.by_use_count[place] += 1
        self.age_seconds_sum += age_seconds


MOST_USES = 255


class EvictionPolicy(Protocol):
    """Is told about every use of a slot, and chooses the slot to evict."""

    def use(self, slot: int) -> None:
        """Note that the slot's chunk was sealed, recovered or matched."""

    def offer(self, slot: int) -> None:
        """Make the slot a candidate until it is chosen or refused."""

    def forget(self, slot: int) -> None:
        """Drop the slot: its chunk is gone."""

    def choose(self, is_evictable: Callable[[int], bool]) -> int | None:
        """Return the slot to evict among the offered ones that are evictable. None if none is.

        A slot that `is_evictable` refuses must be offered again.
        """


class _OldestFirst:
    """Orders slots by a number that only grows for a slot.

    A heap with lazy deletion: every operation takes O(log n) amortised, and a use only
    increments a counter.
    """

    def __init__(self) -> None:
        self._moments = 0
        self._moment: dict[int, int] = {}
        self._offered: list[tuple[int, int]] = []  # (moment when offered, slot)
        self._in_heap: set[int] = set()

    def _stamp(self, slot: int) -> None:
        self._moments += 1
        self._moment[slot] = self._moments

    def offer(self, slot: int) -> None:
        # At most one heap entry per slot. A stale one is corrected when it is popped.
        if slot not in self._in_heap:
            self._in_heap.add(slot)
            heapq.heappush(self._offered, (self._moment[slot], slot))

    def forget(self, slot: int) -> None:
        del self._moment[slot]

    def choose(self, is_evictable: Callable[[int], bool]) -> int | None:
        while self._offered:
            offered_at, slot = heapq.heappop(self._offered)
            moment = self._moment.get(slot)
            if moment is None or not is_evictable(slot):
                self._in_heap.discard(slot)
            elif moment != offered_at:
                heapq.heappush(self._offered, (moment, slot))
            else:
                self._in_heap.discard(slot)
                return slot
        return None


class LeastRecentlyUsed(_OldestFirst):
    """Evicts the chunk whose last use is longest ago."""

    def use(self, slot: int) -> None:
        self._stamp(slot)


class FirstInFirstOut(_OldestFirst):
    """Evicts the chunk that was sealed first, however often it was used since."""

    def use(self, slot: int) -> None:
        if slot not in self._moment:
            self._stamp(slot)


class LeastOftenUsed:
    """Evicts the oldest of the chunks with the fewest uses: policy `counter`.

    Counts are 8 bits. When one reaches 255 all are halved, so that once popular chunks are
    evicted in the end. A new chunk begins at the (lower) median of all counts. Otherwise it
    would always be evicted next.

    There is one heap of ages for each count. A use leaves a stale entry in the heap of a lower
    count, which is corrected when it is popped. Halving joins heaps 2k and 2k + 1 to k by moving
    the smaller one into the larger, so a chunk moves once per doubling of its heap.
    """

    def __init__(self) -> None:
        self._births = 0
        self._halvings = 0
        self._born: dict[int, int] = {}
        self._uses: dict[int, tuple[int, int]] = {}  # slot -> (count, halvings when counted)
        self._slot_counts = [0] * (MOST_USES + 1)  # chunks with each count
        self._offered: list[list[tuple[int, int]]] = [[] for _ in range(MOST_USES + 1)]
        self._in_heap: set[tuple[int, int]] = set()  # (born, slot)

    def count_of(self, slot: int) -> int:
        """Return the chunk's current count of uses. Raises KeyError."""
        count, halvings = self._uses[slot]
        return count >> (self._halvings - halvings)

    def use(self, slot: int) -> None:
        if slot not in self._born:
            self._births += 1
            self._born[slot] = self._births
            self._set_count(slot, self._median())
            return
        count = self.count_of(slot)
        self._slot_counts[count] -= 1
        self._set_count(slot, count + 1)
        if count + 1 == MOST_USES:
            self._halve()

    def offer(self, slot: int) -> None:
        entry = (self._born[slot], slot)
        if entry not in self._in_heap:
            self._in_heap.add(entry)
            heapq.heappush(self._offered[self.count_of(slot)], entry)

    def forget(self, slot: int) -> None:
        self._slot_counts[self.count_of(slot)] -= 1
        del self._uses[slot]
        del self._born[slot]

    def choose(self, is_evictable: Callable[[int], bool]) -> int | None:
        for count, heap in enumerate(self._offered):
            while heap:
                entry = heapq.heappop(heap)
                born, slot = entry
                # The slot may hold another chunk by now.
                if self._born.get(slot) != born or not is_evictable(slot):
                    self._in_heap.discard(entry)
                elif self.count_of(slot) != count:
                    heapq.heappush(self._offered[self.count_of(slot)], entry)
                else:
                    self._in_heap.discard(entry)
                    return slot
        return None

    def _set_count(self, slot: int, count: int) -> None:
        self._uses[slot] = (count, self._halvings)
        self._slot_counts[count] += 1

    def _median(self) -> int:
        """Return the lower median of all counts. 0 without chunks."""
        middle = (sum(self._slot_counts) + 1) // 2
        passed = 0
        for count, slot_count in enumerate(self._slot_counts):
            passed += slot_count
            if passed >= middle:
                return count
        return 0

    def _halve(self) -> None:
        self._halvings += 1
        counts, heaps = self._slot_counts, self._offered
        spare = [0] * (len(counts) // 2)
        self._slot_counts = [counts[i] + counts[i + 1] for i in range(0, len(counts), 2)] + spare
        self._offered = [_joined(heaps[i], heaps[i + 1]) for i in range(0, len(heaps), 2)]
        self._offered += [[] for _ in spare]


def _joined(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join two heaps in the larger one."""
    small, large = sorted((first, second), key=len)
    for entry in small:
        heapq.heappush(large, entry)
    return large


# By their names on the command line and in GetStats.
POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "fifo": FirstInFirstOut,
    "lru": LeastRecentlyUsed,
    "counter": LeastOftenUsed,
}
