"""`splitpoint down`: stop the stack that `up` runs in another terminal."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from splitpoint import config
from splitpoint.errors import DeadlineExceeded, InvalidArgument, NotFound
from splitpoint_cli.checks.ports import bind_error
from splitpoint_cli.output import err
from splitpoint_cli.stack.instance import (
    RunningStack,
    clear_leftovers,
    running_process,
    running_stacks,
)
from splitpoint_cli.stack.plan import instance_of

_STOP_SECONDS = 90.0


def down(
    listen: Annotated[
        str,
        typer.Option(
            "--listen",
            "--address",
            help="Address that the stack listens at (its --listen).",
            envvar="SPLITPOINT_ADDRESS",
        ),
    ] = config.DEFAULT_ADDRESS,
    instance: Annotated[
        str | None, typer.Option(help="Name of the stack (its --instance), if it has one.")
    ] = None,
) -> None:
    """Stop a running stack as Ctrl-C in its terminal would, and wait until it is gone.

    It signals the process of `up`, so it needs no token, and works on the same host for the
    same user only. A stack with a name of its own is found by its address, too.
    """
    name = config.check_instance(instance or instance_of(config.check_address(listen)))
    if instance is None and not _is_here(listen):
        raise InvalidArgument(
            f"{listen} is not an address of this host: run `splitpoint down` there, as the user "
            "that runs the stack (a token does not stop it)",
            field="listen",
        )
    runtime = config.runtime_path(name)
    process_id = running_process(runtime)
    if process_id is None:
        others = running_stacks(runtime.parent)
        there = [each for each in others if _is_same(each.address, listen)]
        if instance is not None or len(there) != 1:
            _clear(name, runtime, others)
            return
        name, process_id = there[0].name, there[0].process_id
    descriptor = os.pidfd_open(process_id)
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        err.print(
            f"stopping {name} (process {process_id}): waiting for running requests, for the time "
            "of its --grace at most, then for its services ..."
        )
        ended, _, _ = select.select([descriptor], [], [], _STOP_SECONDS)
    finally:
        os.close(descriptor)
    if not ended:
        raise DeadlineExceeded(f"process {process_id} still runs after {_STOP_SECONDS:g} s")


def _is_here(address: str) -> bool:
    """Return True if a stack of this host may listen there."""
    if config.is_local_address(address):
        return True
    try:
        error = bind_error(address.rpartition(":")[0].strip("[]"), 0)
    except OSError:  # no such host
        return False
    return error is None


def _is_same(address: str, asked: str) -> bool:
    """Return True if a stack that listens at `address` of this host is reached at `asked`.

    By the port alone: names and addresses of one host are many.
    """
    if asked.startswith("unix:"):
        return address == asked
    return address.rpartition(":")[2] == asked.rpartition(":")[2]


def _clear(instance: str, runtime: Path, others: Sequence[RunningStack]) -> None:
    """Remove the remains of a killed stack.

    Raises NotFound, which names the `others` that run, if there are none.
    """
    was_there = runtime.exists() and clear_leftovers(runtime, instance)
    arena = config.arena_path(instance)
    kept = ""
    if arena.exists():
        kept = (
            f"; its arena is kept at {arena} for the next `splitpoint up` "
            f"(`splitpoint arena rm {instance}` removes it)"
        )
    if not was_there:
        running = ", ".join(f"{each.name} at {each.address or '?'}" for each in others)
        hint = f"; of this user there run {running} (--instance NAME)" if running else ""
        raise NotFound(f"no stack named {instance} is running{kept}{hint}")
    err.print(f"{instance} was killed: removed its remains in {runtime}{kept}")
