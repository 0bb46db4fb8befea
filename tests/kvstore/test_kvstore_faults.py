"""Faults that a store process must survive or refuse: files, bits, descriptors, clients, clocks."""

from __future__ import annotations

import ast
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from kvstore_helpers import LAYOUT
from test_kvstore_kills import Writer
from test_kvstore_process import ROOT, StoreProcess, finish, start_worker, stats_of
from waiting import wait_until

from splitpoint.arena.format import RECORD_BYTES, RECORDS_OFFSET, SUPERBLOCK_BYTES, Geometry
from splitpoint.arena.mapping import Arena
from splitpoint.arena.records import CHUNK_OFFSET
from splitpoint.errors import ResourceExhausted
from splitpoint.transport.channels import open_sync_channel
from splitpoint.transport.local_session import mapped_arena
from splitpoint.transport.statuses import error_of
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import kvstore_pb2_grpc

SIZE = LAYOUT.chunk_tokens


@pytest.fixture
def path(shm_folder: Path) -> Path:
    return shm_folder / "store" / "arena"


@contextmanager
def running(path: Path, address: str, *arguments: str) -> Iterator[StoreProcess]:
    store = StoreProcess(path, address, *arguments)
    assert store.address == address, store.end()
    try:
        yield store
    finally:
        store.end(signal.SIGKILL)


def attach(stub: Any) -> tuple[bytes, Arena]:
    """Open a session of this process without a KeepAlive stream. It lasts one lease."""
    answer = stub.Attach(
        pb.AttachRequest(client_name="test", process_id=os.getpid(), process_start_ticks=1)
    )
    return answer.session_id, mapped_arena(answer)


def is_over(stub: Any, session: bytes) -> bool:
    """Whether the store refuses a session for its age."""
    try:
        stub.Match(pb.MatchRequest(session_id=session, request_id=b"over", token_ids=[7]))
    except grpc.RpcError as error:
        return error_of(error).reason == "SESSION_EXPIRED"
    return False


# -- copies that take too long ------------------------------------------------------------


def test_a_lease_that_expires_protects_the_copy_under_way(path: Path, socket_address: str) -> None:
    """The slots of a reader that is a lease late are not reused before it is done."""
    with running(path, socket_address, "--lease-seconds", "1") as store, store.stub() as stub:
        worker = start_worker(socket_address, [1] * 8, seals=True)
        session, arena = attach(stub)
        found = stub.Match(pb.MatchRequest(session_id=session, request_id=b"m", token_ids=[1] * 8))
        slots = [chunk.slot for chunk in found.chunks]
        generations = [chunk.generation for chunk in found.chunks]
        finish(worker)  # its own lease goes with it
        wait_until(lambda: stats_of(stub).lease_count == 1)
        stats = stats_of(stub)
        # The reader's session ends, its copy does not.
        wait_until(lambda: is_over(stub, session))
        assert arena.is_current(slots, generations)
        third, thirds = attach(stub)
        with pytest.raises(grpc.RpcError) as caught:
            stub.Reserve(
                pb.ReserveRequest(session_id=third, request_id=b"all", slot_count=stats.slot_count)
            )
        assert isinstance(error_of(caught.value), ResourceExhausted)
        assert arena.is_current(slots, generations)
        arena.close()  # the copy is done: the kernel says so for us
        fourth, fourths = attach(stub)
        granted = stub.Reserve(
            pb.ReserveRequest(session_id=fourth, request_id=b"all", slot_count=stats.slot_count)
        )
        assert sum(run.slot_count for run in granted.runs) == stats.slot_count
        for mapped in (thirds, fourths):
            mapped.close()


# -- bits that flip in memory --------------------------------------------------------------


@pytest.mark.parametrize("where", ["superblock", "record", "payload"])
def test_a_flipped_bit_is_another_copy_or_a_miss(
    path: Path, socket_address: str, where: str
) -> None:
    with running(path, socket_address) as store:
        for name in (1, 2):
            finish(start_worker(socket_address, [name] * 8, seals=True))
        with store.stub() as stub:
            found = stub.Match(pb.MatchRequest(token_ids=[1] * 8))
            slots = stats_of(stub).slot_count
        store.end(signal.SIGKILL)
    geometry = Geometry(LAYOUT, slots)
    slot = found.chunks[1].slot
    offset = {
        "superblock": SUPERBLOCK_BYTES + 170,
        "record": RECORDS_OFFSET + slot * RECORD_BYTES + CHUNK_OFFSET + 40,
        "payload": geometry.planes[3].offset + slot * geometry.planes[3].slot_bytes + 5,
    }[where]
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 8]))
    with running(path, socket_address) as store, store.stub() as stub:
        session, arena = attach(stub)
        cached = [
            stub.Match(
                pb.MatchRequest(session_id=session, request_id=b"%d" % name, token_ids=[name] * 8)
            ).cached_tokens
            for name in (1, 2)
        ]
        stats = stats_of(stub)
        arena.close()
        assert stats.epoch == 2
        assert cached == [8 if where == "superblock" else 4, 8]
        assert stats.refused_chunk_count == (where == "record")
        assert stats.checksum_failure_count == (where == "payload")


# -- what lies at the path --------------------------------------------------------------------


@pytest.mark.parametrize("what", ["link", "foreign", "version", "layout", "size"])
def test_files_that_are_not_its_arena_are_refused_and_left(
    path: Path, socket_address: str, tmp_path: Path, what: str
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious" * 1000)
    if what in ("link", "foreign"):
        path.parent.mkdir(mode=0o700)
        if what == "link":
            path.symlink_to(victim)
        else:
            path.write_bytes(victim.read_bytes())
            path.chmod(0o600)
    else:
        with running(path, socket_address) as store:
            store.end(signal.SIGKILL)
        if what == "version":
            with path.open("r+b") as file:
                for offset in (0, SUPERBLOCK_BYTES):
                    file.seek(offset + 8)
                    file.write(b"\x07")
    before = path.read_bytes()
    arguments = {
        "layout": ["--layout", LAYOUT.to_json().replace('"chunk_tokens": 4', '"chunk_tokens": 8')],
        "size": ["--host-memory", "6MiB"],
    }
    store = StoreProcess(path, socket_address, *arguments.get(what, []))
    assert store.address is None
    status, errors = store.end()
    assert status == 1
    assert "Traceback" not in errors
    assert len(errors.splitlines()) == 1, errors
    expected = {
        "link": "cannot be an arena",
        "foreign": "not an arena",
        "version": "arena format 7",
        "layout": "chunk_tokens differ",
        "size": "slots were asked for",
    }[what]
    assert expected in errors
    assert path.read_bytes() == before
    assert victim.read_bytes() == b"precious" * 1000
    assert [entry.name for entry in path.parent.iterdir()] == ["arena"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_can_neither_open_nor_plant(path: Path, socket_address: str) -> None:
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "path = Path(sys.argv[1])\n"
        "for flags in (os.O_RDONLY, os.O_RDWR, os.O_RDWR | os.O_CREAT):\n"
        "    try: os.open(path, flags)\n"
        "    except PermissionError: continue\n"
        "    sys.exit(f'opened with {flags}')\n"
        "try: (path.parent / 'arena.new').symlink_to('/etc/passwd')\n"
        "except PermissionError: sys.exit(0)\n"
        "sys.exit('planted a link')\n"
    )
    with running(path, socket_address):
        result = subprocess.run(
            [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=False
        )
        assert (result.returncode, result.stderr) == (0, "")


# -- limits -----------------------------------------------------------------------------------


def test_an_arena_full_of_leases_says_when_to_ask_again(path: Path, socket_address: str) -> None:
    with running(path, socket_address) as store, store.stub() as stub:
        writer = Writer(0, socket_address, random.Random(0))
        answer, arena = writer.attach(stub)
        stub.Reserve(
            pb.ReserveRequest(
                session_id=answer.session_id, request_id=b"r", slot_count=answer.slot_count
            )
        )
        for index in range(50):
            with pytest.raises(grpc.RpcError) as caught:
                stub.Reserve(
                    pb.ReserveRequest(
                        session_id=answer.session_id, request_id=b"%d" % index, slot_count=1
                    ),
                    timeout=60,
                )
            error = error_of(caught.value)
            assert isinstance(error, ResourceExhausted)
            assert error.retry_after_seconds
        arena.close()


def test_a_store_out_of_descriptors_recovers(path: Path, free_port: int) -> None:
    address = f"127.0.0.1:{free_port}"
    with running(path, address) as store, store.stub() as stub:
        assert stats_of(stub).epoch == 1
        resource.prlimit(store.pid, resource.RLIMIT_NOFILE, (40, 40))
        with ExitStack() as crowd:
            for _ in range(100):
                client = crowd.enter_context(socket.socket())
                client.setblocking(False)
                client.connect_ex(("127.0.0.1", free_port))
            assert stats_of(stub).epoch == 1  # who is in stays in

        def serves_a_newcomer() -> bool:
            with open_sync_channel(address) as channel:
                late = kvstore_pb2_grpc.KvStoreServiceStub(channel)
                try:
                    return bool(late.GetStats(pb.GetStatsRequest(), timeout=2).epoch == 1)
                except grpc.RpcError:
                    return False

        wait_until(serves_a_newcomer)
        status, errors = store.end()
        assert status == 0, errors
    assert not path.parent.exists()


def test_a_forked_child_that_ends_changes_nothing(path: Path, socket_address: str) -> None:
    with running(path, socket_address) as store, store.stub() as stub:
        worker = start_worker(socket_address, [1] * 10, forks=True)
        assert stats_of(stub).writing_slot_count == 3
        assert path.exists()
        worker.kill()
        finish(worker)
        wait_until(lambda: stats_of(stub).free_slot_count == stats_of(stub).slot_count)


def test_sigterm_with_sessions_at_work(path: Path, socket_address: str) -> None:
    with running(path, socket_address, "--keep-arena") as store:
        worker = start_worker(socket_address, [1] * 10)
        assert store.end()[0] == 0
        with running(path, socket_address) as again, again.stub() as stub:
            # The writer lives: its slots are not granted again.
            assert stats_of(stub).quarantined_at_start_count == 3
            assert stats_of(stub).quarantined_slot_count == 3
            worker.kill()
            finish(worker)
            wait_until(lambda: stats_of(stub).quarantined_slot_count == 0)
            assert again.end()[0] == 0


def test_a_store_killed_while_allocating_blocks_no_other(path: Path, socket_address: str) -> None:
    path.parent.mkdir(mode=0o700)
    half_made = path.with_name("arena.new")
    free = os.statvfs(path.parent)
    with half_made.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 64 << 20)
    half_made.chmod(0o600)
    left = os.statvfs(path.parent)
    assert left.f_bavail < free.f_bavail
    with running(path, socket_address) as store, store.stub() as stub:
        assert stats_of(stub).epoch == 1
        assert not half_made.exists()
        assert store.end()[0] == 0


# -- clocks ---------------------------------------------------------------------------------


def test_a_clock_that_jumps_changes_nothing(path: Path, socket_address: str) -> None:
    """A store keeps its leases if its wall clock jumps by an hour at every reading."""
    jumping = (
        "import runpy, sys, time\n"
        "real, sign = time.time, [1]\n"
        "def jump():\n"
        "    sign[0] = -sign[0]\n"
        "    return real() + 3600 * sign[0]\n"
        "time.time = jump\n"
        "sys.argv[0] = 'kvstore_service'\n"
        "runpy.run_module('kvstore_service', run_name='__main__')\n"
    )
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", jumping, "--listen", socket_address),
            *("--layout", LAYOUT.to_json(), "--host-memory", "4MiB", "--arena", str(path)),
            *("--lease-seconds", "30"),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"READY {socket_address}\n"
        worker = start_worker(socket_address, [1] * 8, seals=True)  # beats every 0.2 s
        with open_sync_channel(socket_address) as channel:
            stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
            time.sleep(2.5)  # some sweeps; each jump is far longer than a lease
            assert (stats_of(stub).session_count, stats_of(stub).lease_count) == (1, 1)
            finish(worker)
            wait_until(lambda: stats_of(stub).session_count == 0)
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors


def test_no_decision_hangs_on_the_wall_clock() -> None:
    """Leases, deadlines and ages are monotonic: ±1 h on the wall clock changes nothing."""
    wall = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow")}
    # What a certificate says about its own validity is wall-clock time; it only warns. Logs
    # and traces are stamped with it, for people and other hosts to compare. Chat templates may
    # write the date into a prompt.
    exempt = {
        "splitpoint/chat/template.py",
        "splitpoint/transport/certificates.py",
        "splitpoint/observe/logs.py",
        "splitpoint/observe/tracing.py",
    }
    found = []
    for package in ("splitpoint", "kvstore_service", "worker_service", "scheduler_service"):
        for file in (ROOT / package).rglob("*.py"):
            if "v1" in file.parts or str(file.relative_to(ROOT)) in exempt:
                continue
            source = file.read_text()
            if not any(".".join(each) in source for each in wall):
                continue
            for node in ast.walk(ast.parse(source)):
                if (
                    isinstance(node, ast.Attribute)
                    and isinstance(node.value, ast.Name)
                    and (node.value.id, node.attr) in wall
                ):
                    found.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert found == []
