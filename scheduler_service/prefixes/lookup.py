"""Where the prefix of a request lies: in whose own store, and in which others.

Asks the catalog and sorts the answer for the workers; decides nothing. A store
may be known under several addresses: the one its worker uses, and the one that
it advertises; its instance tells that they are one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scheduler_service.placement.fetch_plan import FetchSource
from scheduler_service.placement.footprint import WorkerFacts
from scheduler_service.prefixes.catalog import LayoutName, PrefixCatalog, PrefixQuery
from splitpoint.config import is_local_address
from splitpoint.discovery.entries import StoreEntry

# Sources that a plan compares; the ones that hold most come first.
_MOST_SOURCES = 8


@dataclass(frozen=True, slots=True)
class PlacedWorker:
    """A worker that is ready, and the address at which the scheduler reaches it."""

    facts: WorkerFacts
    address: str


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Cached tokens of one sequence. Absent: none."""

    # In each worker's own store, by worker.
    own: Mapping[str, int] = field(default_factory=dict)
    # In stores that the worker could fetch from, by worker.
    sources: Mapping[str, tuple[FetchSource, ...]] = field(default_factory=dict)


async def find_prefixes(
    catalog: PrefixCatalog,
    workers: Sequence[PlacedWorker],
    advertised: Sequence[StoreEntry],
    tenant_salt: bytes,
    token_ids: Sequence[int],
) -> Prefixes:
    """Ask the catalog. `advertised`: the stores that Redis knows."""
    with_store = [worker for worker in workers if worker.facts.kvstore_address]
    if not with_store:
        return Prefixes()
    query = PrefixQuery(
        tenant_salt,
        token_ids,
        frozenset(LayoutName(w.facts.layout_hash, w.facts.chunk_tokens) for w in with_store),
        frozenset(worker.facts.kvstore_address for worker in with_store),
    )
    return sort_out(await catalog.cached_tokens(query), with_store, advertised)


def sort_out(
    counts: Mapping[str, int], workers: Sequence[PlacedWorker], advertised: Sequence[StoreEntry]
) -> Prefixes:
    """Tokens by store address -> tokens and sources by worker. Pure.

    No source is: the worker's own store under any of its addresses, a store of
    another layout, an address that means something else on the worker's host.
    """
    instances = {w.facts.kvstore_address: w.facts.store_instance_id for w in workers}
    instances |= {store.address: store.instance_id for store in advertised}
    layouts = {w.facts.kvstore_address: w.facts.layout_hash for w in workers}
    layouts |= {store.address: store.layout_hash for store in advertised}
    own: dict[str, int] = {}
    sources: dict[str, tuple[FetchSource, ...]] = {}
    for worker in workers:
        facts = worker.facts
        mine = {facts.kvstore_address}
        if facts.store_instance_id:
            mine |= {a for a, instance in instances.items() if instance == facts.store_instance_id}
        own[facts.worker_id] = max(counts.get(address, 0) for address in mine)
        others = [
            FetchSource(address, tokens)
            for address, tokens in counts.items()
            if tokens > 0
            and address not in mine
            and layouts.get(address) == facts.layout_hash
            and (is_local_address(worker.address) or not is_local_address(address))
        ]
        others.sort(key=lambda source: (-source.cached_tokens, source.address))
        sources[facts.worker_id] = tuple(others[:_MOST_SOURCES])
    return Prefixes(own, sources)
