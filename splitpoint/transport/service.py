"""Runs a service process from its arguments to its exit code: logs, traces, the serving itself."""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Callable, Coroutine

from splitpoint.errors import SplitpointError
from splitpoint.host.descriptors import raise_descriptor_limit
from splitpoint.observe import tracing
from splitpoint.observe.logs import log_options, setup_logging
from splitpoint.transport.failure import failure_line

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
