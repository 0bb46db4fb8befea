"""A disk tier of a real store brings the back of a prefix while its front is computed. 10 s."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from admitting import admitting
from forked_service import ForkedService
from local_stack import StackShape, serving_worker, start_store, stop_process
from tiny_models import build_tiny, clear_prompt, write_tiny

from splitpoint.transport.channels import open_channel
from splitpoint.v1 import kvstore_pb2, kvstore_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc

SHARED = 400
CHUNKS = SHARED // 16
REFERENCE = build_tiny("llama-3")
PREFIX, _ = clear_prompt(REFERENCE, SHARED, 1)
PROMPT, WANTED = clear_prompt(REFERENCE, 9, 8, before=PREFIX)


class Host:
    """A store with a disk tier in a process of its own, and a worker in this one."""

    def __init__(self, process: ForkedService, store: Any, stream: Any) -> None:
        self.process = process
        self.store = store
        self.stream = stream

    async def begin(self, name: str, prompt: list[int], count: int, **fields: Any) -> None:
        await self.stream.write(admitting(name, prompt, count, **fields))

    async def end(self, name: str) -> tuple[list[int], list[worker_pb2.RestoreReport]]:
        """Return the tokens and the restores of a request."""
        tokens: list[int] = []
        restores: list[worker_pb2.RestoreReport] = []
        async with asyncio.timeout(60):
            while True:
                response = await self.stream.read()
                for result in response.tokens:
                    tokens += result.token_ids
                restores += response.restores
                for finish in response.finishes:
                    assert finish.request_id == name
                    assert finish.reason == types_pb2.FINISH_REASON_LENGTH
                    return tokens, restores

    async def put_on_disk(self) -> None:
        """Use the prefix twice, which sends it to the disk, and empty the arena."""
        for name in ("first", "second"):
            await self.begin(name, [*PREFIX, 5], 1)
            await self.end(name)
        async with asyncio.timeout(60):
            while (await self.stats()).tiers[0].chunk_count < CHUNKS:
                await asyncio.sleep(0.02)
            while (await self.stats()).sealed_slot_count:
                await self.store.Evict(kvstore_pb2.EvictRequest())
                await asyncio.sleep(0.02)

    async def meet(self) -> None:
        await self.begin(
            "both",
            PROMPT,
            8,
            source_tier=types_pb2.TIER_DISK,
            source_cached_tokens=SHARED,
            meeting_tokens=SHARED // 2,
        )

    async def stats(self) -> kvstore_pb2.GetStatsResponse:
        request = kvstore_pb2.GetStatsRequest(check_integrity=True)
        stats: kvstore_pb2.GetStatsResponse = await self.store.GetStats(request)
        assert not stats.integrity_violations
        return stats


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("llama-3", tmp_path_factory.mktemp("llama-3"))


@asynccontextmanager
async def host(folder: Path, tmp_path: Path, arena: Path, rate: str) -> AsyncIterator[Host]:
    shape = StackShape(
        workers=1,
        activations="never",
        store_arguments=(
            *("--tier-disk", str(tmp_path / "tier"), "--tier-disk-size", "64MiB"),
            *("--tier-admission", "second-use", "--tier-rate", rate),
        ),
    )
    addresses = f"unix:{tmp_path}/kv", f"unix:{tmp_path}/w"
    async with AsyncExitStack() as cleanup:
        process = await start_store(folder, addresses[0], arena, shape)
        cleanup.push_async_callback(stop_process, process)
        await cleanup.enter_async_context(
            serving_worker(folder, "0", addresses[1], addresses[0], shape)
        )
        channels = [await cleanup.enter_async_context(open_channel(each)) for each in addresses]
        stream = worker_pb2_grpc.WorkerServiceStub(channels[1]).Run()
        cleanup.callback(stream.cancel)
        yield Host(process, kvstore_pb2_grpc.KvStoreServiceStub(channels[0]), stream)


async def test_both_ends_of_a_disk_give_the_same_text(
    folder: Path, tmp_path: Path, shm_folder: Path
) -> None:
    async with host(folder, tmp_path, shm_folder / "a" / "arena", "1MB") as stack:
        await stack.put_on_disk()
        await stack.meet()
        tokens, (report,) = await stack.end("both")
        assert tokens == WANTED
        assert report.method == types_pb2.RESTORE_METHOD_TOKENS
        assert report.fetched_tokens > 0
        assert report.recomputed_tokens + report.fetched_tokens == SHARED
        stats = await stack.stats()
        assert stats.tiers[0].read_chunk_count >= report.fetched_tokens // 16
        assert stats.sealed_slot_count >= CHUNKS


async def test_a_damaged_file_is_computed(folder: Path, tmp_path: Path, shm_folder: Path) -> None:
    async with host(folder, tmp_path, shm_folder / "a" / "arena", "1MB") as stack:
        await stack.put_on_disk()
        for path in (tmp_path / "tier").rglob("*"):
            if path.is_file() and path.stat().st_size > 100_000:
                damage(path)
        await stack.meet()
        tokens, (report,) = await stack.end("both")
        assert tokens == WANTED
        assert report.fetched_tokens == 0
        stats = await stack.stats()
        assert stats.tiers[0].damaged_chunk_count > 0


async def test_a_store_that_is_killed_in_the_middle_costs_the_load_alone(
    folder: Path, tmp_path: Path, shm_folder: Path
) -> None:
    # The first pieces take 0.1 s; it dies while slots are being filled.
    async with host(folder, tmp_path, shm_folder / "a" / "arena", "1MB") as stack:
        await stack.put_on_disk()
        await stack.meet()
        async with asyncio.timeout(60):
            while not (await stack.stats()).writing_slot_count:
                await asyncio.sleep(0.005)
        stack.process.kill()
        await stack.process.wait()
        tokens, _ = await stack.end("both")
        assert tokens == WANTED


def damage(path: Path) -> None:
    """Change a byte in every few hundred, behind the file's beginning."""
    content = bytearray(path.read_bytes())
    for offset in range(8192, len(content), 397):
        content[offset] ^= 1
    path.write_bytes(content)
