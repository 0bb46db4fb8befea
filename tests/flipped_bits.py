"""An arena's file as failing memory sees it: bits change, and no process is told."""

from __future__ import annotations

import os
import random
import struct
from dataclasses import dataclass
from pathlib import Path

from splitpoint.arena.format import RECORD_BYTES, RECORDS_OFFSET
from splitpoint.arena.mapping import read_superblock
from splitpoint.arena.records import (
    CHUNK_OFFSET,
    ChunkBlock,
    SlotState,
    split_commit_word,
)

NAN = struct.pack("<f", float("nan"))
# What can be damaged: see `ArenaFile.damage`.
WHERE = ("V row", "K row", "X row", "NaN in K", "NaN in V", "commit word", "record", "token row")


@dataclass(frozen=True)
class SealedSlot:
    slot: int
    chunk: ChunkBlock


class ArenaFile:
    """The file of an arena that a store in another process serves; fp32 elements."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._geometry = read_superblock(self._fd).geometry

    def close(self) -> None:
        os.close(self._fd)

    def sealed(self) -> list[SealedSlot]:
        """In sequence order, as the records say."""
        found = []
        for slot in range(self._geometry.slot_count):
            record = os.pread(self._fd, RECORD_BYTES, RECORDS_OFFSET + slot * RECORD_BYTES)
            _, state = split_commit_word(int.from_bytes(record[:8], "little"))
            if state is SlotState.SEALED:
                found.append(SealedSlot(slot, ChunkBlock.decode(record)))
        return sorted(found, key=lambda each: each.chunk.chunk_index)

    def damage(self, where: str, slot: int) -> None:
        """Change a few bits of the slot, in the first layer if it is in a plane."""
        record = RECORDS_OFFSET + slot * RECORD_BYTES
        if where == "commit word":
            self._flip(record + 1, 0x10)  # of the generation
        elif where == "record":
            self._flip(record + CHUNK_OFFSET + 20, 0x01)
        elif where == "token row":
            row = self._geometry.token_row_bytes
            self._flip(self._geometry.tokens_offset + slot * row, 0x01)
        elif where.startswith("NaN"):
            os.pwrite(self._fd, NAN, self._row(where[-1], slot))
        else:
            # The highest bit but one of an exponent: 1.0 becomes infinite or tiny.
            self._flip(self._row(where[0], slot) + 3, 0x40)

    def flip_anywhere(self, slot: int, rng: random.Random) -> None:
        """One bit of the slot's payload."""
        plane = rng.choice(self._geometry.planes)
        place = plane.offset + slot * plane.slot_bytes + rng.randrange(plane.slot_bytes)
        self._flip(place, 1 << rng.randrange(8))

    def _row(self, tensor: str, slot: int) -> int:
        plane = next(p for p in self._geometry.planes if p.tensor == tensor)
        return plane.offset + slot * plane.slot_bytes

    def _flip(self, offset: int, mask: int) -> None:
        (byte,) = os.pread(self._fd, 1, offset)
        os.pwrite(self._fd, bytes([byte ^ mask]), offset)
