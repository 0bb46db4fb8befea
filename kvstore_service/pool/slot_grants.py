"""Slots on their way from free to granted and back, and the tenant that last wrote each slot.

Slots are allocated in contiguous runs: as few as possible, longest first. The allocator is pure: it
knows slot numbers only, no arena and no states.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvstore_service.pool.recovered_state import RecoveredState
from kvstore_service.pool.slot_table import SlotTable
from kvstore_service.sessions import ProcessIdentity
from splitpoint.arena.records import SlotState
from splitpoint.errors import FailedPrecondition


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


# Tag of slots that an unknown tenant wrote. No salt has it.
_UNKNOWN_TENANT = b""


@dataclass(frozen=True, slots=True)
class GrantedRun:
    """Slots [first_slot, first_slot + len(generations)), granted for writing."""

    first_slot: int
    generations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Preparation:
    """Slots that are set aside and not granted yet.

    Attributes:
        tag: salt tag of the tenant that the slots are for.
        dirty_slots: slots with bytes of another or an unknown tenant, which must be zeroed
            before they are granted.
    """

    runs: tuple[Run, ...]
    tag: bytes
    dirty_slots: tuple[int, ...]


class SlotGrants:
    """The free, prepared and granted slots of one arena.

    Attributes:
        allocator: the free slots.
        prepared: slots between `prepare` and `grant` or `abandon`.
        copied: slots between `begin_copy` and `end_copy`, with the number of copies.
        set_aside: free slots among them, which are granted after their last copy.
        checked: granted slots between the comparison of their checksums and their seal.
    """

    def __init__(self, slots: SlotTable, recovered: RecoveredState) -> None:
        self.allocator = RunAllocator(len(recovered.states), slots.in_state(SlotState.FREE))
        self.prepared: set[int] = set()
        self.set_aside: set[int] = set()
        self.copied: Counter[int] = Counter()
        self.checked: Counter[int] = Counter()
        # Granted slots that a tier or another store filled. Their bytes may be another tenant's
        # until their chunk is sealed.
        self._filled: set[int] = set()
        self._slots = slots
        # Salt tag of the tenant that last wrote a slot. Slots without a tag are all zeros.
        self._tags = {
            slot: _UNKNOWN_TENANT
            for slot, generation in enumerate(recovered.generations)
            if generation
        }
        for chunk in recovered.chunks:
            self._tags[chunk.entry.slot] = chunk.entry.salt_tag

    def prepare(self, count: int, tag: bytes) -> Preparation:
        """Set free slots aside for the tenant with this salt tag; see `ChunkPool.prepare`."""
        runs = tuple(self.allocator.allocate(count))
        slots = [slot for run in runs for slot in run]
        self.prepared.update(slots)
        dirty_slots = tuple(slot for slot in slots if self._tags.get(slot, tag) != tag)
        return Preparation(runs, tag, dirty_slots)

    def grant(
        self, preparation: Preparation, session_id: bytes, process: ProcessIdentity
    ) -> list[GrantedRun]:
        """Grant prepared slots for writing. The dirty ones must be zeroed by now."""
        return [
            GrantedRun(
                run.first,
                tuple(self._grant(slot, preparation.tag, session_id, process) for slot in run),
            )
            for run in preparation.runs
        ]

    def _grant(self, slot: int, tag: bytes, session_id: bytes, process: ProcessIdentity) -> int:
        self.prepared.discard(slot)
        self._tags[slot] = tag
        return self._slots.grant(slot, session_id, process.process_id, process.start_ticks)

    def tag_of(self, slot: int) -> bytes:
        """Return the salt tag of the tenant that a slot was granted for."""
        return self._tags[slot]

    def abandon(self, preparation: Preparation) -> None:
        """Free prepared slots that were not granted."""
        for run in preparation.runs:
            for slot in run:
                self.prepared.discard(slot)
                self.allocator.free(slot)

    def give_back(self, slot: int) -> None:
        """Free a slot that holds no chunk any more. It is reused after its copies have ended."""
        self._slots.free(slot)
        if slot in self._filled:
            self._filled.discard(slot)
            self._tags[slot] = _UNKNOWN_TENANT
        if slot in self.copied:
            self.set_aside.add(slot)
        else:
            self.allocator.free(slot)

    def sealed(self, slot: int) -> None:
        """Note that a granted slot holds a verified chunk of the tenant it was granted for."""
        self._filled.discard(slot)

    # -- copies between slots and tiers ----------------------------------------------------------

    def begin_copy(self, slots: Iterable[int]) -> None:
        """Keep slots from being reused until `end_copy`, also if they are freed meanwhile."""
        self.copied.update(slots)

    def end_copy(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.copied[slot] -= 1
            if self.copied[slot] == 0:
                del self.copied[slot]
                if slot in self.set_aside:
                    self.set_aside.discard(slot)
                    self.allocator.free(slot)

    @contextmanager
    def filling(self, slots: Iterable[int]) -> Iterator[None]:
        """Let bytes of any tenant come into granted slots inside the block.

        The slots are not reused before its end, and zeroed before their next grant unless their
        chunk is sealed.
        """
        kept = list(slots)
        self._filled.update(kept)
        self.begin_copy(kept)
        try:
            yield
        finally:
            self.end_copy(kept)

    @contextmanager
    def checking(self, slots: Sequence[int]) -> Iterator[None]:
        """Keep granted slots from being filled inside the block, which seals them at its end.

        Raises FailedPrecondition if one of them is being filled.
        """
        for slot in slots:
            if slot in self._filled and slot in self.copied:
                raise FailedPrecondition(
                    f"a tier still reads into slot {slot}", reason="BEING_FILLED"
                )
        self.checked.update(slots)
        try:
            yield
        finally:
            self.checked.subtract(slots)
            self.checked = +self.checked
