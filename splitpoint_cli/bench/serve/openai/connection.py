"""HTTP/1.1 as a load needs it: one request on a connection that is kept, and events of its answer.

Reads no more than servers of OpenAI's protocol send: answers with a length or in chunks. It is
plain so that the client's own work stays small beside what it measures.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from splitpoint.errors import InvalidArgument, Unavailable

_READ_BYTES = 1 << 16
_LONGEST_LINE = 1 << 16


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go: `prefix` is put before their paths."""

    host: str
    port: int
    prefix: str
    is_encrypted: bool

    @classmethod
    def of(cls, url: str) -> Server:
        """Return the server of a base URL. Raises InvalidArgument."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise InvalidArgument(
                f"{url!r} is not a URL such as http://127.0.0.1:8080", field="base_url"
            )
        is_encrypted = parts.scheme == "https"
        default = 443 if is_encrypted else 80
        return cls(parts.hostname, port or default, parts.path.rstrip("/"), is_encrypted)


class Broken(Unavailable):
    """The connection ended, or its bytes are no answer."""


class Connection:
    """One connection. After an exchange that was read to its end it may carry the next one."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._length: int | None = None
        self._is_chunked = False
        self.is_reusable = True

    @classmethod
    async def open(cls, server: Server, tls: ssl.SSLContext | None) -> Connection:
        """Connect. Raises Unavailable."""
        try:
            reader, writer = await asyncio.open_connection(
                server.host, server.port, ssl=tls, limit=_LONGEST_LINE
            )
        except OSError as error:
            raise Unavailable(
                f"cannot connect to {server.host}:{server.port}: {error.strerror or error}"
            ) from error
        return cls(reader, writer)

    async def send(
        self, verb: str, server: Server, path: str, headers: Mapping[str, str], body: bytes
    ) -> int:
        """Send a request and return the status of its answer, whose body is read next."""
        host = f"[{server.host}]" if ":" in server.host else server.host
        lines = [f"{verb} {server.prefix}{path} HTTP/1.1", f"host: {host}:{server.port}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += [f"content-length: {len(body)}", "", ""]
        self._writer.write("\r\n".join(lines).encode() + body)
        try:
            await self._writer.drain()
            return await self._head()
        except (OSError, EOFError, ValueError) as error:
            self.is_reusable = False
            raise Broken(f"no answer: {error or type(error).__name__}") from error

    async def _head(self) -> int:
        status = int((await self._line()).split(b" ", 2)[1])
        self._length, self._is_chunked = None, False
        while line := await self._line():
            name, _, value = line.partition(b":")
            value = value.strip().lower()
            match name.strip().lower():
                case b"content-length":
                    self._length = int(value)
                case b"transfer-encoding":
                    self._is_chunked = value == b"chunked"
                case b"connection":
                    self.is_reusable = value != b"close"
        return status

    async def _line(self) -> bytes:
        line = await self._reader.readuntil(b"\r\n")
        return line[:-2]

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the body as it comes. Raises Broken if it ends early."""
        try:
            if self._is_chunked:
                while size := int((await self._line()).partition(b";")[0], 16):
                    data = await self._reader.readexactly(size + 2)
                    yield data[:-2]
                await self._line()
            elif self._length is not None:
                yield await self._reader.readexactly(self._length)
            else:
                self.is_reusable = False
                while data := await self._reader.read(_READ_BYTES):
                    yield data
        except (OSError, EOFError, ValueError) as error:
            self.is_reusable = False
            raise Broken(f"the answer ended early: {type(error).__name__}") from error

    async def body(self) -> bytes:
        """Return the whole body."""
        return b"".join([part async for part in self.parts()])

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the data of each server-sent event."""
        rest = b""
        async for part in self.parts():
            *whole, rest = (rest + part if rest else part).split(b"\n\n")
            for event in whole:
                if event.startswith(b"data: "):
                    yield event[6:]

    def close(self) -> None:
        self._writer.close()
