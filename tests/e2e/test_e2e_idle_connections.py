"""2,000 connections that say nothing, beside a stack that works and loses a worker.

pytest -m chaos tests/e2e/test_e2e_idle_connections.py -s
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from own_names import instance_name
from small_model import small_model
from test_e2e_cli import assert_nothing_left, service_processes
from test_e2e_restarts import complete
from up_process import up_process, wait_until_up

CONNECTIONS = 2000
SECONDS = 60.0


@pytest.fixture
def many_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def descriptors(process: int) -> int:
    return len(list(Path(f"/proc/{process}/fd").iterdir()))


@pytest.mark.chaos
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("many_files")
def test_a_stack_works_and_heals_beside_2000_silent_connections() -> None:
    instance = instance_name("idle")
    command = [
        *("prlimit", "--nofile=1024:4096"),
        *(sys.executable, "-m", "splitpoint_cli", "up", "--device", "cpu", "--threads", "1"),
        *("--host-memory", "64MiB", "--device-memory", "128MiB", "--workers", "1"),
        *("--model", str(small_model()), "--listen", "127.0.0.1:0", "--instance", instance),
    ]
    with up_process(command) as process, ExitStack() as opened:
        address = wait_until_up(process).partition("scheduler  ")[2].splitlines()[0]
        wanted = complete(address).token_ids
        services = {name: pid for pid, name in service_processes(instance).items()}
        usual = descriptors(services["scheduler_service"])
        host, _, port = address.rpartition(":")
        for _ in range(CONNECTIONS):
            opened.enter_context(socket.create_connection((host, int(port)), 10))
        most = descriptors(services["scheduler_service"])
        assert complete(address).token_ids == wanted
        os.kill(services["worker_service"], signal.SIGKILL)
        assert process.stderr is not None
        for line in process.stderr:
            if "ready again" in line:
                break
        assert complete(address).token_ids == wanted
        deadline = time.monotonic() + SECONDS
        while (now := descriptors(services["scheduler_service"])) > usual + 8:
            assert time.monotonic() < deadline, f"{now} descriptors, {usual} before"
            time.sleep(0.2)
        print(f"\nscheduler's descriptors: {usual}, {most} beside {CONNECTIONS}, then {now}")
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, errors
    assert_nothing_left(instance)
