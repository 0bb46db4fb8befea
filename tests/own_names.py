"""Names and ports of one test process each, so that several may test on one machine.

Instances of `splitpoint up` and folders in shared memory are found by name. With the
process id in each, tests neither meet nor blame each other for what is left behind. Ports have
no names: a reservation that all test processes see keeps them apart.
"""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path

from splitpoint.config import SHARED_MEMORY

# Below the ports that the kernel chooses for connections, and for servers that name none.
_PORTS = range(20_000, 32_000)
_OWNER = re.compile(r"splitpoint-(?:\d+-)?test-(\d+)-")


def instance_name(name: str) -> str:
    """The name of a stack of this test process."""
    return f"test-{os.getpid()}-{name}"


def shared_memory_folder() -> Path:
    """A path for a folder of arenas that no other test has; not made here."""
    return SHARED_MEMORY / f"splitpoint-test-{os.getpid()}-{time.monotonic_ns()}"


def owner_of(entry: str) -> int | None:
    """The test process whose name stands in an entry of /dev/shm; None: it names none."""
    found = _OWNER.match(entry)
    return int(found[1]) if found is not None else None


def free_ports(count: int) -> int:
    """Return the first of several free ports in a row that no other test process gets.

    A service that is told to use them may need seconds until it does. Nothing else takes them
    until then: this process keeps them reserved for as long as it lives.
    """
    start = _PORTS.start + os.getpid() * 16 % (len(_PORTS) // 2)
    for first in range(start, _PORTS.stop - count, count):
        if all(_is_free(port) and _reserve(port) for port in range(first, first + count)):
            return first
    raise AssertionError("no ports are free")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _reserve(port: int) -> bool:
    """Take the abstract socket address that stands for a port; the end of the process frees it."""
    reservation = socket.socket(socket.AF_UNIX)
    try:
        reservation.bind(f"\0splitpoint-test-port-{port}")
    except OSError:
        reservation.close()
        return False
    reservation.detach()  # stays open
    return True
