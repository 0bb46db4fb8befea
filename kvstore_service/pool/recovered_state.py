"""What recovery found in an arena: the state that a pool starts with."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore_service.pool.prefix_index import Entry
from kvstore_service.sessions import ProcessIdentity
from splitpoint.arena.format import ID_BYTES, ArenaFormatError
from splitpoint.arena.records import SlotState

# Session of slots whose writer is unknown. The store cannot prove that such a writer is gone.
UNKNOWN_WRITER = bytes(ID_BYTES)


@dataclass(frozen=True, slots=True)
class RecoveredChunk:
    """A sealed chunk with an intact record. `seal_number` orders chunks by age."""

    entry: Entry
    seal_number: int


@dataclass(slots=True)
class EarlierSession:
    """A session of an earlier store: its client's process and its unsealed slots."""

    process: ProcessIdentity
    granted: dict[int, int] = field(default_factory=dict)  # slot -> generation


@dataclass(frozen=True, slots=True)
class DamagedRecord:
    slot: int
    error: ArenaFormatError


@dataclass(frozen=True, slots=True)
class RecoveredState:
    """All slots of an arena.

    Attributes:
        generations: per slot, at least as large as any that was granted under this word.
        states: per slot as the commit words say; WRITING where a word is invalid.
        chunks: sealed and reachable from their first chunk, parents first.
        sessions: unsealed slots by session id.
        damages: records that were refused.
        unreachable_count: intact records that lost their parent or repeat a newer one.
    """

    generations: list[int]
    states: list[SlotState]
    chunks: list[RecoveredChunk]
    sessions: dict[bytes, EarlierSession]
    damages: list[DamagedRecord]
    unreachable_count: int

    @property
    def unsealed_count(self) -> int:
        """Unsealed slots whose writers may be alive."""
        return sum(len(session.granted) for session in self.sessions.values())

    @property
    def last_seal_number(self) -> int:
        return max((chunk.seal_number for chunk in self.chunks), default=0)
