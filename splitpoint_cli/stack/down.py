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
from splitpoint_cli.stack.places import instance_of

_STOP_SECONDS = 90.0
# Hosts that mean every address of this host, and its loopback device.
_EVERY = {"0.0.0.0", "::"}
_LOOPBACK = {"127.0.0.1", "::1", "localhost"}


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
    listen = config.check_addresses(listen, field="listen")[0]
    name = instance_of(listen, instance)
    if instance is None and not _is_here(listen):
        raise InvalidArgument(
            f"{listen} is not an address of this host: run `splitpoint down` there, as the user "
            "that runs the stack (a token does not stop it)",
            field="listen",
        )
    runtime = config.runtime_path(name)
    process_id = running_process(runtime)
    others = running_stacks(runtime.parent)
    if instance is None:
        found = stack_at(listen, others)
        if found is not None:
            name, process_id = found.name, found.process_id
    if process_id is None:
        _clear(name, runtime, others)
        return
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


def stack_at(asked: str, stacks: Sequence[RunningStack]) -> RunningStack | None:
    """Return the stack that listens at this address; None if none is there.

    Raises NotFound, which names the stacks, if several are, or if the one that has the
    address's name listens elsewhere.
    """
    there = [each for each in stacks if asked in each.addresses]
    there = there or [
        each for each in stacks if any(_is_same(address, asked) for address in each.addresses)
    ]
    if len(there) == 1:
        return there[0]
    named = [each for each in stacks if each.name == instance_of(asked) and each.address]
    if there or named:
        raise NotFound(
            f"{'more than one' if there else 'no'} stack listens at {asked}{_hint(stacks)}"
        )
    return None


def _is_same(address: str, asked: str) -> bool:
    """Return True if a stack that listens at `address` of this host is reached at `asked`.

    Names of this host other than `localhost` are not looked up: they are the same as themselves.
    """
    if address.startswith("unix:") or asked.startswith("unix:"):
        return address == asked
    host, _, port = address.rpartition(":")
    asked_host, _, asked_port = asked.rpartition(":")
    hosts = {host.strip("[]"), asked_host.strip("[]")}
    return port == asked_port and (len(hosts) == 1 or hosts <= _LOOPBACK or bool(hosts & _EVERY))


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
        raise NotFound(f"no stack named {instance} is running{kept}{_hint(others)}")
    err.print(f"{instance} was killed: removed its remains in {runtime}{kept}")


def _hint(stacks: Sequence[RunningStack]) -> str:
    """Return what a person may choose from instead."""
    running = ", ".join(f"{each.name} at {each.address or '?'}" for each in stacks)
    return f"; of this user there run {running} (--instance NAME)" if running else ""
