"""Read an arena file without changing it, also while a store runs on it.

A slot is judged only if its commit word is the same before and after: what the
store was changing meanwhile is neither whole nor damaged, and looked at again.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from splitpoint.arena.format import SUPERBLOCK_BYTES, ArenaFormatError, Superblock
from splitpoint.arena.mapping import Arena, open_arena
from splitpoint.arena.records import SlotRecord, SlotState

# A store changes a slot within microseconds, and a superblock only when it starts or stops. After
# this many looks that met a change, the check reports it.
_LOOKS = 5
_SUPERBLOCK_PAUSE = 0.02


@dataclass(frozen=True, slots=True)
class Damage:
    """A violated invariant of docs/arena-format.md: its error's name, and the details."""

    place: str  # such as "slot 17" or "superblock 0"
    invariant: str
    message: str

    @classmethod
    def of(cls, place: str, error: ArenaFormatError) -> Damage:
        return cls(place, type(error).__name__, error.message)


@dataclass(frozen=True, slots=True)
class Changing:
    """The store changed the slot during every look at it."""


def read_superblocks(path: Path) -> tuple[Superblock | Damage, Superblock | Damage]:
    """Return both copies. Raises as `open_arena` does."""
    fd = open_arena(path, read_only=True)
    try:
        return _read_superblock(fd, 0), _read_superblock(fd, 1)
    finally:
        os.close(fd)


def _read_superblock(fd: int, copy: int) -> Superblock | Damage:
    for look in range(_LOOKS):
        if look:
            time.sleep(_SUPERBLOCK_PAUSE)
        try:
            return Superblock.decode(os.pread(fd, SUPERBLOCK_BYTES, copy * SUPERBLOCK_BYTES))
        except ArenaFormatError as error:
            damage = Damage.of(f"superblock {copy}", error)
    return damage


def read_slot(
    arena: Arena, slot: int, *, with_payload: bool = False
) -> SlotRecord | Damage | Changing:
    """Return the slot's record if everything its state relies on holds.

    `with_payload` also reads the payload of a sealed slot back.
    """
    for _ in range(_LOOKS):
        word = arena.commit_word(slot)
        found: SlotRecord | Damage
        try:
            found = SlotRecord.decode(arena.record(slot), arena.token_row(slot), arena.layout)
            if with_payload and found.chunk is not None:
                arena.check_payload(slot, found.chunk.token_count, found.chunk.checksum)
        except ArenaFormatError as error:
            found = Damage.of(f"slot {slot}", error)
        if arena.commit_word(slot) == word:
            return found
    return Changing()


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of an arena's slots.

    Attributes:
        states: slots by state; damaged and changing ones are in none of them.
        chunk_count, token_count: of sealed slots; pages have no tokens.
        salt_count: distinct salts among the sealed chunks: one for each tenant, cache salt and
            digest of a worker's numerics.
        changing_count: slots that the store never left alone.
    """

    states: dict[SlotState, int]
    chunk_count: int
    token_count: int
    salt_count: int
    changing_count: int
    damages: tuple[Damage, ...]


def read_contents(
    arena: Arena,
    *,
    with_payload: bool = False,
    done: Callable[[], None] = lambda: None,
) -> Contents:
    """Walk every slot; `done` is called after each."""
    states: Counter[SlotState] = Counter()
    salts: set[bytes] = set()
    damages: list[Damage] = []
    chunk_count = token_count = changing_count = 0
    for slot in range(arena.slot_count):
        found = read_slot(arena, slot, with_payload=with_payload)
        if isinstance(found, Damage):
            damages.append(found)
        elif isinstance(found, Changing):
            changing_count += 1
        else:
            states[found.state] += 1
            if found.chunk is not None:
                chunk_count += 1
                token_count += found.chunk.token_count
                salts.add(found.chunk.salt_tag)
        done()
    return Contents(
        states={state: states[state] for state in SlotState},
        chunk_count=chunk_count,
        token_count=0 if arena.layout.page_bytes else token_count,
        salt_count=len(salts),
        changing_count=changing_count,
        damages=tuple(damages),
    )
