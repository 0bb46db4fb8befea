"""The gateway of `up --http` in status and top: found by its note, asked by HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from running_gateway import running_gateway
from scheduler_doubles import stack
from test_cli_findings import status, the_only

from splitpoint.transport.access import Access, Caller, Role
from splitpoint.transport.tls import PLAIN, Identity
from splitpoint_cli.request.findings import Severity, findings_of
from splitpoint_cli.request.observed import Gateway, GatewayCounts, Status, counts_of, read_gateway
from splitpoint_cli.request.status import gateway_line, status_json
from splitpoint_cli.security.authority import make_certificates
from splitpoint_cli.security.token import add_token
from splitpoint_cli.stack.notes import (
    GatewayNote,
    GivenUpWorker,
    forget_notes,
    read_gateways,
    read_given_up,
    write_gateway,
    write_given_up,
)

URL = "http://127.0.0.1:8000"
COUNTS = GatewayCounts(12, 2, 1, 3, 4, 5, 6)
SERVING = Gateway(URL, True, True, "", COUNTS)


async def asked(url: str, identity: Identity = PLAIN, certificate: str = "") -> Gateway:
    return await asyncio.to_thread(read_gateway, GatewayNote(url, certificate), identity)


async def test_what_a_gateway_counts() -> None:
    async with stack() as behind, running_gateway(behind.address) as http:
        url = f"http://{http.address}"
        assert (await http.complete(max_tokens=2)).status == 200
        assert (await http.complete(max_tokens=2, stream=True)).status == 200
        assert (await http.complete(max_tokens=-2)).status == 400
        assert (await http.ask("GET", "/v1/models")).status == 200
        assert (await http.ask("GET", "/nothing")).status == 404  # no request of the API
        found = await asked(url)
        assert found.is_up
        assert found.is_serving
        assert found.message == ""
        assert found.counts is not None
        assert (found.counts.request_count, found.counts.refused_count) == (4, 1)
        assert (found.counts.failed_count, found.counts.left_count) == (0, 0)
        assert found.counts.connection_count >= 1
        again = await asked(url)
        assert again.counts is not None
        assert again.counts.request_count == 4  # asking is not counted
        http.gateway.is_leaving = True
        leaving = await asked(url)
        assert (leaving.is_up, leaving.is_serving) == (True, False)
        assert leaving.message == "the gateway is stopping"
        assert leaving.counts is not None
    gone = await asked(url)
    assert (gone.is_up, gone.is_serving, gone.counts) == (False, False, None)
    assert "refused" in gone.message


async def test_a_gateway_without_a_scheduler_does_not_serve() -> None:
    async with running_gateway("127.0.0.1:1") as http:
        found = await asked(f"http://{http.address}")
    assert (found.is_up, found.is_serving) == (True, False)
    assert found.message == "no scheduler serves"


async def test_counts_need_a_key_where_there_are_keys(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.toml"
    key = add_token(tokens, Caller("ops", Role.ADMIN))
    access = Access(tokens)
    async with stack() as behind, running_gateway(behind.address, access=access) as http:
        without = await asked(f"http://{http.address}")
        assert (without.is_up, without.is_serving, without.counts) == (True, True, None)
        assert without.message.startswith("it tells no counts: ")
        found = await asked(f"http://{http.address}", Identity(token=key))
        assert found.counts is not None


@asynccontextmanager
async def over_tls(folder: Path, heads: list[str]) -> AsyncIterator[int]:
    """A server of HTTPS at a free port, which notes what it is asked."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server-key.pem")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_only_the_noted_certificate_is_believed(tmp_path: Path) -> None:
    heads: list[str] = []
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
        make_certificates(tmp_path / name, ["gateway.example.org"])
    own, other = ((tmp_path / name / "server.pem").read_text() for name in ("own", "other"))
    async with over_tls(tmp_path / "own", heads) as port:
        url = f"https://127.0.0.1:{port}"
        found = await asked(url, Identity(token="secret"), own)
        assert found == Gateway(url, True, True, "", GatewayCounts())
        assert ["authorization: Bearer secret" in head for head in heads] == [False, True]
        heads.clear()
        wrong = await asked(url, Identity(token="secret"), other)
        assert not wrong.is_up
        assert "certificate" in wrong.message
        assert heads == []


async def test_a_key_goes_to_this_host_only_without_tls() -> None:
    heads: list[str] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        # Not loopback by its text: the name of any host could lead anywhere.
        await asked(f"http://0.0.0.0:{port}", Identity(token="secret"))
        await asked(f"http://127.0.0.1:{port}", Identity(token="secret"))
    assert ["secret" in head for head in heads] == [False, False, False, True]


@pytest.mark.parametrize(
    "body",
    ["splitpoint_gateway_connections NaN", "splitpoint_gateway_connections +Inf", "[" * 30000],
)
@pytest.mark.parametrize("status", [200, 500])
async def test_what_is_no_gateway_is_a_finding(body: str, status: int) -> None:
    """Another program may listen there after a crash."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write((head + body).encode())
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        found = await asked(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    assert found.is_serving is (status == 200 and "[" in body)
    assert found.counts in (None, GatewayCounts())
    assert not (await asked("x")).is_up


def test_metrics_of_others_are_left_out() -> None:
    text = """\
# HELP splitpoint_gateway_requests_total x
splitpoint_gateway_requests_total{endpoint="/v1/chat/completions",status="200"} 7.0
splitpoint_gateway_requests_total{endpoint="/v1/chat/completions",status="499"} 1.0
splitpoint_gateway_requests_total{endpoint="/tokenize",status="429"} 2.0
splitpoint_gateway_requests_total{endpoint="/v1/completions",status="503"} 3.0
splitpoint_gateway_requests_total{endpoint="/health",status="503"} 100.0
splitpoint_gateway_requests_created{endpoint="/v1/completions",status="503"} 1.7e+09
splitpoint_gateway_open_requests 4.0
splitpoint_gateway_open_generations 5.0
splitpoint_gateway_connections 6.0
process_open_fds 7.0
"""
    assert counts_of(text) == GatewayCounts(13, 2, 1, 3, 4, 5, 6)
    assert counts_of("") == GatewayCounts()


def test_lines_of_status() -> None:
    assert gateway_line(SERVING) == (
        f"gateway {URL}: ready\n  12 requests answered (3 failed, 2 refused, 1 left by their "
        "clients), 4 open with 5 streams, 6 connections"
    )
    assert gateway_line(dataclasses.replace(SERVING, counts=GatewayCounts(1))) == (
        f"gateway {URL}: ready\n  1 request answered, 0 open with 0 streams, 0 connections"
    )
    assert gateway_line(Gateway(URL, False, False, "Connection refused")) == (
        f"gateway {URL}: no answer, Connection refused"
    )


def test_findings_of_a_gateway() -> None:
    def found(gateway: Gateway, *, serving: bool = True) -> Status:
        return dataclasses.replace(status(), gateways=(gateway,), serving=serving)

    stopped = Gateway(URL, True, False, "no scheduler serves", COUNTS)
    assert findings_of(found(SERVING)) == []
    # Where nothing serves, the gateway is not what is wrong.
    assert findings_of(found(stopped, serving=False)) == []
    for gateway, what in (
        (stopped, f"the gateway {URL} does not serve"),
        (Gateway(URL, False, False, "refused"), f"the gateway {URL} does not answer"),
    ):
        finding = the_only(found(gateway))
        assert (finding.severity, finding.what) == (Severity.ERROR, what)
        assert finding.why == gateway.message
        assert not found(gateway).is_complete
    assert found(SERVING).is_complete
    gateways: Any = status_json(dataclasses.replace(found(SERVING), stores=()))["gateways"]
    assert [told["url"] for told in gateways] == [URL]
    assert gateways[0]["counts"]["stream_count"] == 5


def test_notes_of_up(tmp_path: Path) -> None:
    workers = [f"unix:{tmp_path}/worker-{i}.sock" for i in range(2)]
    note = GatewayNote(URL, "")
    assert read_gateways(workers) == []
    write_gateway(tmp_path, note)
    write_given_up(tmp_path, [GivenUpWorker(workers[0], "5 deaths", 250.0)])
    assert read_gateways(workers) == [note]
    assert list(read_given_up(workers)) == workers[:1]
    assert (tmp_path / "gateway.json").stat().st_mode & 0o777 == 0o600
    assert read_gateways(["127.0.0.1:50051", "unix:relative"]) == []
    forget_notes(tmp_path)
    assert read_gateways(workers) == []
    assert read_given_up(workers) == {}


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"17", b"{", b'{"url": "x"}', b"\xff", b"[" * 30000]
)
def test_a_damaged_note_says_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "gateway.json").write_bytes(content)
    assert read_gateways([f"unix:{tmp_path}/worker-0.sock"]) == []
