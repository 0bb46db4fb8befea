"""A whole stack whose services are killed one after the other: each comes back and serves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from own_names import instance_name
from small_model import small_model
from test_e2e_arena_loss import Up, up
from test_e2e_cli import assert_nothing_left, service_processes
from up_process import up_process, wait_until_up

from splitpoint.client import Client
from splitpoint.client.answers import Completion
from splitpoint.errors import DeadlineExceeded, SplitpointError
from splitpoint_cli.request.observed import read_store
from splitpoint_cli.stack.child import child_environment

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


def wait_sealed(store: str) -> None:
    """Write-back goes on in the background: wait until it has stored something and rests."""
    deadline = time.monotonic() + SECONDS
    while True:
        stats = read_store(store).stats
        if stats is not None and stats.sealed_slot_count and not stats.writing_slot_count:
            return
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_every_service_comes_back_after_kill_9(tmp_path: Path) -> None:
    instance = instance_name("restarts")
    command = [
        *(sys.executable, "-m", "splitpoint_cli", "up", "--device", "cpu", "--threads", "1"),
        *("--model", str(small_model()), "--host-memory", "64MiB", "--device-memory", "128MiB"),
        *("--listen", "127.0.0.1:0", "--instance", instance),
    ]
    with up_process(command) as process:
        printed = wait_until_up(process)
        address = printed.partition("scheduler  ")[2].splitlines()[0]
        store = printed.partition("store      ")[2].splitlines()[0]
        wanted = complete(address).token_ids
        wait_sealed(store)
        for module in ("kvstore_service", "worker_service", "scheduler_service"):
            [victim] = [pid for pid, name in service_processes(instance).items() if name == module]
            os.kill(victim, signal.SIGKILL)
            assert process.stderr is not None
            for line in process.stderr:
                if "ready again" in line:
                    break
            after = complete(address)
            assert after.token_ids == wanted
            if module == "kvstore_service":
                stats = read_store(store).stats
                assert stats is not None
                assert stats.adopted_chunk_count > 0, "the arena was found by its path"
            else:  # a new scheduler has its predecessor's key, a new worker the same store
                assert after.usage.cached_tokens > 0, module
            again = [pid for pid, name in service_processes(instance).items() if name == module]
            assert len(again) == 1
            assert again != [victim]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, errors
    assert_nothing_left(instance)


def status(stack: Up, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "splitpoint_cli", "status", "--address", stack.address, *more],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=child_environment({}),
        check=False,
    )


def kill_worker(instance: str, name: str) -> None:
    """Whichever life of it there is at the moment."""
    for pid, module in service_processes(instance).items():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if module == "worker_service" and command[command.index("--worker-id") + 1] == name:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def test_a_worker_that_dies_again_and_again_is_given_up_and_the_other_one_serves() -> None:
    instance = instance_name("given-up")
    with up(instance) as stack:
        wanted = stack.ask(0)
        assert status(stack, "--wait", "30").returncode == 0
        deadline = time.monotonic() + 2 * SECONDS
        while not any("given up" in line for line in stack.said):
            assert time.monotonic() < deadline, stack.said
            kill_worker(instance, "1")
            time.sleep(0.05)
        assert stack.ask(0) == wanted
        stack.until(lambda found: found.ready_count == 1)
        done = status(stack, "--json")
        assert done.returncode == 6, done.stdout
        answer = json.loads(done.stdout)
        assert (answer["serves"], answer["complete"]) == (True, False)
        [finding] = [found for found in answer["findings"] if "given up" in found["what"]]
        assert finding["what"] == "worker 1 was given up; the other workers serve"
        assert "SIGKILL, given up after 5 deaths" in finding["why"]
