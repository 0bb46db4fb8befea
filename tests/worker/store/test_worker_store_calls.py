"""Store calls that are not answered, sessions that end, and workers that stop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kvstore_helpers import LAYOUT
from waiting import until

from kvstore_service.pool import prefix_index
from kvstore_service.server import KvStoreServicer
from kvstore_service.store import KvStore
from splitpoint.arena.owner import open_or_create_arena
from splitpoint.arena.records import SlotState
from splitpoint.costs.profile import Profile
from splitpoint.errors import DeadlineExceeded, Unavailable
from splitpoint.transport.cleanups import Cleanups
from splitpoint.transport.servers import create_server, listen
from splitpoint.v1 import kvstore_pb2_grpc
from worker_service.engine.messages import Call
from worker_service.lanes.groups import Group, Piece
from worker_service.lanes.lanes import SerialLanes
from worker_service.lanes.work import Work
from worker_service.runtime import Runtime
from worker_service.store.arena_tensors import ArenaTensors
from worker_service.store.client import StoreClient, WrittenChunk
from worker_service.store.pool_rows import row_numbers
from worker_service.store.write_back import (
    ChunksStored,
    Flushed,
    PoolRelease,
    PoolStart,
    PoolStarted,
    PoolWrite,
    PoolWritten,
    StoreLimitReached,
    WriteBack,
    WriteFailed,
    WriteJob,
    WriteResult,
)

SLOTS = 8
SALT = b"salt"
FIRST = (1, 2, 3, 4)
CACHE: Any = SimpleNamespace(layout=LAYOUT, device=torch.device("cpu"))


class Servicer(KvStoreServicer):
    """Carries out every call. Answers of `held` methods wait until `let_go`."""

    def __init__(self, store: KvStore) -> None:
        super().__init__(store)
        self.held: set[str] = set()
        self.carried_out: dict[str, int] = {}
        self.let_go = asyncio.Event()

    async def _answered(self, name: str, answer: Awaitable[Any]) -> Any:
        result = await answer
        self.carried_out[name] = self.carried_out.get(name, 0) + 1
        if name in self.held:
            await self.let_go.wait()
        return result

    async def Attach(self, request: Any, context: Any) -> Any:
        return await self._answered("attach", super().Attach(request, context))

    async def Match(self, request: Any, context: Any) -> Any:
        return await self._answered("match", super().Match(request, context))

    async def Reserve(self, request: Any, context: Any) -> Any:
        return await self._answered("reserve", super().Reserve(request, context))

    async def Seal(self, request: Any, context: Any) -> Any:
        return await self._answered("seal", super().Seal(request, context))

    async def Release(self, request: Any, context: Any) -> Any:
        return await self._answered("release", super().Release(request, context))

    async def reached(self, name: str, count: int = 1) -> None:
        await until(lambda: self.carried_out.get(name, 0) >= count)


@dataclass
class Setup:
    address: str
    servicer: Servicer

    def held(self) -> tuple[int, int]:
        """Return (leases, slots that are being written)."""
        pool = self.servicer.store.pool
        return len(pool.leases), pool.slots.count(SlotState.WRITING)

    async def nothing_held(self) -> None:
        await until(lambda: self.held() == (0, 0))

    @asynccontextmanager
    async def client(self) -> AsyncIterator[StoreClient]:
        client = StoreClient(self.address, "worker")
        await client.start(LAYOUT)
        yield client
        await client.close()


@pytest.fixture
async def setup(shm_folder: Path, socket_address: str) -> AsyncIterator[Setup]:
    opened = open_or_create_arena(shm_folder / "store" / "arena", LAYOUT, SLOTS)
    store = KvStore(
        opened.arena, clock=lambda: 1000.0, lease_seconds=1.5, is_present=lambda _: True
    )
    servicer = Servicer(store)
    server = create_server()
    kvstore_pb2_grpc.add_KvStoreServiceServicer_to_server(servicer, server)
    listen(server, socket_address)
    await server.start()
    yield Setup(socket_address, servicer)
    servicer.let_go.set()
    servicer.stop()
    await server.stop(1)
    await servicer.close()
    store.close()
    opened.owner.remove()


async def written(
    client: StoreClient, tokens: tuple[int, ...] = FIRST, salt: bytes = SALT, seed: int = 1
) -> list[WrittenChunk]:
    connection = client.connection
    assert connection is not None
    [(slot, generation)] = await client.reserve(connection, salt, 1)
    arena = connection.tensors.arena
    for layer in range(LAYOUT.layer_count):
        for tensor in LAYOUT.tensors:
            plane = arena.plane(layer, tensor)
            plane[slot] = np.full_like(plane[slot], seed)
    return [WrittenChunk(slot, generation, b"", tokens, arena.checksum(slot))]


async def store_one(client: StoreClient, **options: Any) -> None:
    assert client.connection is not None
    chunks = await written(client, **options)
    salt = options.get("salt", SALT)
    sealed = await client.seal(client.connection, salt, chunks, 0)
    await client.release(client.connection, lease_ids=[sealed.lease_id])


# -- not answered ---------------------------------------------------------------------


async def test_a_session_whose_grants_are_not_known_is_given_up(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with setup.client() as client:
        before = client.connection
        assert before is not None
        setup.servicer.held = {"reserve"}
        with monkeypatch.context() as shorter:
            shorter.setattr("splitpoint.transport.store_session.CALL_SECONDS", 1.0)
            with pytest.raises(DeadlineExceeded):
                await client.reserve(before, SALT, 3)
        assert setup.held() == (0, 3)
        setup.servicer.held = set()
        await until(lambda: client.connection not in (None, before))
        assert setup.held() == (0, 0)
        assert setup.servicer.store.pool.slots.count(SlotState.QUARANTINED) == 0
        await store_one(client)


async def test_no_second_lookup_waits_for_a_store_that_is_silent(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker_service.store.client.ANSWER_SECONDS", 0.2)
    async with setup.client() as client:
        await store_one(client)
        setup.servicer.held = {"match"}
        for _ in range(3):
            with pytest.raises(Unavailable) as caught:
                await client.match(SALT, [*FIRST, 5], is_patient=False)
            assert caught.value.reason == "STORE_SILENT"
        await setup.servicer.reached("match")
        assert setup.servicer.carried_out["match"] == 1
        # A request that cannot do without the store waits, and gets its answer.
        patient = asyncio.create_task(client.match(SALT, [*FIRST, 5]))
        await setup.servicer.reached("match", 2)
        setup.servicer.let_go.set()
        match = await patient
        assert match.cached_tokens == 4
        await client.release(match.connection, lease_ids=[match.lease_id])
        # What the late answer leased is free.
        await setup.nothing_held()
        await until(lambda: not client.is_silent)
        match = await client.match(SALT, [*FIRST, 5], is_patient=False)
        assert match.cached_tokens == 4


async def test_slots_that_come_late_are_given_back(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker_service.store.client.ANSWER_SECONDS", 0.2)
    async with setup.client() as client:
        connection = client.connection
        assert connection is not None
        setup.servicer.held = {"reserve", "release"}
        for _ in range(2):
            with pytest.raises(Unavailable):
                await client.reserve(connection, SALT, 3, is_patient=False)
        await setup.servicer.reached("reserve")
        assert (setup.servicer.carried_out["reserve"], setup.held()) == (1, (0, 3))
        setup.servicer.let_go.set()
        await setup.nothing_held()
        assert client.connection is connection


async def test_a_release_is_sent_though_nothing_waits_for_its_answer(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker_service.store.client.ANSWER_SECONDS", 0.2)
    async with setup.client() as client:
        await store_one(client)
        matches = [await client.match(SALT, [*FIRST, 5]) for _ in range(3)]
        setup.servicer.carried_out.clear()
        setup.servicer.held = {"release"}
        for match in matches:
            with pytest.raises(Unavailable):
                await client.release(match.connection, lease_ids=[match.lease_id])
        await setup.servicer.reached("release", 3)
        await setup.nothing_held()
        setup.servicer.let_go.set()


async def test_one_request_waits_for_an_attempt_to_attach_and_no_other(setup: Setup) -> None:
    async with setup.client() as client:
        before = client.connection
        assert before is not None
        setup.servicer.carried_out.clear()
        setup.servicer.held = {"attach"}
        setup.servicer.store.sessions.end(before.session_id)
        await setup.servicer.reached("attach")
        await client.attach_now()
        assert client.connection is None
        with pytest.raises(StopIteration):  # it ends without waiting for anything
            client.attach_now().send(None)
        setup.servicer.let_go.set()
        await until(lambda: client.connection not in (None, before))
        await store_one(client)


# -- attached again -------------------------------------------------------------------


@pytest.mark.parametrize("where", ["quiesce", "reattached"])
async def test_whatever_goes_wrong_it_attaches_again(setup: Setup, where: str) -> None:
    broken = [where]

    def break_once(name: str) -> None:
        if name in broken:
            broken.remove(name)
            raise ValueError("a bug")

    async def quiesce() -> None:
        break_once("quiesce")

    async with setup.client() as client:
        before = client.connection
        assert before is not None
        client.on_reattach(quiesce=quiesce, reattached=lambda: break_once("reattached"))
        setup.servicer.store.sessions.end(before.session_id)
        await until(lambda: client.connection not in (None, before))
        await until(lambda: not broken)
        await store_one(client)
        # And once more, by the same keeper.
        again = client.connection
        assert again is not None
        setup.servicer.store.sessions.end(again.session_id)
        await until(lambda: client.connection not in (None, again))


async def test_a_new_session_without_transfers_has_none_of_their_rates(setup: Setup) -> None:
    async with setup.client() as client:
        before = client.connection
        assert before is not None
        assert not before.loads_from_stores
        engine: Any = Posted()
        engine.cache = CACHE
        engine.restorer = SimpleNamespace(forget_arena=lambda: None)
        engine.queues = SimpleNamespace(running=())
        engine.profile = Profile(1e9, 0.0, 1e9, 0.0, 1e9, "as of a test")
        engine.trace = None
        engine.max_batched_tokens = 16
        runtime = Runtime(engine, client)
        assert runtime.prefixes is not None
        fetcher = runtime.prefixes.fetcher
        # Measured in a session of a store that had them.
        fetcher.rates.by_key |= {"a:1": 2e9, "a:1 direct": 3e9}
        runtime._on_rates()
        assert "a:1 direct" in runtime.profile.remote_bytes_per_second
        setup.servicer.store.sessions.end(before.session_id)
        await until(lambda: client.connection not in (None, before))
        await until(lambda: runtime.profile.remote_bytes_per_second == {"a:1": 2e9})
        assert fetcher.rates.by_key == {"a:1": 2e9}
        await fetcher.close()


# -- stopping -------------------------------------------------------------------------


async def test_chains_are_closed_at_once_and_not_for_ever(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker_service.store.write_back.CLOSE_SECONDS", 1.0)
    async with setup.client() as client:
        await store_one(client)
        posted: list[Any] = []
        write_back = WriteBack(client, CACHE, posted.append, SerialLanes(torch.device("cpu")))
        for number in range(3):
            match = await client.match(SALT, [*FIRST, 5])
            write_back.open((f"r{number}", 0, 0), SALT, match, 4, must_store=False)
        setup.servicer.carried_out.clear()
        setup.servicer.held = {"release"}  # as of a store that is frozen
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(15):
                await write_back.close()
        # All were asked for, none of them after another one.
        assert setup.servicer.carried_out["release"] == 3
        await until(lambda: len(posted) == 3)
        assert {flushed.key for flushed in posted if isinstance(flushed, Flushed)} == {
            ("r0", 0, 0),
            ("r1", 0, 0),
            ("r2", 0, 0),
        }


# -- what becomes of chunks -------------------------------------------------------------


def fill(_: Any, tensors: ArenaTensors, jobs: Any, slots: Any) -> list[int]:
    """Write ones in place of what the jobs' pages have."""
    for plane in (*tensors.keys, *tensors.values, *tensors.inputs):
        plane[list(slots)] = 1.0
    return [tensors.arena.checksum(slot) for slot in slots]


async def test_chunks_that_are_not_exact_are_stored_for_their_writer_alone(
    setup: Setup,
) -> None:
    async with setup.client() as client:
        posted: list[Any] = []
        write_back = WriteBack(client, CACHE, posted.append, SerialLanes(torch.device("cpu")))
        write_back.copy = fill
        tokens = list(range(1, 17))
        jobs = [
            WriteJob(index, 0, 0, tuple(tokens[4 * index : 4 * index + 4]), is_exact=index < 2)
            for index in range(4)
        ]
        for name, sealed in (("a", 4), ("b", 2)):
            match = await client.match(SALT, tokens)
            write_back.open((name, 0, 0), SALT, match, match.cached_tokens, must_store=True)
            write_back.submit((name, 0, 0), jobs[match.cached_tokens // 4 :])
            await until(partial(has_sealed, posted, name, sealed))
            # Only the exact ones are found, also by the one that wrote the others.
            assert (await client.match(SALT, tokens)).cached_tokens == 8
        slots = [chunk.slot for each in posted for chunk in each.chunks]
        assert len(slots) == len(set(slots)) == 6
        await write_back.close()


def has_sealed(posted: list[Any], name: str, count: int) -> bool:
    """Return True if the store has sealed this number of chunks of a request."""
    return sum(len(each.chunks) for each in posted if each.key == (name, 0, 0)) == count


async def test_write_back_counts_how_its_chunks_end(setup: Setup) -> None:
    async with setup.client() as client:
        posted: list[Any] = []
        write_back = WriteBack(client, CACHE, posted.append, SerialLanes(torch.device("cpu")))
        totals = write_back.totals

        def jobs(*indices: int) -> list[WriteJob]:
            return [WriteJob(index, 0, 0, (index, 1, 2, 3)) for index in indices]

        async def open_chain(name: str) -> None:
            match = await client.match(SALT + name.encode(), list(FIRST))
            wanted = replace(match, storable_tokens=8)
            write_back.open((name, 0, 0), SALT + name.encode(), wanted, 0, must_store=False)

        write_back.copy = fill
        await open_chain("a")
        write_back.submit(("a", 0, 0), jobs(0, 1, 2))
        await until(lambda: any(isinstance(each, StoreLimitReached) for each in posted))
        # What was on its way to a chain that has ended meanwhile is wanted no more.
        write_back.submit(("a", 0, 0), jobs(3, 4))
        assert totals.chunks == {
            WriteResult.STORED: 2,
            WriteResult.FAILED: 0,
            WriteResult.UNWANTED: 3,
        }
        assert totals.bytes == 2 * LAYOUT.chunk_bytes
        assert totals.seconds > 0

        def broken(*_: Any) -> list[int]:
            raise OSError("the bus is gone")

        write_back.copy = broken
        await open_chain("b")
        write_back.submit(("b", 0, 0), jobs(0))
        await until(lambda: any(isinstance(each, WriteFailed) for each in posted))
        write_back.submit(("b", 0, 0), jobs(1))
        assert totals.chunks[WriteResult.FAILED] == 2
        assert totals.chunks[WriteResult.STORED] == 2
        assert totals.bytes == 2 * LAYOUT.chunk_bytes
        await write_back.close()
        await setup.nothing_held()


@pytest.mark.parametrize("lost_while", ["moving", "releasing"])
async def test_a_pool_has_slots_of_its_own_and_gives_the_others_back(
    setup: Setup, lost_while: str, chunks_cache: Any
) -> None:
    cache = chunks_cache
    pages = [torch.cat(planes) for planes in zip(cache.keys, cache.values, strict=True)]
    async with setup.client() as client:
        posted: list[Any] = []
        write_back = WriteBack(client, cache, posted.append, SerialLanes(torch.device("cpu")))
        write_back.copy = count_rows
        key, tokens = ("a", 0, 0), list(range(1, 17))

        async def answer(kind: type[Any], *jobs: Any) -> Any:
            posted.clear()
            write_back.submit(key, jobs)
            await until(lambda: any(isinstance(each, kind) for each in posted))
            return posted[-1]

        match = await client.match(SALT, tokens)
        write_back.open(key, SALT, match, 0, must_store=True)
        chunks = [
            WriteJob(index, 0, 0, tuple(tokens[4 * index : 4 * index + 4])) for index in range(4)
        ]
        sealed = (await answer(ChunksStored, *chunks)).chunks
        # Rows 1, 3, ... of head 0 and 0, 2, ... of head 1, in reverse; the same in both layers.
        slots = np.array([chunk.slot for chunk in sealed])
        places = np.array([range(15, 0, -2), range(14, -1, -2)])
        sources = [row_numbers(places, slots, 4)] * 2
        started = (await answer(PoolStarted, PoolStart(sources, sealed, 2))).chunks
        assert setup.held() == (1, 2)
        tensors = match.connection.tensors
        tensors.check_current(started)
        own = [chunk.slot for chunk in started]
        for plane in (*tensors.keys, *tensors.values):
            before = plane[slots.tolist()].transpose(0, 1).flatten(1, 2)
            after = plane[own].transpose(0, 1).flatten(1, 2)
            for head in range(2):
                assert torch.equal(after[head], before[head, places[head].tolist()])
        # The first chunk stays leased, the others can be evicted.
        pool = setup.servicer.store.pool
        assert pool.reclaimable_count() == 0
        stranger = replace(sealed[3], generation=99)
        release = PoolRelease(SALT, sealed[:1], tuple(tokens[:4]), (sealed[2], stranger))
        write_back.submit(key, [release])
        await until(lambda: pool.reclaimable_count() == 3)
        # The third was read more often, and the first was looked up again.
        uses = pool._policy._uses
        assert [uses[chunk.slot] for chunk in sealed] == [1, 0, 1, 0]
        assert setup.held() == (1, 2)
        # Over rows 4, 5, 6, 7 of head 0 and 0, 1, 2, 3 of head 1; then into a slot of its own.
        targets = [row_numbers(np.array([range(4, 8), range(4)]), np.array(own), 4)] * 2
        assert (await answer(PoolWritten, PoolWrite(0, targets))).chunk is None
        for layer, (keys, values) in enumerate(zip(tensors.keys, tensors.values, strict=True)):
            for plane, page in ((keys, pages[layer][0]), (values, pages[layer][1])):
                assert torch.equal(plane[own[1], 0], page[0])
                assert torch.equal(plane[own[0], 1], page[1])
        more = (await answer(PoolWritten, PoolWrite(0, None))).chunk
        assert torch.equal(tensors.values[1][more.slot], pages[1][1])
        assert setup.held() == (1, 3)
        # There are 8 slots, of which this one may take 4.
        assert (await answer(PoolStarted, PoolStart(sources, sealed[:1], 6))).chunks is None
        assert write_back.totals.chunks[WriteResult.STORED] == 6
        # What was moved must be what it was all the time.
        setup.servicer.store.pool.evict_all()
        last: Any = PoolRelease(SALT, (stranger,), tuple(tokens[:4]), ())
        if lost_while == "moving":
            last = PoolStart(sources, sealed, 1)
        lost = await answer(WriteFailed, last)
        assert lost.error.reason == "CHUNK_LOST"
        write_back.flush(key)
        await setup.nothing_held()
        await write_back.close()


@pytest.fixture
def chunks_cache() -> Any:
    """A cache of one page, with random K and V."""
    pages = torch.randn((2, 2, 2, 4, 4))
    return SimpleNamespace(
        layout=LAYOUT,
        device=torch.device("cpu"),
        keys=[page[:1] for page in pages],
        values=[page[1:] for page in pages],
    )


async def test_a_pool_whose_session_changed_leaves_no_lease(
    setup: Setup, chunks_cache: Any
) -> None:
    """Its chunks are looked up under the new session, and leased by it."""
    async with setup.client() as client:
        await store_one(client)
        posted: list[Any] = []
        lanes = SerialLanes(torch.device("cpu"))
        write_back = WriteBack(client, chunks_cache, posted.append, lanes)
        match = await client.match(SALT, FIRST)
        former = replace(match, connection=replace(match.connection))
        key = ("a", 0, 0)
        write_back.open(key, SALT, former, 4, must_store=True)
        write_back.submit(key, [PoolRelease(SALT, match.chunks, FIRST, ())])
        await until(lambda: bool(posted))
        assert posted[0].error.reason == "STORE_LOST"
        assert setup.held() == (1, 0)
        write_back.flush(key)
        await setup.nothing_held()
        await write_back.close()


async def test_a_pool_goes_on_without_a_slot_and_without_a_late_answer(
    setup: Setup, chunks_cache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker_service.store.client.ANSWER_SECONDS", 0.2)
    async with setup.client() as client:
        assert client.connection is not None
        await store_one(client)
        posted: list[Any] = []
        lanes = SerialLanes(torch.device("cpu"))
        write_back = WriteBack(client, chunks_cache, posted.append, lanes)
        key, match = ("a", 0, 0), await client.match(SALT, FIRST)
        write_back.open(key, SALT, match, 4, must_store=True)
        setup.servicer.held.add("release")
        release = PoolRelease(SALT, match.chunks, FIRST, ())
        write_back.submit(key, [release, PoolWrite(0, None)])
        await until(lambda: bool(posted))
        assert isinstance(posted[0], PoolWritten)
        assert posted[0].chunk is not None
        setup.servicer.let_go.set()
        # Another one takes the other slots; the chunk can still be written over others.
        rest = await client.reserve(client.connection, SALT, SLOTS - 2)
        targets = [row_numbers(np.array([range(4)] * 2), np.array([posted[0].chunk.slot]), 4)] * 2
        write_back.submit(key, [PoolWrite(0, None), PoolWrite(0, targets)])
        await until(lambda: len(posted) == 3)
        assert [each.is_refused for each in posted] == [False, True, False]
        assert write_back.totals.chunks[WriteResult.STORED] == 2
        await client.release(client.connection, slots=rest)
        write_back.flush(key)
        await setup.nothing_held()
        await write_back.close()


def count_rows(_: Any, tensors: ArenaTensors, jobs: Any, slots: Any) -> list[int]:
    """Write another number into each element of what the jobs' pages have."""
    for plane in (*tensors.keys, *tensors.values, *tensors.inputs):
        size = plane[list(slots)].shape
        plane[list(slots)] = torch.randn(size)
    return [tensors.arena.checksum(slot) for slot in slots]


# -- the engine's thread --------------------------------------------------------------


class Posted:
    """An engine that takes commands when the test says so, with lanes that do what they get."""

    def __init__(self) -> None:
        self.commands: list[Call] = []
        self.lanes = SerialLanes(torch.device("cpu"))

    def post(self, command: Call) -> None:
        self.commands.append(command)


async def test_between_two_steps_or_never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker_service.runtime.STEP_TIMEOUT_SECONDS", 0.05)
    engine: Any = Posted()
    runtime = Runtime(engine, None)
    ran: list[str] = []
    with pytest.raises(TimeoutError):
        await asyncio.to_thread(runtime.calls.without_copies, lambda: ran.append("late"))
    engine.commands.pop().function()  # the step ended after all
    assert ran == []

    begun, go_on = threading.Event(), threading.Event()
    copy = Piece(Work("copy", lambda: ran.append("copy")), lambda: None)
    restore = Group(iter([copy, None]).__next__)

    def slow() -> None:
        engine.lanes.attach(restore)  # copies nothing while the memory may change
        begun.set()
        assert go_on.wait(30)
        ran.append("whole")

    waiting = asyncio.create_task(asyncio.to_thread(runtime.calls.without_copies, slow))
    await until(lambda: bool(engine.commands))
    running = asyncio.create_task(asyncio.to_thread(engine.commands.pop().function))
    assert await asyncio.to_thread(begun.wait, 30)
    # Its time is over, but it has begun: who waits for it waits on.
    assert not (await asyncio.wait({waiting}, timeout=0.3))[0]
    go_on.set()
    await waiting
    await running
    assert ran == ["whole", "copy"]


async def test_an_error_between_steps_is_its_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = Posted()
    runtime = Runtime(engine, None)

    def broken() -> None:
        raise ValueError("a bug")

    waiting = asyncio.create_task(asyncio.to_thread(runtime.calls.without_copies, broken))
    await until(lambda: bool(engine.commands))
    engine.commands.pop().function()  # raises nothing on the engine's thread
    with pytest.raises(ValueError, match="a bug"):
        await waiting


async def test_equal_hashes_bring_no_bytes_of_another_tenant(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_index, "packed_chunk_key", lambda *_: b"k" * 32)
    async with setup.client() as reader, setup.client() as writer:
        assert reader.connection is not None
        for salt, seed in ((b"A", 1), (b"B", 2)):
            await store_one(writer, salt=salt, seed=seed)
            match = await reader.match(salt, [*FIRST, 5])
            assert match.cached_tokens == 4
            [chunk] = match.chunks
            plane = reader.connection.tensors.arena.plane(1, "K")
            assert np.all(plane[chunk.slot] == seed)
            await reader.release(reader.connection, lease_ids=[match.lease_id])
            assert setup.servicer.store.pool.evict_all() == 1


async def test_what_a_cancelled_call_is_granted_is_given_back() -> None:
    """The store may carry out a call that is cancelled here: its grant must not be lost."""
    cleanups = Cleanups()
    granted, released = asyncio.Event(), asyncio.Event()

    async def call() -> str:
        await granted.wait()
        return "slots"

    async def give_back(what: str) -> None:
        assert what == "slots"
        released.set()

    waiting = asyncio.create_task(cleanups.obtain(call(), give_back))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not released.is_set()
    granted.set()
    await cleanups.wait(10.0)
    assert released.is_set()
