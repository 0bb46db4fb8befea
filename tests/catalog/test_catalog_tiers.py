"""What the catalog in Redis says of chunks that a tier holds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from catalog_helpers import SIZE, ended, linked, query, reading
from kvstore_helpers import LAYOUT, Bench, store_sequence
from redis_server import RedisServer
from tier_double import MemoryTier
from waiting import until

from kvstore_service.catalog import CatalogPublisher
from kvstore_service.tiers.manager import TierManager
from scheduler_service.prefixes.lookup import StoreTokens
from scheduler_service.prefixes.redis import RedisCatalog
from scheduler_service.prefixes.stores import StoreCatalog
from splitpoint.discovery.entries import REVISION_FIELD, STORES, StoreEntry, chunks_key, entry_key
from splitpoint.keys import chunk_keys
from splitpoint.tiers import Tier
from splitpoint.transport.servers import create_server, listen
from splitpoint.v1 import kvstore_pb2, kvstore_pb2_grpc, types_pb2

TOKENS = list(range(3 * SIZE + 1))  # three full chunks and a tail
KEYS = list(chunk_keys(LAYOUT.layout_hash, b"", TOKENS, SIZE))


class PooledStore(kvstore_pb2_grpc.KvStoreServiceServicer):
    """Knows what its pool holds."""

    def __init__(self) -> None:
        self.asked: list[kvstore_pb2.MatchRequest] = []

    async def Match(
        self, request: kvstore_pb2.MatchRequest, context: object
    ) -> kvstore_pb2.MatchResponse:
        self.asked.append(request)
        pool = kvstore_pb2.TierPrefix(tier=types_pb2.TIER_POOL, cached_tokens=2 * SIZE)
        return kvstore_pb2.MatchResponse(cached_tokens=SIZE, tiers=[pool])


async def test_one_store_of_a_pool_is_asked_what_it_holds(
    redis_server: RedisServer, socket_address: str
) -> None:
    servicer, server = PooledStore(), create_server()
    kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server(servicer, server)
    listen(server, socket_address)
    await server.start()
    entries = [
        StoreEntry(bytes([number]) * 16, 1, address, LAYOUT.layout_hash, 8, tiers=tiers)
        for number, (address, tiers) in enumerate(
            ((socket_address, ("pool",)), ("10.0.0.9:1", ("pool",)), ("10.0.0.8:1", ()))
        )
    ]
    direct = StoreCatalog(5.0)
    async with linked(redis_server) as link:
        catalog = RedisCatalog(link, lambda: entries, direct)
        found = await catalog.cached_tokens(query(TOKENS, salt=b""))
        assert found[socket_address] == StoreTokens(SIZE, {Tier.POOL: 2 * SIZE})
        assert found["10.0.0.9:1"] == found["10.0.0.8:1"] == StoreTokens()
        [request] = servicer.asked
        assert request.asks_tiers
        # A store that is asked anyway is not asked again.
        asked = replace(query(TOKENS, salt=b""), stores=frozenset({socket_address, "10.0.0.9:1"}))
        await catalog.cached_tokens(asked)
        assert len(servicer.asked) == 1
    await direct.close()
    await server.stop(0)


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
            async with reading(redis_server) as (catalog, directory):
                await until(lambda: len(directory.stores) == 1)
                found = await catalog.cached_tokens(query(TOKENS, salt=b""))
                assert found == {"h:1": StoreTokens(0, {Tier.DISK: 2 * SIZE})}
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


async def test_the_catalog_of_a_large_disk_is_written_in_parts(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    """Other calls of the store go on meanwhile."""
    bench = Bench(tmp_path, 8)
    tier = MemoryTier(bench.arena)
    session = bench.attach()
    store_sequence(bench.store, session, b"", TOKENS)
    others = [number.to_bytes(32, "big") for number in range(5000)]
    tier.chunks = dict.fromkeys([*KEYS, *others], (b"", 0))
    turns = 0
    turns_at_key: list[int] = []

    def keys() -> Iterator[bytes]:
        for key in list(tier.chunks):
            turns_at_key.append(turns)
            yield key

    tier.keys = keys  # type: ignore[method-assign]
    async with linked(redis_server) as link:
        tiers = TierManager(bench.store.pool, [tier])
        publisher = CatalogPublisher(link, bench.store.pool, "h:1", tiers)
        task = asyncio.create_task(publisher.run())
        try:
            while not publisher.rebuild_count:
                turns += 1
                await tier.drop(others[turns - 1 : turns])
                await asyncio.sleep(0)
            assert len(set(turns_at_key)) >= 4
            superblock = bench.arena.superblock
            name = chunks_key(superblock.instance_id, superblock.epoch)
            with redis_server.client() as client:
                await until(lambda: client.hlen(name) == len(tier.chunks) + 1)
                assert set(client.hkeys(name)) == {*tier.chunks, REVISION_FIELD}
        finally:
            await ended(task)
            bench.close()
