"""The store as a process: workers in other processes, signals, kills, leftovers."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from fork_server import parent_of
from grpc_health.v1 import health_pb2, health_pb2_grpc
from kvstore_helpers import LAYOUT, assert_payloads
from waiting import wait_until

from kvstore_service.server import SERVICE_NAME
from splitpoint.errors import NotFound
from splitpoint.options.store import TIER_POOL
from splitpoint.transport.channels import open_sync_channel
from splitpoint.transport.local_session import mapped_arena
from splitpoint.transport.statuses import error_of
from splitpoint.v1 import kvstore_pb2 as pb
from splitpoint.v1 import kvstore_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("kvstore_worker.py")
LEASE_SECONDS = 2.0
DISK = ("--tier-disk", "/nowhere/tier", "--tier-disk-size", "1GiB")


OF_TOKENS = ("--layout", LAYOUT.to_json())


def store_arguments(arena: Path, address: str, what: Sequence[str] = OF_TOKENS) -> tuple[str, ...]:
    return (
        *("--listen", address, *what, "--host-memory", "4MiB"),
        *("--arena", str(arena), "--lease-seconds", str(LEASE_SECONDS)),
    )


class StoreProcess:
    """A forked `kvstore_service` with a READY line. Its address is None if it ended without.

    `what`: what the arena is for.
    """

    def __init__(
        self, arena: Path, address: str, *more: str, what: Sequence[str] = OF_TOKENS
    ) -> None:
        self.arena = arena
        self._parent = parent_of("kvstore_service")
        self._folder = Path(tempfile.mkdtemp(prefix="store-"))
        self._ended: tuple[int, str] | None = None
        printed, self._told = self._folder / "stdout", self._folder / "stderr"
        printed.touch()
        self._told.touch()
        self._child = self._parent.fork(
            "kvstore_service",
            (*store_arguments(arena, address, what), *more),
            printed,
            errors=self._told,
        )
        self.pid = self._child.process_id
        line = self._child.first_line()
        self.address = line.removeprefix("READY ").strip() if line.startswith("READY ") else None

    @property
    def errors(self) -> str:
        """What it has written to stderr."""
        return self._told.read_text() if self._ended is None else self._ended[1]

    @contextmanager
    def stub(self) -> Iterator[Any]:
        assert self.address is not None
        with open_sync_channel(self.address) as channel:
            yield kvstore_pb2_grpc.KvStoreServiceStub(channel)

    def wait(self) -> int:
        """Return the exit status once the process has ended."""
        if self._ended is None:
            self._child.wait_ended()
            self._ended = self._parent.code_of(self.pid), self.errors
            self._child.close()
            shutil.rmtree(self._folder)
        return self._ended[0]

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """End the process. Return (exit status, stderr)."""
        if self._ended is None:
            self._child.signal(number)
        return self.wait(), self.errors


@pytest.fixture
def store(shm_folder: Path, socket_address: str) -> Iterator[StoreProcess]:
    store = StoreProcess(shm_folder / "store" / "arena", socket_address)
    assert store.address == socket_address
    yield store
    store.end(signal.SIGKILL)


def start_worker(
    address: str,
    tokens: list[int],
    *,
    seals: bool = False,
    forks: bool = False,
    seals_late: bool = False,
) -> subprocess.Popen[str]:
    """Start a process that writes a sequence, then waits for a line on stdin."""
    what = "seal" if seals else "fork" if forks else "late" if seals_late else "write"
    worker = subprocess.Popen(
        [sys.executable, str(WORKER), address, json.dumps(tokens), what],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout is not None
    assert worker.stdout.readline() == "DONE\n"
    return worker


def finish(worker: subprocess.Popen[str], line: str = "\n") -> None:
    worker.communicate(line, timeout=30)


def stats_of(stub: Any) -> pb.GetStatsResponse:
    stats: pb.GetStatsResponse = stub.GetStats(pb.GetStatsRequest(check_integrity=True))
    assert list(stats.integrity_violations) == []
    return stats


def test_one_process_writes_and_another_reads(store: StoreProcess) -> None:
    tokens = list(range(100, 110))
    worker = start_worker(store.address or "", tokens, seals=True)
    with store.stub() as stub:
        session = stub.Attach(
            pb.AttachRequest(client_name="reader", process_id=os.getpid(), process_start_ticks=1)
        )
        arena = mapped_arena(session)
        found = stub.Match(
            pb.MatchRequest(session_id=session.session_id, request_id=b"m", token_ids=[*tokens, 7])
        )
        assert found.cached_tokens == 10
        slots = [chunk.slot for chunk in found.chunks]
        generations = [chunk.generation for chunk in found.chunks]
        assert slots == list(range(slots[0], slots[0] + 3))  # one run
        assert arena.is_current(slots, generations)
        assert assert_payloads(arena, slots, tokens) == list(found.chunk_keys)
        assert [arena.checksum(slot) for slot in slots] == [c.checksum for c in found.chunks]
        assert arena.is_current(slots, generations)
        arena.close()
        assert stats_of(stub).lease_count == 2
        finish(worker)
        wait_until(lambda: stats_of(stub).lease_count == 1)
        assert stats_of(stub).sealed_slot_count == 3


@pytest.mark.parametrize("end", ["kill", "line"])
def test_what_a_dead_worker_held_is_freed(store: StoreProcess, end: str) -> None:
    worker = start_worker(store.address or "", [1] * 10)
    with store.stub() as stub:
        assert stats_of(stub).writing_slot_count == 3
        if end == "kill":
            worker.kill()
        finish(worker)
        wait_until(lambda: stats_of(stub).free_slot_count == stats_of(stub).slot_count)
        stats = stats_of(stub)
        assert (stats.session_count, stats.lease_count, stats.quarantined_slot_count) == (0, 0, 0)


def test_a_stopped_worker_keeps_its_slots_until_it_dies(store: StoreProcess) -> None:
    worker = start_worker(store.address or "", [1] * 10)
    with store.stub() as stub:
        worker.send_signal(signal.SIGSTOP)
        wait_until(lambda: stats_of(stub).quarantined_slot_count == 3)
        time.sleep(LEASE_SECONDS)  # however long: its process lives
        stats = stats_of(stub)
        assert (stats.quarantined_slot_count, stats.session_count) == (3, 1)
        worker.kill()
        finish(worker)
        wait_until(lambda: stats_of(stub).quarantined_slot_count == 0)


def test_the_seals_of_a_worker_that_was_stopped_beyond_its_lease_are_refused(
    store: StoreProcess,
) -> None:
    worker = start_worker(store.address or "", [1] * 10, seals_late=True)
    with store.stub() as stub:
        worker.send_signal(signal.SIGSTOP)
        wait_until(lambda: stats_of(stub).quarantined_slot_count == 3)
        worker.send_signal(signal.SIGCONT)
        answer, _ = worker.communicate("\n", timeout=30)
        assert answer == "SESSION_EXPIRED\n"
        wait_until(lambda: stats_of(stub).quarantined_slot_count == 0)
        assert stats_of(stub).sealed_slot_count == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_clean_stop_leaves_nothing(store: StoreProcess, number: int) -> None:
    assert store.arena.exists()
    socket = Path((store.address or "").removeprefix("unix:"))
    worker = start_worker(store.address or "", [1] * 10, seals=True)
    status, errors = store.end(number)
    finish(worker)
    assert status == 0, errors
    assert not store.arena.parent.exists()
    assert not socket.exists()
    assert "incident" not in errors, errors


def test_the_end_of_the_parent_is_a_clean_stop(shm_folder: Path, socket_address: str) -> None:
    reading, writing = os.pipe()
    arena = shm_folder / "store" / "arena"
    store = subprocess.Popen(
        [
            *(sys.executable, "-m", "kvstore_service", *store_arguments(arena, socket_address)),
            *("--parent-fd", str(reading)),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[reading],
    )
    assert store.stdout is not None
    assert store.stdout.readline().startswith("READY ")
    os.close(reading)
    os.close(writing)
    store.communicate(timeout=30)
    assert store.returncode == 0
    assert not arena.parent.exists()


def test_a_second_store_on_the_same_path_refuses(store: StoreProcess, tmp_path: Path) -> None:
    second = StoreProcess(store.arena, f"unix:{tmp_path}/t")
    assert second.address is None
    status, errors = second.end()
    assert status == 1
    assert "another store is running" in errors
    assert "Traceback" not in errors
    with store.stub() as stub:
        assert stats_of(stub).free_slot_count == stats_of(stub).slot_count


def test_a_kept_arena_stays(shm_folder: Path, socket_address: str) -> None:
    path = shm_folder / "store" / "arena"
    store = StoreProcess(path, socket_address, "--keep-arena")
    assert store.end()[0] == 0
    assert path.exists()
    # Its lock is free: the next store takes the path.
    store = StoreProcess(path, socket_address)
    assert store.end()[0] == 0
    assert not path.parent.exists()


@pytest.mark.parametrize(
    ("arguments", "text", "code"),
    [
        (["--host-memory", "1KiB"], "hold no chunk", 2),
        (["--host-memory", "9000TiB"], "does not fit", 5),
        (["--host-memory", "lots"], "not a size", 2),
        (["--lease-seconds", "nan"], "lease-seconds", 2),
        (["--scrub-seconds", "-1"], "scrub-seconds is at least 0", 2),
        (["--scrub-seconds", "0.01"], "scrub-seconds is 0 or at least", 2),
        (["--scrub-seconds", "inf"], "scrub-seconds is a finite number", 2),
        (["--scrub-rate", "fast"], "scrub-rate", 2),
        (["--listen", "0.0.0.0:1"], "loopback", 2),
        (["--layout", "{}"], "no layout", 2),
        (["--layout", "nonsense"], "no layout", 2),
        (["--evict-to", "0.5"], "evict-to", 2),
        (["--evict-above", "0.5", "--evict-to", "0.6"], "evict-to", 2),
        (["--numa-node", "63"], "NUMA node 63", 2),
        (["--tier-disk", "/nowhere/tier"], "--tier-disk-size", 2),
        (["--tier-disk-size", "1GiB"], "--tier-disk", 2),
        ([*DISK, "--tier-rate", "fast"], "is not a rate", 2),
        (["--tier-rate", "1GB"], f"--tier-rate needs --tier-disk or {TIER_POOL.flag}", 2),
        (["--tier-admission", "second-use"], "--tier-admission needs --tier-disk", 2),
    ],
)
def test_bad_arguments_end_with_one_line(
    shm_folder: Path, socket_address: str, arguments: list[str], text: str, code: int
) -> None:
    store = StoreProcess(shm_folder / "store" / "arena", socket_address, *arguments)
    status, errors = store.end()
    assert store.address is None
    assert status == code
    assert text in errors
    assert "Traceback" not in errors
    assert not (shm_folder / "store").exists()


def test_a_taken_port_for_metrics_is_said_before_an_arena_is_made(
    shm_folder: Path, socket_address: str
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        path = shm_folder / "store" / "arena"
        process = StoreProcess(path, socket_address, "--metrics", taken)
        status, errors = process.end()
    assert (process.address, status) == (None, 3)
    assert f"metrics cannot be served at {taken}: Address already in use" in errors
    assert "Traceback" not in errors
    assert "arena" not in errors
    assert list(shm_folder.iterdir()) == []


def test_metrics_go_on_until_the_end(shm_folder: Path, socket_address: str) -> None:
    """Metrics can be scraped all the time, also while the store stops."""
    path = shm_folder / "store" / "arena"
    store = StoreProcess(path, socket_address, "--metrics", "127.0.0.1:0")
    wait_until(lambda: "metrics at " in store.errors.rpartition("\n")[0])
    address = store.errors.partition("metrics at ")[2].splitlines()[0]
    scrapes: list[str] = []
    failures: list[str] = []

    def scrape() -> None:
        while True:
            try:
                with urllib.request.urlopen(address, timeout=20) as answer:
                    scrapes.append(answer.read().decode())
            except urllib.error.HTTPError as error:
                failures.append(f"{error.code} {error.read().decode()}")
                error.close()
            except (OSError, http.client.HTTPException):  # it has stopped, perhaps in between
                return

    threads = [threading.Thread(target=scrape) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(scrapes) > 20)
    status, errors = store.end()
    for thread in threads:
        thread.join()
    assert (status, failures) == (0, [])
    assert "could not be read" not in errors
    assert "splitpoint_store_slots" in scrapes[0]
    assert not (shm_folder / "store").exists()


def test_the_bundled_model_decides_the_layout(
    shm_folder: Path, socket_address: str, bundled_model: Path
) -> None:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "kvstore_service"),
            *("--listen", socket_address),
            *("--model", str(bundled_model)),
            *("--host-memory", "64MiB"),
            *("--chunk-tokens", "32"),
            *("--activations", "always"),
            *("--arena", str(shm_folder / "store" / "arena")),
            "--reflection",
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == f"READY {socket_address}\n"
    with open_sync_channel(socket_address) as channel:
        stub: Any = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        stats = stub.GetStats(pb.GetStatsRequest())
        assert stats.layout.chunk_tokens == 32
        assert stats.layout.has_activations
        assert len(stats.layout.model_fingerprint) == 32
        assert 32 << 20 < stats.arena_size_bytes <= 64 << 20
        health: Any = health_pb2_grpc.HealthStub(channel)
        for name in ("", SERVICE_NAME):
            answer = health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as caught:
            stub.Release(pb.ReleaseRequest(session_id=bytes(16), request_id=b"r"), timeout=10)
        assert isinstance(error_of(caught.value), NotFound)
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 0
