"""The slot table: every slot's state, and the only writer of the arena's metadata.

Carries out the changes of docs/arena-format.md in the order written there.
Knows no keys' meaning, no sessions and no policy.
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

FREE, WRITING, SEALED, QUARANTINED = SlotState

# What may follow a state, by its number: plain indexing, since every chunk passes here
# several times and hashing an enum is slow.
_MAY_BECOME: tuple[tuple[SlotState, ...], ...] = (
    (WRITING,),  # FREE
    (SEALED, QUARANTINED, FREE),  # WRITING
    (FREE, QUARANTINED),  # SEALED
    (FREE,),  # QUARANTINED
)


class MetadataWriter(Protocol):
    """The two ways in which records change; a seam, since crashes happen between them."""

    def write(self, offset: int, data: bytes) -> None:
        """Put finished bytes at an offset of the file."""

    def store_word(self, offset: int, word: int) -> None:
        """Put a commit word at an aligned offset, in one piece."""

    def close(self) -> None:
        """Let go of the mapping."""


class MappedMetadata:
    """Writes into the arena's mapping, visible to everybody at once."""

    def __init__(self, arena: Arena) -> None:
        self._metadata = arena.metadata
        self._words = arena.metadata.cast("Q")

    def write(self, offset: int, data: bytes) -> None:
        # One copy of finished bytes: struct.pack_into would zero them first.
        self._metadata[offset : offset + len(data)] = data

    def store_word(self, offset: int, word: int) -> None:
        # One aligned 8-byte store: nobody sees half of it.
        self._words[offset // 8] = word

    def close(self) -> None:
        self._words.release()


class SlotTable:
    """States and generations of all slots, mirrored from the arena's records.

    `states` and `generations` are what recovery read, one for each slot. A change
    that the diagram of docs/arena-format.md does not have raises RuntimeError:
    it is a bug.
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
        # What the arena's commit words must be.
        self._words = np.array(
            [commit_word(*slot) for slot in zip(self._generations, self._states, strict=True)],
            dtype=np.uint64,
        )
        self._tokens_offset = arena.geometry.tokens_offset
        self._writer: MetadataWriter = MappedMetadata(arena) if writer is None else writer

    def close(self) -> None:
        """Let go of the mapping; the table may not be used afterwards."""
        self._writer.close()

    def state(self, slot: int) -> SlotState:
        return self._states[slot]

    def generation(self, slot: int) -> int:
        return self._generations[slot]

    def count(self, state: SlotState) -> int:
        return self._counts[state]

    def in_state(self, state: SlotState) -> list[int]:
        return [slot for slot, found in enumerate(self._states) if found is state]

    # -- changes, each in the order of writes that the format asks for ----------------

    def grant(self, slot: int, session_id: bytes, process_id: int, process_start_ticks: int) -> int:
        """FREE → WRITING under a new generation, which is returned."""
        generation = max(self._generations[slot] + 1, first_generation(self._epoch))
        block = GrantBlock(generation, self._epoch, session_id, process_id, process_start_ticks)
        self._check(slot, WRITING)
        self._writer.write(RECORDS_OFFSET + slot * RECORD_BYTES + GRANT_OFFSET, block.encode())
        self._generations[slot] = generation
        self._commit(slot, WRITING)
        return generation

    def seal(self, slot: int, block: ChunkBlock, token_row: bytes) -> None:
        """WRITING → SEALED. The payload must have been verified."""
        self._check(slot, SEALED)
        self._writer.write(self._tokens_offset + slot * len(token_row), token_row)
        self._writer.write(RECORDS_OFFSET + slot * RECORD_BYTES + CHUNK_OFFSET, block.encode())
        self._commit(slot, SEALED)

    def quarantine(self, slot: int) -> None:
        """WRITING → QUARANTINED: the writer may still be writing. SEALED → QUARANTINED:
        the payload proved damaged while somebody leased it."""
        self._check(slot, QUARANTINED)
        self._commit(slot, QUARANTINED)

    def free(self, slot: int) -> None:
        """Any state but FREE → FREE; the generation stays until the next grant."""
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
        """Slots whose commit word in the arena is not the one that was written there."""
        stride = RECORD_BYTES // 8
        words = np.frombuffer(
            self._arena.metadata, "<u8", len(self._words) * stride, RECORDS_OFFSET
        )[::stride]
        return np.flatnonzero(words != self._words).tolist()

    def write_again(self, slot: int) -> None:
        """Put the slot's commit word there once more."""
        self._writer.store_word(RECORDS_OFFSET + slot * RECORD_BYTES, int(self._words[slot]))

    def check_integrity(self) -> list[str]:
        """What is wrong: counts that differ, commit words other than the table's."""
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
    """How many slots are in each state, by the state's number."""
    counts = Counter(int(state) for state in states)
    return [counts[int(state)] for state in SlotState]
