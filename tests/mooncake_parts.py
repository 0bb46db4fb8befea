"""Mooncake in tests: whether it can run here, and a master process."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore_service.mooncake.installed import how_to_install

needs_mooncake = pytest.mark.skipif(bool(how_to_install()), reason=how_to_install())


class Master:
    """A `mooncake_master` on the loopback, which can be killed and started again."""

    def __init__(self, port: int, metrics_port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        self._ports = port, metrics_port
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        program = Path(sys.executable).parent / "mooncake_master"
        found = str(program) if program.exists() else shutil.which("mooncake_master")
        assert found is not None, "the wheel brings mooncake_master"
        port, metrics_port = self._ports
        self._process = subprocess.Popen(
            [
                found,
                f"--rpc_port={port}",
                "--rpc_address=127.0.0.1",
                f"--metrics_port={metrics_port}",
                "--metrics_host=127.0.0.1",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.02)
        raise AssertionError("the master does not listen")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def master_process(port: int, metrics_port: int) -> Iterator[Master]:
    master = Master(port, metrics_port)
    master.start()
    try:
        yield master
    finally:
        master.kill()


def child_of(store_pid: int) -> int:
    """Return the id of a store's Mooncake process."""
    children = Path(f"/proc/{store_pid}/task/{store_pid}/children").read_text().split()
    found = [
        int(pid)
        for pid in children
        if b"kvstore_service.mooncake" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    assert len(found) == 1, children
    return found[0]
