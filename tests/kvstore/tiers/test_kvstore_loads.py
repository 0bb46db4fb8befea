"""LoadChunks and peeks over a real connection, with tiers in memory."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from fuzzing import call_with_bytes, random_messages
from kvstore_helpers import LAYOUT, read_payload, store_sequence, write_payload
from tier_double import MemoryTransfer
from tier_service import KEYS, OTHERS, SIZE, TOKENS, fill_and_evict, serving
from waiting import until

from kvstore_service.server import SERVICE_NAME
from kvstore_service.tiers.loader import ChunkLoader
from splitpoint.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import types_pb2


async def test_a_prefix_goes_down_and_comes_back(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        await fill_and_evict(service)
        peeked = await service.peek()
        assert peeked.cached_tokens == 0
        assert [(t.tier, t.cached_tokens) for t in peeked.tiers] == [
            (types_pb2.TIER_DISK, 5 * SIZE)
        ]
        *_, last = await service.loaded()
        assert last.cached_tokens == 5 * SIZE
        assert last.loaded_bytes == 5 * LAYOUT.chunk_bytes
        assert last.transfer_seconds > 0
        service.assert_payloads(TOKENS, 5)
        assert service.bench.store.pool.leases.leased_slot_count == 5
        assert set(KEYS) <= service.tier.chunks.keys()  # what comes up stays in the tier
        service.release_load(last)
        stats = (await service.stub.GetStats(pb.GetStatsRequest(check_integrity=True))).tiers
        assert [(s.tier, s.read_chunk_count, s.dropped_chunk_count) for s in stats] == [
            (types_pb2.TIER_DISK, 5, 0)
        ]
        assert stats[0].read_bytes_per_second > 0


async def test_a_load_reports_each_batch_and_starts_where_the_arena_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore_service.tiers.loader.BATCH_BYTES", 2 * LAYOUT.chunk_bytes)
    async with serving(tmp_path) as service:
        await fill_and_evict(service)
        store_sequence(service.bench.store, service.session, b"", TOKENS[: 2 * SIZE])
        answers = await service.loaded(TOKENS[: 4 * SIZE + 1])
        assert [a.cached_tokens for a in answers] == [4 * SIZE]
        assert answers[0].loaded_bytes == 2 * LAYOUT.chunk_bytes
        service.release_load(answers[0])
        service.bench.store.evict_all()
        answers = await service.loaded()
        assert [a.cached_tokens // SIZE for a in answers] == [2, 4, 5]
        assert {a.lease_id for a in answers} == {answers[0].lease_id}
        service.assert_payloads(TOKENS, 5)
        # A second load finds everything, and leases it for itself.
        [again] = await service.loaded()
        assert (again.cached_tokens, again.loaded_bytes) == (5 * SIZE, 0)
        assert again.lease_id != answers[0].lease_id


async def test_a_missing_or_damaged_chunk_ends_the_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = iter([1, 3, 3])  # chunks of each batch
    monkeypatch.setattr(ChunkLoader, "_batch_size", lambda self, tier: next(sizes))
    async with serving(tmp_path) as service:
        await fill_and_evict(service)
        del service.tier.chunks[KEYS[4]]
        service.tier.damage(KEYS[2])
        answers = await service.loaded()
        assert [answer.cached_tokens // SIZE for answer in answers] == [1, 2]
        assert KEYS[2] not in service.tier.chunks
        assert service.tier.stats.damaged_chunk_count == 1
        service.assert_payloads(TOKENS, 2)
        assert service.bench.states()[2] == 2
        assert [t.cached_tokens for t in (await service.peek()).tiers] == []


async def test_nothing_to_load_is_an_answer(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        for tokens in (TOKENS, TOKENS[: SIZE - 1]):
            [answer] = await service.loaded(tokens)
            assert (answer.cached_tokens, answer.lease_id, answer.loaded_bytes) == (0, 0, 0)


async def test_chunks_come_from_another_store(tmp_path: Path) -> None:
    async with serving(tmp_path, has_transfer=True) as service:
        await fill_and_evict(service)
        transfer = service.servicer.transfer
        assert isinstance(transfer, MemoryTransfer)
        transfer.peer.chunks = dict(service.tier.chunks)
        service.tier.chunks.clear()
        [answer] = await service.loaded(source_address="peer:1")
        assert answer.cached_tokens == 5 * SIZE
        service.assert_payloads(TOKENS, 5)
        with pytest.raises(Unavailable):
            await service.loaded(OTHERS[0], source_address="peer:2")
        # What the arena has needs no source.
        [answer] = await service.loaded(source_address="peer:2")
        assert (answer.cached_tokens, answer.loaded_bytes) == (5 * SIZE, 0)


async def test_what_a_source_wrote_and_did_not_bring_is_zeroed_before_it_is_granted(
    tmp_path: Path,
) -> None:
    """A slot of the other store is reused by another tenant while it is read."""
    async with serving(tmp_path, has_transfer=True) as service:
        transfer = service.servicer.transfer
        assert isinstance(transfer, MemoryTransfer)
        peer, arena = transfer.peer, service.bench.arena
        peer.chunks = dict.fromkeys(KEYS, (b"", 0))
        foreign: set[int] = set()

        async def read(keys: Sequence[bytes], slots: Sequence[int]) -> list[int | None]:
            for slot in slots:
                write_payload(arena, slot, 7, SIZE)
                foreign.add(slot)
            return [None] * len(keys)

        peer.read = read  # type: ignore[method-assign]
        [answer] = await service.loaded(source_address="peer:1")
        assert answer.cached_tokens == 0
        assert len(foreign) == 5
        await service.reserve(8)
        assert not any(
            any(plane) for slot in foreign for plane in read_payload(arena, slot).values()
        )


async def test_sources_that_are_not_there(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        for fields, error in (
            ({"tier": types_pb2.TIER_POOL}, FailedPrecondition),
            ({"source_address": "peer:1"}, FailedPrecondition),
            ({"tier": types_pb2.TIER_ARENA}, InvalidArgument),
            ({"tier": types_pb2.TIER_DISK, "source_address": "peer:1"}, InvalidArgument),
            ({"tier": 0}, InvalidArgument),
            ({"request_id": b""}, InvalidArgument),
            ({"session_id": bytes(16)}, NotFound),
        ):
            with pytest.raises(error):
                await service.loaded(**fields)
        with pytest.raises(InvalidArgument):
            await service.peek(session_id=service.session, request_id=b"1")
        await fill_and_evict(service)
        service.tier.go_away()
        with pytest.raises(Unavailable):
            await service.loaded()
        assert (await service.peek()).tiers == []
        assert service.bench.store.pool.leases.leased_slot_count == 0


async def test_a_full_arena_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        await fill_and_evict(service)
        await service.reserve(7)
        with pytest.raises(ResourceExhausted):
            await service.loaded()
        # What was loaded before the arena was full stays.
        assert service.bench.store.peek(b"", TOKENS).cached_tokens == SIZE


async def test_a_stalled_tier_makes_a_load_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps evicted slots that a batch counted on; the others can be had."""
    monkeypatch.setattr("kvstore_service.tiers.manager.ROOM_SECONDS", 0.05)
    async with serving(tmp_path, has_transfer=True) as service:
        await fill_and_evict(service)
        transfer = service.servicer.transfer
        assert isinstance(transfer, MemoryTransfer)
        transfer.peer.chunks = dict(service.tier.chunks)
        service.tier.chunks.clear()
        store, pool = service.bench.store, service.bench.store.pool
        service.tier.go_away()
        for tokens in OTHERS[:2]:
            store_sequence(store, service.session, b"", tokens)
        stuck = [entry.slot for entry in pool.next_victims(4)]
        pool.grants.begin_copy(stuck)
        assert (pool.free_count, pool.reclaimable_count()) == (0, 8)
        answers: list[Any] = []

        async def load() -> None:
            async for answer in service.load(source_address="peer:1"):
                answers.append(answer)

        with pytest.raises(grpc.RpcError, match="RESOURCE_EXHAUSTED"):
            await load()
        # Less than the whole, which had been refused.
        [answer] = answers
        assert answer.cached_tokens == 4 * SIZE
        assert pool.grants.set_aside == set(stuck)
        pool.grants.end_copy(stuck)
        *_, answer = await service.loaded(source_address="peer:1")
        assert answer.cached_tokens == 5 * SIZE
        service.assert_payloads(TOKENS, 5)


async def test_loads_of_one_prefix_take_turns(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        await fill_and_evict(service)
        answers = await asyncio.gather(*(service.loaded() for _ in range(4)))
        assert {answer[-1].cached_tokens for answer in answers} == {5 * SIZE}
        assert sorted(answer[-1].loaded_bytes for answer in answers)[:3] == [0, 0, 0]
        assert service.tier.stats.read_chunk_count == 5


@pytest.mark.parametrize("ending", ["cancel", "session"])
async def test_a_slot_is_not_reused_while_a_tier_reads_into_it(tmp_path: Path, ending: str) -> None:
    """The caller goes away, or its session ends, while the read is under way."""
    async with serving(tmp_path) as service:
        await fill_and_evict(service)
        store = service.bench.store
        has = service.tier.has

        async def has_then_closed(keys: Any) -> list[bool]:
            flags = await has(keys)
            service.tier.gate.clear()
            return flags

        service.tier.has = has_then_closed  # type: ignore[method-assign]
        call = service.load()
        await until(lambda: store.pool.grants.copied)
        if ending == "cancel":
            call.cancel()
        else:
            store.sessions.end(service.session)
            service.bench.presence.gone.add(service.session)
            store.sessions.sweep()
            assert len(store.pool.grants.set_aside) == 5
        await asyncio.sleep(0.05)
        assert store.pool.free_count == 3
        assert service.bench.states()[1] == (5 if ending == "cancel" else 0)
        service.tier.gate.set()
        await until(lambda: store.pool.free_count == 8)
        assert not store.pool.grants.set_aside
        assert store.pool.leases.leased_slot_count == 0


async def test_random_bytes_load_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        await fill_and_evict(service)
        rng = random.Random(8)
        path = f"/{SERVICE_NAME}/LoadChunks"
        seen = set()
        for payload in random_messages(rng, 150):
            seen.add(await call_with_bytes(service.channel, path, payload, streams=True))
            fields = pb.LoadChunksRequest(session_id=service.session, request_id=b"r")
            payload += fields.SerializeToString()
            seen.add(await call_with_bytes(service.channel, path, payload, streams=True))
        assert seen <= {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION}, seen
        assert service.bench.store.pool.free_count == 8
