"""Redis killed, frozen, paused, flushed, set back: the catalog is whole again, or gone.

"Within two heartbeats" is counted in heartbeats, not in seconds.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from catalog_helpers import (
    SIZE,
    Store,
    catalog_of,
    ended,
    publishing,
    query,
    reading,
    serving_store,
    until_equal,
)
from redis_server import RedisServer
from waiting import until

from kvstore_service import catalog as publisher_module
from kvstore_service.catalog import CatalogPublisher
from scheduler_service.prefixes.lookup import StoreTokens
from splitpoint.discovery.entries import REVISION_FIELD, STORES, chunks_key, entry_key
from splitpoint.discovery.redis_link import RedisLink
from splitpoint.discovery.redis_options import parse_redis_url
from splitpoint.keys import chunk_keys

PROMPT = list(range(100, 100 + 6 * SIZE))


def written_keys(server: RedisServer, store: Store) -> set[bytes]:
    superblock = store.bench.arena.superblock
    with server.client() as client:
        fields = client.hkeys(chunks_key(superblock.instance_id, superblock.epoch))
    return {field for field in fields if field != REVISION_FIELD}


def held_keys(store: Store) -> set[bytes]:
    return {
        entry.key for entry in store.bench.store.pool.chunks().values() if entry.token_count == SIZE
    }


async def whole_again(
    publisher: CatalogPublisher, server: RedisServer, store: Store, since: int
) -> None:
    """The catalog holds exactly what the store holds, at most two heartbeats after `since`."""
    rebuilt = publisher.rebuild_count
    await until(lambda: publisher.rebuild_count > rebuilt or publisher.beat_count > since + 2)
    # The beat that was under way when the server came back may be the one that rebuilds.
    assert publisher.rebuild_count > rebuilt or publisher.rebuilt_at_beat > since
    assert publisher.rebuilt_at_beat <= since + 2
    assert written_keys(server, store) == held_keys(store) != set()
    superblock = store.bench.arena.superblock
    with server.client() as client:
        assert client.exists(entry_key(STORES, superblock.instance_id))
        assert client.sismember(STORES, superblock.instance_id.hex())


async def ready(publisher: CatalogPublisher, server: RedisServer, store: Store) -> None:
    await until(lambda: publisher.rebuild_count > 0)
    await until(lambda: written_keys(server, store) == held_keys(store))


async def test_a_flush_is_noticed(tmp_path: Path, redis_server: RedisServer) -> None:
    async with serving_store(tmp_path) as store, publishing(store, redis_server) as publisher:
        store.seal(PROMPT)
        await ready(publisher, redis_server, store)
        since = publisher.beat_count
        redis_server.flush()
        await whole_again(publisher, redis_server, store, since)


async def test_a_store_stays_alive_however_long_a_rebuild_takes(
    tmp_path: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two parts the entry runs out, as it does when they take long."""
    monkeypatch.setattr(publisher_module, "_BATCH", 2)
    was_alive: list[bool] = []

    class SlowLink(RedisLink):
        async def run(self, operation: Any, *, is_heartbeat: bool = False) -> Any:
            result = await super().run(operation, is_heartbeat=is_heartbeat)
            with redis_server.client() as client:
                was_alive.append(client.delete(key) == 1)
            return result

    async with serving_store(tmp_path) as store:
        key = entry_key(STORES, store.bench.arena.superblock.instance_id)
        store.seal(PROMPT)
        link = SlowLink(parse_redis_url(redis_server.url))
        publisher = CatalogPublisher(link, store.bench.store.pool, store.address)
        task = asyncio.create_task(publisher.run())
        try:
            await until(lambda: publisher.rebuild_count > 0)
        finally:
            await ended(task)
            await link.close()
        assert written_keys(redis_server, store) == held_keys(store)
    # The old hash's end, four parts of six chunks and a revision, and the replacement.
    assert was_alive[:6] == [False, True, True, True, True, True]


async def test_a_batch_onto_a_flushed_catalog_rebuilds_it_at_once(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    """The batch alone would look like a whole catalog."""
    async with serving_store(tmp_path) as store, publishing(store, redis_server) as publisher:
        store.seal(PROMPT[: 2 * SIZE])
        await ready(publisher, redis_server, store)
        redis_server.flush()
        since = publisher.beat_count
        store.seal(PROMPT)
        await until(lambda: publisher.rebuild_count > 1)
        assert publisher.rebuilt_at_beat <= since + 1
        assert written_keys(redis_server, store) == held_keys(store)


async def test_a_field_that_was_removed_is_noticed(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    async with serving_store(tmp_path) as store, publishing(store, redis_server) as publisher:
        store.seal(PROMPT)
        await ready(publisher, redis_server, store)
        superblock = store.bench.arena.superblock
        since = publisher.beat_count
        with redis_server.client() as client:
            key = chunks_key(superblock.instance_id, superblock.epoch)
            client.hdel(key, next(iter(held_keys(store))))
        await whole_again(publisher, redis_server, store, since)


async def test_a_killed_server_comes_back_empty(
    tmp_path: Path, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving_store(tmp_path) as store, publishing(store, redis_server) as publisher:
        with caplog.at_level(logging.INFO):
            store.seal(PROMPT[:SIZE])
            await ready(publisher, redis_server, store)
            redis_server.kill()
            store.seal(PROMPT)
            since = publisher.beat_count
            await until(lambda: publisher.beat_count >= since + 2)
            await asyncio.to_thread(redis_server.start)
            await whole_again(publisher, redis_server, store, publisher.beat_count)
    assert sum("is away" in record.getMessage() for record in caplog.records) == 1
    assert sum("answers again" in record.getMessage() for record in caplog.records) == 1


async def test_a_frozen_server_holds_nobody_up(tmp_path: Path, redis_server: RedisServer) -> None:
    async with (
        serving_store(tmp_path) as store,
        publishing(store, redis_server) as publisher,
        reading(redis_server) as (catalog, directory),
    ):
        store.seal(PROMPT[: 2 * SIZE])
        await ready(publisher, redis_server, store)
        await until(lambda: len(directory.stores) == 1)
        redis_server.freeze()
        try:
            store.seal(PROMPT)
            # The store itself is asked instead, and says the truth of now.
            for _ in range(5):
                async with asyncio.timeout(30):
                    found = await catalog.cached_tokens(query(PROMPT))
                assert found == {store.address: StoreTokens(6 * SIZE)}
        finally:
            redis_server.thaw()
        await whole_again(publisher, redis_server, store, publisher.beat_count)
        await until_equal(
            lambda: catalog.cached_tokens(query(PROMPT)), {store.address: StoreTokens(6 * SIZE)}
        )


async def test_a_paused_server_too(tmp_path: Path, redis_server: RedisServer) -> None:
    async with serving_store(tmp_path) as store, publishing(store, redis_server) as publisher:
        store.seal(PROMPT)
        await ready(publisher, redis_server, store)
        with redis_server.client() as client:
            client.execute_command("CLIENT", "PAUSE", 1500, "ALL")
        store.seal([9, 9, 9, 9])
        await until(lambda: publisher._link.is_away or publisher._written is None)
        await until(lambda: publisher.rebuild_count > 1)
        assert written_keys(redis_server, store) == held_keys(store)


async def test_an_old_snapshot_is_noticed(tmp_path: Path, redis_server: RedisServer) -> None:
    """What it says of evicted chunks is taken back, what it lacks is added."""
    async with (
        serving_store(tmp_path, slots=8) as store,
        publishing(store, redis_server) as publisher,
    ):
        store.seal(PROMPT)
        await ready(publisher, redis_server, store)
        old = written_keys(redis_server, store)
        snapshot = redis_server.snapshot()
        store.seal([7 + token for token in PROMPT])
        await ready(publisher, redis_server, store)
        await asyncio.to_thread(redis_server.restore, snapshot)
        await whole_again(publisher, redis_server, store, publisher.beat_count)
        assert not old <= written_keys(redis_server, store)


async def test_more_changes_than_can_wait(
    tmp_path: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "_MOST_PENDING", 3)
    async with serving_store(tmp_path) as store, publishing(store, redis_server) as publisher:
        store.seal(PROMPT[:SIZE])
        await ready(publisher, redis_server, store)
        since = publisher.beat_count
        store.seal(PROMPT)
        await whole_again(publisher, redis_server, store, since)


async def test_a_dead_stores_catalog_vanishes(tmp_path: Path, redis_server: RedisServer) -> None:
    async with serving_store(tmp_path) as store:
        async with publishing(store, redis_server) as publisher:
            store.seal(PROMPT)
            await ready(publisher, redis_server, store)
        assert written_keys(redis_server, store)
        async with reading(redis_server) as (catalog, directory):
            await until(lambda: len(directory.stores) == 1)
            await until_equal(lambda: catalog.cached_tokens(query(PROMPT)), {})
        assert written_keys(redis_server, store) == set()


async def test_a_store_that_stops_takes_everything_out(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    async with serving_store(tmp_path) as store:
        async with publishing(store, redis_server) as publisher:
            store.seal(PROMPT)
            await ready(publisher, redis_server, store)
            await publisher.withdraw()
        with redis_server.client() as client:
            assert client.keys("*") == []


async def test_foreign_values_are_misses(tmp_path: Path, redis_server: RedisServer) -> None:
    async with (
        serving_store(tmp_path) as store,
        catalog_of("redis", [store], redis_server) as catalog,
    ):
        store.seal(PROMPT)
        await until_equal(
            lambda: catalog.cached_tokens(query(PROMPT)), {store.address: StoreTokens(6 * SIZE)}
        )
        superblock = store.bench.arena.superblock
        key = chunks_key(superblock.instance_id, superblock.epoch)
        third = list(chunk_keys(store.bench.arena.layout.layout_hash, b"s", PROMPT, SIZE))[2]
        with redis_server.client() as client:
            for value in (b"", b"-1", b"0", b"x", b"9" * 100, b"1.5", b"\xff"):
                client.hset(key, third, value)
                found = await catalog.cached_tokens(query(PROMPT))
                # Or the heartbeat came in between and set it right.
                assert found[store.address].arena in (2 * SIZE, 6 * SIZE)
            client.delete(key)
            client.set(key, "a string")
            found = await catalog.cached_tokens(query(PROMPT))
            assert found[store.address].arena in (0, 6 * SIZE)
        await until_equal(
            lambda: catalog.cached_tokens(query(PROMPT)), {store.address: StoreTokens(6 * SIZE)}
        )
