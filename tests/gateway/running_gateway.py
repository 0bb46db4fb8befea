"""A gateway in this process, on a real socket, and a client of HTTP that sends what it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from waiting import until

from gateway_service.app import App
from gateway_service.endpoints.endpoint import Gateway
from gateway_service.metrics import Counts, readings
from gateway_service.server import HttpServer
from gateway_service.settings import Limits
from gateway_service.upstream import Upstream
from splitpoint.observe.meters import Meters
from splitpoint.observe.metrics import Service
from splitpoint.transport.access import Access
from splitpoint.transport.tls import PLAIN

SECONDS = 60


@dataclass
class HttpAnswer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    @property
    def events(self) -> list[Any]:
        """The events of a stream that ended as it should."""
        *events, last = self.data
        assert last == "[DONE]"
        return [json.loads(event) for event in events]

    @property
    def data(self) -> list[str]:
        """The data of each event."""
        assert self.headers["content-type"] == "text/event-stream; charset=utf-8"
        frames = self.body.decode().split("\n\n")
        assert frames.pop() == ""
        assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
        return [frame.removeprefix("data: ") for frame in frames]


@dataclass
class Wire:
    """One connection: bytes go out as they are, answers are read one by one."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        async with asyncio.timeout(SECONDS):
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        found = [line.partition(": ") for line in lines[1:-2]]
        return int(lines[0].split()[1]), {name: value for name, _, value in found}

    async def chunk(self) -> bytes:
        """The next chunk of a stream; empty at its end."""
        async with asyncio.timeout(SECONDS):
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            return (await self.reader.readexactly(size + 2))[:-2]

    async def answer(self) -> HttpAnswer:
        status, headers = await self.head()
        body = b""
        if "content-length" in headers:
            body = await self.reader.readexactly(int(headers["content-length"]))
        elif headers.get("transfer-encoding") == "chunked":
            while chunk := await self.chunk():
                body += chunk
        return HttpAnswer(status, headers, body)

    async def is_closed(self) -> bool:
        """True once the other side has closed; what it sends before is thrown away."""
        async with asyncio.timeout(SECONDS):
            try:
                while await self.reader.read(65536):
                    pass
            except ConnectionError:
                pass
        return True

    def close(self) -> None:
        self.writer.close()


def request_bytes(
    verb: str, path: str, value: Any = None, headers: Mapping[str, str] | None = None
) -> bytes:
    """A request with a JSON body, or with bytes as they are."""
    body = (
        value if isinstance(value, bytes) else b"" if value is None else json.dumps(value).encode()
    )
    given = {"host": "127.0.0.1", "content-length": str(len(body))}
    if value is not None:
        given["content-type"] = "application/json"
    given |= headers or {}
    lines = [f"{verb} {path} HTTP/1.1", *(f"{name}: {text}" for name, text in given.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass
class RunningGateway:
    gateway: Gateway
    server: HttpServer
    address: str
    wires: list[Wire] = field(default_factory=list)

    async def wire(self, **options: Any) -> Wire:
        host, _, port = self.address.rpartition(":")
        wire = Wire(*await asyncio.open_connection(host, int(port), **options))
        self.wires.append(wire)
        return wire

    async def ask(
        self, verb: str, path: str, value: Any = None, headers: Mapping[str, str] | None = None
    ) -> HttpAnswer:
        wire = await self.wire()
        await wire.send(request_bytes(verb, path, value, headers))
        answer = await wire.answer()
        wire.close()
        return answer

    async def complete(self, **fields: Any) -> HttpAnswer:
        """POST /v1/completions."""
        body = {"model": "stdlib-llama", "prompt": "def main():", "temperature": 0, **fields}
        return await self.ask("POST", "/v1/completions", body)

    async def readings(self) -> dict[tuple[str, ...], float]:
        """Its metrics, by name and the values of their labels."""
        text = (await self.ask("GET", "/metrics")).body.decode()
        return {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


@asynccontextmanager
async def running_gateway(
    scheduler: str,
    *,
    limits: Limits | None = None,
    access: Access | None = None,
    checks_host: bool = False,
    retry_seconds: float = 10.0,
) -> AsyncIterator[RunningGateway]:
    """A gateway for schedulers at these addresses (with commas). Ends without open requests."""
    limits = limits or Limits()
    upstream = Upstream(
        scheduler.split(","), PLAIN, call_seconds=limits.call_seconds, retry_seconds=retry_seconds
    )
    meters = Meters(Service.GATEWAY)
    gateway = Gateway(upstream, limits, access, meters, checks_host=checks_host)
    gateway.on_ended = Counts(meters).ended
    server = HttpServer(App(gateway), limits, None)
    meters.read(lambda: readings(gateway, server))
    running = RunningGateway(gateway, server, await server.start("127.0.0.1:0"))
    try:
        yield running
        await until(lambda: not (gateway.open_count or upstream.open_count or gateway.budget.used))
    finally:
        for wire in running.wires:
            wire.close()
        server.stop_listening()
        await gateway.drain()
        await server.close()
        await upstream.close()
