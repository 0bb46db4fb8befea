"""`splitpoint store` as a user runs it: what it prints, how it ends, what it leaves."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from own_names import free_ports, instance_name
from splitpoint_command import splitpoint
from up_process import up_process, wait_until_up

from splitpoint.config import arena_path, remove_tree
from splitpoint.transport import channels, statuses
from splitpoint.v1 import kvstore_pb2, kvstore_pb2_grpc

SECONDS = 60
PAGE_BYTES = 64 << 10


@contextmanager
def store(instance: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Start a store at a port of its own; yield the process, its address, what it printed."""
    address = f"127.0.0.1:{free_ports(1)}"
    command = [
        *(sys.executable, "-m", "splitpoint_cli", "store", "--listen", address),
        *("--instance", instance, "--host-memory", "16MiB", *arguments),
    ]
    with up_process(command) as process:
        yield process, address, wait_until_up(process)


def stop(process: subprocess.Popen[str], number: int = signal.SIGINT) -> str:
    """Stop it by a signal; return what it wrote to stderr. It must end with exit code 0."""
    process.send_signal(number)
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    return errors


def attach(address: str, page_bytes: int) -> kvstore_pb2.AttachResponse:
    """Attach as an engine that stores pages of this size. Raises SplitpointError."""
    request = kvstore_pb2.AttachRequest(client_name="a test", is_remote=True, page_bytes=page_bytes)
    with channels.open_sync_channel(address) as channel:
        stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        while True:
            try:
                answer: kvstore_pb2.AttachResponse = stub.Attach(request, timeout=SECONDS)
                return answer
            except grpc.RpcError as error:
                found = statuses.error_of(error, address)
                if found.reason != "ARENA_BEING_MADE":
                    raise found from error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_says_where_it_is_serves_and_leaves_nothing(number: int) -> None:
    arena = arena_path(instance_name("store"))
    with store(instance_name("store")) as (process, address, printed):
        assert f"  store      {address}\n" in printed
        assert f"  arena      {arena}, 16 MiB\n" in printed
        assert f'"$(splitpoint vllm-config --store {address})"' in printed
        assert f"splitpoint status --store {address}" in printed
        assert not arena.exists(), "the first engine decides the size of a page"
        answer = attach(address, PAGE_BYTES)
        assert answer.slot_count == 224
        assert arena.exists()
        stop(process, number)
    assert not arena.parent.exists()


def test_a_kept_arena_is_there_for_the_next_start() -> None:
    instance = instance_name("kept")
    arena = arena_path(instance)
    try:
        with store(instance, "--keep-arena") as (process, address, printed):
            assert "(kept on exit)" in printed
            first = attach(address, PAGE_BYTES)
            stop(process)
        assert arena.exists()
        with store(instance, "--keep-arena") as (process, address, _):
            again = attach(address, PAGE_BYTES)
            assert again.instance_id == first.instance_id
            assert again.epoch > first.epoch
            stop(process)
    finally:
        remove_tree(arena.parent)


def test_other_options_reach_the_store(tmp_path: Path) -> None:
    metrics = f"127.0.0.1:{free_ports(1)}"
    words = [
        *("--tier-disk", str(tmp_path / "tier"), "--tier-disk-size", "64MiB"),
        *("--metrics", metrics, "--set", "lease-seconds=30", "--log-level", "warning"),
    ]
    with store(instance_name("options"), *words) as (process, address, printed):
        assert f"  metrics    http://{metrics}/metrics\n" in printed
        assert f"  disk tier  {tmp_path / 'tier'}, at most 64 MiB\n" in printed
        answer = attach(address, PAGE_BYTES)
        assert 25 < answer.lease_duration.ToSeconds() <= 30
        assert len(answer.tiers) == 1
        assert stop(process) == ""


def status(address: str, *arguments: str, code: int = 0) -> str:
    done = splitpoint("status", "--store", address, *arguments)
    assert (done.returncode, done.stderr) == (code, "")
    return done.stdout


def test_status_shows_a_store_alone_and_its_engines() -> None:
    with store(instance_name("status")) as (process, address, _):
        assert status(address) == f"store {address}: serves, no engine has attached yet\n"
        told = json.loads(status(address, "--json"))
        assert (told["serves"], told["reason"], told["findings"]) == (True, "NO_ARENA_YET", [])
        with channels.open_sync_channel(address) as channel:
            stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
            session = attach(address, PAGE_BYTES).session_id
            is_over = threading.Event()

            def beats() -> Iterator[kvstore_pb2.KeepAliveRequest]:
                counts = {"loaded": 3, "miss": 5, "away": 3}
                yield kvstore_pb2.KeepAliveRequest(session_id=session, outcomes=counts)
                is_over.wait(SECONDS)

            stream = stub.KeepAlive(beats())
            next(stream)
            request = kvstore_pb2.MatchPagesRequest(
                session_id=session, request_id=b"1", page_keys=[bytes(32), b"k" * 32]
            )
            stub.MatchPages(request, timeout=SECONDS)
            shown = status(address)
            told = json.loads(status(address, "--json"))
            is_over.set()
        assert "\n  0 of 224 slots sealed, 0 leased, 0 of 2 pages found, arena 16 MiB" in shown
        assert " for pages of 64 KiB\n" in shown
        assert "  a test: 0 of 2 pages found, 5 miss, 3 away, 3 loaded\n" in shown
        assert (told["free_slot_count"], told["page_bytes"]) == (224, PAGE_BYTES)
        [engine] = told["sessions"]
        assert engine["outcomes"] == {"loaded": 3, "miss": 5, "away": 3}
        assert (engine["query_count"], engine["hit_count"]) == (2, 0)
        stop(process)
    gone = status(address, code=3)
    assert f"store {address} does not answer" in gone


def refused(code: int, *arguments: str) -> str:
    """The one line that it ends with, nothing having been made."""
    instance = instance_name("refused")
    done = splitpoint("store", "--instance", instance, *arguments)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    [line] = done.stderr.splitlines()
    assert not arena_path(instance).parent.exists()
    return line


def test_what_cannot_start_says_so_in_one_line() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        assert f"something listens at {taken} already" in refused(3, "--listen", taken)
        line = refused(3, "--listen", "127.0.0.1:0", "--metrics", taken)
        assert f"something listens at {taken} already" in line
    line = refused(2, "--listen", "0.0.0.0:50051")
    assert "a service listens only with TLS and tokens" in line
    line = refused(5, "--listen", "127.0.0.1:0", "--host-memory", "900TiB")
    assert "an arena of 900 TiB does not fit: " in line
    line = refused(2, "--listen", "127.0.0.1:0", "--page-size", "many")
    assert "--page-size: 'many' is not a size" in line
