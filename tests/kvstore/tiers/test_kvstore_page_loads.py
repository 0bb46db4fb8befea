"""Pages that only a tier holds: looked up, loaded in order, and compared."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from kvstore_client import Service, served
from kvstore_helpers import Bench
from page_helpers import PAGES, assert_pages, keys_of, match_pages, store_pages
from tier_double import MemoryTier
from waiting import until

from kvstore_service.server import KvStoreServicer
from kvstore_service.tiers.manager import TierManager
from splitpoint.tiers import Tier
from splitpoint.v1 import kvstore_pb2 as pb

SLOTS = 8
KINDS = (Tier.DISK, Tier.POOL)


class PageService(Service):
    tier: MemoryTier

    async def evict(self, keys: Sequence[bytes], salt: bytes = b"") -> None:
        """Store pages, and let a reservation of all slots push them to the tier."""
        store_pages(self.bench.store, self.session, keys, salt)
        self.give_back(await self.granted(self.bench.store.pool.slot_count))
        await until(lambda: not self.tier_is_behind())

    def tier_is_behind(self) -> bool:
        return bool(self.bench.store.pool.grants.copied)

    async def found(self, keys: Sequence[bytes], **changes: Any) -> list[bool]:
        """Match pages, compare their bytes, and release them. Return which were found."""
        answer = await match_pages(self, keys, **changes)
        salt = changes.get("tenant_salt", b"")
        found = assert_pages(self.bench.arena, answer.pages, keys, salt)
        self.bench.store.sessions.release(self.session, [answer.lease_id], [])
        return found

    def names(self, keys: Sequence[bytes], salt: bytes = b"") -> tuple[bytes, ...]:
        return self.bench.store.pool.name_pages(salt, keys).keys


@asynccontextmanager
async def serving(
    folder: Path, *kinds: Tier, slot_count: int = SLOTS
) -> AsyncIterator[PageService]:
    """Serve an arena of pages with tiers in memory; `service.tier` is the first."""
    bench = Bench(folder, SLOTS, layout=PAGES)
    memories = [MemoryTier(bench.arena, kind) for kind in kinds or (Tier.DISK,)]
    tiers = TierManager(bench.store.pool, memories)
    servicer = KvStoreServicer(bench.store, tiers=tiers)
    writing = asyncio.create_task(tiers.run())
    try:
        async with served(servicer, "127.0.0.1:0") as channel:
            service = PageService(bench, servicer, channel)
            service.tier, service.session = memories[0], bench.attach()
            try:
                yield service
            finally:
                for memory in memories:
                    memory.gate.set()
        assert bench.integrity.check_integrity() == []
        assert bench.store.pool.leases.leased_slot_count == 0
    finally:
        writing.cancel()
        await asyncio.wait({writing})
        bench.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_look_up_brings_pages_back(tmp_path: Path, kind: Tier) -> None:
    async with serving(tmp_path, kind) as service:
        keys = keys_of(*range(5))
        await service.evict(keys)
        assert service.tier.chunks.keys() == set(service.names(keys))
        assert await service.found(keys) == [True] * 5
        assert service.tier.stats.read_chunk_count == 5
        assert await service.found(keys) == [True] * 5  # from the arena
        assert service.tier.stats.read_chunk_count == 5
        stats = await service.stats()
        assert (stats.match_count, stats.query_token_count, stats.hit_token_count) == (2, 10, 10)


@pytest.mark.parametrize("kind", KINDS)
async def test_missing_pages_do_not_hide_those_behind_them(tmp_path: Path, kind: Tier) -> None:
    """No slot is taken for a page that no tier has."""
    async with serving(tmp_path, kind) as service:
        await service.evict(keys_of(1, 3, 5))
        store_pages(service.bench.store, service.session, keys_of(4))
        keys = keys_of(0, 1, 2, 3, 4, 5, 6)
        assert await service.found(keys) == [False, True, False, True, True, True, False]
        assert service.tier.stats.missed_chunk_count == 0
        assert service.bench.states() == (SLOTS - 4, 0, 4, 0)


async def test_pages_of_another_namespace_stay_in_the_tier(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        await service.evict(keys_of(1), b"one")
        assert await service.found(keys_of(1), tenant_salt=b"two") == [False]
        assert service.tier.stats.read_chunk_count == 0
        assert await service.found(keys_of(1), tenant_salt=b"one") == [True]


async def test_as_many_as_fit_are_loaded_first_to_last(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        keys = keys_of(*range(12))
        await service.evict(keys[:6])
        await service.evict(keys[6:])
        assert len(service.tier.chunks) == 12
        assert await service.found(keys) == [True] * SLOTS + [False] * 4
        leased = await match_pages(service, keys[:5])
        assert await service.found(keys) == [True] * SLOTS + [False] * 4
        # What is leased leaves room for three others.
        assert await service.found(keys[5:]) == [True] * 3 + [False] * 4
        service.bench.store.sessions.release(service.session, [leased.lease_id], [])


async def test_a_full_arena_is_a_miss(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        await service.evict(keys_of(1, 2))
        granted = await service.granted(SLOTS)
        assert await service.found(keys_of(1, 2)) == [False, False]
        service.give_back(granted)
        assert await service.found(keys_of(1, 2)) == [True, True]


async def test_a_damaged_page_of_a_tier_is_dropped(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        keys = keys_of(1, 2, 3)
        await service.evict(keys)
        service.tier.damage(service.names(keys)[1])
        assert await service.found(keys) == [True, False, True]
        assert service.tier.stats.damaged_chunk_count == 1
        assert service.names(keys)[1] not in service.tier.chunks
        assert service.bench.states() == (SLOTS - 2, 0, 2, 0)


async def test_a_page_that_vanished_from_a_tier_is_a_miss(tmp_path: Path) -> None:
    async with serving(tmp_path, Tier.POOL) as service:
        keys = keys_of(1, 2, 3)
        await service.evict(keys)
        has = service.tier.has

        first = service.names(keys)[0]

        async def has_then_lost(keys: Sequence[bytes]) -> list[bool]:
            flags = await has(keys)
            del service.tier.chunks[first]
            return flags

        service.tier.has = has_then_lost  # type: ignore[method-assign]
        assert await service.found(keys) == [False, True, True]


async def test_a_tier_that_is_away_is_a_miss(tmp_path: Path) -> None:
    async with serving(tmp_path, Tier.DISK, Tier.POOL) as service:
        keys = keys_of(1, 2)
        await service.evict(keys)
        await until(lambda: len(service.tier.chunks) == 2)
        service.tier.go_away()
        assert await service.found(keys) == [True, True]  # from the other one


async def test_all_tiers_away(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        await service.evict(keys_of(1))
        service.tier.go_away()
        assert await service.found(keys_of(1)) == [False]


async def test_equal_loads_take_turns(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        keys = keys_of(*range(5))
        await service.evict(keys)
        found = await asyncio.gather(*(service.found(keys) for _ in range(4)))
        assert found == [[True] * 5] * 4
        assert service.tier.stats.read_chunk_count == 5


async def test_a_look_up_in_the_arena_does_not_wait_for_a_load(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        await service.evict(keys_of(1, 2, 3))
        store_pages(service.bench.store, service.session, keys_of(0))
        service.tier.gate.clear()
        loading = asyncio.create_task(service.found(keys_of(0, 1, 2, 3)))
        await until(lambda: service.tier.calls)
        assert await service.found(keys_of(0)) == [True]
        assert not loading.done()
        service.tier.gate.set()
        assert await loading == [True] * 4


async def test_a_caller_that_gave_up_gets_its_lease_by_asking_again(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        keys = keys_of(1, 2, 3)
        await service.evict(keys)
        service.tier.gate.clear()
        request = pb.MatchPagesRequest(
            session_id=service.session, request_id=b"late", page_keys=keys
        )
        pending = service.stub.MatchPages(request)
        await until(lambda: service.tier.calls)
        pending.cancel()
        again = asyncio.create_task(match_pages(service, keys, request_id=b"late"))
        await asyncio.sleep(0.05)
        service.tier.gate.set()
        answer = await again
        assert assert_pages(service.bench.arena, answer.pages, keys) == [True] * 3
        assert service.bench.store.counters.matches == 1
        service.bench.store.sessions.release(service.session, [answer.lease_id], [])


async def test_a_session_that_ends_while_pages_are_loaded_leaves_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        await service.evict(keys_of(1, 2, 3))
        store, has = service.bench.store, service.tier.has

        async def has_then_closed(keys: Sequence[bytes]) -> list[bool]:
            flags = await has(keys)
            service.tier.gate.clear()
            return flags

        service.tier.has = has_then_closed  # type: ignore[method-assign]
        loading = asyncio.create_task(match_pages(service, keys_of(1, 2, 3)))
        await until(lambda: store.pool.grants.copied)
        store.sessions.end(service.session)
        service.bench.presence.gone.add(service.session)
        store.sessions.sweep()
        assert store.pool.free_count == SLOTS - 3
        service.tier.gate.set()
        with pytest.raises(Exception, match="session"):
            await loading
        await until(lambda: store.pool.free_count == SLOTS)
