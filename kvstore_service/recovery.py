"""Reads every slot record of an arena after a restart, and changes nothing.

The result holds what intact records say. The payload of each chunk is compared with its checksum
later, before its first use. A damaged record is a miss and is counted, never served. Callers find
the chunks that they are about to use with `in_match` or `in_seal`, `check` their payloads, and
`settle` the result. Only `check` is slow; it may run in any thread.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import numpy as np

from kvstore_service.pool.chunk_pool import ChunkPool, WrittenChunk
from kvstore_service.pool.prefix_index import Entry, PageNames, sortable
from kvstore_service.pool.recovered_state import (
    UNKNOWN_WRITER,
    DamagedRecord,
    EarlierSession,
    RecoveredChunk,
    RecoveredState,
)
from kvstore_service.sessions import ProcessIdentity
from splitpoint.arena.format import RECORD_BYTES, RECORDS_OFFSET, ArenaFormatError
from splitpoint.arena.mapping import Arena
from splitpoint.arena.records import (
    NO_PARENT,
    GrantBlock,
    SlotRecord,
    SlotState,
    first_generation,
    split_commit_word,
)

_log = logging.getLogger(__name__)


class RecoveredChunks:
    """The unverified chunks of one pool. Calls `count_damage` for every damaged payload."""

    def __init__(self, pool: ChunkPool, count_damage: Callable[[], None]) -> None:
        self._pool = pool
        self._count_damage = count_damage

    def in_match(self, salt: bytes, token_ids: Sequence[int]) -> list[Entry]:
        """Return the unverified chunks of the longest cached prefix.

        `KvStore.match` checks them itself, slowly. Callers that must not wait check and settle
        them before, until none is left.
        """
        if not self._pool.unverified:
            return []
        return self._unverified(self._pool.match(salt, token_ids).entries)

    def in_pages(self, names: PageNames) -> list[Entry]:
        """Return the unverified pages among these; `KvStore.match_pages` checks them itself."""
        if not self._pool.unverified:
            return []
        return self._unverified(entry for entry in self._pool.index.pages(names) if entry)

    def in_seal(self, salt: bytes, chunks: Sequence[WrittenChunk]) -> list[Entry]:
        """Return the unverified chunks that `KvStore.seal` would use as parents or duplicates."""
        if not self._pool.unverified:
            return []
        named: list[Entry | None] = []
        for chunk in chunks:
            identity = self._pool.identify(salt, chunk.parent_key, chunk.token_ids)
            named += [self._pool.index.get(chunk.parent_key), self._pool.index.get(identity.key)]
        return self._unverified(entry for entry in named if entry is not None)

    def some(self, limit: int) -> list[Entry]:
        """Return up to `limit` unverified chunks."""
        return [
            entry
            for slot in islice(self._pool.unverified, limit)
            if (entry := self._pool.find(slot))
        ]

    def _unverified(self, entries: Iterable[Entry]) -> list[Entry]:
        found = {entry.slot: entry for entry in entries if entry.slot in self._pool.unverified}
        return list(found.values())

    def check(self, entries: Sequence[Entry]) -> list[ArenaFormatError | None]:
        """Compare each payload with its checksum. Return None for an intact one.

        Slow; any thread may call it.
        """
        arena = self._pool.arena
        return [damage_of(arena, e.slot, e.token_count, e.checksum) for e in entries]

    def settle(self, entries: Sequence[Entry], damages: Sequence[ArenaFormatError | None]) -> None:
        """Serve the intact chunks from now on; drop the damaged ones with all below them."""
        for entry, damage in zip(entries, damages, strict=True):
            if not self._pool.holds(entry):
                continue  # evicted meanwhile; its slot may be in use again
            if damage is None:
                self._pool.unverified.discard(entry.slot)
            elif entry.slot in self._pool.unverified:
                self._count_damage()
                lost = self._pool.discard(entry)
                _log.error("%s: the chunk and %d below it are dropped", damage.message, lost - 1)


def damage_of(arena: Arena, slot: int, token_count: int, checksum: int) -> ArenaFormatError | None:
    """Compare a slot's payload with its checksum. Return None if it is intact.

    Slow; any thread may call it.
    """
    try:
        arena.check_payload(slot, token_count, checksum)
    except ArenaFormatError as error:
        return error
    return None


def read_arena(arena: Arena) -> RecoveredState:
    """Read all records. A new arena is all zeros: free slots that were never granted."""
    # Nothing made here is garbage; searching for garbage would take a third of the time.
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        return _read_arena(arena)
    finally:
        if was_collecting:
            gc.enable()


def _read_arena(arena: Arena) -> RecoveredState:
    stride = RECORD_BYTES // 8
    words = np.frombuffer(
        arena.metadata, "<u8", count=arena.slot_count * stride, offset=RECORDS_OFFSET
    )[::stride].copy()
    generations: list[int] = (words >> 8).tolist()
    states = [SlotState.FREE] * arena.slot_count
    candidates: list[RecoveredChunk] = []
    sessions: dict[bytes, EarlierSession] = {}
    damages: list[DamagedRecord] = []
    for slot in np.flatnonzero(words & 0xFF).tolist():
        try:
            _, states[slot] = split_commit_word(int(words[slot]))
            chunk = _read_slot(arena, slot, sessions)
        except ArenaFormatError as error:
            damages.append(DamagedRecord(slot, error))
            if states[slot] is not SlotState.SEALED:
                # A client may be writing there: never grant the slot to another one.
                states[slot] = SlotState.WRITING
                generations[slot] = max(generations[slot], first_generation(arena.superblock.epoch))
                _add_damaged(arena, slot, generations[slot], sessions)
        else:
            if chunk is not None:
                candidates.append(chunk)
    chunks = _reachable(candidates, arena.layout.chunk_tokens)
    return RecoveredState(
        generations=generations,
        states=states,
        chunks=chunks,
        sessions=sessions,
        damages=damages,
        unreachable_count=len(candidates) - len(chunks),
    )


def _read_slot(
    arena: Arena, slot: int, sessions: dict[bytes, EarlierSession]
) -> RecoveredChunk | None:
    """Return the chunk of a sealed slot; add an unsealed slot to its session.

    Raises ArenaFormatError.
    """
    token_row = arena.token_row(slot)
    record = SlotRecord.decode(arena.record(slot), token_row, arena.layout)
    chunk, grant = record.chunk, record.grant
    if chunk is None:
        if grant is not None:
            _session(sessions, grant).granted[slot] = record.generation
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
    return RecoveredChunk(entry, chunk.seal_number)


def _add_damaged(
    arena: Arena, slot: int, generation: int, sessions: dict[bytes, EarlierSession]
) -> None:
    """Add a slot with a damaged commit word to the session named in its grant block, if any."""
    try:
        session = _session(sessions, GrantBlock.decode(arena.record(slot)))
    except ArenaFormatError:
        session = sessions.setdefault(UNKNOWN_WRITER, EarlierSession(ProcessIdentity(0, 0)))
    session.granted[slot] = generation


def _session(sessions: dict[bytes, EarlierSession], grant: GrantBlock) -> EarlierSession:
    process = ProcessIdentity(grant.process_id, grant.process_start_ticks)
    return sessions.setdefault(grant.session_id, EarlierSession(process))


def _reachable(candidates: Iterable[RecoveredChunk], chunk_tokens: int) -> list[RecoveredChunk]:
    """Return the chunks that lookups can reach, newest per key, parents first."""
    newest: dict[bytes, RecoveredChunk] = {}
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


def _by_index(chunks: Iterable[RecoveredChunk]) -> Sequence[RecoveredChunk]:
    return sorted(chunks, key=lambda chunk: (chunk.entry.chunk_index, chunk.seal_number))
