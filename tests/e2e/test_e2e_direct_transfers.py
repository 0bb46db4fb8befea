"""Prefixes that come from another host's store by direct reads: the same text, whatever happens.

Each store is a process with an engine process of its own, on the loopback.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_pair import NEW_TOKENS, SHAPE, Host, host
from tiny_models import build_tiny, clear_prompt
from transfer_engine import Duty, child_of, direct_arguments, needs_engine
from waiting import until

from splitpoint.v1 import kvstore_pb2

pytestmark = needs_engine

MODEL = build_tiny("llama")
PROMPT, ANSWER = clear_prompt(MODEL, 150, NEW_TOKENS)  # nine chunks of 16 and a tail
FULL_TOKENS = len(PROMPT) // 16 * 16
LEASE_SECONDS = 1.0
DIRECT = replace(SHAPE, store_arguments=direct_arguments())
SECONDS = 30.0


@pytest.fixture
async def hosts(folder: Path, tmp_path: Path, shm_folder: Path) -> AsyncIterator[tuple[Host, Host]]:
    forgetful = replace(DIRECT, lease_seconds=LEASE_SECONDS)
    async with (
        host(folder, tmp_path, shm_folder, "a", forgetful) as first,
        host(folder, tmp_path, shm_folder, "b", DIRECT) as second,
    ):
        await until(lambda: is_registered(first))
        yield first, second


async def is_registered(host: Host) -> bool:
    return (await host.stats()).transfer.registered_bytes > 0


def source(first: Host) -> dict[str, Any]:
    return {"source_store_address": first.store_address, "source_cached_tokens": 10**6}


async def transfer_of(host: Host) -> kvstore_pb2.TransferStats:
    return (await host.stats()).transfer


async def wait_until_read(first: Host) -> None:
    """Return when the other store has leased the prefix of `first`, so its read is under way."""

    async def is_leased() -> bool:
        return (await first.stats()).leased_slot_count > 0

    await until(is_leased)
    await asyncio.sleep(0.2)


async def assert_sealed_chunks_are_right(first: Host, second: Host) -> None:
    """Every chunk of the prompt that the second host sealed has the bytes that the first computed.

    The first host computes them again if it lost them.
    """
    await first.generate(PROMPT)
    right = await first.match(PROMPT)
    checksums = {
        key: chunk.checksum for key, chunk in zip(right.chunk_keys, right.chunks, strict=True)
    }
    found = await second.match(PROMPT)
    assert second.worker.store is not None
    connection = second.worker.store.connection
    assert connection is not None
    for key, chunk in zip(found.chunk_keys, found.chunks, strict=True):
        assert connection.tensors.arena.checksum(chunk.slot) == chunk.checksum
        assert checksums[key] == chunk.checksum


async def test_full_chunks_come_by_direct_reads(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    assert (await first.generate(PROMPT))[0] == ANSWER
    tokens, restore = await second.generate(PROMPT, **source(first))
    assert tokens == ANSWER
    assert restore.fetched_tokens == FULL_TOKENS
    assert restore.cached_tokens >= FULL_TOKENS
    assert (await first.stats()).remote_read_bytes == 0  # nothing was streamed
    stats = await transfer_of(second)
    assert (stats.is_up, stats.read_chunk_count, stats.failed_read_count) == (True, 9, 0)
    # Now it is there: nothing is read again.
    tokens, restore = await second.generate(PROMPT, **source(first))
    assert (tokens, restore.fetched_tokens) == (ANSWER, 0)
    assert (await transfer_of(second)).read_chunk_count == 9
    for each in hosts:
        await each.assert_clean()
    assert (await first.stats()).session_count == 1  # the read's is gone


async def test_a_corrupted_byte_is_computed_again(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    await first.generate(PROMPT)
    assert first.worker.store is not None
    connection = first.worker.store.connection
    assert connection is not None
    chunks = (await first.match(PROMPT)).chunks
    connection.tensors.arena.plane(1, "K")[chunks[4].slot, 7] ^= 1
    tokens, restore = await second.generate(PROMPT, **source(first))
    assert (tokens, restore.fetched_tokens) == (ANSWER, 4 * 16)
    # The source was told, and dropped the chunk.
    assert (await first.stats()).damaged_chunk_count == 1
    assert len((await first.match(PROMPT)).chunks) == 4
    await assert_sealed_chunks_are_right(first, second)
    for each in hosts:
        await each.assert_clean()


async def test_a_source_that_is_killed_under_the_read(hosts: tuple[Host, Host]) -> None:
    first, second = hosts
    await first.generate(PROMPT)
    os.kill(child_of(first.process.pid), signal.SIGSTOP)
    name = await second.admit(PROMPT, **source(first))
    await wait_until_read(first)
    first.process.kill()  # its stopped engine process goes with it
    results = await second.results(name)
    assert results.tokens[name] == ANSWER
    assert (await transfer_of(second)).failed_read_count == 1
    await second.assert_clean()


async def test_a_slot_that_is_reused_under_the_read(hosts: tuple[Host, Host]) -> None:
    """The reader's lease expires while its read is stopped, and other chunks take the slots."""
    first, second = hosts
    await first.generate(PROMPT)
    before = {chunk.slot: chunk.generation for chunk in (await first.match(PROMPT)).chunks}
    engine = child_of(first.process.pid)
    os.kill(engine, signal.SIGSTOP)
    name = await second.admit(PROMPT, **source(first))
    await wait_until_read(first)
    second.process.send_signal(signal.SIGSTOP)
    try:
        await asyncio.sleep(2 * LEASE_SECONDS)
        await first.store.Evict(kvstore_pb2.EvictRequest())
        await overwrite(first, before)
    finally:
        os.kill(engine, signal.SIGCONT)
        await asyncio.sleep(0.2)  # the bytes go over while the reading store still stands
        second.process.send_signal(signal.SIGCONT)
    results = await second.results(name)
    assert results.tokens[name] == ANSWER
    assert results.restores[name].fetched_tokens == 0
    assert (await transfer_of(second)).read_chunk_count == 0
    await assert_sealed_chunks_are_right(first, second)
    await second.assert_clean()


async def overwrite(first: Host, before: dict[int, int]) -> None:
    """Compute other prompts until every slot has another chunk, or none, and other bytes."""
    assert first.worker.store is not None
    connection = first.worker.store.connection
    assert connection is not None
    arena = connection.tensors.arena
    for seed in range(3, 60):
        others, _ = clear_prompt(MODEL, 150, 1, seed=seed)
        await first.generate(others)
        if not any(arena.is_current([slot], [generation]) for slot, generation in before.items()):
            break
    reused = [slot for slot in before if np.any(arena.plane(0, "K")[slot])]
    assert reused
    assert not any(arena.is_current([slot], [before[slot]]) for slot in before)


async def test_a_killed_engine_costs_the_transfer_only(hosts: tuple[Host, Host]) -> None:
    """The worker streams by gRPC meanwhile; the engine comes back by itself."""
    first, second = hosts
    await first.generate(PROMPT)
    os.kill(child_of(second.process.pid, Duty.READ), signal.SIGKILL)
    tokens, restore = await second.generate(PROMPT, **source(first))
    assert tokens == ANSWER
    assert (restore.fetched_tokens, restore.fetch_transfer) == (len(PROMPT), "stream")
    assert (await first.stats()).remote_read_bytes > 0

    async def is_back() -> bool:
        stats = await transfer_of(second)
        return stats.is_up and stats.restart_count == 1

    await until(is_back)
    for each in hosts:
        await each.assert_clean()


async def test_the_engines_end_with_a_killed_store(hosts: tuple[Host, Host]) -> None:
    first, _ = hosts
    engines = [child_of(first.process.pid, duty) for duty in Duty]
    first.process.kill()
    await first.process.wait()
    async with asyncio.timeout(SECONDS):
        while any(os.path.exists(f"/proc/{engine}") for engine in engines):
            await asyncio.sleep(0.01)
