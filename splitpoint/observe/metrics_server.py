"""Serve one process's metrics to Prometheus by HTTP, on their own port, in threads.

Sources are read on the service's event loop within a time limit, so that a service that
hangs fails its scrapes instead of showing old values. Connections are limited in time and
number, and TLS handshakes run in the connections' threads, so that silent peers cost no
scrape. (prometheus_client's own server has none of these bounds.)
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import logging
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer

from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import CollectorRegistry

from splitpoint.config import check_address, is_local_address
from splitpoint.errors import InvalidArgument, Unavailable
from splitpoint.observe.meters import Family, Meters, Reader

_log = logging.getLogger(__name__)

PATH = "/metrics"
# Time for the loop to answer one scrape; Prometheus's default limit is 10 s.
READ_SECONDS = 5.0
# Duration of a connection, from the handshake to its last byte; and their number.
CONNECTION_SECONDS = 15.0
MOST_CONNECTIONS = 16
# How often the accepting thread checks the clock and whether to stop.
_POLL_SECONDS = 0.2


class LoopHangs(Exception):
    """The event loop did not answer in time, or has stopped."""


@asynccontextmanager
async def metrics_served(arguments: argparse.Namespace, meters: Meters) -> AsyncIterator[str]:
    """Serve metrics in this block if --metrics was given; yield the bound address or "".

    It uses TLS with --tls-cert and --tls-key, and demands client certificates with
    --tls-ca; with --metrics-open neither. Raises InvalidArgument for an address that is
    open without --metrics-open, Unavailable for a port that is taken.
    """
    if arguments.metrics is None:
        yield ""
        return
    host, port = _check(arguments)
    tls = _tls_of(arguments)
    meters.read_by(on_loop(asyncio.get_running_loop()))
    try:
        server = MetricsServer(host, port, meters.registry, tls)
    except OSError as error:
        raise Unavailable(
            f"metrics cannot be served at {arguments.metrics}: {error.strerror}",
            reason="METRICS_PORT",
        ) from error
    bound = f"{arguments.metrics.rpartition(':')[0]}:{server.server_port}"
    _log.info("metrics at %s://%s%s", "http" if tls is None else "https", bound, PATH)
    server.start()
    try:
        yield bound
    finally:
        # In a thread, because open connections still need this loop.
        await asyncio.to_thread(server.stop)


def _check(arguments: argparse.Namespace) -> tuple[str, int]:
    """Return host and port. Raises InvalidArgument."""
    address: str = check_address(arguments.metrics, field="metrics")
    if address.startswith("unix:"):
        raise InvalidArgument(
            f"--metrics: {address!r} is a socket; Prometheus reads HOST:PORT only", field="metrics"
        )
    is_closed = arguments.tls_cert is not None and _authority_of(arguments) is not None
    if not (is_local_address(address) or is_closed or arguments.metrics_open):
        raise InvalidArgument(
            f"--metrics: {address!r} is not a loopback address: beyond it metrics are served with "
            "--tls-cert, --tls-key and --tls-ca (to clients with a certificate), or with "
            "--metrics-open (to every client)",
            field="metrics",
            reason="OPEN_METRICS_ADDRESS",
        )
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _authority_of(arguments: argparse.Namespace) -> str | None:
    """Return the file of --tls-ca. The gateway has none: browsers have no certificates."""
    authority: str | None = getattr(arguments, "tls_ca", None)
    return authority


def _tls_of(arguments: argparse.Namespace) -> ssl.SSLContext | None:
    """Return the TLS context; None: plain HTTP. Raises InvalidArgument."""
    # --metrics-open is for a separate monitoring network without certificates, also for
    # services whose gRPC port uses TLS.
    if arguments.tls_cert is None or arguments.metrics_open:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # The empty password: an encrypted key must fail, not ask on the terminal.
        context.load_cert_chain(arguments.tls_cert, arguments.tls_key, password="")
        if (authority := _authority_of(arguments)) is not None:
            context.load_verify_locations(authority)
            context.verify_mode = ssl.CERT_REQUIRED
    except (ssl.SSLError, OSError) as error:
        raise InvalidArgument(
            "metrics cannot be served with the files of --tls-cert, --tls-key and --tls-ca: "
            f"{error.strerror or error}",
            field="tls-cert",
        ) from error
    return context


def on_loop(
    loop: asyncio.AbstractEventLoop, seconds: float = READ_SECONDS
) -> Callable[[Reader], list[Family]]:
    """Return a function that runs a reader in the loop's thread, from another thread.

    The function raises LoopHangs after `seconds`.
    """

    def run(reader: Reader) -> list[Family]:
        answer: concurrent.futures.Future[list[Family]] = concurrent.futures.Future()

        def read() -> None:
            if not answer.set_running_or_notify_cancel():
                return  # the scrape has given up
            try:
                answer.set_result(reader())
            except Exception as error:
                answer.set_exception(error)

        try:
            loop.call_soon_threadsafe(read)
        except RuntimeError:  # closed
            raise LoopHangs("the service has stopped") from None
        done, _ = concurrent.futures.wait([answer], seconds)
        if not done:
            answer.cancel()
            raise LoopHangs(f"the service did not answer within {seconds:g} s: it hangs")
        return answer.result()

    return run


class MetricsServer(socketserver.ThreadingMixIn, HTTPServer):
    """Listens from its construction, which may raise OSError. Call `start`, then `stop`."""

    # `stop` joins the threads, whose time is limited.
    daemon_threads = False
    block_on_close = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        tls: ssl.SSLContext | None = None,
        *,
        connection_seconds: float = CONNECTION_SECONDS,
    ) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, address = found[0]
        self.registry = registry
        self._tls = tls
        self._connection_seconds = connection_seconds
        self._lock = threading.Lock()
        self._open: dict[socket.socket, float] = {}  # since when
        self._thread = threading.Thread(
            target=self.serve_forever, args=(_POLL_SECONDS,), name="metrics", daemon=True
        )
        super().__init__(address[:2], _Handler)  # type: ignore[arg-type]

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Close the port and all connections. Call it in another thread than the loop's."""
        self.shutdown()
        self._thread.join()
        self._hang_up(0.0)
        self.server_close()

    # -- the base class's hooks ------------------------------------------------------------

    def server_bind(self) -> None:
        # HTTPServer's method resolves this host's name, which may take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def verify_request(self, request: object, client_address: object) -> bool:
        with self._lock:
            return len(self._open) < MOST_CONNECTIONS

    def process_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        with self._lock:
            self._open[request] = time.monotonic()
        super().process_request(request, client_address)

    def finish_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        """Answer in the connection's thread, with the handshake, which the peer may delay."""
        request.settimeout(self._connection_seconds)
        if self._tls is None:
            super().finish_request(request, client_address)
            return
        # `secured` is another object over the same connection; `_hang_up` uses `request`.
        with self._tls.wrap_socket(request.dup(), server_side=True) as secured:
            super().finish_request(secured, client_address)

    def shutdown_request(self, request: socket.socket) -> None:  # type: ignore[override]
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Log a broken connection at DEBUG; the base class would print a traceback."""
        _log.debug("a connection for metrics broke", exc_info=True)

    def service_actions(self) -> None:
        self._hang_up(self._connection_seconds)

    def _hang_up(self, seconds: float) -> None:
        """Shut down connections that are this old; their threads fail and end."""
        now = time.monotonic()
        with self._lock:
            for request, since in self._open.items():
                if now - since >= seconds:
                    with suppress(OSError):
                        request.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """One request per connection."""

    server: MetricsServer
    server_version = "splitpoint"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == PATH:
            self._answer(*self._metrics())
        elif path == "/":
            self._answer(200, f"metrics are at {PATH}\n")
        else:
            self._answer(404, f"nothing is here; metrics are at {PATH}\n")

    do_HEAD = do_GET

    def _metrics(self) -> tuple[int, str | bytes, str]:
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        try:
            return 200, encode(self.server.registry), content_type
        except LoopHangs as error:
            return 503, f"{error}\n", _TEXT
        except Exception:  # a bug in a source
            _log.exception("the metrics could not be read")
            return 500, "the metrics could not be read; the service's log says why\n", _TEXT

    def _answer(self, status: int, body: str | bytes, content_type: str = "") -> None:
        payload = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        self.send_header("Content-Type", content_type or _TEXT)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(payload)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: scrapes are frequent, and clients choose the paths."""


_TEXT = "text/plain; charset=utf-8"
