"""What an adopted arena holds: reads every slot record, changes nothing.

The answer is what the records say and their checksums vouch for; the payloads
are compared with theirs later, each before its first use. A record that does
not hold together is a miss and is counted, never served.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvstore_service.pool.prefix_index import Entry, sortable
from kvstore_service.sessions import ProcessIdentity
from splitpoint.arena.format import (
    ID_BYTES,
    RECORD_BYTES,
    RECORDS_OFFSET,
    ArenaFormatError,
)
from splitpoint.arena.mapping import Arena
from splitpoint.arena.records import (
    NO_PARENT,
    GrantBlock,
    SlotRecord,
    SlotState,
    first_generation,
    split_commit_word,
)

# Session of slots whose writer nobody knows any more: it is never proven gone.
UNKNOWN_WRITER = bytes(ID_BYTES)


@dataclass(frozen=True, slots=True)
class AdoptedChunk:
    """A sealed chunk whose record is whole. `seal_number` orders chunks by age."""

    entry: Entry
    seal_number: int


@dataclass(slots=True)
class Holder:
    """A session of an earlier store: its writer's process and its unsealed slots."""

    process: ProcessIdentity
    granted: dict[int, int] = field(default_factory=dict)  # slot -> generation


@dataclass(frozen=True, slots=True)
class Damage:
    """A record that cannot be believed."""

    slot: int
    error: ArenaFormatError


@dataclass(frozen=True, slots=True)
class Findings:
    """All slots of an arena.

    Attributes:
        generations: per slot, at least any that was ever handed out under this word.
        states: per slot as the commit words say; WRITING where a word says nothing
            that can be.
        chunks: sealed and reachable from their first chunk, parents first.
        holders: unsealed slots by session id.
        damages: records that were refused.
        unreachable_count: whole records that lost their parent or repeat a newer one.
    """

    generations: list[int]
    states: list[SlotState]
    chunks: list[AdoptedChunk]
    holders: dict[bytes, Holder]
    damages: list[Damage]
    unreachable_count: int

    @property
    def held_count(self) -> int:
        """Unsealed slots whose writers may be alive."""
        return sum(len(holder.granted) for holder in self.holders.values())

    @property
    def last_seal_number(self) -> int:
        return max((chunk.seal_number for chunk in self.chunks), default=0)


def read_arena(arena: Arena) -> Findings:
    """Read all records. A new arena is all zeros: free slots that were never granted."""
    # Nothing made here is garbage, and looking for it among so much costs a third.
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        return _read_arena(arena)
    finally:
        if was_collecting:
            gc.enable()


def _read_arena(arena: Arena) -> Findings:
    stride = RECORD_BYTES // 8
    words = np.frombuffer(
        arena.metadata, "<u8", count=arena.slot_count * stride, offset=RECORDS_OFFSET
    )[::stride].copy()
    generations: list[int] = (words >> 8).tolist()
    states = [SlotState.FREE] * arena.slot_count
    candidates: list[AdoptedChunk] = []
    holders: dict[bytes, Holder] = {}
    damages: list[Damage] = []
    for slot in np.flatnonzero(words & 0xFF).tolist():
        try:
            _, states[slot] = split_commit_word(int(words[slot]))
            chunk = _read_slot(arena, slot, holders)
        except ArenaFormatError as error:
            damages.append(Damage(slot, error))
            if states[slot] is not SlotState.SEALED:
                # Somebody may be writing there: keep it away from everybody.
                states[slot] = SlotState.WRITING
                generations[slot] = max(generations[slot], first_generation(arena.superblock.epoch))
                _hold_damaged(arena, slot, generations[slot], holders)
        else:
            if chunk is not None:
                candidates.append(chunk)
    chunks = _reachable(candidates, arena.layout.chunk_tokens)
    return Findings(
        generations=generations,
        states=states,
        chunks=chunks,
        holders=holders,
        damages=damages,
        unreachable_count=len(candidates) - len(chunks),
    )


def _read_slot(arena: Arena, slot: int, holders: dict[bytes, Holder]) -> AdoptedChunk | None:
    """The chunk of a sealed slot; an unsealed one joins its holder. Raises ArenaFormatError."""
    token_row = arena.token_row(slot)
    record = SlotRecord.decode(arena.record(slot), token_row, arena.layout)
    chunk, grant = record.chunk, record.grant
    if chunk is None:
        if grant is not None:
            _holder(holders, grant).granted[slot] = record.generation
        return None
    entry = Entry(
        slot=slot,
        generation=chunk.generation,
        key=chunk.key,
        parent_key=b"" if chunk.parent_key == NO_PARENT else chunk.parent_key,
        salt_tag=chunk.salt_tag,
        packed=sortable(token_row[: 4 * chunk.token_count]),
        fingerprint=chunk.fingerprint,
        checksum=chunk.checksum,
        chunk_index=chunk.chunk_index,
    )
    return AdoptedChunk(entry, chunk.seal_number)


def _hold_damaged(arena: Arena, slot: int, generation: int, holders: dict[bytes, Holder]) -> None:
    """Give a slot with an unbelievable commit word to whom its grant block names, if anybody."""
    try:
        holder = _holder(holders, GrantBlock.decode(arena.record(slot)))
    except ArenaFormatError:
        holder = holders.setdefault(UNKNOWN_WRITER, Holder(ProcessIdentity(0, 0)))
    holder.granted[slot] = generation


def _holder(holders: dict[bytes, Holder], grant: GrantBlock) -> Holder:
    process = ProcessIdentity(grant.process_id, grant.process_start_ticks)
    return holders.setdefault(grant.session_id, Holder(process))


def _reachable(candidates: Iterable[AdoptedChunk], chunk_tokens: int) -> list[AdoptedChunk]:
    """Parents first; without those that no lookup could reach, or that a newer one replaced."""
    newest: dict[bytes, AdoptedChunk] = {}
    for chunk in candidates:
        known = newest.get(chunk.entry.key)
        if known is None or chunk.seal_number > known.seal_number:
            newest[chunk.entry.key] = chunk
    reached: dict[bytes, Entry] = {}
    chunks = []
    for chunk in _by_index(newest.values()):
        entry = chunk.entry
        if entry.parent_key:
            parent = reached.get(entry.parent_key)
            if (
                parent is None
                or parent.chunk_index + 1 != entry.chunk_index
                or parent.salt_tag != entry.salt_tag
                or parent.token_count != chunk_tokens
            ):
                continue
        reached[entry.key] = entry
        chunks.append(chunk)
    return chunks


def _by_index(chunks: Iterable[AdoptedChunk]) -> Sequence[AdoptedChunk]:
    return sorted(chunks, key=lambda chunk: (chunk.entry.chunk_index, chunk.seal_number))
