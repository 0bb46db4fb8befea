"""Interfaces behind the arena: tiers, which keep chunks, and reads of other stores' arenas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

from kvstore_service.pool.prefix_index import Entry
from splitpoint.tiers import Tier


@dataclass(slots=True)
class TierStats:
    """Facts and counts of one tier since the start; see TierStats in kvstore.proto.

    Attributes:
        engine: name of what keeps a pool's chunks; empty: the store itself keeps them.
        message: why it is away; empty if it is up.
        capacity_bytes, used_bytes, chunk_count: 0 if unknown.
    """

    location: str
    engine: str = ""
    is_up: bool = True
    message: str = ""
    capacity_bytes: int = 0
    used_bytes: int = 0
    chunk_count: int = 0
    written_chunk_count: int = 0
    written_bytes: int = 0
    read_chunk_count: int = 0
    read_bytes: int = 0
    missed_chunk_count: int = 0
    damaged_chunk_count: int = 0
    evicted_chunk_count: int = 0


def leading(flags: Iterable[bool]) -> int:
    """Count the flags before the first that is not set."""
    return sum(1 for _ in takewhile(bool, flags))


class ChunkSource(Protocol):
    """A place that chunks come from: a tier, or another store's arena.

    Payloads move into slots of the arena directly. The caller protects the slots until a method
    returns, also when it is cancelled: a method that is cancelled returns only after its I/O has
    ended. A method raises Unavailable while the source is away.
    """

    async def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether the source holds it. A hint: nothing protects it."""

    async def read(self, keys: Sequence[bytes], slots: Sequence[int]) -> list[int | None]:
        """Read the payload of each chunk into a slot.

        Return each chunk's checksum as it was recorded; None for a chunk that is missing or
        whose record is damaged. The caller compares the payload with it.
        """

    async def drop(self, keys: Sequence[bytes]) -> None:
        """Forget chunks, since they proved damaged. Never raises."""


class ChunkTier(ChunkSource, Protocol):
    """One tier. Its methods run on the event loop and do their I/O elsewhere.

    `write` reads slots directly, under the same rules as `ChunkSource.read` writes them. It may
    run for chunks that leave the arena meanwhile: their slots keep their bytes until it returns.

    Attributes:
        tier: DISK or POOL.
        stats: updated in place by the tier; read on the event loop. `read` counts chunks that
            are missing or have a damaged record, `drop` counts its keys as damaged.
        on_change: is called on the event loop with the keys of chunks that the tier stored or
            lost. None: the tier tells nothing.
    """

    on_change: Callable[[Sequence[bytes]], None] | None

    @property
    def tier(self) -> Tier: ...

    @property
    def stats(self) -> TierStats: ...

    def holds(self, key: bytes) -> bool | None:
        """Return True if the tier holds a chunk, without I/O. None if only I/O could tell."""

    def keys(self) -> Iterable[bytes]:
        """Return the keys of all chunks that `holds` would name now.

        Chunks may come and go while the caller iterates. Empty if only I/O could tell.
        """

    async def write(self, entries: Sequence[Entry]) -> int:
        """Store full chunks of the arena. Return how many are stored now, duplicates included.

        A full disk stores fewer; it is no error.
        """

    async def start(self) -> None:
        """Open the tier. Raises InvalidArgument or FailedPrecondition if it cannot be used."""

    async def close(self) -> None:
        """Finish writes and release everything."""


@dataclass(slots=True)
class TransferStats:
    """Facts and counts of the engine since the start; see TransferStats in kvstore.proto."""

    interface: str
    engine: str = ""
    is_up: bool = False
    message: str = ""
    segment: str = ""
    registered_bytes: int = 0
    read_bytes: int = 0
    read_chunk_count: int = 0
    failed_read_count: int = 0
    restart_count: int = 0


@dataclass(frozen=True, slots=True)
class TransferEndpoint:
    """Where other stores read this arena; see TransferEndpoint in kvstore.proto."""

    segment: str
    arena_address: int


class ChunkTransfer(Protocol):
    """The transfer engine of one store.

    Attributes:
        stats: updated in place; read on the event loop.
        endpoint: None while the engine is not ready.
    """

    @property
    def stats(self) -> TransferStats: ...

    @property
    def endpoint(self) -> TransferEndpoint | None: ...

    def open(
        self, address: str, salt: bytes, token_ids: Sequence[int]
    ) -> AbstractAsyncContextManager[ChunkSource]:
        """Lease a sequence's chunks in the store at an address; release them at the end.

        The source knows this sequence's keys only. Raises FailedPrecondition if that store has
        another layout or no transfer engine, Unavailable if it or the own engine is away.
        """

    async def start(self) -> None:
        """Start the engine. Raises InvalidArgument or FailedPrecondition if it cannot be used."""

    async def close(self) -> None:
        """Stop the engine and release everything."""
