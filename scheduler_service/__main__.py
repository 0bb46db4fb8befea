"""`python -m scheduler_service`: one scheduler process, from arguments to a drained stop."""

from __future__ import annotations

from splitpoint.checkpoint.config import read_shape
from splitpoint.extras import need_for_program

need_for_program("scheduler")  # before the imports that it is about

import argparse
import asyncio
import logging
import os
import secrets
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from scheduler_service.limits import Limits
from scheduler_service.server import ServedModel
from scheduler_service.service import Scheduler, SchedulerOptions
from splitpoint.checkpoint.resolve import eos_token_ids, resolve_model
from splitpoint.checkpoint.text import Tokenizer
from splitpoint.config import check_address, check_listen_address
from splitpoint.discovery.redis_options import add_redis_arguments, redis_options
from splitpoint.errors import InvalidArgument, PermissionDenied
from splitpoint.observe.metrics_server import add_metrics_arguments, metrics_served
from splitpoint.planning.planner import Objective, Residency
from splitpoint.shapes import DataType
from splitpoint.transport.access import access_of
from splitpoint.transport.service import (
    add_service_arguments,
    announce_ready,
    run_service,
    stop_on_signals,
    watch_parent,
)
from splitpoint.transport.tls import identity_of, read_private

_log = logging.getLogger(__name__)

_KEY_BYTES = 32
_SHORTEST_KEY = 16


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 after a stop that was asked for, 2 for wrong arguments; others by the error."""
    return run_service(
        "scheduler",
        _serve,
        parse_arguments(arguments),
        wrong_arguments=(PermissionDenied,),
    )


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    defaults = Limits()
    parser = argparse.ArgumentParser(prog="scheduler_service", description=__doc__)
    add_service_arguments(parser)
    parser.add_argument(
        "--worker",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="repeatable; optional with --redis, where workers are found",
    )
    add_metrics_arguments(parser)
    add_redis_arguments(parser)
    parser.add_argument("--model", required=True, metavar="DIR", help="config and tokenizer")
    parser.add_argument(
        "--dtype",
        choices=["auto", *(kind.value for kind in DataType)],
        default="auto",
        help="what the workers compute in; auto: the checkpoint's own type",
    )
    parser.add_argument("--queue-capacity", type=int, default=defaults.queue_capacity, metavar="N")
    parser.add_argument(
        "--tenant-requests",
        type=int,
        metavar="N",
        help="most requests of one tenant that may run or wait; default: no such bound",
    )
    parser.add_argument(
        "--server-key-file",
        metavar="PATH",
        help="secret behind the chunk keys, made when missing; default: a new one at each start, "
        "with which cached prefixes of earlier starts are not found",
    )
    parser.add_argument("--residency", choices=["auto", "resident", "streamed"], default="auto")
    parser.add_argument(
        "--objective",
        choices=[objective.value for objective in Objective],
        default=Objective.LATENCY.value,
        help="of plans: least time for each request, or least use of whichever of link and "
        "device is busier",
    )
    parser.add_argument(
        "--grace-seconds", type=float, default=30.0, metavar="S", help="for running requests"
    )
    return parser.parse_args(arguments)


def _options(arguments: argparse.Namespace) -> SchedulerOptions:
    if arguments.queue_capacity < 0:
        raise InvalidArgument("the queue capacity must be at least 0", field="queue_capacity")
    if arguments.tenant_requests is not None and arguments.tenant_requests < 1:
        raise InvalidArgument("a tenant may have at least 1 request", field="tenant_requests")
    if len(set(arguments.worker)) != len(arguments.worker):
        raise InvalidArgument("a worker's address is given twice", field="worker")
    redis = redis_options(arguments)
    if not arguments.worker and redis is None:
        raise InvalidArgument("give --worker ADDRESS, --redis URL, or both", field="worker")
    for address in arguments.worker:
        check_address(address, field="worker")
    folder = resolve_model(arguments.model, download=False)
    data_type = None if arguments.dtype == "auto" else DataType(arguments.dtype)
    shape = read_shape(folder, data_type=data_type)
    residency = None if arguments.residency == "auto" else Residency(arguments.residency)
    return SchedulerOptions(
        model=ServedModel(shape, Tokenizer.load(folder)),
        worker_addresses=arguments.worker,
        server_key=read_server_key(arguments.server_key_file),
        eos_token_ids=frozenset(eos_token_ids(folder)),
        limits=replace(
            Limits(),
            queue_capacity=arguments.queue_capacity,
            tenant_requests=arguments.tenant_requests,
        ),
        default_residency=residency,
        objective=Objective(arguments.objective),
        reflection=arguments.reflection,
        identity=identity_of(arguments),
        access=access_of(arguments.tokens),
        redis=redis,
    )


def read_server_key(path: str | None) -> bytes:
    """The key in a file that only this user can read; made when missing; random without a file.

    Raises PermissionDenied for a file that others can read, InvalidArgument for
    one that is too short to be a secret.
    """
    if path is None:
        return secrets.token_bytes(_KEY_BYTES)
    if not os.path.lexists(path):
        _make_key(path)
    key = read_private(path, "the server key", field="server_key_file")
    if len(key) < _SHORTEST_KEY:
        raise InvalidArgument(
            f"the server key {path} has {len(key)} bytes, at least {_SHORTEST_KEY} are needed",
            field="server_key_file",
        )
    return key


def _make_key(path: str) -> None:
    """A new key, whole or not at all: a half-written one would stop every later start."""
    # Not named by the process: in a container every start may have the same id.
    fresh = f"{path}.{secrets.token_hex(8)}.new"
    try:
        made = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(made, "wb") as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
            with suppress(FileExistsError):  # somebody else was quicker: theirs counts
                os.link(fresh, path)
        finally:
            os.unlink(fresh)
    except OSError as error:
        raise InvalidArgument(
            f"the server key {path} cannot be made: {error.strerror}", field="server_key_file"
        ) from error


async def _serve(arguments: argparse.Namespace) -> None:
    check_listen_address(
        arguments.listen,
        has_tls=arguments.tls_cert is not None,
        has_tokens=arguments.tokens is not None,
    )
    stop = asyncio.Event()
    stop_on_signals(stop)
    if arguments.parent_fd is not None:
        watch_parent(arguments.parent_fd, stop)
    scheduler = Scheduler(_options(arguments))
    async with metrics_served(arguments, scheduler.meters):
        address = await scheduler.start(arguments.listen)
        try:
            announce_ready(address)
            found = " and those found in Redis" if arguments.redis else ""
            _log.info("listening on %s for %d workers%s", address, len(arguments.worker), found)
            await stop.wait()
            _log.info("draining")
        finally:
            await scheduler.stop(arguments.grace_seconds)


if __name__ == "__main__":
    sys.exit(main())
