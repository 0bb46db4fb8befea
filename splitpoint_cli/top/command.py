"""`splitpoint top`: a live view of what a running stack does, and what limits it.

It asks scheduler, stores and gateway again and again. rates.py computes the numbers, view.py draws
them. Single keys are read without Enter; the terminal's settings are always restored.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.live import Live

from splitpoint.client import Client
from splitpoint.config import DEFAULT_ADDRESS
from splitpoint.errors import Cancelled, DeadlineExceeded, InvalidArgument, Unavailable
from splitpoint.transport.tls import client_identity
from splitpoint_cli.options import Address, CaFile, TokenFile
from splitpoint_cli.output import (
    AsJson,
    OutputFile,
    code_name,
    hand_over,
    out,
)
from splitpoint_cli.request.observed import read_status
from splitpoint_cli.request.status import status_json
from splitpoint_cli.signals import handled_by
from splitpoint_cli.top.rates import (
    Reading,
    Readings,
    first,
    following,
    link_limit,
    rates_of,
    rates_of_gateway,
    rates_of_store,
    scheduler_rates,
    with_newcomers,
)
from splitpoint_cli.top.view import Frame

Wait = Callable[[float], bool]
# Signals that end a process without unwinding it, unless they are handled.
_ENDINGS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def quitting_keys(keys: str = "qQ") -> Iterator[Wait]:
    """Give a function that waits some seconds or for a key of `keys`; it returns True for a key.

    Without a terminal to read from it only waits. Ctrl-C stays KeyboardInterrupt; SIGTERM
    and SIGHUP end the block by SystemExit, so that callers can restore the terminal.
    """
    with handled_by(_end, *_ENDINGS):
        if not sys.stdin.isatty():
            yield _sleep
            return
        terminal = sys.stdin.fileno()
        settings = termios.tcgetattr(terminal)
        try:
            tty.setcbreak(terminal)
            yield lambda seconds: _wait(terminal, keys, seconds)
        finally:
            termios.tcsetattr(terminal, termios.TCSADRAIN, settings)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _wait(terminal: int, keys: str, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        left = max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([terminal], [], [], left)
        if not ready:
            return False
        pressed = os.read(terminal, 1)
        if not pressed:  # the terminal is gone
            return True
        if pressed.decode("ascii", "replace") in keys:
            return True


# Workers send telemetry about once a second.
_TELLING_SECONDS = 3.0
_POLL_SECONDS = 0.2
# Limit of each call: a scheduler that hangs must show as one that is away.
_CALL_SECONDS = 3.0
_HINT = "q quits"

Show = Callable[[Frame], None]


def top(
    address: Address = DEFAULT_ADDRESS,
    interval: Annotated[
        float, typer.Option(help="Seconds between two readings.", min=0.2, max=3600)
    ] = 2.0,
    ca: CaFile = None,
    token_file: TokenFile = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print one snapshot after one interval, and end.")
    ] = False,
    as_json: AsJson = False,
    output: OutputFile = None,
) -> None:
    """Watch a running stack: requests, each worker's link, power and split, stores, gateway, queue.

    Rates are over the last interval. A `-` stands for a missing number. q or
    Ctrl-C ends it. While the scheduler is away it says so and goes on trying; with --once
    that is an error (exit code 3).
    """
    for option, is_given in (("json", as_json), ("output", output is not None)):
        if is_given and not once:
            raise InvalidArgument(f"--{option} is for one snapshot: add --once", field=option)
    identity = client_identity(ca=ca, token_file=token_file)
    with Client(address, timeout=_CALL_SECONDS, identity=identity) as client:
        if once:
            _once(client, interval, as_json=as_json, output=output)
        elif not out.is_terminal:
            raise InvalidArgument("this is no terminal: add --once", field="once")
        else:
            _live(client, interval)


def read(client: Client) -> Reading:
    """Read the status once. Raises Unavailable or DeadlineExceeded without a scheduler."""
    status = read_status(client)
    return Reading(time.monotonic(), status)


def _once(client: Client, interval: float, *, as_json: bool, output: Path | None) -> None:
    begun = first(read(client))
    time.sleep(interval)
    deadline = time.monotonic() + _TELLING_SECONDS
    while True:
        # Over the whole time: late telemetry of one process must not shorten the others' interval.
        readings = following(begun, read(client))
        if readings.is_complete or time.monotonic() >= deadline:
            break
        begun = with_newcomers(begun, readings)
        time.sleep(_POLL_SECONDS)
    frame = Frame(client.address, readings)
    hand_over(
        readings_json(readings),
        lambda: out.print(frame, soft_wrap=False),
        as_json=as_json,
        output=output,
    )


def _live(client: Client, interval: float) -> None:
    try:
        with quitting_keys() as wait:
            if out.is_dumb_terminal:  # cannot be drawn over: one frame below the other
                _watch(client, interval, wait, lambda frame: out.print(frame, "", soft_wrap=False))
                return
            with Live(console=out, screen=True, auto_refresh=False) as live:
                _watch(
                    client,
                    interval,
                    wait,
                    lambda frame: live.update(replace(frame, fills_screen=True), refresh=True),
                )
    except KeyboardInterrupt:
        pass  # the way out, like q


def _watch(client: Client, interval: float, wait: Wait, show: Show) -> None:
    """Read and show until a key is pressed; a scheduler that is away may come back."""
    readings: Readings | None = None
    lost_at = time.monotonic()
    while True:
        away: tuple[float, str] | None = None
        try:
            reading = read(client)
        except (Unavailable, DeadlineExceeded, Cancelled) as error:
            # Cancelled: by the scheduler, which stopped while it was asked.
            away = (time.monotonic() - lost_at, code_name(error))
        else:
            lost_at = time.monotonic()
            readings = first(reading) if readings is None else following(readings, reading)
        show(Frame(client.address, readings, away, _HINT))
        if wait(interval):
            return


def readings_json(readings: Readings) -> dict[str, object]:
    """Return what `status --json` prints, and the rates of the last interval."""
    status = readings.latest.status
    limits = {worker.id: link_limit(worker) for worker in status.workers}
    return {
        "status": status_json(status),
        "interval_seconds": readings.scheduler.seconds,
        "rates": {
            "scheduler": asdict(scheduler_rates(readings.scheduler)),
            "workers": {
                worker.id: {
                    **asdict(rates_of(readings, worker.id)),
                    "link_limit": limits[worker.id][0],
                    "link_limit_is": limits[worker.id][1],
                }
                for worker in status.workers
            },
            "stores": {
                store.address: asdict(rates_of_store(readings, store)) for store in status.stores
            },
            "gateways": {
                gateway.url: asdict(rates_of_gateway(readings, gateway))
                for gateway in status.gateways
            },
        },
    }
