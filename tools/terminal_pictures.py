"""Makes docs/pictures/top.svg and doctor.svg: both commands on a real stack under load.

    python tools/terminal_pictures.py [--folder docs/pictures] [--listen 127.0.0.1:50050]

Starts two CPU workers with an emulated link, sends requests whose beginnings repeat, asks
`splitpoint top` for a snapshot while they run, stops the stack, and asks `splitpoint doctor`
for its report of a stack with a port that is taken. Takes a minute. Everything in the pictures
is as it was found: run it where /dev/shm holds nothing else, as in

    unshare --mount sh -c 'mount -t tmpfs -o size=8g tmpfs /dev/shm && exec python tools/...'
"""

from __future__ import annotations

import argparse
import inspect
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from splitpoint.client import Client
from splitpoint.errors import Cancelled, Unavailable
from splitpoint.planning.plan import Residency

PROGRAM = [sys.executable, "-m", "splitpoint_cli"]
WARM_UP_SECONDS = 25.0
CLIENTS = 5
READY_SECONDS = 90.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("docs/pictures"))
    parser.add_argument("--listen", default="127.0.0.1:50050")
    arguments = parser.parse_args()
    options = ("--instance", "demo", "--link-rate", "184MB", "--host-memory", "192MiB")
    with stack(arguments.listen, *options), load(arguments.listen):
        time.sleep(WARM_UP_SECONDS)
        subprocess.run(
            [
                *PROGRAM,
                *("top", "--address", arguments.listen, "--interval", "4"),
                *("--svg", str(arguments.folder / "top.svg")),
            ],
            check=True,
        )
    host, _, port = arguments.listen.rpartition(":")
    with socket.create_server((host, int(port))):
        # Exit code 1: the taken port is a problem.
        subprocess.run(
            [
                *PROGRAM,
                *("doctor", "--listen", arguments.listen, "--host-memory", "512MiB"),
                *("--svg", str(arguments.folder / "doctor.svg")),
            ],
            check=False,
        )


@contextmanager
def stack(listen: str, *options: str) -> Iterator[None]:
    """Run two CPU workers of one thread each, with these further options of `up`."""
    process = subprocess.Popen(
        [
            *(*PROGRAM, "up", "--listen", listen, "--workers", "2", "--threads", "1"),
            *("--device", "cpu", *options),
        ],
        stdout=subprocess.DEVNULL,
    )
    try:
        with Client(listen) as client:
            client.wait_ready(READY_SECONDS)
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)  # the second one does not wait for answers
        process.wait(READY_SECONDS)


@contextmanager
def load(address: str) -> Iterator[None]:
    """Clients that ask on and on, until the block ends."""
    stop = threading.Event()
    threads = [
        threading.Thread(target=ask, args=(address, number, stop)) for number in range(CLIENTS)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def ask(address: str, number: int, stop: threading.Event) -> None:
    """Prompts of a few thousand tokens: three beginnings, and new endings."""
    text = inspect.getsource(argparse)
    options: Any = {"residency": Residency.STREAMED} if number % 2 else {}
    count = 0
    with Client(address) as client:
        while not stop.is_set():
            beginning = text[4000 * (count % 3) :][: 6000 + 500 * (number % 3)]
            generation = client.generate(
                f"{beginning}\n# {number}.{count}\n",
                max_tokens=80,
                ignore_eos=True,
                **options,
            )
            try:
                for _ in generation:
                    if stop.is_set():
                        return
            except (Cancelled, Unavailable):
                return
            finally:
                generation.close()
            count += 1


if __name__ == "__main__":
    main()
