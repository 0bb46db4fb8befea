"""Chunks that go down to a tier: when, in what order, and what a slow or absent tier costs."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from kvstore_helpers import LAYOUT, Bench, store_sequence
from tier_double import MemoryTier
from tier_service import (
    KEYS,
    OTHERS,
    SIZE,
    TOKENS,
    TierService,
    fill_and_evict,
    serving,
)
from waiting import until

from kvstore_service.eviction.policies import POLICIES
from kvstore_service.eviction.watermarks import WatermarkEvictor, Watermarks
from kvstore_service.tiers.manager import TierManager
from splitpoint.errors import ResourceExhausted, SplitpointError
from splitpoint.keys import chunk_keys
from splitpoint.tiers import Tier
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import types_pb2


def dropped(service: TierService) -> int:
    return service.servicer.tiers.writers[Tier.DISK].dropped_chunk_count


async def test_reserve_waits_until_its_slots_are_copied(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        service.tier.gate.clear()
        store_sequence(service.bench.store, service.session, b"", TOKENS)  # six slots of eight
        reserving = asyncio.create_task(service.reserve(7))
        await until(lambda: service.bench.store.pool.grants.set_aside)
        assert service.bench.integrity.check_integrity() == []
        # The chunks are out of the index at once.
        assert service.bench.store.peek(b"", TOKENS).cached_tokens < len(TOKENS)
        assert not reserving.done()
        service.tier.gate.set()
        await reserving
        assert KEYS[0] in service.tier.chunks or service.bench.store.pool.index.get(KEYS[0])
        assert set(KEYS[1:]) <= service.tier.chunks.keys()
        assert dropped(service) == 0


async def test_a_slow_tier_costs_chunks_and_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore_service.tiers.writer.SLOW_SECONDS", 0.2)
    monkeypatch.setattr("kvstore_service.tiers.manager.ROOM_SECONDS", 0.1)
    async with serving(tmp_path, 16) as service:
        store = service.bench.store
        for tokens in OTHERS[:4]:  # four full chunks each
            store_sequence(store, service.session, b"", tokens)
        service.tier.gate.clear()
        # The write that has begun keeps its slots; the others are given up.
        first = await service.granted(8)
        copied = len(store.pool.grants.copied)
        assert 0 < copied <= 4
        assert dropped(service) >= 8 - copied
        await asyncio.sleep(0.25)
        assert not service.servicer.tiers.writers[Tier.DISK].accepts()
        service.give_back(first)
        second = await service.granted(12 - copied)
        assert service.bench.integrity.check_integrity() == []
        with pytest.raises(ResourceExhausted):
            await service.reserve(15)
        service.tier.gate.set()
        await until(lambda: not store.pool.grants.copied)
        service.give_back(second)
        await service.reserve(16)
        assert len(service.tier.chunks) >= copied


@pytest.mark.parametrize("fault", ["away", "full"])
async def test_an_absent_or_full_tier_costs_chunks(tmp_path: Path, fault: str) -> None:
    async with serving(tmp_path) as service:
        if fault == "away":
            service.tier.go_away()
        else:
            service.tier.capacity = 2
        store_sequence(service.bench.store, service.session, b"", TOKENS)
        await service.reserve(8)
        assert len(service.tier.chunks) == (0 if fault == "away" else 2)
        assert dropped(service) == (5 if fault == "away" else 3)


async def test_second_use(tmp_path: Path) -> None:
    async with serving(tmp_path, on_eviction=False) as service:
        store = service.bench.store
        store_sequence(store, service.session, b"", TOKENS)
        store_sequence(store, service.session, b"", OTHERS[0][: 2 * SIZE])
        request = pb.MatchRequest(
            session_id=service.session, request_id=b"m", token_ids=TOKENS[: 3 * SIZE]
        )
        answer = await service.stub.Match(request)
        await until(lambda: service.tier.chunks.keys() == set(KEYS[:3]))
        store.sessions.release(service.session, [answer.lease_id], [])
        await service.reserve(8)
        assert service.tier.chunks.keys() == set(KEYS[:3])
        assert dropped(service) == 0


async def test_the_operators_eviction_and_partial_chunks_reach_no_tier(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        store_sequence(service.bench.store, service.session, b"", TOKENS)
        service.tier.gate.clear()
        answer = await service.stub.Evict(pb.EvictRequest())
        assert answer.evicted_chunk_count == 6
        service.tier.gate.set()
        store_sequence(service.bench.store, service.session, b"", TOKENS[5 * SIZE :])
        await service.reserve(8)
        assert service.tier.chunks == {}
        assert dropped(service) == 0


async def test_the_next_victims_are_written_before_they_are_evicted(tmp_path: Path) -> None:
    async with serving(tmp_path, 16) as service:
        for tokens in OTHERS[:4]:
            store_sequence(service.bench.store, service.session, b"", tokens)
        size = LAYOUT.chunk_tokens
        last_of_first = list(chunk_keys(LAYOUT.layout_hash, b"", OTHERS[0], size))[2:]
        await until(lambda: service.tier.chunks.keys() == set(last_of_first))
        service.tier.gate.clear()
        await service.reserve(2)
        # It waited for nothing: chunks that the tier does not take in time are dropped.
        assert dropped(service) == 0
        assert not service.bench.store.pool.grants.set_aside


async def test_watermarks_evict_through_the_tier(tmp_path: Path) -> None:
    async with serving(tmp_path, 16) as service:
        store = service.bench.store
        for tokens in OTHERS[:4]:
            store_sequence(store, service.session, b"", tokens)
        evictor = WatermarkEvictor(store.pool, Watermarks(0.8, 0.25))
        running = asyncio.create_task(evictor.run())
        await until(lambda: store.pool.free_count == 12)
        await asyncio.sleep(0.1)
        running.cancel()
        assert (store.pool.free_count, evictor.evicted_total, dropped(service)) == (12, 12, 0)
        assert len(service.tier.chunks) >= 12


async def test_a_reservation_that_cannot_be_granted_evicts_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        store_sequence(service.bench.store, service.session, b"", TOKENS, keep_leased=True)
        with pytest.raises(ResourceExhausted):
            await service.reserve(4)
        assert service.bench.store.peek(b"", TOKENS).cached_tokens == len(TOKENS)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(5))
async def test_next_victims_are_those_of_eviction(tmp_path: Path, policy: str, seed: int) -> None:
    chance = random.Random(seed)
    bench = Bench(tmp_path, 32, policy=POLICIES[policy]())
    try:
        session = bench.attach()
        pool = bench.store.pool
        sequences = [[chance.randrange(2) for _ in range(6 * SIZE)] for _ in range(4)]
        sequences += [[*s[: 3 * SIZE], *range(9, 9 + 2 * SIZE)] for s in sequences[:2]]
        for _ in range(20):
            tokens = chance.choice(sequences)
            found = bench.store.match(session, b"", tokens[: chance.randrange(1, len(tokens))])
            if not found.entries:
                store_sequence(bench.store, session, b"", tokens)
            if chance.random() < 0.8 and found.lease_id:
                bench.store.sessions.release(session, [found.lease_id], [])
        limit = chance.randrange(1, 32)
        before = pool.evicted_total
        victims = pool.next_victims(limit)
        assert pool.next_victims(limit) == victims  # it changes nothing
        for entry in victims:
            assert pool.holds(entry)
            assert pool.evict(1) == 1
            assert not pool.holds(entry)
        assert len(victims) == limit or pool.evict(1) == 0
        assert pool.evicted_total == before + len(victims)
    finally:
        bench.close()


@pytest.mark.parametrize("seed", range(4))
async def test_random_calls_lose_no_slot_and_serve_no_wrong_byte(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore_service.tiers.writer.SLOW_SECONDS", 0.03)
    monkeypatch.setattr("kvstore_service.tiers.manager.ROOM_SECONDS", 0.02)
    monkeypatch.setattr("kvstore_service.tiers.loader.BATCH_BYTES", 2 * LAYOUT.chunk_bytes)
    chance = random.Random(seed)
    sequences = [*OTHERS[:6], TOKENS, [*TOKENS[: 3 * SIZE], *OTHERS[9]]]
    async with serving(tmp_path, 12, on_eviction=chance.random() < 0.7) as service:
        store = service.bench.store
        loading: list[asyncio.Task[list[pb.LoadChunksResponse]]] = []
        for _ in range(120):
            tokens = chance.choice(sequences)
            kind = chance.choice(["store", "reserve", "load", "match", "gate", "damage", "pause"])
            if kind == "store":
                if not store.peek(b"", tokens).entries and store.pool.free_count >= 5:
                    store_sequence(store, service.session, b"", tokens)
            elif kind == "reserve":
                await _ignoring(_reserve_and_return(service, chance.randrange(1, 12)))
            elif kind == "load":
                loading.append(asyncio.create_task(service.loaded(tokens)))
            elif kind == "match":
                found = store.match(service.session, b"", tokens)
                store.sessions.release(service.session, [found.lease_id], [])
                service.servicer.tiers.used(found.entries)
            elif kind == "gate":
                (service.tier.gate.clear if chance.random() < 0.3 else service.tier.gate.set)()
            elif kind == "damage" and service.tier.chunks and service.tier.gate.is_set():
                service.tier.damage(chance.choice(list(service.tier.chunks)))
            await asyncio.sleep(0.002)
            assert service.bench.integrity.check_integrity() == []
            for each in sequences:
                service.assert_payloads(each, store.peek(b"", each).cached_tokens // SIZE)
        service.tier.gate.set()
        for task in loading:
            await _ignoring(task)
        await until(lambda: not store.pool.grants.copied)
        assert not store.pool.grants.set_aside


async def _reserve_and_return(service: TierService, count: int) -> None:
    service.give_back(await service.granted(count))


async def _ignoring(work: object) -> None:
    """Wait for work that may be refused."""
    try:
        await work  # type: ignore[misc]
    except SplitpointError:
        pass


async def test_two_tiers_get_what_each_lacks(tmp_path: Path) -> None:
    bench = Bench(tmp_path, 8)
    disk, pool_tier = MemoryTier(bench.arena), MemoryTier(bench.arena, Tier.POOL)
    tiers = TierManager(bench.store.pool, [disk, pool_tier])
    running = asyncio.create_task(tiers.run())
    try:
        session = bench.attach()
        store_sequence(bench.store, session, b"", TOKENS)
        disk.chunks = dict.fromkeys(KEYS, (b"", 0))
        await tiers.make_room(8)
        assert pool_tier.chunks.keys() == set(KEYS)
        assert not any(set(KEYS) & set(keys) for keys in disk.writes)
        assert bench.store.pool.free_count == 8
        assert await tiers.held(KEYS) == {Tier.DISK: 5, Tier.POOL: 5}
    finally:
        running.cancel()
        await asyncio.wait({running})
        bench.close()


@pytest.mark.parametrize("is_kept", [False, True])
async def test_a_stop_writes_what_the_arena_holds(tmp_path: Path, is_kept: bool) -> None:
    bench = Bench(tmp_path, 16)
    disk, pool_tier = MemoryTier(bench.arena), MemoryTier(bench.arena, Tier.POOL)
    pool_tier.capacity = 3
    tiers = TierManager(bench.store.pool, [disk, pool_tier])
    try:
        await tiers.start()
        session = bench.attach()
        store_sequence(bench.store, session, b"", OTHERS[0])
        store_sequence(bench.store, session, b"", TOKENS, keep_leased=True)
        await tiers.flush(is_arena_kept=is_kept)
        assert len(disk.chunks) == (0 if is_kept else 9)
        # A tier with little room gets the leading chunks of what is in use.
        assert pool_tier.chunks.keys() == set(KEYS[:3])
        assert bench.store.pool.grants.copied == {}
    finally:
        await tiers.close()
        bench.close()


class PoolBench:
    """A store whose only tier is a pool, which tells what it holds by I/O only."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.bench = Bench(folder, 8)
        self.store = self.bench.store
        self.tier = MemoryTier(self.bench.arena, Tier.POOL)
        self.tiers = TierManager(self.store.pool, [self.tier], **options)
        self.session = self.bench.attach()

    @property
    def written(self) -> Counter[bytes]:
        """The number of writes of each chunk."""
        return Counter(key for keys in self.tier.writes for key in keys)

    def match(self) -> None:
        found = self.store.match(self.session, b"", TOKENS)
        self.tiers.used(found.entries)
        self.store.sessions.release(self.session, [found.lease_id], [])


@asynccontextmanager
async def pool_bench(folder: Path, **options: Any) -> AsyncIterator[PoolBench]:
    bench = PoolBench(folder, **options)
    running = asyncio.create_task(bench.tiers.run())
    try:
        yield bench
    finally:
        running.cancel()
        await asyncio.wait({running})
        bench.bench.close()


@pytest.mark.parametrize("on_eviction", [True, False])
async def test_a_pool_gets_each_chunk_once(tmp_path: Path, on_eviction: bool) -> None:
    async with pool_bench(tmp_path, on_eviction=on_eviction) as bench:
        for _ in range(3):
            store_sequence(bench.store, bench.session, b"", TOKENS)
            for _ in range(4):
                bench.match()
                await asyncio.sleep(0.01)
            await bench.tiers.make_room(8)
            assert bench.tier.chunks.keys() == set(KEYS)
        assert bench.written == Counter(KEYS)


@pytest.mark.parametrize("loss", ["peek", "read", "fill", "away", "time"])
async def test_a_pool_gets_again_what_it_may_lack(
    tmp_path: Path, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, tier_name=Tier.POOL) as service:
        await fill_and_evict(service)
        has = service.tier.has
        service.tier.chunks.clear()
        if loss == "peek":
            await service.peek()
        elif loss == "time":
            monkeypatch.setattr("kvstore_service.tiers.writer.KNOWN_SECONDS", 0.0)
        elif loss == "away":
            service.tier.go_away()
            await asyncio.sleep(0.1)
            service.tier.come_back()
        elif loss == "fill":
            slots = await service.granted(5)
            await service.fill(slots, KEYS, tier=types_pb2.TIER_POOL)
            service.give_back(slots)
        else:

            async def stale(keys: Sequence[bytes]) -> list[bool]:
                return [True] * len(keys)

            service.tier.has = stale  # type: ignore[method-assign]
            [loaded] = await service.loaded(tier=types_pb2.TIER_POOL)
            assert loaded.cached_tokens == 0
            service.tier.has = has  # type: ignore[method-assign]
        await fill_and_evict(service)
        assert service.tier.chunks.keys() == set(KEYS)


async def test_a_reservation_does_not_wait_for_a_tier_without_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore_service.tiers.writer.SLOW_SECONDS", 0.05)
    monkeypatch.setattr("kvstore_service.tiers.manager.ROOM_SECONDS", 12.0)  # longer than a call
    async with serving(tmp_path, 16) as service:
        store, pool = service.bench.store, service.bench.store.pool
        service.tier.gate.clear()
        for tokens in OTHERS[:4]:
            store_sequence(store, service.session, b"", tokens)
        await until(lambda: pool.grants.copied)  # written before they are evicted
        for _ in range(3):
            service.give_back(await service.granted(8))
            for tokens in OTHERS[4:6]:
                if not store.peek(b"", tokens).entries and pool.free_count >= 4:
                    store_sequence(store, service.session, b"", tokens)
        assert pool.grants.set_aside
        assert pool.soon_free_count == pool.free_count


async def test_slots_that_a_stuck_thread_holds_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the disk tier holds them while it is away."""
    monkeypatch.setattr("kvstore_service.tiers.manager.ROOM_SECONDS", 12.0)
    async with serving(tmp_path, 16) as service:
        store, pool = service.bench.store, service.bench.store.pool
        service.tier.go_away()
        for tokens in OTHERS[:4]:
            store_sequence(store, service.session, b"", tokens)
        held = [entry.slot for entry in pool.next_victims(4)]
        pool.grants.begin_copy(held)
        assert pool.evict(4) == 4
        assert pool.grants.set_aside == set(held)
        assert (pool.free_count, pool.soon_free_count) == (0, 0)
        # The watermarks ask for as many chunks as without these slots.
        evictor = WatermarkEvictor(pool, Watermarks(0.9, 0.75))
        evictor.step()
        assert (evictor.evicted_total, pool.free_count) == (4, 4)
        service.give_back(await service.granted(6))
        with pytest.raises(ResourceExhausted):
            await service.reserve(13)
        pool.grants.end_copy(held)
        service.give_back(await service.granted(16))
