"""FillSlots over a real connection: slots are filled from a tier, and sealed by the caller."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from kvstore_helpers import granted_slots, read_payload
from tier_service import KEYS, SIZE, TOKENS, TierService, fill_and_evict, serving
from waiting import until

from splitpoint.errors import FailedPrecondition, InvalidArgument, Unavailable
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import types_pb2


async def seal(
    service: TierService, slots: Sequence[tuple[int, int]], first: int, checksums: Sequence[int]
) -> pb.SealResponse:
    chunks = [
        pb.SealChunk(
            slot=slot,
            generation=generation,
            parent_key=KEYS[index - 1] if index else b"",
            token_ids=TOKENS[index * SIZE : (index + 1) * SIZE],
            checksum=checksum,
        )
        for index, ((slot, generation), checksum) in enumerate(
            zip(slots, checksums, strict=True), first
        )
    ]
    return await service.seal(chunks)


async def test_the_back_is_filled_first_and_sealed_behind_the_front(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        await fill_and_evict(service)
        slots = await service.granted(5)
        back = await service.fill(slots[3:], KEYS[3:])
        assert [slot.is_filled for slot in back.slots] == [True, True]
        assert service.bench.store.peek(b"", TOKENS).cached_tokens == 0
        front = await service.fill(slots[:3], KEYS[:3])
        await seal(service, slots[:3], 0, [slot.checksum for slot in front.slots])
        await seal(service, slots[3:], 3, [slot.checksum for slot in back.slots])
        assert service.bench.store.peek(b"", TOKENS).cached_tokens == 5 * SIZE
        service.assert_payloads(TOKENS, 5)


async def test_missing_and_damaged_chunks_stay_empty(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        await fill_and_evict(service)
        del service.tier.chunks[KEYS[1]]
        service.tier.damage(KEYS[2])
        slots = await service.granted(4)
        answer = await service.fill(slots, KEYS[:4])
        assert [slot.is_filled for slot in answer.slots] == [True, False, False, True]
        assert KEYS[2] not in service.tier.chunks
        stats = service.tier.stats
        assert (stats.missed_chunk_count, stats.damaged_chunk_count) == (1, 1)
        service.give_back(slots)


async def test_what_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        await fill_and_evict(service)
        slots = await service.granted(2)
        with pytest.raises(InvalidArgument, match="tier"):
            await service.fill(slots, KEYS[:2], tier=types_pb2.TIER_UNSPECIFIED)
        with pytest.raises(InvalidArgument, match="1 to 4096"):
            await service.fill([], [])
        with pytest.raises(InvalidArgument, match="twice"):
            await service.fill([slots[0], slots[0]], KEYS[:2])
        with pytest.raises(InvalidArgument, match="outside the arena"):
            await service.fill([(99, 1)], KEYS[:1])
        with pytest.raises(InvalidArgument, match="32 bytes"):
            await service.fill(slots[:1], [b"short"])
        with pytest.raises(FailedPrecondition, match="no pool tier"):
            await service.fill(slots, KEYS[:2], tier=types_pb2.TIER_POOL)
        with pytest.raises(FailedPrecondition, match="not granted"):
            await service.fill([(slots[0][0], slots[0][1] + 1)], KEYS[:1])
        other = service.bench.attach()
        with pytest.raises(FailedPrecondition, match="not granted"):
            await service.fill(slots, KEYS[:2], session_id=other)
        service.tier.go_away()
        with pytest.raises(Unavailable):
            await service.fill(slots, KEYS[:2])
        service.give_back(slots)


async def test_slots_that_are_released_under_the_read_are_not_reused_before_its_end(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as service:
        await fill_and_evict(service)
        pool = service.bench.store.pool
        slots = await service.granted(2)
        free = pool.free_count
        service.tier.gate.clear()
        calls = service.tier.calls
        filling = asyncio.create_task(service.fill(slots, KEYS[:2]))
        await until(lambda: service.tier.calls > calls)
        service.give_back(slots)
        assert pool.free_count == free
        service.tier.gate.set()
        await filling
        await until(lambda: pool.free_count == free + 2)


async def test_what_was_filled_and_not_sealed_is_zeroed_before_it_is_granted(
    tmp_path: Path,
) -> None:
    """The keys of another tenant's chunks bring its bytes."""
    async with serving(tmp_path) as service:
        await fill_and_evict(service)
        store, salt = service.bench.store, b"tenant B"
        slots = granted_slots(store.reserve(service.session, 2, salt))
        answer = await service.fill(slots, KEYS[:2])
        assert all(slot.is_filled for slot in answer.slots)
        assert any_bytes(service, slots)
        service.give_back(slots)
        again = store.reserve(service.session, 8, salt)
        assert not any_bytes(service, slots)
        service.give_back(granted_slots(again))


def any_bytes(service: TierService, slots: Sequence[tuple[int, int]]) -> bool:
    return any(
        any(plane)
        for slot, _ in slots
        for plane in read_payload(service.bench.arena, slot).values()
    )


async def test_sealed_slots_are_not_zeroed_for_their_own_tenant(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        await fill_and_evict(service)
        slots = await service.granted(2)
        filled = await service.fill(slots, KEYS[:2])
        await seal(service, slots, 0, [slot.checksum for slot in filled.slots])
        store = service.bench.store
        assert store.evict_all() == 2
        assert store.prepare(service.session, 8, b"").dirty_slots == ()


async def test_a_slot_is_not_sealed_while_a_tier_reads_into_it(tmp_path: Path) -> None:
    """Not even if the read ends before the seal, after the checksums were compared."""
    async with serving(tmp_path) as service:
        await fill_and_evict(service)
        store = service.bench.store
        slots = await service.granted(1)
        checksum = store.arena.checksum(slots[0][0])
        service.tier.gate.clear()
        calls = service.tier.calls
        filling = asyncio.create_task(service.fill(slots, KEYS[3:4]))
        await until(lambda: service.tier.calls > calls)
        with pytest.raises(FailedPrecondition) as caught:
            await seal(service, slots, 0, [checksum])
        assert caught.value.reason == "BEING_FILLED"
        with pytest.raises(FailedPrecondition, match="another call"):
            await service.fill(slots, KEYS[:1])
        service.tier.gate.set()
        await filling
        again = await service.fill(slots, KEYS[:1])
        await seal(service, slots, 0, [again.slots[0].checksum])
        service.assert_payloads(TOKENS, 1)


async def test_a_slot_is_not_filled_while_it_is_being_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as service:
        await fill_and_evict(service)
        slots = await service.granted(1)
        filled = await service.fill(slots, KEYS[:1])
        compared, may_seal = asyncio.Event(), asyncio.Event()
        sealer = service.servicer._sealer
        read_back = sealer.read_back

        async def read_back_slowly(chunks: Any) -> Any:
            damages = await read_back(chunks)
            compared.set()
            await may_seal.wait()
            return damages

        monkeypatch.setattr(sealer, "read_back", read_back_slowly)
        sealing = asyncio.create_task(seal(service, slots, 0, [filled.slots[0].checksum]))
        await compared.wait()
        try:
            with pytest.raises(FailedPrecondition, match="another call"):
                await service.fill(slots, KEYS[3:4])
        finally:
            may_seal.set()
        await sealing
        service.assert_payloads(TOKENS, 1)
        assert not service.bench.store.pool.grants.checked
