"""A whole stack whose services are killed one after the other: each comes back and serves."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from test_e2e_cli import assert_nothing_left, service_processes
from up_process import up_process, wait_until_up

from splitpoint.answers import Completion
from splitpoint.client import Client
from splitpoint.errors import DeadlineExceeded, SplitpointError

SECONDS = 60
PROMPT = "import asyncio\nimport collections\n\n\nclass Queue:\n" * 12


def complete(address: str) -> Completion:
    """A completion, tried again while a service that was killed is not back."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            with Client(address) as client:
                client.wait_ready(SECONDS)
                return client.generate(PROMPT, max_tokens=8, ignore_eos=True).complete()
        except SplitpointError as error:
            if time.monotonic() > deadline:
                raise DeadlineExceeded("the stack did not come back") from error
            time.sleep(0.1)


def test_every_service_comes_back_after_kill_9(tmp_path: Path) -> None:
    instance = f"test-kill-{os.getpid()}"
    command = [
        *(sys.executable, "-m", "splitpoint_cli", "up", "--device", "cpu", "--threads", "1"),
        *("--dtype", "float32", "--host-memory", "64MiB", "--device-memory", "128MiB"),
        *("--listen", "127.0.0.1:0", "--instance", instance),
    ]
    with up_process(command) as process:
        printed = wait_until_up(process)
        address = printed.partition("scheduler  ")[2].splitlines()[0]
        wanted = complete(address).token_ids
        for module in ("kvstore_service", "worker_service", "scheduler_service"):
            [victim] = [pid for pid, name in service_processes(instance).items() if name == module]
            os.kill(victim, signal.SIGKILL)
            assert process.stderr is not None
            for line in process.stderr:
                if "ready again" in line:
                    break
            assert complete(address).token_ids == wanted
            again = [pid for pid, name in service_processes(instance).items() if name == module]
            assert len(again) == 1
            assert again != [victim]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, errors
    assert_nothing_left(instance)
