"""What the catalog in Redis says of chunks that a tier holds."""

from __future__ import annotations

import asyncio
from pathlib import Path

from catalog_helpers import SIZE, ended, linked, until
from kvstore_helpers import LAYOUT, Bench, store_sequence
from redis_server import RedisServer
from tier_double import MemoryTier

from kvstore_service.catalog import CatalogPublisher
from kvstore_service.tiers.manager import TierManager
from splitpoint.discovery.entries import REVISION_FIELD, STORES, StoreEntry, chunks_key, entry_key
from splitpoint.keys import chunk_keys

TOKENS = list(range(3 * SIZE + 1))  # three full chunks and a tail
KEYS = list(chunk_keys(LAYOUT.layout_hash, b"", TOKENS, SIZE))


async def test_values_follow_the_arena_and_the_disk(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    bench = Bench(tmp_path, 8)
    tier = MemoryTier(bench.arena)
    tiers = TierManager(bench.store.pool, [tier], on_eviction=False)
    superblock = bench.arena.superblock

    def values() -> list[str | None]:
        with redis_server.client() as client:
            found = client.hgetall(chunks_key(superblock.instance_id, superblock.epoch))
        assert set(found) <= {*KEYS, REVISION_FIELD}
        return [found[key].decode() if key in found else None for key in KEYS]

    async with linked(redis_server) as link:
        publisher = CatalogPublisher(link, bench.store.pool, "h:1", tiers)
        tasks = [asyncio.create_task(publisher.run()), asyncio.create_task(tiers.run())]
        try:
            await until(lambda: publisher.rebuild_count == 1)
            session = bench.attach()
            store_sequence(bench.store, session, b"", TOKENS)
            entries = [bench.store.pool.index.get(key) for key in KEYS]
            generations = [str(entry.generation) for entry in entries if entry is not None]
            await until(lambda: values() == generations)
            tiers.used(entries[:2])  # type: ignore[arg-type]
            on_disk = [f"{generations[0]}d", f"{generations[1]}d", generations[2]]
            await until(lambda: values() == on_disk)
            bench.store.evict_all()
            await until(lambda: values() == ["0d", "0d", None])
            redis_server.flush()
            await until(lambda: publisher.rebuild_count == 2)
            assert values() == ["0d", "0d", None]
            with redis_server.client() as client:
                text = client.get(entry_key(STORES, superblock.instance_id))
            entry = StoreEntry.from_json(text)
            assert entry is not None
            assert (entry.tiers, entry.chunk_count) == (("disk",), 2)
            await tier.drop(KEYS[1:2])
            await until(lambda: values() == ["0d", None, None])
        finally:
            for task in tasks:
                await ended(task)
            bench.close()
