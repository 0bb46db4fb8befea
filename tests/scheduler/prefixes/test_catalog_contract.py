"""The contract of prefix catalogs, checked for both: with Redis, and by asking the stores."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from catalog_helpers import SIZE, Store, catalog_of, query, serving_store, until_equal
from redis_server import RedisServer
from waiting import until

from kvstore_service.server import KvStoreServicer
from kvstore_service.store import KvStore
from scheduler_service.prefixes.lookup import LayoutName, PrefixCatalog, PrefixQuery, keys_by_layout
from scheduler_service.prefixes.stores import StoreCatalog

KINDS = pytest.mark.parametrize("kind", ["peek", "redis"])
PROMPT = list(range(100, 100 + 6 * SIZE))


async def settles(catalog: PrefixCatalog, question: PrefixQuery, wanted: dict[Store, int]) -> None:
    """Wait until the answer is this; a store without tokens may be missing from it."""

    async def ask() -> dict[str, int]:
        found = await catalog.cached_tokens(question)
        return {address: tokens.arena for address, tokens in found.items() if tokens.arena}

    await until_equal(ask, {s.address: n for s, n in wanted.items() if n})


@KINDS
async def test_the_longest_run_of_chunks_counts(
    kind: str, tmp_path: Path, redis_server: RedisServer
) -> None:
    async with (
        serving_store(tmp_path) as store,
        catalog_of(kind, [store], redis_server) as catalog,
    ):
        await settles(catalog, query(PROMPT, store), {})
        store.seal(PROMPT[: 3 * SIZE])
        await settles(catalog, query(PROMPT, store), {store: 3 * SIZE})
        await settles(catalog, query(PROMPT[: 2 * SIZE], store), {store: 2 * SIZE})
        store.seal(PROMPT)
        await settles(catalog, query(PROMPT, store), {store: 6 * SIZE})
        # Nothing is found for another beginning or another tenant.
        await settles(catalog, query([5, *PROMPT], store), {})
        await settles(catalog, query(PROMPT, store, salt=b"t"), {})
        store.seal(PROMPT[:SIZE], salt=b"t")
        await settles(catalog, query(PROMPT, store, salt=b"t"), {store: SIZE})


@KINDS
async def test_what_is_evicted_goes(kind: str, tmp_path: Path, redis_server: RedisServer) -> None:
    async with (
        serving_store(tmp_path, slots=8) as store,
        catalog_of(kind, [store], redis_server) as catalog,
    ):
        store.seal(PROMPT)
        await settles(catalog, query(PROMPT, store), {store: 6 * SIZE})
        other = [7 + token for token in PROMPT[: 4 * SIZE]]
        store.seal(other)  # takes two free slots and the two last chunks of the other
        await settles(catalog, query(PROMPT, store), {store: 4 * SIZE})
        await settles(catalog, query(other, store), {store: 4 * SIZE})


@KINDS
async def test_each_store_has_its_own_count(
    kind: str, tmp_path: Path, redis_server: RedisServer
) -> None:
    async with (
        serving_store(tmp_path, "a") as first,
        serving_store(tmp_path, "b") as second,
    ):
        first.seal(PROMPT[: 2 * SIZE])
        second.seal(PROMPT[: 5 * SIZE])
        async with catalog_of(kind, [first, second], redis_server) as catalog:
            question = query(PROMPT, first, second)
            await settles(catalog, question, {first: 2 * SIZE, second: 5 * SIZE})


async def test_other_layouts_are_not_asked_for(tmp_path: Path, redis_server: RedisServer) -> None:
    async with serving_store(tmp_path) as store:
        store.seal(PROMPT)
        async with catalog_of("redis", [store], redis_server) as catalog:
            other = frozenset({LayoutName(b"x" * 16, SIZE)})
            keys = keys_by_layout(other, b"s", PROMPT)
            question = PrefixQuery(b"s", PROMPT, other, frozenset(), keys)
            assert await catalog.cached_tokens(question) == {}


class Silent(KvStoreServicer):
    """A store that answers no Match until `goes_on` is set."""

    def __init__(self, store: KvStore) -> None:
        super().__init__(store)
        self.asked = 0
        self.goes_on = asyncio.Event()

    async def Match(self, request: Any, context: Any) -> Any:
        self.asked += 1
        await self.goes_on.wait()
        return await super().Match(request, context)


async def test_one_lookup_waits_for_a_silent_store_and_no_other(tmp_path: Path) -> None:
    catalog = StoreCatalog(0.2)
    async with serving_store(tmp_path, make=Silent) as store:
        silent = store.servicer
        assert isinstance(silent, Silent)
        store.seal(PROMPT)
        question = query(PROMPT, store)
        for _ in range(5):
            assert await catalog.cached_tokens(question) == {}
        await until(lambda: silent.asked > 0)
        assert silent.asked == 1
        # Its late answer is enough: it is asked again.
        silent.goes_on.set()
        await settles(catalog, question, {store: 6 * SIZE})
        await catalog.close()
