"""A store that seals on command, and a catalog of it: by Redis, or by asking it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvstore_helpers import LAYOUT, Bench, store_sequence
from redis_server import RedisServer
from waiting import until

from kvstore_service.catalog import CatalogPublisher
from kvstore_service.server import KvStoreServicer
from kvstore_service.store import KvStore
from scheduler_service.cluster.directory import Directory
from scheduler_service.prefixes.lookup import LayoutName, PrefixCatalog, PrefixQuery, keys_by_layout
from scheduler_service.prefixes.redis import RedisCatalog
from scheduler_service.prefixes.stores import StoreCatalog
from splitpoint.discovery.redis_link import RedisLink
from splitpoint.discovery.redis_options import parse_redis_url
from splitpoint.transport import servers
from splitpoint.v1 import kvstore_pb2_grpc

SIZE = LAYOUT.chunk_tokens
LAYOUTS = frozenset({LayoutName(LAYOUT.layout_hash, SIZE)})


def has_rebuilt(publisher: CatalogPublisher) -> bool:
    return publisher.rebuild_count > 0


async def until_equal(
    ask: Callable[[], Awaitable[object]], wanted: object, seconds: float = 60
) -> None:
    deadline = time.monotonic() + seconds
    while (got := await ask()) != wanted:
        assert time.monotonic() < deadline, f"it stays {got}, not {wanted}"
        await asyncio.sleep(0.02)


async def ended(task: asyncio.Task[None]) -> None:
    """Cancels a task that goes on forever; raises what ended it before."""
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        pass


@dataclass(eq=False)
class Store:
    """A real store in this process."""

    bench: Bench
    address: str
    session: bytes
    servicer: KvStoreServicer

    def seal(self, tokens: Sequence[int], salt: bytes = b"s") -> None:
        store_sequence(self.bench.store, self.session, salt, list(tokens))


@asynccontextmanager
async def serving_store(
    folder: Path,
    name: str = "a",
    slots: int = 16,
    make: Callable[[KvStore], KvStoreServicer] = KvStoreServicer,
) -> AsyncIterator[Store]:
    (folder / name).mkdir()
    bench = Bench(folder / name, slots)
    servicer = make(bench.store)
    server = servers.create_server()
    kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server(servicer, server)
    address = servers.listen(server, f"unix:{folder}/{name}.s")
    await server.start()
    try:
        yield Store(bench, address, bench.attach(), servicer)
    finally:
        servicer.stop()
        await server.stop(0)
        await servicer.close()
        bench.close()


@asynccontextmanager
async def linked(server: RedisServer) -> AsyncIterator[RedisLink]:
    link = RedisLink(parse_redis_url(server.url))
    try:
        yield link
    finally:
        await link.close()


@asynccontextmanager
async def publishing(store: Store, server: RedisServer) -> AsyncIterator[CatalogPublisher]:
    """Ends like a process that is killed: nothing is taken out."""
    async with linked(server) as link:
        publisher = CatalogPublisher(link, store.bench.store.pool, store.address)
        task = asyncio.create_task(publisher.run())
        try:
            yield publisher
        finally:
            await ended(task)


@asynccontextmanager
async def reading(server: RedisServer) -> AsyncIterator[tuple[RedisCatalog, Directory]]:
    async with linked(server) as link:
        directory = Directory(link)
        direct = StoreCatalog(0.5)
        task = asyncio.create_task(directory.run(lambda workers: None))
        try:
            yield RedisCatalog(link, lambda: directory.stores, direct), directory
        finally:
            await ended(task)
            await direct.close()


@asynccontextmanager
async def catalog_of(
    kind: str, stores: Sequence[Store], server: RedisServer
) -> AsyncIterator[PrefixCatalog]:
    """Either implementation, ready."""
    async with AsyncExitStack() as stack:
        if kind == "peek":
            direct = StoreCatalog(5.0)
            stack.push_async_callback(direct.close)
            yield direct
            return
        for store in stores:
            publisher = await stack.enter_async_context(publishing(store, server))
            await until(partial(has_rebuilt, publisher))
        catalog, directory = await stack.enter_async_context(reading(server))
        await until(lambda: len(directory.stores) == len(stores))
        yield catalog


def query(tokens: Sequence[int], *stores: Store, salt: bytes = b"s") -> PrefixQuery:
    keys = keys_by_layout(LAYOUTS, salt, tokens)
    return PrefixQuery(salt, list(tokens), LAYOUTS, frozenset(s.address for s in stores), keys)
