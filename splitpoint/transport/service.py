"""The life of a service process: its arguments, its READY line, its signals and its exit code."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine

from splitpoint.errors import SplitpointError
from splitpoint.host.descriptors import raise_descriptor_limit
from splitpoint.observe import tracing
from splitpoint.observe.logs import add_log_arguments, log_options, setup_logging
from splitpoint.transport.failure import failure_line

READY_PREFIX = "READY "

Serve = Callable[[argparse.Namespace], Coroutine[None, None, None]]


def run_service(
    service: str,
    serve: Serve,
    arguments: argparse.Namespace,
    *,
    wrong_arguments: tuple[type[SplitpointError], ...] = (),
) -> int:
    """Run a service to its end; its exit code is that of its error, 0 without one.

    What it raises on purpose is one log line, and one on stdout for a supervisor.
    `wrong_arguments`: errors that end it with exit code 2, whatever theirs is.
    """
    setup_logging(service, log_options(arguments))
    raise_descriptor_limit()
    try:
        with tracing.exported(service, arguments.otlp_endpoint):
            asyncio.run(serve(arguments))
    except SplitpointError as error:
        logging.getLogger(service).error("%s", error.message)
        if arguments.parent_fd is not None:
            print(failure_line(error), flush=True)
        return 2 if isinstance(error, wrong_arguments) else error.exit_code
    return 0


def add_service_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that every service has."""
    parser.add_argument(
        "--listen", required=True, metavar="ADDRESS", help="host:port (0: any) or unix:/path"
    )
    parser.add_argument(
        "--parent-fd", type=int, metavar="N", help="stop when this inherited pipe is closed"
    )
    parser.add_argument("--reflection", action="store_true", help="serve gRPC reflection")
    add_log_arguments(parser)
    tracing = parser.add_argument_group("traces (docs/tracing.md)")
    tracing.add_argument(
        "--otlp-endpoint",
        metavar="HOST:PORT|URL|env",
        help="send OpenTelemetry spans to this collector by OTLP/gRPC; https:// for TLS; env: "
        "where OTEL_EXPORTER_OTLP_ENDPOINT says",
    )
    security = parser.add_argument_group("security")
    security.add_argument("--tls-cert", metavar="PATH", help="PEM chain; serve TLS on ports")
    security.add_argument("--tls-key", metavar="PATH", help="its private key, mode 0600")
    security.add_argument(
        "--tls-ca",
        metavar="PATH",
        help="verify peers: demand a certificate of it from clients, and speak TLS to the ports "
        "of other services",
    )
    security.add_argument(
        "--tls-server-name",
        default="",
        metavar="NAME",
        help="the name that other services' certificates carry, where it is not the host by which "
        "they are reached",
    )
    security.add_argument("--tokens", metavar="FILE", help="TOML of who may call, mode 0600")
    security.add_argument(
        "--token-file", metavar="PATH", help="the token shown to other services, mode 0600"
    )


def announce_ready(address: str) -> None:
    """Print the line the supervisor waits for. `address` is what clients connect to."""
    print(f"{READY_PREFIX}{address}", flush=True)


def stop_on_signals(stop: asyncio.Event) -> None:
    """SIGTERM and SIGINT set `stop`. Call inside the running loop."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)


def watch_parent(fd: int, stop: asyncio.Event) -> None:
    """Set `stop` once the other end of the inherited pipe `fd` is closed.

    The kernel closes it however the parent dies, kill -9 included. Call inside
    the running loop; returns at once.
    """
    loop = asyncio.get_running_loop()

    def readable() -> None:
        if not os.read(fd, 4096):
            loop.remove_reader(fd)
            stop.set()

    loop.add_reader(fd, readable)
