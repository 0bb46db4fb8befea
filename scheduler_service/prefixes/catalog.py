"""Which stores hold how much of a prefix: one question, whoever answers it.

Two catalogs answer: `StorePeeker` asks the stores that are known by name,
`RedisCatalog` looks up what all stores wrote. Every answer is a hint; the truth
is the worker's Match at its own store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class LayoutName:
    """What chunk keys depend on besides tokens and salt."""

    layout_hash: bytes
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixQuery:
    """One sequence, first token first, and whose chunks of it count."""

    tenant_salt: bytes
    token_ids: Sequence[int]
    # Layouts of the stores whose chunks are of use to somebody.
    layouts: frozenset[LayoutName]
    # Addresses of the stores that workers named.
    stores: frozenset[str]


class PrefixCatalog(Protocol):
    """Where to ask."""

    async def cached_tokens(self, query: PrefixQuery) -> dict[str, int]:
        """Leading tokens in each store, by address; a store that is missing has none.

        Never raises for a store or a Redis that is away: that is an empty answer.
        """
        ...


class JoinedCatalogs:
    """Several catalogs as one, asked at once; what an earlier one says of a store stands."""

    def __init__(self, catalogs: Collection[PrefixCatalog]) -> None:
        self._catalogs = tuple(catalogs)

    async def cached_tokens(self, query: PrefixQuery) -> dict[str, int]:
        answers = await asyncio.gather(*(c.cached_tokens(query) for c in self._catalogs))
        joined: dict[str, int] = {}
        for answer in reversed(answers):
            joined |= answer
        return joined
