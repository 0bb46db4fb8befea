"""`splitpoint up`: the whole stack on one host, until Ctrl-C."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from splitpoint_cli.options import configurable
from splitpoint_cli.stack.keeper import RestartLimits
from splitpoint_cli.stack.options import StackOptions
from splitpoint_cli.stack.plan import plan_stack
from splitpoint_cli.stack.preflight import check_store_arguments
from splitpoint_cli.stack.runner import run_stack


@configurable
def up(
    options: StackOptions,
    no_restart: Annotated[
        bool,
        typer.Option(
            "--no-restart",
            help="Stop everything when a service dies for the first time.",
        ),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show every log line, not only warnings.")
    ] = False,
) -> None:
    """Start store, workers and scheduler on this host; Ctrl-C stops them.

    Running requests may finish first, for --grace seconds; a second Ctrl-C ends
    everything at once.
    Nothing is left behind: no process, no socket, no shared memory; files of
    --tier-disk and an arena of --keep-arena are for the next start.
    A service that dies is started again after a pause; when it dies while starting for
    the first time, or 5 times within 2 minutes, everything stops, with its reason
    in the last line and its exit code: 2 wrong input, 3 a port is taken, 4 not ready
    in time, 5 memory or another resource is short, 1 anything else.
    If other workers still run, only the failing worker is given up; it is started again later.
    """
    stack = plan_stack(options)
    check_store_arguments(stack)
    running = run_stack(
        stack,
        # If the user sets a log level, the lines of this level are shown.
        verbose=verbose or options.log_level is not None,
        limits=None if no_restart else RestartLimits(),
    )
    raise typer.Exit(asyncio.run(running))
