"""The catalog with Redis: looks a prefix up in what the stores wrote there.

A pool of several hosts' memory is not written there: one of its stores is asked for what it holds.

One pipelined round trip (HMGET) asks for every key of the prefix in all stores. A binary
search for the prefix's end would send fewer keys but wait for several answers, and round
trips are what costs: 128,000 tokens are 2,000 keys, 64 KB.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from redis.asyncio import Redis

from scheduler_service.prefixes.lookup import LayoutName, PrefixQuery, StoreTokens
from scheduler_service.prefixes.stores import StoreCatalog
from splitpoint.discovery.entries import StoreEntry, chunks_key
from splitpoint.discovery.redis_link import RedisLink
from splitpoint.errors import Unavailable
from splitpoint.tiers import Tier

_log = logging.getLogger(__name__)

# Stores of one lookup.
_MOST_STORES = 64
# Stores that are asked directly while Redis is away.
_MOST_FALLBACK_STORES = 16
# After a chunk's generation: the store's disk tier holds it.
_ON_DISK = b"d"
_MOST_DIGITS = 20


class RedisCatalog:
    """Looks prefixes up in Redis, or asks the stores known last while Redis is away.

    `known_stores` returns the stores that Redis listed last.
    """

    def __init__(
        self,
        link: RedisLink,
        known_stores: Callable[[], Sequence[StoreEntry]],
        direct: StoreCatalog,
    ) -> None:
        self._link = link
        self._known_stores = known_stores
        self._direct = direct
        self._is_falling_back = False

    async def cached_tokens(self, query: PrefixQuery) -> dict[str, StoreTokens]:
        """Return tokens in full chunks, by advertised address."""
        layouts = {layout.layout_hash: layout for layout in query.layouts}
        stores = [s for s in self._known_stores() if s.layout_hash in layouts][:_MOST_STORES]
        if not stores:
            return {}
        try:
            if self._link.is_away:
                raise Unavailable("Redis is away")
            found, pools = await asyncio.gather(
                self._lookup(stores, layouts, query), self._ask_pools(stores, query)
            )
        except Unavailable:
            return await self._ask_stores(stores, query)
        self._is_falling_back = False
        return found | pools

    async def _ask_stores(
        self, stores: Sequence[StoreEntry], query: PrefixQuery
    ) -> dict[str, StoreTokens]:
        """Ask the stores that no worker named, and whose catalog cannot be read, directly."""
        if not self._is_falling_back:
            self._is_falling_back = True
            _log.warning("without Redis: the %d stores known last are asked directly", len(stores))
        known = frozenset(store.address for store in stores[:_MOST_FALLBACK_STORES])
        return await self._direct.cached_tokens(replace(query, stores=known - query.stores))

    async def _ask_pools(
        self, stores: Sequence[StoreEntry], query: PrefixQuery
    ) -> dict[str, StoreTokens]:
        """Ask one store of each layout what its pool holds; none that is asked anyway."""
        asked: dict[bytes, str] = {}
        for store in stores:
            if Tier.POOL.value in store.tiers and store.address not in query.stores:
                asked.setdefault(store.layout_hash, store.address)
        if not asked:
            return {}
        return await self._direct.cached_tokens(replace(query, stores=frozenset(asked.values())))

    async def _lookup(
        self, stores: Sequence[StoreEntry], layouts: dict[bytes, LayoutName], query: PrefixQuery
    ) -> dict[str, StoreTokens]:
        """Ask Redis. Raises Unavailable."""
        keys = query.keys
        asked = [store for store in stores if keys.get(store.layout_hash)]
        if not asked:
            return {}
        answers = await self._link.run(_read(asked, keys))
        found: dict[str, StoreTokens] = {}
        for store, answer in zip(asked, answers, strict=True):
            size = layouts[store.layout_hash].chunk_tokens
            arena, disk = leading_counts(answer)
            tiers = {Tier.DISK: disk * size} if Tier.DISK.value in store.tiers else {}
            before = found.get(store.address, StoreTokens())
            # A store that restarted may be listed twice for a moment.
            if arena * size >= before.arena:
                found[store.address] = StoreTokens(arena * size, tiers)
        return found


def leading_counts(answer: Any) -> tuple[int, int]:
    """Return how many leading values name a chunk in the arena; and in the arena or on disk.

    A value is the generation in the arena, 0 for none, and "d" if the disk tier holds the chunk.
    """
    if not isinstance(answer, list):
        return 0, 0
    arena: int | None = None
    for count, value in enumerate(answer):
        if not isinstance(value, bytes):
            break
        digits = value.removesuffix(_ON_DISK)
        if not digits.isdigit() or len(digits) > _MOST_DIGITS:
            break
        if int(digits) == 0:
            arena = count if arena is None else arena
            if digits == value:
                break
    else:
        count = len(answer)
    return count if arena is None else arena, count


def _read(
    stores: Sequence[StoreEntry], keys: Mapping[bytes, Sequence[bytes]]
) -> Callable[[Redis], Any]:
    async def read(redis: Redis) -> Any:
        async with redis.pipeline(transaction=False) as pipe:
            for store in stores:
                pipe.hmget(
                    chunks_key(store.instance_id, store.epoch), list(keys[store.layout_hash])
                )
            # A key of a wrong type is a miss of its store only.
            return await pipe.execute(raise_on_error=False)

    return read
