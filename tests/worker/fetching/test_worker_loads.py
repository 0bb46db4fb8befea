"""Fetches that the own store makes: from its tiers, and from other stores by its transfers.

The store is a double of LoadChunks alone: the test says what it answers, and when.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from waiting import until

from splitpoint.costs.fetching import ASSUMED_BYTES_PER_SECOND, ROUND_TRIP_SECONDS
from splitpoint.shapes import ArenaLayout, DataType
from splitpoint.tiers import ChunkSource, Tier, Transfer
from splitpoint.transport.servers import create_server, listen
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import kvstore_pb2_grpc, types_pb2
from worker_service.fetching.fetcher import MEASURABLE_BYTES, PrefixFetcher
from worker_service.fetching.results import BATCH_BYTES, FetchResult, FetchSource
from worker_service.store.client import StoreClient
from worker_service.store.session import Connection

LAYOUT = ArenaLayout(
    chunk_tokens=16,
    layer_count=2,
    kv_head_count=2,
    head_dim=4,
    hidden_size=8,
    data_type=DataType.FLOAT32,
    has_activations=False,
    model_fingerprint=b"test model",
)
SALT = b"salt"
TOKENS = list(range(100))
# Nothing listens there.
OTHER = "127.0.0.1:1"
SESSION = b"s" * 16
LOADED = 512


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give fetches up soon whose predicted time is short."""
    monkeypatch.setattr("worker_service.fetching.results.SPARE_SECONDS", 0.2)


@dataclass
class Store(kvstore_pb2_grpc.KvStoreServiceServicer):
    """Answers LoadChunks with `answers`: messages, a failure, events and seconds to wait for."""

    answers: list[Any] = field(default_factory=list)
    loads: list[pb.LoadChunksRequest] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    matches: int = 0

    async def LoadChunks(self, request: pb.LoadChunksRequest, context: Any) -> Any:
        self.loads.append(request)
        for answer in self.answers:
            if isinstance(answer, asyncio.Event):
                await answer.wait()
            elif isinstance(answer, float):
                await asyncio.sleep(answer)
            elif isinstance(answer, grpc.StatusCode):
                await context.abort(answer, "as the test wants")
            else:
                yield answer

    async def Match(self, request: pb.MatchRequest, context: Any) -> pb.MatchResponse:
        self.matches += 1
        return pb.MatchResponse()

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        self.released += request.lease_ids
        return pb.ReleaseResponse()


class Client(StoreClient):
    """A client with a session that nothing keeps alive and no arena belongs to."""

    loads_from_stores = False

    @property
    def connection(self) -> Connection | None:
        tensors: Any = None
        return Connection(SESSION, 1, 10.0, tensors, self.loads_from_stores)

    async def attach(self) -> None:
        self._session.connection = self.connection


@asynccontextmanager
async def fetching(
    address: str, store: Store, *, loads_from_stores: bool = False
) -> AsyncIterator[PrefixFetcher]:
    server = create_server()
    kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server(store, server)
    listen(server, address)
    await server.start()
    client = Client(address, "worker")
    client.loads_from_stores = loads_from_stores
    await client.attach()
    fetcher = PrefixFetcher(client, LAYOUT, lambda rates: None)
    yield fetcher
    await fetcher.close()
    await client.close()
    await server.stop(0)


def on_disk(tokens: int, seconds: float = 0.0) -> FetchSource:
    return FetchSource(ChunkSource(tier=Tier.DISK), tokens, seconds)


def progress(chunks: int, seconds: float = 0.0) -> pb.LoadChunksResponse:
    return pb.LoadChunksResponse(
        cached_tokens=chunks * LAYOUT.chunk_tokens,
        lease_id=7,
        loaded_bytes=chunks * LAYOUT.chunk_bytes,
        transfer_seconds=seconds,
    )


async def test_a_tier_is_loaded_by_the_own_store(socket_address: str) -> None:
    store = Store([progress(2), progress(5)])
    async with fetching(socket_address, store) as fetcher:
        result = await fetcher.fetch(on_disk(90), SALT, TOKENS)
    [request] = store.loads
    # Full chunks only, and no more of them than are expected there.
    assert list(request.token_ids) == TOKENS[:80]
    assert (request.session_id, request.tenant_salt) == (SESSION, SALT)
    assert (request.tier, request.source_address) == (types_pb2.TIER_DISK, "")
    assert (result.tokens, result.bytes) == (80, 5 * LAYOUT.chunk_bytes)
    assert store.released == [7]
    assert fetcher.totals.tokens == 80
    assert not fetcher.rates.by_key  # too little to measure a rate


async def test_rates_are_kept_by_source_and_transfer(socket_address: str) -> None:
    megabytes = LOADED * LAYOUT.chunk_bytes
    assert megabytes >= 1 << 20
    store = Store([progress(LOADED, seconds=2.0)])
    async with fetching(socket_address, store, loads_from_stores=True) as fetcher:
        tier = await fetcher.fetch(on_disk(90), SALT, TOKENS)
        other = await fetcher.fetch(FetchSource(ChunkSource(OTHER), 90), SALT, TOKENS)
        assert (tier.came_by, other.came_by) == ("", "direct")
        # The bytes took longer than the call's own time allows: theirs counts.
        assert fetcher.rates.by_key == {
            "disk": megabytes / 2.0,
            f"{OTHER} direct": megabytes / 2.0,
        }
        store.answers = [progress(LOADED, seconds=1.0)]
        await fetcher.fetch(on_disk(90), SALT, TOKENS)
        assert fetcher.rates.by_key["disk"] == pytest.approx(megabytes * (0.7 / 2 + 0.3))
    assert store.loads[1].source_address == OTHER
    assert not store.loads[1].tier
    assert store.matches == 0  # nothing was streamed


async def test_waits_in_the_store_count_in_the_rate(socket_address: str) -> None:
    store = Store([0.1, progress(LOADED)])
    async with fetching(socket_address, store) as fetcher:
        await fetcher.fetch(on_disk(90), SALT, TOKENS)
    fastest = LOADED * LAYOUT.chunk_bytes / (0.1 - ROUND_TRIP_SECONDS)
    assert fetcher.rates.by_key["disk"] <= fastest * 1.01


async def test_a_slow_rate_that_is_not_measured_again_ages(
    socket_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source that was slow once would never be tried again."""
    monkeypatch.setattr("worker_service.fetching.fetcher.AGING_SECONDS", 0.01)
    slow = LOADED * LAYOUT.chunk_bytes / 100
    store = Store([progress(LOADED, seconds=100.0)])
    async with fetching(socket_address, store) as fetcher:
        await fetcher.fetch(on_disk(90), SALT, TOKENS)
        assert fetcher.rates.by_key["disk"] in {slow * 2**times for times in range(20)}
        await until(lambda: fetcher.rates.by_key["disk"] >= ASSUMED_BYTES_PER_SECOND)
        # No rate is invented beyond that.
        assert fetcher.rates.by_key["disk"] == ASSUMED_BYTES_PER_SECOND
        assert not fetcher.rates._aging
        # Nothing is known any more: the next measurement is not averaged with an assumption.
        monkeypatch.setattr("worker_service.fetching.fetcher.AGING_SECONDS", 60.0)
        await fetcher.fetch(on_disk(90), SALT, TOKENS)
        assert fetcher.rates.by_key["disk"] == pytest.approx(slow)


@pytest.mark.parametrize(
    "status", [grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAVAILABLE]
)
async def test_a_store_that_cannot_be_loaded_from_is_streamed_from(
    socket_address: str, status: grpc.StatusCode
) -> None:
    store = Store([progress(LOADED, seconds=1.0)])
    async with fetching(socket_address, store, loads_from_stores=True) as fetcher:
        source = FetchSource(ChunkSource(OTHER), 90)
        await fetcher.fetch(source, SALT, TOKENS)
        assert f"{OTHER} direct" in fetcher.rates.by_key
        store.answers = [progress(1), status]
        result = await fetcher.fetch(source, SALT, TOKENS)
        # What was loaded counts; the rate is forgotten, and the stream was tried.
        assert (result.tokens, result.came_by, store.matches) == (16, "direct", 1)
        assert not fetcher.rates.by_key
        assert store.released == [7, 7]
        # For a while the own store is not asked again.
        streamed = await fetcher.fetch(source, SALT, TOKENS)
        assert (len(store.loads), store.matches) == (2, 2)
        assert (streamed.tokens, streamed.came_by) == (0, "")  # it had nothing


async def test_a_tier_that_is_away_costs_reuse(socket_address: str) -> None:
    store = Store([grpc.StatusCode.UNAVAILABLE])
    async with fetching(socket_address, store) as fetcher:
        result = await fetcher.fetch(on_disk(90), SALT, TOKENS)
    assert result.tokens == 0
    assert not store.released


async def test_nothing_is_asked_for_less_than_a_chunk(socket_address: str) -> None:
    store = Store()
    async with fetching(socket_address, store) as fetcher:
        assert (await fetcher.fetch(on_disk(15), SALT, TOKENS)).tokens == 0
        assert (await fetcher.fetch(on_disk(90), SALT, TOKENS[:15])).tokens == 0
    assert not store.loads


async def test_a_lease_that_comes_after_the_cancel_is_released(socket_address: str) -> None:
    gate = asyncio.Event()
    store = Store([gate, progress(2), asyncio.Event()])
    async with fetching(socket_address, store) as fetcher:
        fetch = asyncio.create_task(fetcher.fetch(on_disk(90), SALT, TOKENS))
        async with asyncio.timeout(30):
            while not store.loads:
                await asyncio.sleep(0.005)
            fetch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await fetch
            assert not store.released
            gate.set()
            while not store.released:
                await asyncio.sleep(0.005)
    assert store.released == [7]


async def test_a_slow_tier_is_given_up_with_what_it_brought(socket_address: str) -> None:
    store = Store([progress(2), asyncio.Event()])
    async with fetching(socket_address, store) as fetcher:
        result = await fetcher.fetch(on_disk(90, 1e-6), SALT, TOKENS)
        assert result.tokens == 32
        # Although it is less than what is measured.
        assert fetcher.rates.by_key["disk"] > 0
    assert store.released == [7]


def test_a_late_source_brings_at_most_what_was_wanted_in_the_time_that_it_had() -> None:
    for wanted, came, most in ((5 << 20, 1 << 20, 5 << 20), (1 << 40, 0, BATCH_BYTES)):
        result = FetchResult(bytes=came, began=time.monotonic() - 2.0, wanted_bytes=wanted)
        result.is_late()
        assert 0 < result.late_rate <= most / 2.0


@pytest.mark.usefixtures("impatient")
async def test_a_source_that_brings_nothing_is_not_waited_for_again_and_again(
    socket_address: str,
) -> None:
    """By the assumed rate every request would wait for it until its limit."""
    store = Store([asyncio.Event()])
    async with fetching(socket_address, store) as fetcher:
        await fetcher.fetch(on_disk(90, 1e-6), SALT, TOKENS)
        assert fetcher.rates.by_key["disk"] > 0
        assert fetcher.rates._aging  # it is tried again later
        # A fetch that had no turn knows nothing.
        fetcher.rates.by_key.clear()
        first = asyncio.create_task(fetcher.fetch(on_disk(90, 10.0), SALT, TOKENS))
        await until(lambda: len(store.loads) >= 2)
        await fetcher.fetch(on_disk(90, 1e-6), SALT, TOKENS)
        assert not fetcher.rates.by_key
        first.cancel()
        await asyncio.wait({first})
        for event in store.answers:
            event.set()


def test_how_the_tokens_came() -> None:
    result = FetchResult()
    for tokens, transfer, came_by in (
        (0, Transfer.DIRECT, ""),
        (16, Transfer.DIRECT, "direct"),
        (32, Transfer.DIRECT, "direct"),
        (32, Transfer.STREAM, "direct"),
        (48, Transfer.STREAM, "direct, stream"),
        (64, Transfer.STREAM, "direct, stream"),
    ):
        result.came(tokens, transfer)
        assert (result.tokens, result.came_by) == (tokens, came_by)


async def test_a_rate_that_was_doubled_is_aged_until_it_is_measured(socket_address: str) -> None:
    store = Store([progress(LOADED, seconds=1.0)])
    async with fetching(socket_address, store) as fetcher:
        rates = fetcher.rates
        await fetcher.fetch(on_disk(90), SALT, TOKENS)
        measured = rates.by_key["disk"]
        assert not rates.aged
        rates._age("disk")
        assert (rates.by_key["disk"], rates.aged) == (2 * measured, {"disk"})
        await fetcher.fetch(on_disk(90), SALT, TOKENS)
        assert not rates.aged
        rates._age("disk")
        rates.forget("disk")
        assert (rates.by_key, rates.aged) == ({}, set())


@pytest.mark.usefixtures("impatient")
async def test_a_transfer_that_hangs_gives_way_to_the_stream(socket_address: str) -> None:
    store = Store([progress(LOADED, seconds=1.0)])
    async with fetching(socket_address, store, loads_from_stores=True) as fetcher:
        await fetcher.fetch(FetchSource(ChunkSource(OTHER), 90), SALT, TOKENS)
        source = FetchSource(ChunkSource(OTHER), 90, 1e-6)
        store.answers = [progress(1), asyncio.Event()]
        await fetcher.fetch(source, SALT, TOKENS)
        assert not fetcher.rates.by_key
        await fetcher.fetch(source, SALT, TOKENS)
        assert (len(store.loads), store.matches) == (2, 1)


async def test_a_fall_back_after_much_has_come_forgets_the_transfers_rate(
    socket_address: str,
) -> None:
    """The plan would say that the next fetch, a stream, is as fast."""
    store = Store([progress(LOADED, seconds=1.0), asyncio.Event()])
    async with fetching(socket_address, store, loads_from_stores=True) as fetcher:
        result = await fetcher.fetch(FetchSource(ChunkSource(OTHER), 90, 1e-6), SALT, TOKENS)
        assert result.bytes >= MEASURABLE_BYTES
        assert not fetcher.rates.by_key


async def test_rates_of_transfers_end_with_the_store_that_has_them(socket_address: str) -> None:
    store = Store([progress(LOADED, seconds=1.0)])
    async with fetching(socket_address, store, loads_from_stores=True) as fetcher:
        reported: list[dict[str, float]] = []
        fetcher.rates._on_change = lambda rates: reported.append(dict(rates))
        place = ChunkSource(OTHER)
        await fetcher.fetch(on_disk(90), SALT, TOKENS)
        await fetcher.fetch(FetchSource(place, 90), SALT, TOKENS)
        before = dict(fetcher.rates.by_key)
        assert set(before) == {"disk", f"{OTHER} direct"}
        fetcher.reattached()
        assert fetcher.rates.by_key == before
        client: Any = fetcher._store
        client.loads_from_stores = False
        fetcher.reattached()
        assert reported[-1] == {"disk": before["disk"]}
        # One that was under way meanwhile is not reported either.
        loaded = FetchResult(bytes=MEASURABLE_BYTES, rate=1e9, transfer=Transfer.DIRECT)
        fetcher.measured(place, loaded)
        assert set(fetcher.rates.by_key) == {"disk"}
