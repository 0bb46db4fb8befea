"""Connections: uvicorn's protocol, with bounds on headers, silent clients and slow readers.

A connection answers one request at a time. Bytes that come behind a request before its answer are
discarded, and the connection is closed behind the answer: a client that pipelines asks again then
(RFC 9112, 9.3.2). So reading never pauses, and the client's end is noticed at once.
"""

from __future__ import annotations

import asyncio

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from gateway_service.settings import Limits

_REFUSAL = (
    b"HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    b"connection: close\r\n\r\n%s"
)
_HEADERS_TOO_LARGE = (
    b'{"error":{"message":"the headers are too large","type":"invalid_request_error",'
    b'"param":null,"code":"headers_too_large"}}'
)
_NO_REQUEST = (
    b'{"error":{"message":"this is not an HTTP request","type":"invalid_request_error",'
    b'"param":null,"code":"malformed_request"}}'
)


class _EarlyRequest(Exception):
    """A request begins before the answer to the one before it has ended."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection. uvicorn itself bounds neither headers nor a reader that has stopped."""

    def __init__(
        self, config: Config, server_state: ServerState, limits: Limits, most_connections: int
    ) -> None:
        super().__init__(config, server_state, {})
        # uvicorn would log every path if the root logger has a handler.
        self.access_log = False
        self.limits = limits
        self.most_connections = most_connections
        self._is_in_headers = False
        # Bytes of the request whose headers come: parsed, and received.
        self._header_bytes = self._unparsed_bytes = 0
        # Thrown away, behind the request that is being answered.
        self._early_bytes = 0
        # Closes the connection unless the headers come, or what lingers ends.
        self._patience: asyncio.TimerHandle | None = None
        # Closes the connection unless the client reads.
        self._stall: asyncio.TimerHandle | None = None

    # -- silent clients --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most_connections:
            transport.abort()
            return
        self._wait_at_most(self.limits.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_patience()
        self._end_stall()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_answering:
            self._throw_away(len(data))
            return
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self._patience is None:
            self._wait_at_most(self.limits.header_seconds)
        self._unset_keepalive_if_required()
        # Not uvicorn's method: it warns of each wrong byte, which any port scanner can send.
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # is answered as if it asked for no other protocol
        except httptools.HttpParserError:
            if not self._is_answering:
                self._refuse(b"400 Bad Request", _NO_REQUEST)
                return
            self._throw_away(0)  # the rest of these bytes; the next ones count
        # The parser keeps a header to itself until it is whole.
        if self._is_in_headers and not self.transport.is_closing():
            self._unparsed_bytes += len(data)
            self._check(self._unparsed_bytes)

    @property
    def _is_answering(self) -> bool:
        """True from the last byte of a request to the last byte of its answer."""
        cycle = self.cycle
        return cycle is not None and not cycle.more_body and not cycle.response_complete

    def _throw_away(self, size: int) -> None:
        self.cycle.keep_alive = False
        self._early_bytes += size
        if self._early_bytes > self.limits.body_bytes:
            self._hang_up()

    def on_message_begin(self) -> None:
        if self._is_answering:
            raise _EarlyRequest  # ends `feed_data`
        super().on_message_begin()
        self._is_in_headers = True
        self._header_bytes = self._unparsed_bytes = 0
        self._wait_at_most(self.limits.header_seconds)

    def on_headers_complete(self) -> None:
        self._is_in_headers = False
        self._end_patience()
        if not self.transport.is_closing():
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._end_patience()
        if not self.transport.is_closing():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.more_body and not self.transport.is_closing():
            self._wait_at_most(self.limits.linger_seconds)

    def _wait_at_most(self, seconds: float) -> None:
        self._end_patience()
        self._patience = self.loop.call_later(seconds, self._hang_up)

    def _end_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _hang_up(self) -> None:
        self._patience = None
        self.transport.abort()

    # -- large headers -------------------------------------------------------------------------

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + len(b": \r\n"))
        if not self.transport.is_closing():
            super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._header_bytes += size
        self._check(self._header_bytes)

    def _check(self, size: int) -> None:
        if size > self.limits.header_bytes and not self.transport.is_closing():
            self._refuse(b"431 Request Header Fields Too Large", _HEADERS_TOO_LARGE)

    def _refuse(self, status: bytes, body: bytes) -> None:
        """Answer in place of an exchange, unless it has begun to; it ends as if the client left."""
        cycle = self.cycle
        is_open = cycle is not None and not cycle.response_complete
        if not is_open or not cycle.response_started:
            self.transport.write(_REFUSAL % (status, len(body), body))
        if is_open:
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()

    # -- slow readers --------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._end_stall()
        self._stall = self.loop.call_later(self.limits.stall_seconds, self._give_up_reader)

    def resume_writing(self) -> None:
        self._end_stall()
        super().resume_writing()

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _give_up_reader(self) -> None:
        self._stall = None
        self.transport.abort()
