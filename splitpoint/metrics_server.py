"""Serves one process's metrics to Prometheus: HTTP on a port of its own, in a thread.

The library's server answers. What the service keeps on its event loop is read there,
within a bound, so that a service whose loop hangs shows as a failed scrape and not as
numbers of long ago.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from prometheus_client import start_http_server

from splitpoint.config import check_address, is_local_address
from splitpoint.errors import InvalidArgument, Unavailable
from splitpoint.meters import Family, Meters

Reader = Callable[[], Iterable[Family]]

_log = logging.getLogger(__name__)

# Of the loop, to answer one scrape; below Prometheus's default of 10 s.
_READ_SECONDS = 5.0


def add_metrics_arguments(parser: argparse.ArgumentParser) -> None:
    metrics = parser.add_argument_group("metrics (docs/metrics.md)")
    metrics.add_argument(
        "--metrics", metavar="HOST:PORT", help="serve Prometheus metrics there (port 0: any)"
    )
    metrics.add_argument(
        "--metrics-open",
        action="store_true",
        help="allow --metrics beyond loopback without TLS: for a network that only the "
        "monitoring can reach",
    )


@asynccontextmanager
async def metrics_served(arguments: argparse.Namespace, meters: Meters) -> AsyncIterator[str]:
    """For the length of the context, if --metrics was given; the bound address, or "".

    With --tls-cert and --tls-key it speaks TLS, with --tls-ca to clients with a
    certificate of theirs only. Raises InvalidArgument for a port that others could read
    unasked, Unavailable for one that is taken.
    """
    if arguments.metrics is None:
        yield ""
        return
    host, port = _check(arguments)
    meters.read_by(_on_loop(asyncio.get_running_loop()))
    tls = {}
    if arguments.tls_cert is not None:
        tls = {"certfile": arguments.tls_cert, "keyfile": arguments.tls_key}
    if tls and arguments.tls_ca is not None:
        tls |= {"client_cafile": arguments.tls_ca, "client_auth_required": True}
    try:
        server, thread = start_http_server(port, host, meters.registry, **tls)
    except OSError as error:
        raise Unavailable(
            f"metrics cannot be served at {arguments.metrics}: {error.strerror}"
        ) from error
    bound = f"{arguments.metrics.rpartition(':')[0]}:{server.server_port}"
    _log.info("metrics at %s://%s/metrics", "https" if tls else "http", bound)
    try:
        yield bound
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        thread.join()


def _check(arguments: argparse.Namespace) -> tuple[str, int]:
    """Host and port. Raises InvalidArgument."""
    address: str = check_address(arguments.metrics, field="metrics")
    if address.startswith("unix:"):
        raise InvalidArgument("metrics are served at HOST:PORT only", field="metrics")
    is_closed = arguments.tls_cert is not None and arguments.tls_ca is not None
    if not (is_local_address(address) or is_closed or arguments.metrics_open):
        raise InvalidArgument(
            f"{address!r} is not a loopback address: beyond it metrics are served with --tls-cert, "
            "--tls-key and --tls-ca (clients with a certificate), or with --metrics-open",
            field="metrics",
            reason="OPEN_METRICS_ADDRESS",
        )
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _on_loop(loop: asyncio.AbstractEventLoop) -> Callable[[Reader], Iterable[Family]]:
    """Runs a reader in the loop's thread, for whoever asks from another one."""

    async def read(reader: Reader) -> Iterable[Family]:
        return reader()

    def run(reader: Reader) -> Iterable[Family]:
        return asyncio.run_coroutine_threadsafe(read(reader), loop).result(_READ_SECONDS)

    return run
