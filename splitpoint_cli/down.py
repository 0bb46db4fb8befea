"""`splitpoint down`: stop the stack that `up` runs in another terminal."""

from __future__ import annotations

import fcntl
import os
import select
import signal
from typing import Annotated

import typer

from splitpoint import config
from splitpoint.errors import DeadlineExceeded, NotFound
from splitpoint_cli.output import err
from splitpoint_cli.stack import instance_of

_STOP_SECONDS = 90.0


def down(
    listen: Annotated[
        str,
        typer.Option(
            "--listen",
            "--address",
            help="The --listen address of the stack.",
            envvar="SPLITPOINT_ADDRESS",
        ),
    ] = config.DEFAULT_ADDRESS,
    instance: Annotated[str | None, typer.Option(help="Its --instance, where it has one.")] = None,
) -> None:
    """Stop a running stack as Ctrl-C in its terminal would, and wait until it is gone."""
    name = config.check_instance(instance or instance_of(config.check_address(listen)))
    process_id = running_process(name)
    descriptor = os.pidfd_open(process_id)
    try:
        err.print(f"stopping {name} (process {process_id}) ...")
        signal.pidfd_send_signal(descriptor, signal.SIGTERM)
        ended, _, _ = select.select([descriptor], [], [], _STOP_SECONDS)
    finally:
        os.close(descriptor)
    if not ended:
        raise DeadlineExceeded(f"process {process_id} still runs after {_STOP_SECONDS:g} s")


def running_process(instance: str) -> int:
    """Process id of the `up` that holds the instance's lock. Raises NotFound."""
    folder = config.runtime_directory(instance)
    try:
        with (folder / "lock").open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(lock.read())
    except FileNotFoundError:
        folder.rmdir()
    raise NotFound(f"no stack named {instance} is running")
