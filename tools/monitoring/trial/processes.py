"""Processes of the trial: each has a log, and is stopped in any case."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from splitpoint.errors import Unavailable

_STOP_SECONDS = 30.0
_TRIES = 50


@contextmanager
def running(name: str, command: Sequence[str], logs: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`command`, its output in `logs`/NAME.log; SIGTERM at the end, and SIGKILL if need be."""
    with (logs / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_ports(count: int) -> int:
    """Return the first of this many neighbouring ports of this host that are free now."""
    for _ in range(_TRIES):
        with ExitStack() as held:
            first = _bound(held, 0)
            try:
                for port in range(first + 1, first + count):
                    _bound(held, port)
            except (OSError, OverflowError):
                continue
            return first
    raise Unavailable(f"no {count} neighbouring ports are free")


def _bound(held: ExitStack, port: int) -> int:
    listener = held.enter_context(socket.socket())
    listener.bind(("127.0.0.1", port))
    number: int = listener.getsockname()[1]
    return number


def worker_process(parent: int, worker_id: str) -> int:
    """Process id of a worker that `splitpoint up` (process `parent`) has started."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    for child in children:
        arguments = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
        if "worker_service" in arguments and f"--worker-id\0{worker_id}\0" in "\0".join(arguments):
            return int(child)
    raise Unavailable(f"up has no worker {worker_id}")


@contextmanager
def frozen(process: int) -> Iterator[None]:
    """SIGSTOP for the length of the context."""
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)
