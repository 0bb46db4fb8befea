"""Trouble in a real stack shows in `splitpoint status`: a full arena, Redis gone, a kill."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from forked_service import ForkedService
from local_stack import prompt_of, start_service, stop_process, wait_for_workers
from redis_server import RedisServer
from tiny_models import write_tiny

from splitpoint.client import AsyncClient
from splitpoint.planning.plan import Residency
from splitpoint_cli.stack.child import child_environment

# Seconds until a finding shows: some of what is read travels once a second.
SECONDS = 40.0
CHUNK_TOKENS = 64


@dataclass(frozen=True)
class RealStack:
    """Every service is a process of its own, without a supervisor."""

    client: AsyncClient
    worker: ForkedService


@asynccontextmanager
async def real_stack(
    folder: Path, sockets: Path, shm: Path, redis: RedisServer
) -> AsyncIterator[RealStack]:
    """With an arena of a few chunks, and a link slow enough to watch."""
    store, worker, public = (f"unix:{sockets}/{name}" for name in ("kv", "w0", "s"))
    model = ("--model", str(folder), "--dtype", "float32", "--redis", redis.url)
    async with AsyncExitStack() as cleanup:

        async def started(module: str, *arguments: str) -> ForkedService:
            process = await start_service(module, *arguments, *model)
            cleanup.push_async_callback(stop_process, process)
            return process

        await started(
            "kvstore_service",
            *("--listen", store, "--arena", f"{shm}/0/arena", "--host-memory", "4MiB"),
            *("--chunk-tokens", str(CHUNK_TOKENS)),
        )
        killed = await started(
            "worker_service",
            *("--listen", worker, "--worker-id", "0", "--kvstore", store, "--device", "cpu"),
            *("--device-memory", "64MiB", "--link-rate", "10MB"),
        )
        await started("scheduler_service", "--listen", public, "--worker", worker)
        client = await cleanup.enter_async_context(AsyncClient(public))
        await wait_for_workers(client, 1)
        yield RealStack(client, killed)


def status(address: str, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "splitpoint_cli", "status", "--address", address, *more],
        capture_output=True,
        text=True,
        timeout=60,
        env=child_environment({}),
        check=False,
    )


async def found(stack: RealStack, *words: str) -> dict[str, Any]:
    """The finding with these words in it, once it is there; its stack's exit code beside it."""
    deadline = time.monotonic() + SECONDS
    while True:
        done = await asyncio.to_thread(status, stack.client.address, "--json")
        answer = json.loads(done.stdout)
        assert done.returncode == (0 if answer["serves"] else 1)
        for finding in answer["findings"]:
            if all(word in finding["what"] + finding["why"] for word in words):
                assert finding["do"]
                return {**finding, "serves": answer["serves"]}
        assert time.monotonic() < deadline, f"no {words} in {answer['findings']}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=8192)


async def test_each_trouble_shows_with_what_to_do(
    folder: Path, tmp_path: Path, shm_folder: Path, redis_server: RedisServer
) -> None:
    async with real_stack(folder, tmp_path, shm_folder, redis_server) as stack:
        done = await asyncio.to_thread(status, stack.client.address, "--json")
        well = json.loads(done.stdout)
        assert done.returncode == 0
        assert ["EMULATES" in finding["what"] for finding in well["findings"]] == [True]
        slots = well["stores"][0]["slot_count"]
        vocabulary = (await stack.client.get_model()).shape.vocabulary_size

        # A streamed request holds nearly all slots; a resident one then finds no room.
        new = CHUNK_TOKENS
        streamed = stack.client.generate(
            prompt_of(slots * CHUNK_TOKENS - new, 1, vocabulary),
            max_tokens=new - 1,
            ignore_eos=True,
            residency=Residency.STREAMED,
        )
        await anext(streamed)
        await stack.client.generate(
            prompt_of(8 * CHUNK_TOKENS, 2, vocabulary), max_tokens=1
        ).complete()
        full = await found(stack, "arena", "is full", "1 reservation was refused")
        assert (full["severity"], full["serves"]) == ("warning", True)
        assert "--host-memory" in full["do"]
        await streamed.close()

        redis_server.stop()
        away = await found(stack, "Redis", "the scheduler", "store", "worker 0")
        assert redis_server.url in away["what"]
        assert (away["severity"], away["serves"]) == ("warning", True)

        stack.worker.kill()
        lost = await found(stack, "worker 0 was lost", "ago and is not back")
        assert (lost["severity"], lost["serves"]) == ("error", False)
        assert "failed to connect to all" not in lost["why"]
        printed = await asyncio.to_thread(status, stack.client.address)
        assert printed.returncode == 1
        lines = printed.stdout.splitlines()
        assert lines[1].startswith("error: worker 0 was lost")
        assert lines[2].startswith("  do: read the end of its log")
