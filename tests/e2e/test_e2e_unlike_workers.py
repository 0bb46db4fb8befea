"""Workers with unlike kernels on one store, as real processes: each gives its own one answer.

Two are alike and share chunks; the third multiplies otherwise, the fourth has fast numerics. About
20 seconds.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from local_stack import (
    StackShape,
    make_scheduler,
    prompt_of,
    start_service,
    start_store,
    stop_process,
    wait_for_workers,
)
from own_names import shared_memory_folder
from tiny_models import write_tiny

from splitpoint.checkpoint.decoder import read_shape
from splitpoint.client import AsyncClient
from splitpoint.client.answers import Completion
from splitpoint.host.processor import compiler
from splitpoint.shapes import Numerics

PAGE = 16
LENGTH = 8 * PAGE + 5
FUSED = "decode=fused,prefill=fused"
WORKERS = {
    "0": ("--cpu-kernels", f"{FUSED},linear=panels", "--numerics", "invariant"),
    "1": ("--cpu-kernels", f"{FUSED},linear=panels", "--numerics", "invariant"),
    "2": ("--cpu-kernels", f"{FUSED},linear=plain", "--numerics", "invariant"),
    "3": ("--cpu-kernels", f"{FUSED},linear=panels", "--numerics", "fast"),
}
FAST = "3"
# Tokens in full pages.
FULL = LENGTH // PAGE * PAGE
SECONDS = 120.0

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")


@asynccontextmanager
async def unlike_workers(folder: Path, sockets: Path) -> AsyncIterator[AsyncClient]:
    """A store and the WORKERS, each a process, under a scheduler; yields a client."""
    shape = StackShape(workers=len(WORKERS), chunk_tokens=PAGE)
    arena = shared_memory_folder() / "arena"
    async with AsyncExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, arena.parent, ignore_errors=True)
        store = f"unix:{sockets}/kv"
        process = await start_store(folder, store, arena, shape)
        cleanup.push_async_callback(stop_process, process)
        starting = (
            start_service(
                *("worker_service", "--listen", f"unix:{sockets}/w{name}", "--worker-id", name),
                *("--model", str(folder), "--kvstore", store, "--device", "cpu"),
                *("--dtype", "float32", "--threads", "1", "--device-memory", "64MiB"),
                *("--no-device-prefix-cache", *arguments),
            )
            for name, arguments in WORKERS.items()
        )
        for process in await asyncio.gather(*starting):
            cleanup.push_async_callback(stop_process, process)
        scheduler = make_scheduler(folder, sockets, shape)
        address = await scheduler.start("127.0.0.1:0")
        cleanup.push_async_callback(scheduler.stop, 1.0)
        client = await cleanup.enter_async_context(AsyncClient(address))
        await wait_for_workers(client, shape.workers, SECONDS)
        yield client


async def test_unlike_workers_share_no_chunks(tmp_path: Path) -> None:
    folder = write_tiny("llama", tmp_path / "llama")
    sockets = tmp_path / "s"
    sockets.mkdir()
    prompt = prompt_of(LENGTH, 1, read_shape(folder).vocabulary_size)
    async with unlike_workers(folder, sockets) as client:
        told = {each.id: each for each in await client.list_workers()}
        digests = {name: each.numerics_digest for name, each in told.items()}
        assert digests["0"] == digests["1"] != digests["2"]
        assert all(digests[name] for name in "012")
        assert digests[FAST] == ""
        assert {name for name in told if told[name].numerics is Numerics.INVARIANT} == set("012")
        model = await client.get_model()
        assert (model.numerics, model.numerics_digest) == (Numerics.FAST, "")

        async def ask(worker: str, salt: bytes) -> Completion:
            generation = client.generate(
                prompt, max_tokens=8, ignore_eos=True, logprobs=2, worker=worker, cache_salt=salt
            )
            return await generation.complete()

        # Each worker's own answer, with nothing cached.
        cold = {name: await ask(name, f"of {name} alone".encode()) for name in WORKERS}
        assert all(each.usage.cached_tokens == 0 for each in cold.values())
        assert cold["0"].logprobs == cold["1"].logprobs
        for salt, order in ((b"up", "0123"), (b"down", "3210")):
            stored: set[str] = set()
            for name in order:
                found = await ask(name, salt)
                is_shared = digests[name] in stored
                # A match may end inside of a page.
                assert found.usage.cached_tokens >= (FULL if is_shared else 0), (salt, name)
                assert is_shared or found.usage.cached_tokens == 0, (salt, name)
                assert same(found, cold[name])
                # What it computed is stored in the background.
                async with asyncio.timeout(SECONDS):
                    while found.usage.cached_tokens < FULL:
                        found = await ask(name, salt)
                        assert same(found, cold[name]) or name == FAST
                stored.add(digests[name])


def same(one: Completion, other: Completion) -> bool:
    return (one.token_ids, one.logprobs) == (other.token_ids, other.logprobs)
