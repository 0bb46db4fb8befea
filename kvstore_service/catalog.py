"""Publishes the keys of a store's chunks in Redis, where schedulers find prefixes.

Changes of the arena and of the disk tier only record the key. A task writes the recorded changes
in batches. Each write also replaces the hash's revision and returns the one before. So the next
write or heartbeat detects a flush, a lost key or an old snapshot, and the catalog is rebuilt.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from redis.asyncio import Redis

from kvstore_service.pool.chunk_pool import ChunkPool
from kvstore_service.pool.prefix_index import Entry
from kvstore_service.tiers.manager import TierManager
from splitpoint.discovery.directory import add_announcement, add_withdrawal, prune
from splitpoint.discovery.entries import (
    BEATS_BETWEEN_PRUNES,
    HEARTBEAT_SECONDS,
    LIFETIME_MILLISECONDS,
    REVISION_FIELD,
    STORES,
    StoreEntry,
    chunks_key,
)
from splitpoint.discovery.redis_link import RedisLink
from splitpoint.errors import Unavailable

_log = logging.getLogger(__name__)

# Most pending changes: to write everything takes no longer than to write more of them.
_MOST_PENDING = 65_536
_BATCH = 1024
# Changes within this time go into one write.
_GATHER_SECONDS = 0.05

# Follows the generation of a chunk that the disk tier holds.
_ON_DISK = "d"

_Fields = dict[Any, Any]  # chunk key -> value, and the revision; typed for redis-py


@dataclass(frozen=True, slots=True)
class _Written:
    """The expected state of the hash in Redis."""

    revision: bytes
    field_count: int  # chunks and the revision


class CatalogPublisher:
    """The publisher of one store: `run` it as a task, `withdraw` at the end.

    Attributes:
        beat_count: heartbeats so far, failed ones included.
        rebuild_count: number of rebuilds.
        rebuilt_at_beat: `beat_count` at the last rebuild.
    """

    def __init__(
        self,
        link: RedisLink,
        pool: ChunkPool,
        address: str,
        tiers: TierManager | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        superblock = pool.arena.superblock
        self.beat_count = 0
        self.rebuild_count = 0
        self.rebuilt_at_beat = 0
        self._link = link
        self._pool = pool
        self._tiers = TierManager(pool) if tiers is None else tiers
        self._address = address
        self._instance_id = superblock.instance_id
        self._epoch = superblock.epoch
        self._key = chunks_key(self._instance_id, self._epoch)
        self._clock = clock
        # Two publishers never write equal revisions.
        self._publisher_id = secrets.token_hex(8)
        self._writes = 0
        self._written: _Written | None = None  # None if the catalog must be rebuilt
        self._pending: dict[bytes, None] = {}  # keys, in the order of their changes
        self._overflowed = False
        self._changed = asyncio.Event()
        pool.listener = self._changed_entry
        self._tiers.on_change(self._record)

    # -- changes of the chunks --------------------------------------------------------------

    def _changed_entry(self, entry: Entry) -> None:
        # Schedulers cannot derive the keys of partial tails from a prompt.
        if entry.token_count == self._pool.layout.chunk_tokens:
            self._record([entry.key])

    def _record(self, keys: Sequence[bytes]) -> None:
        self._pending.update(dict.fromkeys(keys))
        if len(self._pending) > _MOST_PENDING:
            self._pending.clear()
            self._overflowed = True
        self._changed.set()

    # -- the task -------------------------------------------------------------------------

    async def run(self) -> None:
        """Send heartbeats and batches until cancelled. An absent Redis is no error."""
        next_beat = self._clock()
        while True:
            try:
                if self._clock() >= next_beat:
                    next_beat = self._clock() + HEARTBEAT_SECONDS
                    self.beat_count += 1
                    await self._heartbeat()
                    if self.beat_count % BEATS_BETWEEN_PRUNES == 0:
                        await prune(self._link, STORES)
                elif self._written is not None and not self._link.is_away:
                    await self._flush()
            except Unavailable:
                # It is unknown whether the last write arrived.
                self._written = None
            await self._wait(next_beat)

    async def _wait(self, until: float) -> None:
        await asyncio.sleep(_GATHER_SECONDS)
        if self._written is not None and self._pending:
            return
        self._changed.clear()
        try:
            async with asyncio.timeout(max(0.0, until - self._clock())):
                await self._changed.wait()
                if self._written is None:  # the next heartbeat rebuilds
                    await asyncio.Event().wait()
        except TimeoutError:
            pass

    async def withdraw(self) -> None:
        """Remove the store's entries when it stops, if Redis is there."""

        async def remove(redis: Redis) -> Any:
            async with redis.pipeline(transaction=True) as pipe:
                add_withdrawal(pipe, STORES, self._instance_id)
                pipe.delete(self._key)
                return await pipe.execute()

        try:
            await self._link.run(remove, is_heartbeat=True)
        except Unavailable as error:
            _log.info("the entries in Redis are left to expire: %s", error.message)

    async def _heartbeat(self) -> None:
        """Renew the store's entry, and check that the catalog is what was written."""
        written = self._written
        if written is None or self._overflowed:
            await self._rebuild()
            return

        async def beat(redis: Redis) -> Any:
            async with redis.pipeline(transaction=True) as pipe:
                pipe.hget(self._key, REVISION_FIELD)
                pipe.hlen(self._key)
                pipe.pexpire(self._key, LIFETIME_MILLISECONDS)
                add_announcement(pipe, STORES, self._entry(written))
                return await pipe.execute(raise_on_error=False)

        revision, field_count, *_ = await self._link.run(beat, is_heartbeat=True)
        if (revision, field_count) != (written.revision, written.field_count):
            _log.info("the catalog in Redis is not what was written: writing it anew")
            await self._rebuild()
        else:
            await self._flush()

    async def _flush(self) -> None:
        """Write what changed since the last write."""
        while self._pending and self._written is not None and not self._overflowed:
            written = self._written
            batch = list(islice(self._pending, _BATCH))
            for key in batch:
                del self._pending[key]
            values = {key: self._value(key) for key in batch}
            sealed: _Fields = {key: value for key, value in values.items() if value}
            evicted = [key for key, value in values.items() if not value]
            revision = self._next_revision()
            before, added, removed = await self._link.run(
                self._batch_write(sealed, evicted, revision)
            )
            if before != written.revision:
                # The write changed a hash that is not ours, perhaps an empty one.
                await self._rebuild()
                return
            self._written = _Written(revision, written.field_count + added - removed)

    def _value(self, key: bytes) -> str:
        """Return what the hash says of a full chunk. Empty: it is nowhere."""
        entry = self._pool.index.get(key)
        generation = 0 if entry is None else entry.generation
        flag = _ON_DISK if self._tiers.is_on_disk(key) else ""
        return f"{generation}{flag}" if generation or flag else ""

    def _batch_write(
        self, sealed: _Fields, evicted: Sequence[bytes], revision: bytes
    ) -> Callable[[Redis], Any]:
        async def write(redis: Redis) -> tuple[Any, int, int]:
            async with redis.pipeline(transaction=True) as pipe:
                pipe.hget(self._key, REVISION_FIELD)
                pipe.hset(self._key, mapping=sealed | {REVISION_FIELD: revision})
                if evicted:
                    pipe.hdel(self._key, *evicted)
                pipe.pexpire(self._key, LIFETIME_MILLISECONDS)
                answers = await pipe.execute(raise_on_error=False)
            before, added = answers[0], answers[1]
            removed = answers[2] if evicted else 0
            if not isinstance(added, int) or not isinstance(removed, int):
                return None, 0, 0  # the key has another type
            return before, added, removed

        return write

    async def _rebuild(self) -> None:
        """Write everything to a new hash, then rename it to the old one's key.

        Every part is a heartbeat, too, since the rebuild may take longer than an entry lives.
        """
        self._written = None
        self._pending.clear()
        self._overflowed = False
        chunk_tokens = self._pool.layout.chunk_tokens
        in_arena = {
            entry.key for entry in self._pool.chunks().values() if entry.token_count == chunk_tokens
        }
        on_disk = (key for key in self._tiers.keys_on_disk() if key not in in_arena)
        names = chain([REVISION_FIELD], in_arena, on_disk)
        revision = self._next_revision()
        fresh = f"{self._key}:new"
        await self._link.run(lambda redis: redis.delete(fresh), is_heartbeat=True)
        field_count = 0
        # Part by part: a disk may hold millions of chunks. Changes meanwhile are flushed later.
        while batch := list(islice(names, _BATCH)):
            part: _Fields = {
                name: value
                for name in batch
                if (value := revision if name == REVISION_FIELD else self._value(name))
            }
            field_count += len(part)
            so_far = self._entry(_Written(revision, field_count))
            if part:
                await self._link.run(_hash_write(fresh, part, so_far), is_heartbeat=True)
        written = _Written(revision, field_count)

        async def replace(redis: Redis) -> Any:
            async with redis.pipeline(transaction=True) as pipe:
                pipe.rename(fresh, self._key)
                pipe.pexpire(self._key, LIFETIME_MILLISECONDS)
                add_announcement(pipe, STORES, self._entry(written))
                return await pipe.execute(raise_on_error=False)

        renamed, *_ = await self._link.run(replace, is_heartbeat=True)
        if isinstance(renamed, Exception):
            return  # flushed meanwhile; the next heartbeat tries again
        self.rebuild_count += 1
        self.rebuilt_at_beat = self.beat_count
        self._written = written
        _log.info("wrote a catalog of %d chunks to Redis", field_count - 1)

    def _next_revision(self) -> bytes:
        self._writes += 1
        return f"{self._publisher_id}:{self._writes}".encode()

    def _entry(self, written: _Written) -> StoreEntry:
        return StoreEntry(
            instance_id=self._instance_id,
            epoch=self._epoch,
            address=self._address,
            layout_hash=self._pool.layout.layout_hash,
            slot_count=self._pool.arena.slot_count,
            chunk_count=written.field_count - 1,
            tiers=tuple(tier.value for tier in self._tiers.tiers),
            revision=written.revision.decode(),
        )


def _hash_write(key: str, fields: _Fields, entry: StoreEntry) -> Callable[[Redis], Any]:
    async def write(redis: Redis) -> Any:
        async with redis.pipeline(transaction=True) as pipe:
            pipe.hset(key, mapping=fields)
            # In case this process dies during the rebuild.
            pipe.pexpire(key, 10 * LIFETIME_MILLISECONDS)
            add_announcement(pipe, STORES, entry)
            return await pipe.execute()

    return write
