"""The interface of a tier: a place behind the arena that keeps full chunks by their keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore_service.pool.prefix_index import Entry
from splitpoint.tiers import Tier


@dataclass(slots=True)
class TierStats:
    """Facts and counts of one tier since the start; see TierStats in kvstore.proto.

    Attributes:
        message: why it is away; empty if it is up.
        capacity_bytes, used_bytes, chunk_count: 0 if unknown.
    """

    location: str
    is_up: bool = True
    message: str = ""
    capacity_bytes: int = 0
    used_bytes: int = 0
    chunk_count: int = 0
    written_chunks: int = 0
    written_bytes: int = 0
    read_chunks: int = 0
    read_bytes: int = 0
    missed_chunks: int = 0
    damaged_chunks: int = 0
    evicted_chunks: int = 0


class ChunkTier(Protocol):
    """One tier. Its methods run on the event loop and do their I/O elsewhere.

    Payloads move between the tier and slots of the arena directly. The caller protects the
    slots until a method returns, also when it is cancelled: a method that is cancelled returns
    only after its I/O has ended. Unless it says otherwise, a method raises Unavailable while the
    tier is away.

    Attributes:
        tier: DISK or MOONCAKE.
        stats: updated in place; read on the event loop.
    """

    @property
    def tier(self) -> Tier: ...

    @property
    def stats(self) -> TierStats: ...

    async def held(self, keys: Sequence[bytes]) -> int:
        """Return how many leading keys the tier holds. A hint: nothing protects them."""

    def holds(self, key: bytes) -> bool | None:
        """Return True if the tier holds a chunk, without I/O. None if only I/O could tell."""

    async def read(self, keys: Sequence[bytes], slots: Sequence[int]) -> list[int | None]:
        """Read the payload of each chunk into a slot.

        Return each chunk's checksum as it was recorded; None for a chunk that is missing or
        whose record is damaged. The caller compares the payload with it.
        """

    async def write(self, entries: Sequence[Entry]) -> int:
        """Store full chunks of the arena. Return how many are stored now, duplicates included.

        A full disk stores fewer; it is no error.
        """

    async def drop(self, keys: Sequence[bytes]) -> None:
        """Forget chunks, since they proved damaged. Never raises."""

    async def start(self) -> None:
        """Open the tier. Raises InvalidArgument or FailedPrecondition if it cannot be used."""

    async def close(self) -> None:
        """Finish writes and release everything."""
