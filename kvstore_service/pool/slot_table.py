"""The slot table: every slot's state, and the only writer of the arena's metadata.

It writes in the order that docs/arena-format.md prescribes. It knows no meaning of keys, no
sessions and no policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from splitpoint.arena.format import RECORD_BYTES, RECORDS_OFFSET
from splitpoint.arena.mapping import Arena
from splitpoint.arena.records import (
    CHUNK_OFFSET,
    GRANT_OFFSET,
    ChunkBlock,
    GrantBlock,
    SlotState,
    commit_word,
    first_generation,
)
from splitpoint.host.memory_order import fence

FREE, WRITING, SEALED, QUARANTINED = SlotState

# The states that may follow a state, indexed by its number: hashing an enum would be slow.
_MAY_BECOME: tuple[tuple[SlotState, ...], ...] = (
    (WRITING,),  # FREE
    (SEALED, QUARANTINED, FREE),  # WRITING
    (FREE, QUARANTINED),  # SEALED
    (FREE,),  # QUARANTINED
)


class MetadataWriter(Protocol):
    """The two kinds of metadata writes. Tests replace it to crash between two writes."""

    def write(self, offset: int, data: bytes) -> None:
        """Write bytes at an offset of the file."""

    def store_word(self, offset: int, word: int) -> None:
        """Write a commit word at an aligned offset, atomically."""

    def close(self) -> None:
        """Release the mapping."""


class MappedMetadata:
    """Writes into the arena's mapping, visible to all processes at once."""

    def __init__(self, arena: Arena) -> None:
        self._metadata = arena.metadata
        self._words = arena.metadata.cast("Q")

    def write(self, offset: int, data: bytes) -> None:
        # One copy of finished bytes: struct.pack_into would zero them first.
        self._metadata[offset : offset + len(data)] = data

    def store_word(self, offset: int, word: int) -> None:
        # What the word vouches for is visible before it, and it before what follows: the
        # answer that grants the slot to another writer.
        fence()
        # One aligned 8-byte store is atomic.
        self._words[offset // 8] = word
        fence()

    def close(self) -> None:
        self._words.release()


class SlotTable:
    """States and generations of all slots, a copy of the arena's records.

    `states` and `generations` are what recovery read, per slot. A state change that
    docs/arena-format.md does not allow is a bug and raises RuntimeError.
    """

    def __init__(
        self,
        arena: Arena,
        states: Sequence[SlotState],
        generations: Sequence[int],
        writer: MetadataWriter | None = None,
    ) -> None:
        self._arena = arena
        self._epoch = arena.superblock.epoch
        self._states = list(states)
        self._generations = list(generations)
        self._counts = _count(self._states)
        # The expected commit words of the arena.
        self._words = np.array(
            [commit_word(*slot) for slot in zip(self._generations, self._states, strict=True)],
            dtype=np.uint64,
        )
        self._tokens_offset = arena.geometry.tokens_offset
        self._writer: MetadataWriter = MappedMetadata(arena) if writer is None else writer

    def close(self) -> None:
        """Release the mapping. The table may not be used afterwards."""
        self._writer.close()

    def state(self, slot: int) -> SlotState:
        return self._states[slot]

    def generation(self, slot: int) -> int:
        return self._generations[slot]

    def count(self, state: SlotState) -> int:
        return self._counts[state]

    def in_state(self, state: SlotState) -> list[int]:
        return [slot for slot, found in enumerate(self._states) if found is state]

    # -- state changes, each with the order of writes that the format prescribes ----------------

    def grant(self, slot: int, session_id: bytes, process_id: int, process_start_ticks: int) -> int:
        """FREE → WRITING. Return the new generation."""
        generation = max(self._generations[slot] + 1, first_generation(self._epoch))
        block = GrantBlock(generation, self._epoch, session_id, process_id, process_start_ticks)
        self._check(slot, WRITING)
        self._writer.write(RECORDS_OFFSET + slot * RECORD_BYTES + GRANT_OFFSET, block.encode())
        self._generations[slot] = generation
        self._commit(slot, WRITING)
        return generation

    def seal(self, slot: int, block: ChunkBlock, token_row: bytes) -> None:
        """WRITING → SEALED. The payload must be verified."""
        self._check(slot, SEALED)
        self._writer.write(self._tokens_offset + slot * len(token_row), token_row)
        self._writer.write(RECORDS_OFFSET + slot * RECORD_BYTES + CHUNK_OFFSET, block.encode())
        self._commit(slot, SEALED)

    def quarantine(self, slot: int) -> None:
        """WRITING → QUARANTINED: the writer may still be writing. SEALED → QUARANTINED: the
        payload proved damaged while it was leased."""
        self._check(slot, QUARANTINED)
        self._commit(slot, QUARANTINED)

    def free(self, slot: int) -> None:
        """Any state but FREE → FREE. The generation stays until the next grant."""
        self._check(slot, FREE)
        self._commit(slot, FREE)

    def _check(self, slot: int, state: SlotState) -> None:
        if state not in _MAY_BECOME[self._states[slot]]:
            raise RuntimeError(f"slot {slot} cannot go from {self._states[slot].name} to {state}")

    def _commit(self, slot: int, state: SlotState) -> None:
        word = commit_word(self._generations[slot], state)
        self._writer.store_word(RECORDS_OFFSET + slot * RECORD_BYTES, word)
        self._words[slot] = word
        self._counts[self._states[slot]] -= 1
        self._counts[state] += 1
        self._states[slot] = state

    def differing(self) -> list[int]:
        """Return the slots whose commit word in the arena is not the expected one."""
        stride = RECORD_BYTES // 8
        words = np.frombuffer(
            self._arena.metadata, "<u8", len(self._words) * stride, RECORDS_OFFSET
        )[::stride]
        return np.flatnonzero(words != self._words).tolist()

    def write_again(self, slot: int) -> None:
        """Write the slot's expected commit word again."""
        self._writer.store_word(RECORDS_OFFSET + slot * RECORD_BYTES, int(self._words[slot]))

    def check_integrity(self) -> list[str]:
        """Return the violated invariants: wrong counts, unexpected commit words."""
        violations = []
        if _count(self._states) != self._counts:
            violations.append("the counts of states differ from the states")
        if sum(self._counts) != self._arena.slot_count:
            violations.append("free, writing, sealed and quarantined slots are not all slots")
        for slot, state in enumerate(self._states):
            word = self._arena.commit_word(slot)
            if word != commit_word(self._generations[slot], state):
                violations.append(f"slot {slot} has commit word {word:#x}, not {state.name}")
        return violations


def _count(states: Sequence[SlotState]) -> list[int]:
    """Count the slots in each state, by the state's number."""
    counts = Counter(int(state) for state in states)
    return [counts[int(state)] for state in SlotState]
