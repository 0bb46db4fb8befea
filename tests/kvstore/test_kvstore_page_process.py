"""A store of pages as a process: its first engine, kills, kept arenas, a disk behind it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvstore_helpers import LAYOUT, granted_slots
from page_helpers import assert_pages, keys_of, write_pages
from redis_server import RedisServer
from test_kvstore_process import StoreProcess
from waiting import wait_until

from kvstore_service.server import SERVICE_NAME
from splitpoint.arena.owner import open_or_create_arena
from splitpoint.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from splitpoint.shapes import ArenaLayout
from splitpoint.transport.channels import open_sync_channel
from splitpoint.transport.local_session import mapped_arena
from splitpoint.transport.statuses import error_of
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import kvstore_pb2_grpc

PAGE_BYTES = 64 << 10
SLOTS = 32  # of 4 MiB
AUTO = ("--page-size", "auto")
SIZED = ("--page-size", "64KiB")

Start = Callable[..., StoreProcess]


class Engine:
    """A client that maps the arena, as a rank of an engine does. Its calls block."""

    def __init__(self, address: str, page_bytes: int = PAGE_BYTES) -> None:
        self._channel = open_sync_channel(address)
        self.stub: Any = kvstore_pb2_grpc.KvStoreServiceStub(self._channel)
        request = pb.AttachRequest(
            client_name="engine", process_id=os.getpid(), page_bytes=page_bytes
        )
        self.attached = self.stub.Attach(request, timeout=20)
        self.session = self.attached.session_id
        self.arena = mapped_arena(self.attached)
        self._requests = 0
        self._stop = threading.Event()
        self._beats = self.stub.KeepAlive(self._messages())
        next(self._beats)

    def _messages(self) -> Iterator[pb.KeepAliveRequest]:
        while not self._stop.is_set():
            yield pb.KeepAliveRequest(session_id=self.session)
            self._stop.wait(0.3)

    def ids(self) -> dict[str, Any]:
        self._requests += 1
        return {"session_id": self.session, "request_id": b"%d" % self._requests}

    def write(self, keys: Sequence[bytes]) -> None:
        reserved = self.stub.Reserve(
            pb.ReserveRequest(slot_count=len(keys), **self.ids()), timeout=10
        )
        chunks = write_pages(self.arena, granted_slots(reserved.runs), keys)
        self.stub.Seal(pb.SealRequest(chunks=chunks, **self.ids()), timeout=10)

    def found(self, keys: Sequence[bytes]) -> list[bool]:
        """Match pages, compare their bytes, and release them. Return which were found."""
        answer = self.stub.MatchPages(
            pb.MatchPagesRequest(page_keys=keys, **self.ids()), timeout=20
        )
        found = assert_pages(self.arena, answer.pages, keys)
        self.stub.Release(pb.ReleaseRequest(lease_ids=[answer.lease_id], **self.ids()))
        return found

    def stats(self) -> pb.GetStatsResponse:
        stats: pb.GetStatsResponse = self.stub.GetStats(pb.GetStatsRequest(check_integrity=True))
        assert list(stats.integrity_violations) == []
        return stats

    def close(self) -> None:
        self._stop.set()
        self._channel.close()
        self.arena.close()


@pytest.fixture
def start(shm_folder: Path) -> Iterator[Start]:
    """Starts stores of pages; kills what still runs at the end."""
    stores: list[StoreProcess] = []

    def run(address: str, *more: str, what: Sequence[str] = AUTO, arena: str = "a") -> StoreProcess:
        path = shm_folder / arena / "arena"
        stores.append(StoreProcess(path, address, *more, what=what))
        return stores[-1]

    yield run
    for store in stores:
        store.end(signal.SIGKILL)


def refused(call: Callable[[], Any]) -> Any:
    """Return the error of a call."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return error_of(caught.value)


# -- before the arena -----------------------------------------------------------------------


def test_before_its_first_engine_a_store_says_so(
    start: Start, shm_folder: Path, socket_address: str
) -> None:
    store = start(socket_address, "--reflection")
    assert store.address == socket_address
    with open_sync_channel(socket_address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE_NAME):
            answer = health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with store.stub() as stub:
        without_size = pb.AttachRequest(client_name="engine", process_id=1)
        for call in (
            lambda: stub.GetStats(pb.GetStatsRequest()),
            lambda: stub.Attach(without_size),
            lambda: stub.Match(pb.MatchRequest(token_ids=[1])),
            lambda: stub.Evict(pb.EvictRequest()),
        ):
            error = refused(call)
            assert isinstance(error, Unavailable)
            assert error.reason == "NO_ARENA_YET"
        # Sessions of a store before this one are gone.
        for call in (
            lambda: stub.MatchPages(pb.MatchPagesRequest(session_id=bytes(16))),
            lambda: stub.Release(pb.ReleaseRequest(session_id=bytes(16), request_id=b"r")),
            lambda: next(stub.KeepAlive(iter([pb.KeepAliveRequest(session_id=bytes(16))]))),
        ):
            assert isinstance(refused(call), NotFound)
        for size in (-1, 1 << 31, 8 << 20):
            request = pb.AttachRequest(client_name="engine", process_id=1, page_bytes=size)
            assert isinstance(refused(partial(stub.Attach, request)), InvalidArgument)
    assert list(shm_folder.iterdir()) == []


def test_sigterm_before_the_first_engine_leaves_nothing(
    start: Start, shm_folder: Path, socket_address: str
) -> None:
    store = start(socket_address, "--metrics", "127.0.0.1:0")
    status, errors = store.end()
    assert status == 0, errors
    assert list(shm_folder.iterdir()) == []


def test_the_first_engine_decides_the_size(start: Start, socket_address: str) -> None:
    store = start(socket_address)
    engine = Engine(socket_address)
    assert engine.attached.layout.page_bytes == PAGE_BYTES
    assert engine.attached.slot_count == SLOTS
    engine.write(keys_of(1, 2, 3))
    assert engine.found(keys_of(3, 4, 1)) == [True, False, True]
    smaller = Engine(socket_address, PAGE_BYTES // 2)
    assert smaller.found(keys_of(2)) == [True]
    error = refused(lambda: Engine(socket_address, PAGE_BYTES + 1))
    assert isinstance(error, FailedPrecondition)
    assert error.reason == "PAGES_DO_NOT_FIT"
    stats = engine.stats()
    assert (stats.layout.page_bytes, stats.sealed_slot_count) == (PAGE_BYTES, 3)
    assert [each.client_name for each in stats.sessions] == ["engine"] * 2
    engine.close()
    smaller.close()
    assert store.end()[0] == 0
    assert not store.arena.parent.exists()


def test_of_two_first_engines_one_decides(start: Start, socket_address: str) -> None:
    start(socket_address)
    sizes = (PAGE_BYTES, 2 * PAGE_BYTES)
    barrier = threading.Barrier(2)

    def attach(size: int) -> Engine | str:
        barrier.wait()
        try:
            return Engine(socket_address, size)
        except grpc.RpcError as error:
            return error_of(error).reason

    with ThreadPoolExecutor(2) as threads:
        small, large = threads.map(attach, sizes)
    assert isinstance(small, Engine)
    size = small.attached.layout.page_bytes
    if isinstance(large, Engine):
        assert size == large.attached.layout.page_bytes == 2 * PAGE_BYTES
        large.close()
    else:
        assert (large, size) == ("PAGES_DO_NOT_FIT", PAGE_BYTES)
    small.close()


def test_tiny_pages_make_no_table_of_millions_of_slots(start: Start, socket_address: str) -> None:
    start(socket_address)
    tiny = Engine(socket_address, 1)
    assert (tiny.attached.layout.page_bytes, tiny.attached.slot_count) == (64 << 10, SLOTS)
    tiny.close()


def test_a_size_makes_the_arena_at_once(start: Start, socket_address: str) -> None:
    store = start(socket_address, what=SIZED)
    with store.stub() as stub:
        stats = stub.GetStats(pb.GetStatsRequest())
    assert (stats.layout.page_bytes, stats.slot_count) == (PAGE_BYTES, SLOTS)


def test_an_arena_that_cannot_fit_is_refused_before_an_engine_comes(
    start: Start, shm_folder: Path, socket_address: str
) -> None:
    store = start(socket_address, "--host-memory", "9000TiB")
    status, errors = store.end()
    assert (store.address, status) == (None, 5)
    assert "does not fit" in errors
    assert list(shm_folder.iterdir()) == []


def test_pages_are_not_announced_in_redis(
    start: Start, socket_address: str, redis_server: RedisServer
) -> None:
    start(socket_address, "--redis", redis_server.url)
    engine = Engine(socket_address)
    engine.write(keys_of(1, 2))
    assert not engine.stats().HasField("redis")
    with redis_server.client() as client:
        assert client.keys() == []
    engine.close()


# -- starts on what is there ----------------------------------------------------------------


def test_pages_survive_kills(start: Start, socket_address: str) -> None:
    """The store that follows serves them again, without being told their size."""
    keys = keys_of(*range(20))
    addresses = [f"{socket_address}{number}" for number in range(4)]
    for number, address in enumerate(addresses):
        store = start(address)
        assert store.address == address
        if number:
            with store.stub() as stub:  # before any engine attached
                stats = stub.GetStats(pb.GetStatsRequest())
            assert stats.adopted_chunk_count == 5 * number
        engine = Engine(address)
        assert engine.attached.epoch == number + 1
        assert engine.found(keys) == [True] * 5 * number + [False] * (20 - 5 * number)
        engine.write(keys[5 * number : 5 * number + 5])
        store.end(signal.SIGKILL)
        engine.close()


def test_a_changed_page_is_never_served(start: Start, socket_address: str) -> None:
    store = start(socket_address, "--scrub-seconds", "0.2")
    engine = Engine(socket_address)
    keys = keys_of(*range(4))
    engine.write(keys)
    answer = engine.stub.MatchPages(pb.MatchPagesRequest(page_keys=keys, **engine.ids()))
    slots = [page.slot for page in answer.pages]
    engine.arena.plane(0, "P")[slots[1], 1000] ^= 0x20
    wait_until(lambda: engine.stats().damaged_chunk_count == 1)  # the scrubber
    handle = answer.pages[1]
    assert not engine.arena.is_current([handle.slot], [handle.generation])
    assert engine.found(keys) == [True, False, True, True]
    store.end(signal.SIGKILL)
    engine.arena.plane(0, "P")[slots[2], -1] ^= 0x20
    engine.close()
    address = f"{socket_address}b"
    start(address)
    engine = Engine(address)
    assert engine.found(keys) == [True, False, False, True]
    assert engine.stats().checksum_failure_count == 1
    engine.close()


def test_a_kept_arena_of_pages(start: Start, socket_address: str) -> None:
    store = start(socket_address, "--keep-arena")
    engine = Engine(socket_address)
    engine.write(keys_of(1))
    engine.close()
    assert store.end()[0] == 0
    store = start(socket_address, "--keep-arena", what=SIZED)
    engine = Engine(socket_address)
    assert engine.found(keys_of(1, 2)) == [True, False]
    engine.close()
    assert store.end()[0] == 0
    other = start(socket_address, what=("--page-size", "32KiB"))
    status, errors = other.end()
    assert (other.address, status) == (None, 1)
    assert "page_bytes differ" in errors
    replaced = start(socket_address, "--replace-arena", what=("--page-size", "32KiB"))
    with replaced.stub() as stub:
        assert stub.GetStats(pb.GetStatsRequest()).layout.page_bytes == 32 << 10


@pytest.mark.parametrize("size", [PAGE_BYTES, 2 * PAGE_BYTES])
def test_the_first_engine_decides_whether_a_kept_arena_is_replaced(
    start: Start, socket_address: str, size: int
) -> None:
    store = start(socket_address, "--keep-arena")
    engine = Engine(socket_address)
    engine.write(keys_of(1))
    engine.close()
    assert store.end()[0] == 0
    start(socket_address, "--replace-arena")
    engine = Engine(socket_address, size)
    assert engine.attached.layout.page_bytes == size
    assert engine.found(keys_of(1)) == [size == PAGE_BYTES]
    engine.close()


@pytest.mark.parametrize("kind", ["tokens", "version 1"])
def test_an_arena_of_another_kind_is_refused_at_the_start(
    start: Start, shm_folder: Path, socket_address: str, kind: str
) -> None:
    path = shm_folder / "a" / "arena"
    opened = open_or_create_arena(path, LAYOUT, 8)
    opened.owner.keep(opened.arena.superblock)
    if kind == "version 1":
        with path.open("r+b") as file:
            for offset in (8, 4096 + 8):
                file.seek(offset)
                file.write((1).to_bytes(4, "little"))
    store = start(socket_address)
    status, errors = store.end()
    assert (store.address, status) == (None, 1)
    assert ("an arena of chunks of tokens" if kind == "tokens" else "arena format 1") in errors
    assert "splitpoint arena rm" in errors
    assert path.exists()
    start(socket_address, "--replace-arena")
    engine = Engine(socket_address)
    assert engine.attached.layout.page_bytes == PAGE_BYTES
    engine.close()


@pytest.mark.parametrize(
    ("what", "more", "text"),
    [
        (("--page-size", "many"), (), "not a size"),
        (("--page-size", "0"), (), "at least 1 byte"),
        (("--page-size", "2GiB"), (), "pages have 1 to"),
        (("--page-size", "8MiB"), (), "hold no page"),
        ((*AUTO, "--layout", LAYOUT.to_json()), (), "give one of --model"),
        ((), (), "give one of --model"),
        (AUTO, ("--admission", "second-use"), "for chunks of tokens"),
    ],
)
def test_bad_options(
    start: Start,
    shm_folder: Path,
    socket_address: str,
    what: Sequence[str],
    more: Sequence[str],
    text: str,
) -> None:
    store = start(socket_address, *more, what=what)
    status, errors = store.end()
    assert (store.address, status) == (None, 2)
    assert text in errors
    assert "Traceback" not in errors
    assert list(shm_folder.iterdir()) == []


# An engine that dies between its copies and their seal.
DYING = """
import sys, time
from kvstore_helpers import granted_slots
from page_helpers import keys_of, write_pages
from test_kvstore_page_process import Engine, pb
engine = Engine(sys.argv[1])
reserved = engine.stub.Reserve(pb.ReserveRequest(slot_count=5, **engine.ids()))
write_pages(engine.arena, granted_slots(reserved.runs), keys_of(1, 2, 3, 4, 5))
answer = engine.stub.MatchPages(pb.MatchPagesRequest(page_keys=keys_of(0), **engine.ids()))
print(answer.lease_id, flush=True)
time.sleep(600)
"""


def test_what_a_killed_engine_held_is_free_again(start: Start, socket_address: str) -> None:
    start(socket_address)
    engine = Engine(socket_address)
    engine.write(keys_of(0))
    dying = subprocess.Popen(
        [sys.executable, "-c", DYING, socket_address],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert dying.stdout is not None
    assert int(dying.stdout.readline()) > 0
    stats = engine.stats()
    assert (stats.writing_slot_count, stats.leased_slot_count) == (5, 1)
    dying.kill()
    dying.communicate()
    wait_until(lambda: engine.stats().free_slot_count == SLOTS - 1)
    stats = engine.stats()
    assert (stats.lease_count, stats.quarantined_slot_count, stats.session_count) == (0, 0, 1)
    assert engine.found(keys_of(0, 1, 2, 3, 4, 5)) == [True] + [False] * 5
    engine.close()


# -- a disk behind it -----------------------------------------------------------------------


def test_pages_go_to_the_disk_and_come_back(
    start: Start, shm_folder: Path, socket_address: str
) -> None:
    """Through a clean stop and a new arena: every page that the disk took, byte for byte."""
    disk = ("--tier-disk", str(shm_folder / "tier"), "--tier-disk-size", "32MiB")
    keys = keys_of(*range(80))
    store = start(socket_address, *disk)
    engine = Engine(socket_address)
    for first in range(0, len(keys), 8):
        engine.write(keys[first : first + 8])
    assert engine.stats().tiers[0].dropped_chunk_count == 0
    # More than the arena holds, by look-ups of a part each.
    for first in range(0, len(keys), 16):
        assert engine.found(keys[first : first + 16]) == [True] * 16
    assert engine.stats().tiers[0].read_chunk_count >= len(keys) - SLOTS
    engine.close()
    assert store.end()[0] == 0
    address = f"{socket_address}b"
    start(address, *disk, arena="b")
    engine = Engine(address)
    for first in range(0, len(keys), 16):
        assert engine.found(keys[first : first + 16]) == [True] * 16
    absent = keys_of(*range(100, 110))
    assert engine.found([*absent, *keys[:4]]) == [False] * 10 + [True] * 4
    tier = engine.stats().tiers[0]
    assert (tier.chunk_count, tier.missed_chunk_count) == (len(keys), 0)
    engine.close()


def test_pages_of_two_sizes_share_a_folder(
    start: Start, shm_folder: Path, socket_address: str
) -> None:
    disk = ("--tier-disk", str(shm_folder / "tier"), "--tier-disk-size", "32MiB")
    hashes = set()
    for number, size in enumerate((2 * PAGE_BYTES, PAGE_BYTES)):
        store = start(f"{socket_address}{number}", *disk, arena=str(number))
        engine = Engine(f"{socket_address}{number}", size)
        assert engine.found(keys_of(1)) == [False]
        engine.write(keys_of(1))
        hashes.add(ArenaLayout.of_pages(size).layout_hash.hex())
        engine.close()
        assert store.end()[0] == 0
    assert {each.name for each in (shm_folder / "tier").iterdir() if each.is_dir()} == hashes
