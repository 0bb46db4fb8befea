"""Listens for HTTP: sockets, TLS, and a stop that lets running requests finish."""

from __future__ import annotations

import asyncio
import ssl
import time
from email.utils import formatdate

from uvicorn.config import Config
from uvicorn.server import ServerState

from gateway_service.app import App
from gateway_service.http.connections import BoundedProtocol
from gateway_service.settings import Limits
from splitpoint.errors import Unavailable
from splitpoint.host.descriptors import connection_limit
from splitpoint.transport.tls import load_pair

_HANDSHAKE_SECONDS = 10.0
_BACKLOG = 2048
# For the last bytes of answers, after which connections are cut.
_CLOSE_SECONDS = 2.0
_POLL_SECONDS = 0.02


def tls_context(certificate: str, key: str) -> ssl.SSLContext:
    """Return the context for HTTPS. Raises InvalidArgument."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    load_pair(context, certificate, key)
    return context


class HttpServer:
    """One listening address. Create and use it inside one event loop."""

    def __init__(self, app: App, limits: Limits, tls: ssl.SSLContext | None) -> None:
        self._limits = limits
        self._tls = tls
        self._most_connections = connection_limit()
        self._state = ServerState()
        self._server: asyncio.Server | None = None
        self._clock: asyncio.TimerHandle | None = None
        # uvicorn's settings of a connection; uvicorn runs no server here.
        self._config = Config(
            app,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=round(limits.idle_seconds),
        )
        self._config.load()

    async def start(self, address: str) -> str:
        """Listen at host:port or unix:/path, and return the address with the real port.

        Raises Unavailable if it cannot be bound.
        """
        loop = asyncio.get_running_loop()
        self._tell_time()
        try:
            if address.startswith("unix:"):
                path = address.removeprefix("unix:")
                self._server = await loop.create_unix_server(self._connection, path)
                return address
            host, _, port = address.rpartition(":")
            self._server = await loop.create_server(
                self._connection,
                host.strip("[]"),
                int(port),
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else _HANDSHAKE_SECONDS,
                backlog=_BACKLOG,
            )
        except OSError as error:
            raise Unavailable(
                f"cannot listen on {address}: {error.strerror or error}", reason="CANNOT_LISTEN"
            ) from error
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    @property
    def connection_count(self) -> int:
        return len(self._state.connections)

    def stop_listening(self) -> None:
        """Accept no connection any more. Open ones are closed once they have their answer."""
        if self._server is not None:
            self._server.close()
        for connection in [*self._state.connections]:
            connection.shutdown()

    async def close(self) -> None:
        """Cut the connections that have not ended by themselves."""
        for _ in range(round(_CLOSE_SECONDS / _POLL_SECONDS)):
            if not self._state.connections:
                break
            await asyncio.sleep(_POLL_SECONDS)
        for connection in [*self._state.connections]:
            connection.transport.abort()
        if self._clock is not None:
            self._clock.cancel()
        if self._server is not None:
            await self._server.wait_closed()

    def _connection(self) -> BoundedProtocol:
        return BoundedProtocol(self._config, self._state, self._limits, self._most_connections)

    def _tell_time(self) -> None:
        """Renew the header that every answer has, each second."""
        now = formatdate(time.time(), usegmt=True)
        self._state.default_headers = [(b"date", now.encode())]
        self._clock = asyncio.get_running_loop().call_later(1.0, self._tell_time)
