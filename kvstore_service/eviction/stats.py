"""Statistics of an eviction policy, which help to choose a policy. The clock is injected."""

from __future__ import annotations

from collections.abc import Callable

from kvstore_service.eviction.policies import EvictionPolicy

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
