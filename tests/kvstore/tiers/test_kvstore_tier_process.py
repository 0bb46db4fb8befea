"""A store process with a disk tier: options, a clean stop, and kills while chunks go down."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvstore_helpers import LAYOUT as SMALL
from kvstore_helpers import assert_payloads, granted_slots, pieces_of, write_chunks
from test_kvstore_process import StoreProcess
from waiting import until

from splitpoint.errors import Unavailable
from splitpoint.transport.channels import open_channel
from splitpoint.transport.convert import to_message
from splitpoint.transport.local_session import mapped_arena
from splitpoint.transport.statuses import error_of
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import kvstore_pb2_grpc, types_pb2

# Chunks of 48 KiB, so that the smallest arena has about 80 slots.
LAYOUT = replace(SMALL, chunk_tokens=16, head_dim=64, hidden_size=128)
SIZE = LAYOUT.chunk_tokens
CHUNKS = 6
SEQUENCES = [[1000 * n + i for i in range(CHUNKS * SIZE)] for n in range(1, 200)]
STORED = 30  # about twice the arena


class Client:
    """A client that maps the arena, as a worker does."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self.stub = kvstore_pb2_grpc.KvStoreServiceStub(self._channel)
        self.session = b""
        self._requests = 0

    async def attach(self) -> Client:
        answer = await self.stub.Attach(
            pb.AttachRequest(client_name="test", process_id=os.getpid())
        )
        assert list(answer.tiers) == [types_pb2.TIER_DISK]
        assert not answer.loads_from_stores
        self.session = answer.session_id
        self.arena = mapped_arena(answer)
        self._keeper = self.stub.KeepAlive()
        await self._keeper.write(pb.KeepAliveRequest(session_id=self.session))
        await self._keeper.read()
        self._beats = asyncio.create_task(self._beat())
        return self

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.3)
            await self._keeper.write(pb.KeepAliveRequest(session_id=self.session))

    async def close(self) -> None:
        self._beats.cancel()
        await asyncio.gather(self._beats, return_exceptions=True)
        await self._channel.close()
        self.arena.close()

    def _ids(self) -> dict[str, Any]:
        self._requests += 1
        return {"session_id": self.session, "request_id": b"%d" % self._requests}

    async def write(self, tokens: list[int]) -> None:
        reserved = await self.stub.Reserve(
            pb.ReserveRequest(slot_count=CHUNKS, **self._ids()), timeout=10
        )
        written = write_chunks(self.arena, granted_slots(reserved.runs), pieces_of(tokens, SIZE))
        chunks = [to_message(pb.SealChunk, each, page_key=b"") for each in written]
        request = pb.SealRequest(chunks=chunks, **self._ids())
        await self.stub.Seal(request, timeout=10)

    async def load(self, tokens: list[int]) -> int:
        """Load a sequence, compare what the arena has then, and return its chunks."""
        request = pb.LoadChunksRequest(tier=types_pb2.TIER_DISK, token_ids=tokens, **self._ids())
        answers = [answer async for answer in self.stub.LoadChunks(request, timeout=20)]
        match = await self.stub.Match(pb.MatchRequest(token_ids=tokens, **self._ids()))
        assert match.cached_tokens >= answers[-1].cached_tokens
        assert_payloads(self.arena, [chunk.slot for chunk in match.chunks], tokens)
        leases = [answers[-1].lease_id, match.lease_id]
        await self.stub.Release(pb.ReleaseRequest(lease_ids=leases, **self._ids()))
        return len(match.chunks)

    async def stats(self) -> pb.GetStatsResponse:
        answer: pb.GetStatsResponse = await self.stub.GetStats(
            pb.GetStatsRequest(check_integrity=True)
        )
        assert list(answer.integrity_violations) == []
        return answer


Start = Callable[..., StoreProcess]


@pytest.fixture
def start(shm_folder: Path) -> Iterator[Start]:
    """Starts stores with one tier; kills what still runs at the end."""
    stores: list[StoreProcess] = []

    def run(address: str, *more: str, arena: str = "arena") -> StoreProcess:
        tier = ["--tier-disk", str(shm_folder / "tier"), "--tier-disk-size", "128MiB"]
        layout = ["--layout", LAYOUT.to_json()]
        path = shm_folder / arena / "arena"
        stores.append(StoreProcess(path, address, *layout, *tier, *more))
        assert stores[-1].address == address
        return stores[-1]

    yield run
    for store in stores:
        store.end(signal.SIGKILL)


async def test_a_new_arena_finds_what_an_earlier_one_held(
    start: Start, socket_address: str
) -> None:
    """Chunks of a clean stop, too, though nothing evicted them."""
    store = start(socket_address)
    client = await Client(socket_address).attach()
    for tokens in SEQUENCES[:STORED]:
        await client.write(tokens)
    stats = await client.stats()
    assert 0 < stats.tiers[0].chunk_count < STORED * CHUNKS
    assert stats.tiers[0].dropped_chunk_count == 0
    await client.close()
    assert store.end()[0] == 0
    store = start(socket_address, "--tier-rate", "100MB", arena="new")
    client = await Client(socket_address).attach()
    for tokens in SEQUENCES[:STORED]:
        assert await client.load(tokens) == CHUNKS
    tier = (await client.stats()).tiers[0]
    assert (tier.chunk_count, tier.read_chunk_count) == (STORED * CHUNKS, STORED * CHUNKS)
    assert 0 < tier.read_bytes_per_second <= 100e6
    await client.close()
    store.end()


@pytest.mark.parametrize(
    "kills", [4, pytest.param(50, marks=[pytest.mark.chaos, pytest.mark.timeout(600)])]
)
async def test_kills_while_chunks_go_down_and_come_up(
    start: Start, socket_address: str, kills: int
) -> None:
    """Every byte that comes up is compared."""
    chance = random.Random(7)
    written = came_up = 0

    async def work(client: Client) -> None:
        nonlocal written, came_up
        while True:
            if written < len(SEQUENCES):
                await client.write(SEQUENCES[written])
                written += 1
            came_up += await client.load(SEQUENCES[chance.randrange(written)])

    async def kill_after(store: StoreProcess, least: int, pause: float) -> None:
        await until(lambda: written >= least)
        await asyncio.sleep(pause)
        began = time.monotonic()
        await asyncio.to_thread(store.end, signal.SIGKILL)
        assert time.monotonic() - began < 30

    for kill in range(kills):
        # gRPC waits before it connects to an address again that refused it.
        address = f"{socket_address}{kill}"
        store = start(address)
        client = await Client(address).attach()
        found = [await client.load(tokens) for tokens in SEQUENCES[:written]]
        assert sum(found) >= 0.5 * CHUNKS * written
        came_up += sum(found)
        await client.stats()
        least = min(written + chance.randrange(3, 12), len(SEQUENCES))
        killed = asyncio.create_task(kill_after(store, least, chance.uniform(0, 0.2)))
        with pytest.raises(grpc.RpcError) as caught:
            await work(client)
        assert isinstance(error_of(caught.value), Unavailable)
        await killed
        await client.close()
    assert written > 10
    report = {"test": "kills of a store process", "kills": kills, "chunks_compared": came_up}
    print(json.dumps(report))
