"""Finds the cached prefix of a request: in each worker's own store, and in other stores.

A store may have several addresses: the one that its worker uses, and the one that it
advertises. Its instance id tells that they are one store.

A catalog says which stores hold how much of a prefix: `StoreCatalog` asks the stores that workers
named, `RedisCatalog` looks up what all stores wrote to Redis. Every answer is a hint: the worker
asks its own store again.

Keys and marks of chunks are bounded: the chunks after the first 4,096 are neither looked up nor
shared in the scheduler's accounts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Protocol, overload

from scheduler_service.worker_facts import KeySpace, WorkerFacts
from splitpoint.config import is_local_address
from splitpoint.discovery.entries import StoreEntry
from splitpoint.keys import MARK_BYTES, chunk_keys, numerics_salt
from splitpoint.tiers import ChunkSource, Tier

# Other stores that a plan compares: those that hold most tokens.
_MOST_SOURCES = 8
MOST_KEYS = 4096
# Longer sequences are hashed in a thread, which keeps the event loop free.
_SHORT_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class LayoutName:
    """What chunk keys depend on besides tokens and salt."""

    layout_hash: bytes
    chunk_tokens: int


class ChunkMarks(Sequence[bytes]):
    """The marks of the chunks of a sequence, in order; packed, since there may be thousands.

    A mark is the first MARK_BYTES of a key. A wrong one costs a wrong charge, not a wrong answer.
    """

    __slots__ = ("packed",)

    def __init__(self, packed: bytes = b"") -> None:
        self.packed = packed

    @classmethod
    def of(cls, keys: Sequence[bytes]) -> ChunkMarks:
        return cls(b"".join(key[:MARK_BYTES] for key in keys))

    def __len__(self) -> int:
        return len(self.packed) // MARK_BYTES

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> ChunkMarks: ...

    def __getitem__(self, index: int | slice) -> bytes | ChunkMarks:
        if isinstance(index, slice):
            return ChunkMarks(b"".join(list(self)[index]))
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.packed[index * MARK_BYTES : (index + 1) * MARK_BYTES]

    def __iter__(self) -> Iterator[bytes]:
        packed = self.packed
        return (packed[n : n + MARK_BYTES] for n in range(0, len(packed), MARK_BYTES))


@dataclass(frozen=True, slots=True)
class PrefixQuery:
    """A sequence, and the stores and layouts in which to look for its prefix."""

    # Salt of the tenant's keys, for the numerics of the workers that would use the prefix.
    tenant_salt: bytes
    # From the first token on.
    token_ids: Sequence[int]
    # Layouts of the workers' stores; chunks of other layouts are of no use.
    layouts: frozenset[LayoutName]
    # Addresses of the stores that workers named.
    stores: frozenset[str]
    # Keys of the leading full chunks by layout hash.
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


@dataclass(frozen=True, slots=True)
class FetchSource:
    """Another store, or a tier of the worker's own (no address), and the leading tokens of the
    sequence that are probably there: in a tier or in the arena before it.
    """

    address: str
    cached_tokens: int
    tier: Tier = Tier.ARENA
    # Where what it brings is expected to meet what is computed meanwhile. 0: it is fetched before
    # anything is computed.
    meeting_tokens: int = 0

    @property
    def place(self) -> ChunkSource:
        return ChunkSource(self.address, self.tier)


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """Where the leading tokens of one sequence are cached, by worker id."""

    # Tokens in the arena of the worker's own store.
    own: Mapping[str, int] = field(default_factory=dict)
    # Tiers of that store, and other stores, from which the worker could fetch tokens.
    sources: Mapping[str, tuple[FetchSource, ...]] = field(default_factory=dict)
    # Marks of the full chunks.
    marks: Mapping[KeySpace, Sequence[bytes]] = field(default_factory=dict)


async def find_prefix(
    catalog: PrefixCatalog,
    workers: Sequence[WorkerFacts],
    advertised: Sequence[StoreEntry],
    tenant_salt: bytes,
    token_ids: Sequence[int],
) -> CachedPrefix:
    """Ask the catalog. `advertised`: the stores that Redis lists.

    Workers that compute other bits have other keys, so each digest is a question of its own.
    """
    groups: dict[str, list[WorkerFacts]] = {}
    for worker in workers:
        groups.setdefault(worker.numerics_digest, []).append(worker)
    found = await asyncio.gather(
        *(
            _find_alike(
                catalog, group, workers, advertised, numerics_salt(tenant_salt, digest), token_ids
            )
            for digest, group in groups.items()
        )
    )
    # No two groups have a worker or a key space in common.
    return CachedPrefix(
        own={name: tokens for each in found for name, tokens in each.own.items()},
        sources={name: stores for each in found for name, stores in each.sources.items()},
        marks={space: marks for each in found for space, marks in each.marks.items()},
    )


async def _find_alike(
    catalog: PrefixCatalog,
    workers: Sequence[WorkerFacts],
    known: Sequence[WorkerFacts],
    advertised: Sequence[StoreEntry],
    salt: bytes,
    token_ids: Sequence[int],
) -> CachedPrefix:
    """Ask for the chunks of workers with one digest, whose keys have this salt.

    The stores of all `known` workers with their layout may hold some: one outlives its workers.
    """
    layouts = frozenset(LayoutName(w.layout_hash, w.chunk_tokens) for w in workers)
    keys = await hash_chunks(layouts, salt, token_ids)
    digest = workers[0].numerics_digest
    marks = {(layout, digest): ChunkMarks.of(found) for layout, found in keys.items()}
    with_store = [worker for worker in workers if worker.kvstore_address]
    if not with_store:
        return CachedPrefix(marks=marks)
    layouts = frozenset(LayoutName(w.layout_hash, w.chunk_tokens) for w in with_store)
    hashes = {layout.layout_hash for layout in layouts}
    stores = {w.kvstore_address for w in known if w.kvstore_address and w.layout_hash in hashes}
    query = PrefixQuery(salt, token_ids, layouts, frozenset(stores), keys)
    found = by_worker(await catalog.cached_tokens(query), with_store, advertised, known)
    return replace(found, marks=marks)


def by_worker(
    found: Mapping[str, StoreTokens],
    workers: Sequence[WorkerFacts],
    advertised: Sequence[StoreEntry],
    known: Sequence[WorkerFacts],
) -> CachedPrefix:
    """Convert tokens by store address to tokens and sources of `workers`. Pure.

    Stores are those that the `known` workers named, `workers` among them, and the advertised ones.

    Three kinds of stores are no source: the worker's own store under any of its
    addresses, a store of another layout, and a local address of another host. Of tiers, those of
    the own store are; what its pool holds another store of the pool may say.
    """
    instances = {w.kvstore_address: w.store_instance_id for w in known}
    instances |= {store.address: store.instance_id for store in advertised}
    layouts = {w.kvstore_address: w.layout_hash for w in known}
    layouts |= {store.address: store.layout_hash for store in advertised}
    pooled = {store.address for store in advertised if Tier.POOL.value in store.tiers}
    own: dict[str, int] = {}
    sources: dict[str, tuple[FetchSource, ...]] = {}
    for worker in workers:
        own_addresses = {worker.kvstore_address}
        if worker.store_instance_id:
            own_addresses |= {a for a, i in instances.items() if i == worker.store_instance_id}
        here = [found[address] for address in own_addresses if address in found]
        own[worker.worker_id] = max((store.arena for store in here), default=0)
        alike = {a: t for a, t in found.items() if layouts.get(a) == worker.layout_hash}
        pool = alike.values() if own_addresses & pooled else ()
        others = [
            FetchSource(address, tokens.arena)
            for address, tokens in alike.items()
            if tokens.arena > 0
            and address not in own_addresses
            and (is_local_address(worker.address) or not is_local_address(address))
        ]
        others.sort(key=lambda source: (-source.cached_tokens, source.address))
        tiers = _tiers(here, pool, own[worker.worker_id])
        sources[worker.worker_id] = (*tiers, *others[:_MOST_SOURCES])
    return CachedPrefix(own, sources)


def _tiers(
    here: Iterable[StoreTokens], pool: Iterable[StoreTokens], arena_tokens: int
) -> list[FetchSource]:
    """Return the tiers of a store that hold more than its arena, fastest kind first.

    Args:
        here: what is known of the store; it may be known under several addresses.
        pool: what is known of stores that share its pool.
    """
    held: dict[Tier, int] = {}
    for store in here:
        for tier, tokens in store.tiers.items():
            held[tier] = max(tokens, held.get(tier, 0))
    for store in pool:
        tokens = store.tiers.get(Tier.POOL, 0)
        held[Tier.POOL] = max(tokens, held.get(Tier.POOL, 0))
    return [FetchSource("", held[tier], tier) for tier in Tier if held.get(tier, 0) > arena_tokens]


async def hash_chunks(
    layouts: Collection[LayoutName], tenant_salt: bytes, token_ids: Sequence[int]
) -> dict[bytes, list[bytes]]:
    """Return `keys_by_layout`, without blocking the event loop for a long sequence."""
    if len(token_ids) > _SHORT_TOKENS:
        return await asyncio.to_thread(keys_by_layout, layouts, tenant_salt, token_ids)
    return keys_by_layout(layouts, tenant_salt, token_ids)


def keys_by_layout(
    layouts: Collection[LayoutName], tenant_salt: bytes, token_ids: Sequence[int]
) -> dict[bytes, list[bytes]]:
    """Return the keys of a sequence's full chunks by layout hash, at most MOST_KEYS of each."""
    return {
        layout.layout_hash: list(
            islice(
                chunk_keys(layout.layout_hash, tenant_salt, token_ids, layout.chunk_tokens),
                MOST_KEYS,
            )
        )
        for layout in layouts
    }
