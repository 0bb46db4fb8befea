"""HTTP/1.1 as a load on a gateway needs it: one request on one connection, and its answer.

It reads no more than the gateway sends, answers with a length or in chunks, and is plain so that
the client's own work stays small beside what it measures.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from splitpoint.errors import Internal, Unavailable

_LONGEST_LINE = 1 << 16


async def answer(
    place: str, path: str, body: Mapping[str, Any] | None = None
) -> AsyncGenerator[bytes]:
    """Yield the body of an answer as it comes; a request with a body is a POST of JSON.

    Raises Unavailable if there is no whole answer, and Internal for any status but 200.
    """
    host, _, port = place.rpartition(":")
    payload = b"" if body is None else json.dumps(body).encode()
    verb = "GET" if body is None else "POST"
    head = f"{verb} {path} HTTP/1.1\r\nhost: {place}\r\ncontent-length: {len(payload)}\r\n"
    if payload:
        head += "content-type: application/json\r\n"
    try:
        reader, writer = await asyncio.open_connection(host, int(port), limit=_LONGEST_LINE)
    except OSError as error:
        raise Unavailable(f"cannot connect to {place}: {error.strerror or error}") from error
    try:
        writer.write(head.encode() + b"\r\n" + payload)
        await writer.drain()
        status = int((await _line(reader)).split(b" ", 2)[1])
        length, is_chunked = 0, False
        while line := await _line(reader):
            name, _, value = line.lower().partition(b":")
            if name == b"content-length":
                length = int(value)
            elif name == b"transfer-encoding":
                is_chunked = value.strip() == b"chunked"
        if status != 200:
            raise Internal(
                f"the gateway answered {status}: {(await reader.read(_LONGEST_LINE))!r}",
                reason=f"HTTP_{status}",
            )
        if not is_chunked:
            yield await reader.readexactly(length)
            return
        while size := int((await _line(reader)).partition(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
    except (OSError, EOFError, ValueError) as error:
        raise Unavailable(f"the answer ended early: {error or type(error).__name__}") from error
    finally:
        writer.close()


async def _line(reader: asyncio.StreamReader) -> bytes:
    return (await reader.readuntil(b"\r\n"))[:-2]


async def events(place: str, path: str, body: Mapping[str, Any]) -> AsyncGenerator[bytes]:
    """Yield the data of each server-sent event of an answer."""
    rest = b""
    async with aclosing(answer(place, path, body)) as parts:
        async for part in parts:
            *whole, rest = (rest + part if rest else part).split(b"\n\n")
            for event in whole:
                if event.startswith(b"data: "):
                    yield event[6:]
