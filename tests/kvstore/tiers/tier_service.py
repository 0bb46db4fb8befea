"""A store with tiers in memory behind a server, and a local session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from kvstore_helpers import LAYOUT, Bench, payload_of, read_payload, seed_of, store_sequence
from tier_double import MemoryTier, MemoryTransfer

from kvstore_service.server import KvStoreServicer
from kvstore_service.tiers.manager import TierManager
from splitpoint.keys import chunk_keys
from splitpoint.tiers import Tier
from splitpoint.transport.channels import open_channel
from splitpoint.transport.servers import create_server, listen
from splitpoint.transport.statuses import error_of
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import kvstore_pb2_grpc, types_pb2

SIZE = LAYOUT.chunk_tokens
TOKENS = list(range(100, 100 + 5 * SIZE + 2))  # five full chunks and a tail of two
KEYS = list(chunk_keys(LAYOUT.layout_hash, b"", TOKENS, SIZE))
OTHERS = [[1000 * n + i for i in range(4 * SIZE)] for n in range(1, 20)]


class Service:
    """A store with tiers behind a server, and a local session."""

    def __init__(self, bench: Bench, servicer: KvStoreServicer, tier: MemoryTier) -> None:
        self.bench = bench
        self.servicer = servicer
        self.tier = tier
        self.stub: Any = None
        self.channel: Any = None
        self.session = bench.attach()
        self._requests = 0

    def request_id(self) -> bytes:
        self._requests += 1
        return b"r%d" % self._requests

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
        try:
            answer: pb.MatchResponse = await self.stub.Match(request, timeout=10)
        except grpc.RpcError as error:
            raise error_of(error) from error
        return answer

    async def reserve(self, count: int) -> pb.ReserveResponse:
        request = pb.ReserveRequest(
            session_id=self.session, request_id=self.request_id(), slot_count=count
        )
        try:
            answer: pb.ReserveResponse = await self.stub.Reserve(request, timeout=10)
        except grpc.RpcError as error:
            raise error_of(error) from error
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
        try:
            answer: pb.FillSlotsResponse = await self.stub.FillSlots(request, timeout=10)
        except grpc.RpcError as error:
            raise error_of(error) from error
        return answer

    def release(self, answer: pb.LoadChunksResponse) -> None:
        released = self.bench.store.sessions.release(self.session, [answer.lease_id], [])
        assert released.lease_count == 1

    def assert_payloads(self, tokens: list[int], count: int) -> None:
        """Check the bytes of the first chunks of a sequence in the arena."""
        entries = self.bench.store.peek(b"", tokens).entries
        parent = b""
        assert len(entries) >= count
        for index, entry in enumerate(entries[:count]):
            piece = tuple(tokens[index * SIZE : (index + 1) * SIZE])
            expected = payload_of(LAYOUT, seed_of(parent, piece), SIZE)
            assert read_payload(self.bench.arena, entry.slot) == expected
            parent = entry.key


@asynccontextmanager
async def serving(
    folder: Path,
    slot_count: int = 8,
    *,
    tier_name: Tier = Tier.DISK,
    has_transfer: bool = False,
    **options: Any,
) -> AsyncIterator[Service]:
    bench = Bench(folder, slot_count)
    tier = MemoryTier(bench.arena, tier_name)
    tiers = TierManager(bench.store.pool, [tier], **options)
    transfer = MemoryTransfer(MemoryTier(bench.arena)) if has_transfer else None
    servicer = KvStoreServicer(bench.store, tiers=tiers, transfer=transfer)
    service = Service(bench, servicer, tier)
    server = create_server(max_concurrent_rpcs=64)
    kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server(servicer, server)
    address = listen(server, "127.0.0.1:0")
    await server.start()
    writing = asyncio.create_task(tiers.run())
    try:
        async with open_channel(address) as channel:
            service.channel = channel
            service.stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
            yield service
            tier.gate.set()
        assert bench.integrity.check_integrity() == []
    finally:
        tier.gate.set()  # also after a failure, or the writer would not end
        servicer.stop()
        await server.stop(1)
        await servicer.close()
        writing.cancel()
        await asyncio.wait({writing})
        bench.close()


async def eventually(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


async def fill_and_evict(service: Service, tokens: list[int] = TOKENS) -> None:
    """Store a sequence, and let other sequences push all of it to the tier."""
    store = service.bench.store
    store_sequence(store, service.session, b"", tokens)
    answer = await service.reserve(store.pool.slot_count)
    store.sessions.release(
        service.session,
        [],
        [(run.first_slot + n, g) for run in answer.runs for n, g in enumerate(run.generations)],
    )
    assert store.peek(b"", tokens).cached_tokens == 0
