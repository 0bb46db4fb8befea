"""The interface of a transfer engine, which reads chunks out of other stores' arenas."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from kvstore_service.tiers.tier import ChunkSource


@dataclass(slots=True)
class TransferStats:
    """Facts and counts of the engine since the start; see TransferStats in kvstore.proto."""

    interface: str
    is_up: bool = False
    message: str = ""
    segment: str = ""
    registered_bytes: int = 0
    read_bytes: int = 0
    read_chunks: int = 0
    failed_reads: int = 0
    restarts: int = 0


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
