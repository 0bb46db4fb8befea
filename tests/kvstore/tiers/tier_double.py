"""A tier in memory, in place of a disk, and a transfer engine that reads another store's arena."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

from kvstore_service.pool.prefix_index import Entry
from kvstore_service.tiers.tier import ChunkSource, TierStats, TransferEndpoint, TransferStats
from splitpoint.arena.mapping import Arena, Payload
from splitpoint.errors import Unavailable
from splitpoint.tiers import Tier


class MemoryTier:
    """A `ChunkTier` in a dictionary.

    Attributes:
        chunks: (payload, checksum) by key.
        gate: reads and writes wait until it is set.
        calls: reads and writes that have begun.
        capacity: most chunks; others are not stored.
    """

    def __init__(self, arena: Arena, tier: Tier = Tier.DISK, *, capacity: int = 1 << 20) -> None:
        self.chunks: dict[bytes, tuple[bytes, int]] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.calls = 0
        self.capacity = capacity
        self.on_change: Callable[[Sequence[bytes]], None] | None = None
        self.writes: list[list[bytes]] = []
        self._payload = Payload(arena)
        self._tier = tier
        self._stats = TierStats("memory", engine="weave" if tier is Tier.POOL else "")

    @property
    def tier(self) -> Tier:
        return self._tier

    @property
    def stats(self) -> TierStats:
        return self._stats

    def holds(self, key: bytes) -> bool | None:
        return key in self.chunks if self._tier is Tier.DISK else None

    def keys(self) -> Iterable[bytes]:
        return list(self.chunks) if self._tier is Tier.DISK else ()

    async def has(self, keys: Sequence[bytes]) -> list[bool]:
        await self._wait()
        return [key in self.chunks for key in keys]

    async def read(self, keys: Sequence[bytes], slots: Sequence[int]) -> list[int | None]:
        await self._wait()
        checksums: list[int | None] = []
        for key, slot in zip(keys, slots, strict=True):
            payload, checksum = self.chunks.get(key, (b"", None))
            if checksum is None:
                self._stats.missed_chunk_count += 1
            else:
                self._payload.scatter(slot, 0, payload)
                self._stats.read_chunk_count += 1
            checksums.append(checksum)
        return checksums

    async def write(self, entries: Sequence[Entry]) -> int:
        self.writes.append([entry.key for entry in entries])
        await self._wait()
        stored = 0
        for entry in entries:
            if entry.key in self.chunks or len(self.chunks) < self.capacity:
                payload = self._payload.gather(entry.slot, 0, self._payload.size_bytes)
                self.chunks[entry.key] = (payload, entry.checksum)
                stored += 1
        self._stats.written_chunk_count += stored
        self._changed([entry.key for entry in entries])
        return stored

    async def drop(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._stats.damaged_chunk_count += self.chunks.pop(key, None) is not None
        self._changed(keys)

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def go_away(self) -> None:
        self._stats.is_up = False
        self._stats.message = "unplugged"

    def come_back(self) -> None:
        self._stats.is_up = True
        self._stats.message = ""

    def damage(self, key: bytes) -> None:
        payload, checksum = self.chunks[key]
        self.chunks[key] = (bytes([payload[0] ^ 1]) + payload[1:], checksum)

    def _changed(self, keys: Sequence[bytes]) -> None:
        if self.on_change is not None:
            self.on_change(keys)

    async def _wait(self) -> None:
        """Wait for the gate, also after a cancellation: the bytes of slots are in use."""
        self.calls += 1
        waiting = asyncio.ensure_future(self.gate.wait())
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            await waiting
            raise
        if not self._stats.is_up:
            raise Unavailable("the tier is away")


class MemoryTransfer:
    """A `ChunkTransfer` whose only peer is a `MemoryTier` at the address "peer:1"."""

    def __init__(self, peer: MemoryTier) -> None:
        self.peer = peer
        self._stats = TransferStats(interface="eth1", is_up=True, segment="here:9")

    @property
    def stats(self) -> TransferStats:
        return self._stats

    @property
    def endpoint(self) -> TransferEndpoint | None:
        return TransferEndpoint("here:9", 4096)

    @asynccontextmanager
    async def open(
        self, address: str, salt: bytes, token_ids: Sequence[int]
    ) -> AsyncIterator[ChunkSource]:
        if address != "peer:1":
            raise Unavailable(f"{address} does not answer")
        yield self.peer

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass
