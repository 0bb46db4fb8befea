"""The question which stores hold how much of a prefix, and the interface that answers it.

`StoreCatalog` asks the stores that workers named; `RedisCatalog` looks up what all
stores wrote to Redis. Every answer is a hint: the worker asks its own store again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from splitpoint.tiers import Tier


@dataclass(frozen=True, slots=True)
class LayoutName:
    """What chunk keys depend on besides tokens and salt."""

    layout_hash: bytes
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixQuery:
    """A sequence, and the stores and layouts in which to look for its prefix."""

    # Of the tenant's keys, for the numerics of the workers that would use the prefix.
    tenant_salt: bytes
    # From the first token on.
    token_ids: Sequence[int]
    # Layouts of the workers' stores; chunks of other layouts are of no use.
    layouts: frozenset[LayoutName]
    # Addresses of the stores that workers named.
    stores: frozenset[str]
    # Keys of the leading full chunks by layout hash (`marks.py`).
    keys: Mapping[bytes, Sequence[bytes]]


@dataclass(frozen=True, slots=True)
class StoreTokens:
    """Leading tokens of a sequence that one store holds.

    Attributes:
        arena: in its arena; the last chunk may match in part.
        tiers: in its arena or in this tier behind it, in full chunks.
    """

    arena: int = 0
    tiers: Mapping[Tier, int] = field(default_factory=dict)


class PrefixCatalog(Protocol):
    async def cached_tokens(self, query: PrefixQuery) -> dict[str, StoreTokens]:
        """Return what each store holds, by its address; a missing store holds nothing.

        A store or a Redis that does not answer gives an empty result, not an error.
        """
        ...


class JoinedCatalogs:
    """Several catalogs, asked at the same time. An earlier one wins for the same store."""

    def __init__(self, catalogs: Collection[PrefixCatalog]) -> None:
        self._catalogs = tuple(catalogs)

    async def cached_tokens(self, query: PrefixQuery) -> dict[str, StoreTokens]:
        answers = await asyncio.gather(*(c.cached_tokens(query) for c in self._catalogs))
        joined: dict[str, StoreTokens] = {}
        for answer in reversed(answers):
            joined |= answer
        return joined
