"""A store with tiers in memory behind a server, and a local session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from kvstore_client import Service, call, served
from kvstore_helpers import LAYOUT, Bench, assert_payloads, store_sequence
from tier_double import MemoryTier, MemoryTransfer

from kvstore_service.server import KvStoreServicer
from kvstore_service.tiers.manager import TierManager
from splitpoint.keys import chunk_keys
from splitpoint.tiers import Tier
from splitpoint.transport.statuses import error_of
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import types_pb2

SIZE = LAYOUT.chunk_tokens
TOKENS = list(range(100, 100 + 5 * SIZE + 2))  # five full chunks and a tail of two
KEYS = list(chunk_keys(LAYOUT.layout_hash, b"", TOKENS, SIZE))
OTHERS = [[1000 * n + i for i in range(4 * SIZE)] for n in range(1, 20)]


class TierService(Service):
    """A store with tiers behind a server, and a local session."""

    tier: MemoryTier

    def load(self, tokens: list[int] = TOKENS, **fields: Any) -> Any:
        if "source_address" not in fields:
            fields.setdefault("tier", types_pb2.TIER_DISK)
        fields.setdefault("session_id", self.session)
        fields.setdefault("request_id", self.request_id())
        return self.stub.LoadChunks(pb.LoadChunksRequest(token_ids=tokens, **fields), timeout=10)

    async def loaded(
        self, tokens: list[int] = TOKENS, **fields: Any
    ) -> list[pb.LoadChunksResponse]:
        try:
            return [answer async for answer in self.load(tokens, **fields)]
        except grpc.RpcError as error:
            raise error_of(error) from error

    async def peek(self, tokens: list[int] = TOKENS, **fields: Any) -> pb.MatchResponse:
        request = pb.MatchRequest(token_ids=tokens, asks_tiers=True, **fields)
        answer: pb.MatchResponse = await call(self.stub.Match(request, timeout=10))
        return answer

    async def fill(
        self, slots: Sequence[tuple[int, int]], keys: Sequence[bytes], **fields: Any
    ) -> pb.FillSlotsResponse:
        fields = {"session_id": self.session, "tier": types_pb2.TIER_DISK, **fields}
        request = pb.FillSlotsRequest(
            slots=[
                pb.SlotToFill(slot=slot, generation=generation, chunk_key=key)
                for (slot, generation), key in zip(slots, keys, strict=True)
            ],
            **fields,
        )
        answer: pb.FillSlotsResponse = await call(self.stub.FillSlots(request, timeout=10))
        return answer

    def release_load(self, answer: pb.LoadChunksResponse) -> None:
        released = self.bench.store.sessions.release(self.session, [answer.lease_id], [])
        assert released.lease_count == 1

    def assert_payloads(self, tokens: list[int], count: int) -> None:
        """Check the bytes of the first chunks of a sequence in the arena."""
        entries = self.bench.store.peek(b"", tokens).entries
        assert len(entries) >= count
        assert_payloads(self.bench.arena, [entry.slot for entry in entries[:count]], tokens)


@asynccontextmanager
async def serving(
    folder: Path,
    slot_count: int = 8,
    *,
    tier_name: Tier = Tier.DISK,
    has_transfer: bool = False,
    **options: Any,
) -> AsyncIterator[TierService]:
    bench = Bench(folder, slot_count)
    tier = MemoryTier(bench.arena, tier_name)
    tiers = TierManager(bench.store.pool, [tier], **options)
    transfer = MemoryTransfer(MemoryTier(bench.arena)) if has_transfer else None
    servicer = KvStoreServicer(bench.store, tiers=tiers, transfer=transfer)
    writing = asyncio.create_task(tiers.run())
    try:
        async with served(servicer, "127.0.0.1:0") as channel:
            service = TierService(bench, servicer, channel)
            service.tier, service.session = tier, bench.attach()
            try:
                yield service
            finally:
                tier.gate.set()  # also after a failure, or the writer would not end
        assert bench.integrity.check_integrity() == []
    finally:
        writing.cancel()
        await asyncio.wait({writing})
        bench.close()


async def fill_and_evict(service: TierService, tokens: list[int] = TOKENS) -> None:
    """Store a sequence, and let other sequences push all of it to the tier."""
    store = service.bench.store
    store_sequence(store, service.session, b"", tokens)
    service.give_back(await service.granted(store.pool.slot_count))
    assert store.peek(b"", tokens).cached_tokens == 0
