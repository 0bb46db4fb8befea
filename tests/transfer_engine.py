"""The transfer engine in tests: whether it can run here, the options of stores, a pool's master."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from own_names import free_ports

from kvstore_service.mooncake.process import Duty as Duty
from kvstore_service.opening import missing_engine

_CAPACITY = "master_total_capacity_bytes "

needs_engine = pytest.mark.skipif(bool(missing_engine()), reason=missing_engine())


def direct_arguments(interface: str = "lo") -> tuple[str, ...]:
    """Return the options of a store that reads other stores' arenas directly."""
    return ("--transfer", "mooncake", "--transfer-interface", interface)


def pool_arguments(master: str) -> tuple[str, ...]:
    """Return the options of a store with the pool of a master at this address."""
    return ("--tier-mooncake", master, "--transfer-interface", "lo")


class Master:
    """A `mooncake_master` on the loopback, which can be killed and started again."""

    def __init__(self, port: int, metrics_port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self._ports = port, metrics_port
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        port, metrics_port = self._ports
        self._process = start_program(
            "mooncake_master",
            *(f"--rpc_port={port}", "--rpc_address=127.0.0.1"),
            *(f"--metrics_port={metrics_port}", "--metrics_host=127.0.0.1"),
        )
        wait_for_port(port, self._process)

    def has_memory(self) -> bool:
        """Return True if a process has given memory to the pool."""
        url = f"http://127.0.0.1:{self._ports[1]}/metrics"
        with urllib.request.urlopen(url, timeout=60) as answer:
            metrics = answer.read().decode()
        line = next(each for each in metrics.splitlines() if each.startswith(_CAPACITY))
        return float(line.removeprefix(_CAPACITY)) > 0

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def start_program(name: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a program that the wheel brings."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    assert found is not None, f"the wheel brings {name}"
    return subprocess.Popen(
        [found, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        assert process.poll() is None, f"{process.args!r} ended"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise AssertionError(f"nothing listens on port {port}")


@contextmanager
def master_process() -> Iterator[Master]:
    first = free_ports(2)
    master = Master(first, first + 1)
    master.start()
    try:
        yield master
    finally:
        master.kill()


def child_of(store_pid: int, duty: Duty = Duty.SERVE) -> int:
    """Return the id of a store's engine process for a duty."""
    children = Path(f"/proc/{store_pid}/task/{store_pid}/children").read_text().split()
    name = f"\0kvstore_service.mooncake\0{duty}\0".encode()
    found = [
        int(pid) for pid in children if Path(f"/proc/{pid}/cmdline").read_bytes().endswith(name)
    ]
    assert len(found) == 1, children
    return found[0]


@contextmanager
def pool_memory(master: Master, size: str = "256 MB") -> Iterator[None]:
    """A `mooncake_client` that gives memory to the pool, and is no store."""
    port = free_ports(1)
    arguments = (
        *("-host", "127.0.0.1", "-port", str(port), "-global_segment_size", size),
        *("-metadata_server", "P2PHANDSHAKE", "-master_server_address", master.address),
    )
    process = start_program("mooncake_client", *arguments)
    try:
        wait_for_port(port, process)
        yield
    finally:
        process.kill()
        process.wait()
