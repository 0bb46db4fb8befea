"""The metrics' port: real sockets, real certificates, peers that misbehave."""

from __future__ import annotations

import argparse
import asyncio
import http.client
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from waiting import until

from splitpoint.errors import InvalidArgument, SplitpointError, Unavailable
from splitpoint.observe import metrics
from splitpoint.observe.meters import Meters, Reading
from splitpoint.observe.metrics import Service
from splitpoint.observe.metrics_server import (
    MOST_CONNECTIONS,
    MetricsServer,
    metrics_served,
    on_loop,
)
from splitpoint.options.option import parser_of
from splitpoint.options.service import METRICS_SECTION, SECURITY
from splitpoint_cli.security.authority import make_certificates


@dataclass(frozen=True)
class Answer:
    status: int
    content_type: str
    body: str


def parse(*arguments: str) -> argparse.Namespace:
    """As the services do."""
    return parser_of("service", "", [METRICS_SECTION, SECURITY]).parse_args(arguments)


def ask(
    address: str,
    path: str = "/metrics",
    method: str = "GET",
    tls: ssl.SSLContext | None = None,
    **headers: str,
) -> Answer:
    host, _, port = address.rpartition(":")
    if tls is None:
        connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=20)
    else:
        connection = http.client.HTTPSConnection(host, int(port), timeout=20, context=tls)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        body = answer.read().decode()
        return Answer(answer.status, answer.getheader("Content-Type", ""), body)
    finally:
        connection.close()


async def scrape(address: str, *arguments: Any, **more: Any) -> Answer:
    return await asyncio.to_thread(ask, address, *arguments, **more)


def values(text: str) -> dict[str, float]:
    """By name; what has labels comes once, under the last of them."""
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def store_meters(leases: Callable[[], float] = lambda: 3) -> Meters:
    meters = Meters(Service.KVSTORE)
    meters.read(lambda: [Reading(metrics.STORE_LEASES, leases())])
    return meters


def fd_count() -> int:
    return len(os.listdir("/proc/self/fd"))


# -- a scrape ------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
async def test_a_scrape(host: str, capfd: pytest.CaptureFixture[str]) -> None:
    if host == "[::1]" and not has_ipv6():
        host = "127.0.0.2"  # another one of this host's, where there is no IPv6
    async with metrics_served(parse("--metrics", f"{host}:0"), store_meters()) as address:
        assert address.startswith(f"{host}:")
        assert not address.endswith(":0")
        answer = await scrape(address)
    assert answer.status == 200
    assert answer.content_type.startswith("text/plain; version=0.0.4")
    found = values(answer.body)
    assert found["splitpoint_store_leases"] == 3
    assert found["splitpoint_build_info"] == 1
    assert found["process_cpu_seconds_total"] > 0
    assert found["process_resident_memory_bytes"] > 1 << 20
    assert capfd.readouterr() == ("", "")


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


async def test_nothing_is_served_unless_asked() -> None:
    threads = threading.active_count()
    async with metrics_served(parse(), store_meters()) as address:
        assert address == ""
        assert threading.active_count() == threads


async def test_what_prometheus_asks_for_it_gets() -> None:
    async with metrics_served(parse("--metrics", "127.0.0.1:0"), store_meters()) as address:
        answer = await scrape(
            address, Accept="application/openmetrics-text;version=1.0.0;q=0.8,text/plain;q=0.5"
        )
    assert answer.content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert answer.body.endswith("# EOF\n")


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("HEAD", "/metrics", 200, ""),
        ("GET", "/metrics?name=any", 200, "splitpoint_store_leases 3.0"),
        ("GET", "/", 200, "metrics are at /metrics"),
        ("GET", "/metrics/more", 404, "metrics are at /metrics"),
        ("GET", "/<script>", 404, "metrics are at /metrics"),
        ("POST", "/metrics", 501, "Unsupported method"),
    ],
)
async def test_other_paths_and_methods(
    method: str, path: str, status: int, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async with metrics_served(parse("--metrics", "127.0.0.1:0"), store_meters()) as address:
        answer = await scrape(address, path, method)
        assert answer.status == status
        assert words in answer.body
        assert "<script>" not in answer.body
        assert bool(answer.body) is (method != "HEAD")
    assert capfd.readouterr() == ("", "")


async def test_many_scrape_at_once_while_others_count() -> None:
    meters = store_meters()
    calls = meters.counter(metrics.RPC_CALLS)
    stop = threading.Event()

    def count(method: str) -> None:
        number = 0
        while not stop.is_set():
            calls.labels(method, str(number % 20)).inc()
            number += 1

    counters = [threading.Thread(target=count, args=(f"m{i}",)) for i in range(2)]
    async with metrics_served(parse("--metrics", "127.0.0.1:0"), meters) as address:
        for thread in counters:
            thread.start()
        try:
            for _ in range(3):
                answers = await asyncio.gather(*(scrape(address) for _ in range(8)))
                assert {answer.status for answer in answers} == {200}
                for answer in answers:
                    assert values(answer.body)["splitpoint_store_leases"] == 3
        finally:
            stop.set()
            for thread in counters:
                thread.join()


# -- who may ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    return folder


def tls_arguments(folder: Path, *, ca: bool) -> list[str]:
    arguments = ["--tls-cert", str(folder / "server.pem")]
    arguments += ["--tls-key", str(folder / "server-key.pem")]
    return [*arguments, "--tls-ca", str(folder / "ca.pem")] if ca else arguments


def client_tls(folder: Path, *, certificate: bool) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    if certificate:
        context.load_cert_chain(folder / "client.pem", folder / "client-key.pem")
    return context


async def test_tls(certificates: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = parse("--metrics", "localhost:0", *tls_arguments(certificates, ca=False))
    async with metrics_served(arguments, store_meters()) as address:
        answer = await scrape(address, tls=client_tls(certificates, certificate=False))
        assert answer.status == 200
        assert "splitpoint_store_leases 3.0" in answer.body
        with pytest.raises((OSError, http.client.HTTPException)):
            await scrape(address)  # plain HTTP is not understood
    assert capfd.readouterr() == ("", "")


async def test_with_an_authority_clients_show_a_certificate(
    certificates: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make_certificates(tmp_path / "others")
    strange = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    strange.load_cert_chain(tmp_path / "others/client.pem", tmp_path / "others/client-key.pem")
    arguments = parse("--metrics", "localhost:0", *tls_arguments(certificates, ca=True))
    async with metrics_served(arguments, store_meters()) as address:
        answer = await scrape(address, tls=client_tls(certificates, certificate=True))
        assert answer.status == 200
        for context in (client_tls(certificates, certificate=False), strange):
            with pytest.raises((OSError, http.client.HTTPException)):
                await scrape(address, tls=context)
        answer = await scrape(address, tls=client_tls(certificates, certificate=True))
        assert answer.status == 200
    assert capfd.readouterr() == ("", "")


async def test_open_metrics_are_plain_beside_a_port_with_tls(certificates: Path) -> None:
    tls = tls_arguments(certificates, ca=True)
    arguments = parse("--metrics", "localhost:0", "--metrics-open", *tls)
    async with metrics_served(arguments, store_meters()) as address:
        assert (await scrape(address)).status == 200


async def refusal(*arguments: str) -> SplitpointError:
    with pytest.raises(SplitpointError) as caught:
        async with metrics_served(parse(*arguments), store_meters()):
            raise AssertionError("it is served")
    return caught.value


async def test_beyond_loopback_it_is_for_clients_with_a_certificate(certificates: Path) -> None:
    for tls in ([], tls_arguments(certificates, ca=False)):
        error = await refusal("--metrics", "0.0.0.0:0", *tls)
        assert (type(error), error.reason) == (InvalidArgument, "OPEN_METRICS_ADDRESS")
        assert "--tls-ca" in error.message
        assert "--metrics-open" in error.message
    closed = parse("--metrics", "0.0.0.0:0", *tls_arguments(certificates, ca=True))
    async with metrics_served(closed, store_meters()) as address:
        local = f"localhost:{address.rpartition(':')[2]}"
        with pytest.raises((OSError, http.client.HTTPException)):
            await scrape(local)
        certified = client_tls(certificates, certificate=True)
        assert (await scrape(local, tls=certified)).status == 200
    opened = parse("--metrics", "0.0.0.0:0", "--metrics-open")
    async with metrics_served(opened, store_meters()) as address:
        assert (await scrape(f"127.0.0.1:{address.rpartition(':')[2]}")).status == 200


async def test_wrong_arguments_are_named(certificates: Path, tmp_path: Path) -> None:
    for address in ("9400", "127.0.0.1:", "127.0.0.1:99999", "unix:/tmp/metrics"):
        error = await refusal("--metrics", address)
        assert isinstance(error, InvalidArgument)
        assert address in error.message
    (tmp_path / "empty.pem").touch()
    tls = tls_arguments(certificates, ca=False)
    for ca in ("empty.pem", "missing.pem"):
        error = await refusal("--metrics", "127.0.0.1:0", *tls, "--tls-ca", str(tmp_path / ca))
        assert isinstance(error, InvalidArgument)
        assert "--tls-ca" in error.message


async def test_a_port_that_is_taken_or_not_ours() -> None:
    threads, fds = threading.active_count(), fd_count()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        error = await refusal("--metrics", taken)
    assert isinstance(error, Unavailable)
    assert taken in error.message
    assert "in use" in error.message
    error = await refusal("--metrics", "192.0.2.1:9400", "--metrics-open")  # an address of no host
    assert isinstance(error, Unavailable)
    assert "192.0.2.1:9400" in error.message
    assert (threading.active_count(), fd_count()) == (threads, fds)


# -- when something hangs ------------------------------------------------------------------------


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """One that runs in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_a_loop_that_hangs_is_a_failed_scrape(
    loop: asyncio.AbstractEventLoop, capfd: pytest.CaptureFixture[str]
) -> None:
    reads = []
    meters = store_meters(lambda: reads.append(threading.current_thread()) or len(reads))  # type: ignore[func-returns-value]
    meters.read_by(on_loop(loop, 0.3))
    server = MetricsServer("127.0.0.1", 0, meters.registry)
    server.start()
    address = f"127.0.0.1:{server.server_port}"
    try:
        assert ask(address).status == 200
        assert reads[0] not in (threading.current_thread(), threading.main_thread())
        free = threading.Event()
        loop.call_soon_threadsafe(free.wait)
        for _ in range(3):
            answer = ask(address)  # which does not wait for the loop: that hangs on
            assert not free.is_set()
            assert answer.status == 503
            assert answer.content_type.startswith("text/plain")
            assert answer.body == "the service did not answer within 0.3 s: it hangs\n"
        assert len(reads) == 1
        free.set()
        assert values(ask(address).body)["splitpoint_store_leases"] == 2  # no reading in between
    finally:
        server.stop()
    assert capfd.readouterr() == ("", "")


def test_a_loop_that_is_gone_is_a_failed_scrape() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    meters = store_meters()
    meters.read_by(on_loop(loop))
    server = MetricsServer("127.0.0.1", 0, meters.registry)
    server.start()
    try:
        answer = ask(f"127.0.0.1:{server.server_port}")
    finally:
        server.stop()
    assert (answer.status, answer.body) == (503, "the service has stopped\n")


async def test_a_source_that_fails_is_said_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> float:
        raise RuntimeError("a bug")

    async with metrics_served(parse("--metrics", "127.0.0.1:0"), store_meters(fail)) as address:
        answer = await scrape(address)
    assert answer.status == 500
    assert "a bug" not in answer.body
    assert "a bug" in caplog.text


@pytest.mark.parametrize("tls", [False, True])
async def test_silent_peers_hold_up_nobody_and_are_hung_up_on(
    tls: bool, certificates: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    context = None
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates / "server.pem", certificates / "server-key.pem")
    meters = store_meters()
    server = MetricsServer("localhost", 0, meters.registry, context, connection_seconds=2.0)
    server.start()
    address = f"localhost:{server.server_port}"
    client = client_tls(certificates, certificate=False) if tls else None
    place = ("localhost", server.server_port)
    silent = [socket.create_connection(place) for _ in range(MOST_CONNECTIONS - 1)]
    dribbling = silent[0]
    try:
        dribbling.sendall(b"G")
        answer = await scrape(address, tls=client)
        assert answer.status == 200
        deadline = time.monotonic() + 60
        for peer in silent:
            peer.settimeout(max(0.1, deadline - time.monotonic()))
            try:
                assert peer.recv(100) == b""
            except ConnectionResetError:
                pass
        await until(
            lambda: not any("process_request" in thread.name for thread in threading.enumerate())
        )
    finally:
        await asyncio.to_thread(server.stop)
        for peer in silent:
            peer.close()
    assert capfd.readouterr() == ("", "")


async def test_beyond_the_most_connections_one_is_closed_at_once(
    capfd: pytest.CaptureFixture[str],
) -> None:
    server = MetricsServer("localhost", 0, store_meters().registry, connection_seconds=3600.0)
    server.start()
    place = ("localhost", server.server_port)
    peers = [socket.create_connection(place) for _ in range(MOST_CONNECTIONS + 4)]
    try:
        await until(lambda: open_count(peers) <= MOST_CONNECTIONS)
        assert open_count(peers) == MOST_CONNECTIONS
        # Although they may stay open for an hour.
        await asyncio.wait_for(asyncio.to_thread(server.stop), 60)
    finally:
        for peer in peers:
            peer.close()
    assert capfd.readouterr() == ("", "")


def open_count(peers: list[socket.socket]) -> int:
    count = 0
    for peer in peers:
        peer.setblocking(False)
        try:
            count += peer.recv(1) != b""
        except BlockingIOError:
            count += 1
        except ConnectionResetError:
            pass
    return count


async def test_starting_and_stopping_leaves_nothing(certificates: Path) -> None:
    async def once() -> None:
        arguments = parse("--metrics", "localhost:0", *tls_arguments(certificates, ca=True))
        async with metrics_served(arguments, store_meters()) as address:
            tls = client_tls(certificates, certificate=True)
            assert (await scrape(address, tls=tls)).status == 200
            with pytest.raises((OSError, http.client.HTTPException)):
                await scrape(address)

    await once()  # whatever is made once: the loop's own threads, modules
    names = {thread.name for thread in threading.enumerate() if "asyncio" not in thread.name}
    fds = fd_count()
    for _ in range(5):
        await once()
    assert fd_count() == fds
    assert {t.name for t in threading.enumerate() if "asyncio" not in t.name} == names


async def test_the_port_is_free_at_once_for_the_next_one() -> None:
    address = "127.0.0.1:0"
    for _ in range(3):
        async with metrics_served(parse("--metrics", address), store_meters()) as address:
            assert (await scrape(address)).status == 200
