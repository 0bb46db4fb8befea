"""The pool as a tier of the store: several hosts' memory, behind one Mooncake master."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from kvstore_service.mooncake.messages import names
from kvstore_service.mooncake.process import (
    POOL_CANCEL_SECONDS,
    QUESTION_SECONDS,
    MooncakeProcess,
    pool_seconds_for,
)
from kvstore_service.mooncake.trailer import DAMAGED
from kvstore_service.pool.prefix_index import Entry
from kvstore_service.tiers.tier import TierStats
from splitpoint.errors import Unavailable
from splitpoint.options.store import ENGINE
from splitpoint.tiers import Tier


class MooncakeTier:
    """A ChunkTier. The process is started and closed by it, or before and after it.

    Attributes:
        on_change: never called. Any host's store can write to the pool, and the master can
            evict, so no store knows what it holds.
    """

    def __init__(self, process: MooncakeProcess, master: str, chunk_bytes: int) -> None:
        self.on_change: Callable[[Sequence[bytes]], None] | None = None
        self._process = process
        self._chunk_bytes = chunk_bytes
        self._stats = TierStats(
            location=master, engine=ENGINE, is_up=False, message=process.pool_message
        )
        process.on_pool = self._set_state

    @property
    def tier(self) -> Tier:
        return Tier.POOL

    @property
    def stats(self) -> TierStats:
        return self._stats

    def holds(self, key: bytes) -> bool | None:
        return None

    def keys(self) -> Iterable[bytes]:
        return ()

    async def has(self, keys: Sequence[bytes]) -> list[bool]:
        self._check_up()
        found: list[bool] = await self._process.ask("pool_has", QUESTION_SECONDS, keys=names(keys))
        return found

    async def read(self, keys: Sequence[bytes], slots: Sequence[int]) -> list[int | None]:
        self._check_up()
        found: list[int | None] = await self._process.call(
            "pool_read",
            pool_seconds_for(len(keys) * self._chunk_bytes),
            cancel_seconds=POOL_CANCEL_SECONDS,
            keys=names(keys),
            slots=list(slots),
        )
        whole = sum(checksum is not None and checksum != DAMAGED for checksum in found)
        self._stats.missed_chunk_count += found.count(None)
        self._stats.damaged_chunk_count += found.count(DAMAGED)
        self._stats.read_chunk_count += whole
        self._stats.read_bytes += whole * self._chunk_bytes
        return [None if checksum == DAMAGED else checksum for checksum in found]

    async def write(self, entries: Sequence[Entry]) -> int:
        self._check_up()
        # Only read slots: if they change under a late call, its object proves damaged.
        stored: list[bool] = await self._process.ask(
            "pool_write",
            pool_seconds_for(len(entries) * self._chunk_bytes),
            keys=names([entry.key for entry in entries]),
            slots=[entry.slot for entry in entries],
            checksums=[entry.checksum for entry in entries],
        )
        self._stats.written_chunk_count += sum(stored)
        self._stats.written_bytes += sum(stored) * self._chunk_bytes
        return sum(stored)

    async def drop(self, keys: Sequence[bytes]) -> None:
        self._stats.damaged_chunk_count += len(keys)
        with suppress(Unavailable):  # their next reader compares them again
            self._check_up()
            await self._process.ask("pool_drop", QUESTION_SECONDS, keys=names(keys))

    async def start(self) -> None:
        await self._process.start()

    async def close(self) -> None:
        await self._process.close()

    def _check_up(self) -> None:
        if not self._stats.is_up:
            raise Unavailable(f"the pool is away: {self._stats.message}", reason="TIER_AWAY")

    def _set_state(self) -> None:
        self._stats.is_up = self._process.pool_is_up
        self._stats.message = self._process.pool_message
