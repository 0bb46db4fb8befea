"""`python -m scheduler_service`: one scheduler process, from its arguments to its stop."""

from __future__ import annotations

from splitpoint.extras import need_for_program

need_for_program("scheduler")  # before the imports that need the extra

import argparse
import logging
import os
import secrets
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from scheduler_service.limits import Limits
from scheduler_service.options import SchedulerOptions, load_served_model
from scheduler_service.policy.settings import PolicySettings
from scheduler_service.service import Scheduler
from splitpoint.checkpoint.resolve import resolve_model
from splitpoint.config import check_address
from splitpoint.errors import InvalidArgument, PermissionDenied
from splitpoint.observe.metrics_server import metrics_served
from splitpoint.options.scheduler import SECTIONS, AnswerCharge, Policy
from splitpoint.options.values import parse_options
from splitpoint.planning.plan import Objective, Residency
from splitpoint.service import OnReady, Setup, announce_ready, run_service, set_up
from splitpoint.shapes import DataType
from splitpoint.transport.tls import read_private

_log = logging.getLogger(__name__)

_KEY_BYTES = 32
_SHORTEST_KEY = 16


def main(arguments: Sequence[str] | None = None) -> int:
    """Return exit code 0 after a requested stop, 2 for wrong arguments, else the error's."""
    return run_service(
        "scheduler",
        _serve,
        parse_arguments(arguments),
        SECTIONS,
        wrong_arguments=(PermissionDenied,),
    )


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    return parse_options("scheduler_service", __doc__, SECTIONS, arguments)


def _options(arguments: argparse.Namespace, setup: Setup) -> SchedulerOptions:
    if len(set(arguments.worker)) != len(arguments.worker):
        raise InvalidArgument("a worker's address is given twice", field="worker")
    if not arguments.worker and setup.redis is None:
        raise InvalidArgument("give --worker ADDRESS, --redis URL, or both", field="worker")
    for address in arguments.worker:
        check_address(address, field="worker")
    folder = resolve_model(arguments.model, download=False)
    data_type = None if arguments.dtype == "auto" else DataType(arguments.dtype)
    template = None if arguments.chat_template is None else Path(arguments.chat_template)
    residency = None if arguments.residency == "auto" else Residency(arguments.residency)
    return SchedulerOptions(
        model=load_served_model(
            folder,
            data_type,
            chat_template=template,
            served_names=arguments.served_model_name,
            max_model_len=arguments.max_model_len,
        ),
        worker_addresses=arguments.worker,
        server_key=read_server_key(arguments.server_key_file),
        limits=replace(
            Limits(),
            queue_capacity=arguments.queue_capacity,
            tenant_requests=arguments.tenant_requests,
        ),
        default_residency=residency,
        objective=Objective(arguments.objective),
        answer_charge=AnswerCharge(arguments.answer_charge),
        policy=PolicySettings(
            Policy(arguments.policy),
            aging_seconds=arguments.policy_aging_seconds,
            lead_requests=arguments.policy_lead_requests,
        ),
        reflection=arguments.reflection,
        identity=setup.identity,
        access=setup.access,
        redis=setup.redis,
    )


def read_server_key(path: str | None) -> bytes:
    """Return the key in a file, which is created if it is missing; a random key without a path.

    Raises PermissionDenied for a file that other users can read, and InvalidArgument for
    one that is too short to be a secret.
    """
    if path is None:
        return secrets.token_bytes(_KEY_BYTES)
    if not os.path.lexists(path):
        _make_key(path)
    key = read_private(path, "the server key", field="server-key-file")
    if len(key) < _SHORTEST_KEY:
        raise InvalidArgument(
            f"the server key {path} has {len(key)} bytes, at least {_SHORTEST_KEY} are needed",
            field="server-key-file",
        )
    return key


def _make_key(path: str) -> None:
    """Write a new key in one step: an incomplete one would prevent every later start."""
    # A random name: in a container every start may have the same process id.
    fresh = f"{path}.{secrets.token_hex(8)}.new"
    try:
        made = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(made, "wb") as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
            with suppress(FileExistsError):  # another process was quicker: its key counts
                os.link(fresh, path)
        finally:
            os.unlink(fresh)
    except OSError as error:
        raise InvalidArgument(
            f"the server key {path} cannot be made: {error.strerror}", field="server-key-file"
        ) from error


async def _serve(arguments: argparse.Namespace) -> None:
    """Serve until a signal or the parent's end."""
    await run(arguments, set_up(arguments), announce_ready)


async def run(arguments: argparse.Namespace, setup: Setup, on_ready: OnReady) -> None:
    """Serve until `setup.stop` is set, then drain."""
    scheduler = Scheduler(_options(arguments, setup))
    async with metrics_served(arguments, scheduler.meters):
        address = await scheduler.start(arguments.listen)
        try:
            on_ready(address)
            found = " and those found in Redis" if arguments.redis else ""
            _log.info("listening on %s for %d workers%s", address, len(arguments.worker), found)
            await setup.stop.wait()
            _log.info("draining")
        finally:
            await scheduler.stop(arguments.grace_seconds)


if __name__ == "__main__":
    sys.exit(main())
