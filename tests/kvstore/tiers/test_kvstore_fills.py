"""FillSlots over a real connection: slots are filled from a tier, and sealed by the caller."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from tier_service import KEYS, SIZE, TOKENS, Service, eventually, fill_and_evict, serving

from splitpoint.errors import FailedPrecondition, InvalidArgument, Unavailable
from splitpoint.transport.statuses import error_of
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import types_pb2


async def granted(service: Service, count: int) -> list[tuple[int, int]]:
    answer = await service.reserve(count)
    return [(run.first_slot + n, g) for run in answer.runs for n, g in enumerate(run.generations)]


async def fill(
    service: Service, slots: Sequence[tuple[int, int]], keys: Sequence[bytes], **fields: Any
) -> pb.FillSlotsResponse:
    fields = {"session_id": service.session, "tier": types_pb2.TIER_DISK, **fields}
    request = pb.FillSlotsRequest(
        slots=[
            pb.SlotToFill(slot=slot, generation=generation, chunk_key=key)
            for (slot, generation), key in zip(slots, keys, strict=True)
        ],
        **fields,
    )
    try:
        answer: pb.FillSlotsResponse = await service.stub.FillSlots(request, timeout=10)
    except grpc.RpcError as error:
        raise error_of(error) from error
    return answer


async def seal(
    service: Service, slots: Sequence[tuple[int, int]], first: int, checksums: Sequence[int]
) -> pb.SealResponse:
    request = pb.SealRequest(
        session_id=service.session,
        request_id=service.request_id(),
        chunks=[
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
        ],
    )
    answer: pb.SealResponse = await service.stub.Seal(request, timeout=10)
    return answer


async def test_the_back_is_filled_first_and_sealed_behind_the_front(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        await fill_and_evict(service)
        slots = await granted(service, 5)
        back = await fill(service, slots[3:], KEYS[3:])
        assert [slot.is_filled for slot in back.slots] == [True, True]
        assert service.bench.store.peek(b"", TOKENS).cached_tokens == 0
        front = await fill(service, slots[:3], KEYS[:3])
        await seal(service, slots[:3], 0, [slot.checksum for slot in front.slots])
        await seal(service, slots[3:], 3, [slot.checksum for slot in back.slots])
        assert service.bench.store.peek(b"", TOKENS).cached_tokens == 5 * SIZE
        service.assert_payloads(TOKENS, 5)


async def test_missing_and_damaged_chunks_stay_empty(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        await fill_and_evict(service)
        del service.tier.chunks[KEYS[1]]
        service.tier.damage(KEYS[2])
        slots = await granted(service, 4)
        answer = await fill(service, slots, KEYS[:4])
        assert [slot.is_filled for slot in answer.slots] == [True, False, False, True]
        assert KEYS[2] not in service.tier.chunks
        stats = service.tier.stats
        assert (stats.missed_chunks, stats.damaged_chunks) == (1, 1)
        service.bench.store.sessions.release(service.session, [], slots)


async def test_what_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as service:
        await fill_and_evict(service)
        slots = await granted(service, 2)
        with pytest.raises(InvalidArgument, match="tier"):
            await fill(service, slots, KEYS[:2], tier=types_pb2.TIER_UNSPECIFIED)
        with pytest.raises(InvalidArgument, match="1 to 4096"):
            await fill(service, [], [])
        with pytest.raises(InvalidArgument, match="twice"):
            await fill(service, [slots[0], slots[0]], KEYS[:2])
        with pytest.raises(InvalidArgument, match="outside the arena"):
            await fill(service, [(99, 1)], KEYS[:1])
        with pytest.raises(InvalidArgument, match="32 bytes"):
            await fill(service, slots[:1], [b"short"])
        with pytest.raises(FailedPrecondition, match="no mooncake tier"):
            await fill(service, slots, KEYS[:2], tier=types_pb2.TIER_MOONCAKE)
        with pytest.raises(FailedPrecondition, match="not granted"):
            await fill(service, [(slots[0][0], slots[0][1] + 1)], KEYS[:1])
        other = service.bench.attach()
        with pytest.raises(FailedPrecondition, match="not granted"):
            await fill(service, slots, KEYS[:2], session_id=other)
        service.tier.go_away()
        with pytest.raises(Unavailable):
            await fill(service, slots, KEYS[:2])
        service.bench.store.sessions.release(service.session, [], slots)


async def test_slots_that_are_released_under_the_read_are_not_reused_before_its_end(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as service:
        await fill_and_evict(service)
        pool = service.bench.store.pool
        slots = await granted(service, 2)
        free = pool.free_count
        service.tier.gate.clear()
        calls = service.tier.calls
        filling = asyncio.create_task(fill(service, slots, KEYS[:2]))
        await eventually(lambda: service.tier.calls > calls)
        service.bench.store.sessions.release(service.session, [], slots)
        assert pool.free_count == free
        service.tier.gate.set()
        await filling
        await eventually(lambda: pool.free_count == free + 2)
