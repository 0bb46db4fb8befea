"""The catalog with Redis: looks a prefix up in what the stores wrote there.

One pipelined round trip (HMGET) asks for every key of the prefix in all stores. A binary
search for the prefix's end would send fewer keys but wait for several answers, and round
trips are what costs: 128,000 tokens are 2,000 keys, 64 KB.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from redis.asyncio import Redis

from scheduler_service.prefixes.catalog import LayoutName, PrefixQuery
from scheduler_service.prefixes.stores import StoreCatalog
from splitpoint.discovery.entries import StoreEntry, chunks_key
from splitpoint.discovery.redis_link import RedisLink
from splitpoint.errors import Unavailable

_log = logging.getLogger(__name__)

# Stores of one lookup.
_MOST_STORES = 64
# Stores that are asked directly while Redis is away.
_MOST_FALLBACK_STORES = 16


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

    async def cached_tokens(self, query: PrefixQuery) -> dict[str, int]:
        """Return tokens in full chunks, by advertised address."""
        layouts = {layout.layout_hash: layout for layout in query.layouts}
        stores = [s for s in self._known_stores() if s.layout_hash in layouts][:_MOST_STORES]
        if not stores:
            return {}
        try:
            found = await self._lookup(stores, layouts, query) if not self._link.is_away else None
        except Unavailable:
            found = None
        if found is not None:
            self._is_falling_back = False
            return found
        if not self._is_falling_back:
            self._is_falling_back = True
            _log.warning("without Redis: the %d stores known last are asked directly", len(stores))
        known = frozenset(store.address for store in stores[:_MOST_FALLBACK_STORES])
        return await self._direct.cached_tokens(replace(query, stores=known - query.stores))

    async def _lookup(
        self, stores: Sequence[StoreEntry], layouts: dict[bytes, LayoutName], query: PrefixQuery
    ) -> dict[str, int]:
        """Ask Redis. Raises Unavailable."""
        keys = query.keys
        asked = [store for store in stores if keys.get(store.layout_hash)]
        if not asked:
            return {}
        answers = await self._link.run(_read(asked, keys))
        found: dict[str, int] = {}
        for store, answer in zip(asked, answers, strict=True):
            chunk_tokens = layouts[store.layout_hash].chunk_tokens
            tokens = leading_count(answer) * chunk_tokens
            # A store that restarted may be listed twice for a moment.
            found[store.address] = max(tokens, found.get(store.address, 0))
        return found


def leading_count(answer: Any) -> int:
    """Return how many valid generations (positive integers) the answer starts with."""
    if not isinstance(answer, list):
        return 0
    count = 0
    for value in answer:
        if not isinstance(value, bytes) or not value.isdigit() or len(value) > 20:
            break
        if int(value) == 0:
            break
        count += 1
    return count


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
