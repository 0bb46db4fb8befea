"""What every service process does: set up from its command line, run, and end with an exit code."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass

from splitpoint.config import check_address, check_listen_address
from splitpoint.discovery.redis_options import RedisOptions, redis_options
from splitpoint.errors import SplitpointError
from splitpoint.host.descriptors import raise_descriptor_limit
from splitpoint.observe import tracing
from splitpoint.observe.logs import log_options, setup_logging
from splitpoint.options.option import Section, check_values
from splitpoint.transport.access import Access, access_of
from splitpoint.transport.statuses import failure_line
from splitpoint.transport.tls import Identity, identity_of

READY_PREFIX = "READY "

Serve = Callable[[argparse.Namespace], Coroutine[None, None, None]]
# Is called with the address that clients connect to, once the service serves.
OnReady = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Setup:
    """What a service takes from the options that all services have.

    Attributes:
        stop: set by a signal and by the end of the parent process.
        identity: what the service shows to its peers.
        access: permitted callers; None if callers need no token.
        redis: None if the service uses none.
    """

    stop: asyncio.Event
    identity: Identity
    access: Access | None
    redis: RedisOptions | None


def set_up(arguments: argparse.Namespace) -> Setup:
    """Check the common options and follow signals and the parent. Call inside the running loop.

    Raises InvalidArgument, PermissionDenied.
    """
    stop = asyncio.Event()
    stop_on_signals(stop)
    if arguments.parent_fd is not None:
        watch_parent(arguments.parent_fd, stop)
    check_listen_address(
        arguments.listen,
        has_tls=arguments.tls_cert is not None,
        has_tokens=arguments.tokens is not None,
    )
    if getattr(arguments, "advertise", None) is not None:
        check_address(arguments.advertise, field="advertise")
    return Setup(
        stop, identity_of(arguments), access_of(arguments.tokens), redis_options(arguments)
    )


def run_service(
    service: str,
    serve: Serve,
    arguments: argparse.Namespace,
    sections: Iterable[Section],
    *,
    wrong_arguments: tuple[type[SplitpointError], ...] = (),
    run: Callable[[Coroutine[None, None, None]], None] = asyncio.run,
) -> int:
    """Run a service to its end and return the exit code: 0, or that of the error.

    An error is logged in one line, and written to stdout in one line for a supervisor.
    `sections` have the service's options, whose bounds are checked first.
    `wrong_arguments`: errors that lead to exit code 2, whatever their own is. `run`: runs the
    event loop.
    """
    # What the imports made stays to the end: no collection goes through it, nor does the exit.
    gc.freeze()
    setup_logging(service, log_options(arguments))
    raise_descriptor_limit()
    try:
        check_values(sections, vars(arguments))
        with tracing.exported(service, arguments.otlp_endpoint):
            run(serve(arguments))
    except SplitpointError as error:
        logging.getLogger(service).error("%s", error.message)
        if arguments.parent_fd is not None:
            print(failure_line(error), flush=True)
        return 2 if isinstance(error, wrong_arguments) else error.exit_code
    return 0


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
