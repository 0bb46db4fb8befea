"""`up --keep-arena`: the file outlives the stack, can be looked at, and warms the next one."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from own_names import instance_name
from small_model import small_model
from splitpoint_command import splitpoint
from test_e2e_cli import assert_nothing_left
from test_e2e_restarts import PROMPT, SECONDS, wait_sealed
from up_process import up_process, wait_until_up

from splitpoint.client import Client
from splitpoint.client.answers import Completion
from splitpoint.config import arena_path, remove_tree

INSTANCE = instance_name("keep")


@contextmanager
def stack(*more: str) -> Iterator[tuple[str, str]]:
    """Addresses of scheduler and store while the stack runs."""
    with up_process(
        [
            *(sys.executable, "-m", "splitpoint_cli", "up", "--device", "cpu", "--threads", "1"),
            *("--model", str(small_model()), "--device-memory", "128MiB", "--keep-arena"),
            *("--listen", "127.0.0.1:0", "--instance", INSTANCE, *more),
        ]
    ) as process:
        printed = wait_until_up(process)
        assert "(kept on exit)" in printed
        scheduler = printed.partition("scheduler  ")[2].splitlines()[0]
        yield scheduler, printed.partition("store      ")[2].splitlines()[0]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, errors


def complete(address: str) -> Completion:
    with Client(address) as client:
        return client.generate(PROMPT, max_tokens=8, ignore_eos=True).complete()


def test_a_kept_arena_serves_the_next_stack() -> None:
    try:
        with stack("--host-memory", "64MiB") as (scheduler, store):
            cold = complete(scheduler)
            wait_sealed(store)
        assert cold.usage.cached_tokens == 0

        found = json.loads(splitpoint("arena", "inspect", INSTANCE, "--json").stdout)
        assert found["condition"] == "CLOSED"
        assert found["locked"] is False
        assert found["owner_alive"] is False
        assert found["chunk_count"] > 0
        assert found["salt_count"] == 1
        verified = splitpoint("arena", "verify", INSTANCE)
        assert verified.returncode == 0, verified.stderr
        assert f"{found['chunk_count']} of" in verified.stdout
        assert "each compared with its checksum" in verified.stdout
        # No process runs it, so `down` says so, and where the memory is.
        down = splitpoint("down", "--instance", INSTANCE)
        assert down.returncode == 2
        assert f"splitpoint arena rm {INSTANCE}" in down.stderr

        # Whatever is free now: the size is that of the file.
        with stack() as (scheduler, store):
            warm = complete(scheduler)
            beside = splitpoint("arena", "verify", INSTANCE)
            assert beside.returncode == 0, beside.stdout
            refused = splitpoint("arena", "rm", INSTANCE)
            assert refused.returncode == 1
            assert "another store is running" in refused.stderr
        assert warm.usage.cached_tokens > 0
        assert warm.token_ids == cold.token_ids

        removed = splitpoint("arena", "rm", INSTANCE)
        assert removed.returncode == 0, removed.stderr
        assert_nothing_left(INSTANCE)
    finally:
        remove_tree(arena_path(INSTANCE).parent)
