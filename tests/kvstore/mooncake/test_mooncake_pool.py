"""The pool as a tier: what is written is read back, and what is not the chunk is none."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from test_mooncake_process import LAYOUT, fill
from transfer_engine import Master, master_process, needs_engine
from waiting import until

from kvstore_service.mooncake.process import MooncakeProcess
from kvstore_service.mooncake.settings import MooncakeSettings, PoolSettings
from kvstore_service.mooncake.tier import MooncakeTier
from kvstore_service.mooncake.trailer import TRAILER_BYTES
from kvstore_service.pool.prefix_index import Entry
from splitpoint.arena.mapping import Arena
from splitpoint.arena.owner import open_or_create_arena
from splitpoint.errors import Unavailable
from splitpoint.shapes import ArenaLayout

pytestmark = needs_engine

MEMORY = 64 << 20


@pytest.fixture
def master() -> Iterator[Master]:
    with master_process() as found:
        yield found


@contextlib.asynccontextmanager
async def pool(
    folder: Path,
    master: Master,
    *,
    memory_bytes: int = MEMORY,
    replicas: int = 1,
    layout: ArenaLayout = LAYOUT,
    slot_count: int = 60,
) -> AsyncIterator[tuple[Arena, MooncakeTier]]:
    """A tier of an arena whose slots have random bytes."""
    folder.mkdir(mode=0o700)
    opened = open_or_create_arena(folder / "arena", layout, slot_count)
    fill(opened.arena, 1)
    settings = MooncakeSettings(
        "lo", has_transfer=False, pool=PoolSettings(master.address, memory_bytes, replicas)
    )
    process = MooncakeProcess(opened.arena, settings)
    tier = MooncakeTier(process, master.address, layout.chunk_bytes)
    try:
        await tier.start()
        await until(lambda: tier.stats.is_up)
        yield opened.arena, tier
    finally:
        await tier.close()
        opened.owner.remove()


def entries(arena: Arena, slots: list[int]) -> list[Entry]:
    """Chunks in slots, with keys of their own."""
    return [
        Entry(slot, 1, os.urandom(32), b"", b"", b"", 0, arena.checksum(slot), 0) for slot in slots
    ]


@pytest.mark.parametrize("layout", [LAYOUT, ArenaLayout.of_pages(300_001)], ids=["chunks", "pages"])
async def test_chunks_come_back_into_other_slots(
    shm_folder: Path, master: Master, layout: ArenaLayout
) -> None:
    async with pool(shm_folder / "a", master, layout=layout) as (arena, tier):
        chunks = entries(arena, [3, 4, 9])
        assert await tier.write(chunks) == 3
        assert await tier.write(chunks) == 3  # they are there
        keys = [chunk.key for chunk in chunks]
        assert await tier.has([*keys, os.urandom(32)]) == [True, True, True, False]
        assert await tier.has([os.urandom(32), *keys]) == [False, True, True, True]
        found = await tier.read([keys[0], os.urandom(32), keys[2]], [20, 21, 22])
        assert found == [chunks[0].checksum, None, chunks[2].checksum]
        assert (arena.checksum(20), arena.checksum(22)) == (found[0], found[2])
        await tier.drop([keys[0]])
        assert await tier.read([keys[0]], [23]) == [None]
        stats = tier.stats
        assert stats.engine == "mooncake"  # of the metrics' labels, too
        assert stats.written_chunk_count == 6
        assert (stats.read_chunk_count, stats.missed_chunk_count) == (2, 2)
        assert stats.damaged_chunk_count == 1  # as the caller said


async def test_an_object_of_another_size_is_none(shm_folder: Path, master: Master) -> None:
    smaller = replace(LAYOUT, layer_count=2)
    async with (
        pool(shm_folder / "a", master) as (arena, tier),
        pool(shm_folder / "b", master, layout=smaller) as (other, wrong),
    ):
        [chunk] = entries(other, [1])
        assert await wrong.write([chunk]) == 1
        assert await tier.read([chunk.key], [5]) == [None]
        [larger] = entries(arena, [1])
        assert await tier.write([larger]) == 1
        assert await wrong.read([larger.key], [5]) == [None]
        assert wrong.stats.damaged_chunk_count == 1
        assert await tier.has([larger.key]) == [False]  # it is removed


# Another program's client: puts bytes under a name.
STRANGER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", sys.argv[1]) == 0
assert store.put(sys.argv[2], b"x" * int(sys.argv[3])) == 0
store.close()
"""


async def test_garbage_under_a_chunks_name_is_removed(shm_folder: Path, master: Master) -> None:
    async with pool(shm_folder / "a", master) as (arena, tier):
        [chunk] = entries(arena, [1])
        stranger = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", STRANGER, master.address, f"splitpoint-{chunk.key.hex()}"),
            str(LAYOUT.chunk_bytes + TRAILER_BYTES),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert await stranger.wait() == 0
        assert await tier.has([chunk.key]) == [True]
        assert await tier.read([chunk.key], [2]) == [None]
        assert (tier.stats.damaged_chunk_count, await tier.has([chunk.key])) == (1, [False])
        assert await tier.write([chunk]) == 1
        assert await tier.read([chunk.key], [2]) == [chunk.checksum]


async def test_a_full_pool_evicts_or_refuses(shm_folder: Path, master: Master) -> None:
    """More chunks than fit: each call ends, and what is held is right."""
    layout = replace(LAYOUT, chunk_tokens=256, layer_count=8)  # 2 MiB a chunk
    async with pool(shm_folder / "a", master, layout=layout, slot_count=48) as (arena, tier):
        chunks = entries(arena, list(range(44)))
        stored = await tier.write(chunks)
        assert 0 < stored <= 44
        found = await tier.read([chunk.key for chunk in chunks], [44, 45, 46, 47, *range(40)])
        there = [index for index, checksum in enumerate(found) if checksum is not None]
        assert there
        assert all(found[index] == chunks[index].checksum for index in there)


async def test_two_replicas_outlive_one_host(shm_folder: Path, master: Master) -> None:
    async with (
        pool(shm_folder / "a", master, memory_bytes=0, replicas=2) as (arena, tier),
        pool(shm_folder / "b", master),
    ):
        async with pool(shm_folder / "c", master):
            chunks = entries(arena, [1, 2, 3, 4])
            assert await tier.write(chunks) == 4
        found = await tier.read([chunk.key for chunk in chunks], [10, 11, 12, 13])
        assert found == [chunk.checksum for chunk in chunks]
        assert [arena.checksum(slot) for slot in (10, 11, 12, 13)] == found


async def test_only_a_pool_that_goes_by_itself_is_an_alarm(
    shm_folder: Path, master: Master, caplog: pytest.LogCaptureFixture
) -> None:
    async with pool(shm_folder / "a", master) as (_, tier):
        caplog.clear()
    assert not tier.stats.is_up
    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
    async with pool(shm_folder / "b", master) as (_, tier):
        master.kill()
        await until(lambda: not tier.stats.is_up)
    assert "Mooncake's pool is away: " in caplog.text


async def test_without_a_master_calls_fail_at_once(shm_folder: Path, master: Master) -> None:
    async with pool(shm_folder / "a", master) as (arena, tier):
        chunks = entries(arena, [1])
        await tier.write(chunks)
        master.kill()
        await until(lambda: not tier.stats.is_up)
        for call in (
            tier.has([chunks[0].key]),
            tier.read([chunks[0].key], [2]),
            tier.write(chunks),
        ):
            with pytest.raises(Unavailable, match="away"):
                await call
        await tier.drop([chunks[0].key])  # never raises
