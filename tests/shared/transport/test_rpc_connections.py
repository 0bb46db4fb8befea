"""Connections that say nothing: they do not take what others need, and they end."""

from __future__ import annotations

import asyncio
import resource
import socket
import struct
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import pytest
from scheduler_doubles import MODEL_FOLDER, ROOT, WorkerDouble
from waiting import until

from splitpoint.errors import Unavailable
from splitpoint.transport import channels
from splitpoint.transport.statuses import error_of
from splitpoint.transport.tls import PLAIN
from splitpoint.v1 import scheduler_pb2, scheduler_pb2_grpc

HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # and no settings after it


@asynccontextmanager
async def scheduler(worker: str, soft: int, hard: int) -> AsyncIterator[tuple[int, str]]:
    """A real process with these limits of open files: its id, its address."""
    started = await asyncio.create_subprocess_exec(
        *("prlimit", f"--nofile={soft}:{hard}"),
        *(sys.executable, "-m", "scheduler_service", "--listen", "127.0.0.1:0"),
        *("--worker", worker, "--model", str(MODEL_FOLDER)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        cwd=ROOT,
    )
    try:
        assert started.stdout is not None
        line = await asyncio.wait_for(started.stdout.readline(), 30)
        yield started.pid, line.decode().split()[1]
    finally:
        started.terminate()
        await started.communicate()


def descriptors(process: int) -> int:
    return len(list(Path(f"/proc/{process}/fd").iterdir()))


@contextmanager
def silent(address: str, count: int) -> Iterator[list[socket.socket]]:
    host, _, port = address.rpartition(":")
    with ExitStack() as opened:
        made = []
        for index in range(count):
            made.append(opened.enter_context(socket.create_connection((host, int(port)), 10)))
            if index % 2:
                made[-1].sendall(HELLO)
        yield made


async def tokenize(channel: grpc.aio.Channel) -> None:
    stub = scheduler_pb2_grpc.InferenceServiceStub(channel)
    await stub.Tokenize(scheduler_pb2.TokenizeRequest(text="x"), wait_for_ready=True, timeout=60)


@pytest.fixture
async def worker() -> AsyncIterator[str]:
    double = WorkerDouble()
    yield await double.start()
    await double.kill()


async def test_silent_connections_neither_stop_a_service_nor_stay(worker: str) -> None:
    async with (
        scheduler(worker, 256, 256) as (process, address),
        channels.open_channel(address) as before,
    ):
        await tokenize(before)
        usual = descriptors(process)
        with silent(address, 400):
            await tokenize(before)
            # At most half of its descriptors are theirs.
            assert descriptors(process) < 200
            async with channels.open_channel(address) as late:
                await tokenize(late)
            # All still open here, and gone there.
            await until(lambda: descriptors(process) <= usual + 2)
        await tokenize(before)


async def test_a_service_takes_all_the_descriptors_it_may_have(worker: str) -> None:
    async with scheduler(worker, 128, 512) as (process, _):
        assert resource.prlimit(process, resource.RLIMIT_NOFILE) == (512, 512)


@pytest.mark.parametrize(
    ("address", "reason"),
    [("127.0.0.1:1", "Connection refused"), ("unix:/no/such", "No such file or directory")],
)
def test_a_server_that_is_not_there_is_named_in_plain_words(address: str, reason: str) -> None:
    with channels.open_sync_channel(address, PLAIN) as channel:
        stub = scheduler_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as raised:
            stub.Tokenize(scheduler_pb2.TokenizeRequest(text="a"), timeout=20)
    error = error_of(raised.value)
    assert isinstance(error, Unavailable)
    assert error.message == f"cannot connect to {address}: {reason}"
    assert error_of(raised.value, address).message == error.message


def test_a_host_with_several_addresses_is_named_as_it_was_called() -> None:
    """gRPC tries two addresses of localhost, and tells either in its text."""
    with channels.open_sync_channel("localhost:1", PLAIN) as channel:
        stub = scheduler_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as raised:
            stub.Tokenize(scheduler_pb2.TokenizeRequest(text="a"), timeout=20)
    begin, _, tried = error_of(raised.value, "localhost:1").message.rpartition(" at ")
    assert begin == "cannot connect to localhost:1: Connection refused"
    assert tried in ("127.0.0.1:1", "[::1]:1")


class _Plain(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_port_that_speaks_http_is_called_one() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Plain) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        with channels.open_sync_channel(address, PLAIN) as channel:
            stub = scheduler_pb2_grpc.InferenceServiceStub(channel)
            with pytest.raises(grpc.RpcError) as raised:
                stub.Tokenize(scheduler_pb2.TokenizeRequest(text="a"), timeout=20)
        server.shutdown()
    assert error_of(raised.value).message.startswith(f"{address} does not speak gRPC: most likely")


@pytest.mark.parametrize("resets", [False, True])
def test_a_connection_that_is_closed_at_once_is_told_to_want_tls(resets: bool) -> None:
    """A server of TLS ends plain connections in either way, by chance."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def end_all() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.recv(1 << 16)
                        if resets:
                            no_wait = struct.pack("ii", 1, 0)
                            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_wait)
                            continue
                        connection.shutdown(socket.SHUT_WR)
                        while connection.recv(1 << 16):
                            pass

        thread = threading.Thread(target=end_all)
        thread.start()
        with channels.open_sync_channel(f"127.0.0.1:{server.getsockname()[1]}", PLAIN) as channel:
            stub = scheduler_pb2_grpc.InferenceServiceStub(channel)
            with pytest.raises(grpc.RpcError) as raised:
                stub.Tokenize(scheduler_pb2.TokenizeRequest(text="a"), timeout=20)
        server.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        thread.join()
    error = error_of(raised.value)
    assert isinstance(error, Unavailable)
    assert error.message.startswith("no TLS connection: the server closed the connection at once")
    assert "give --ca" in error.message
