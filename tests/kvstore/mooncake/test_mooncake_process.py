"""The Mooncake process: reads between two arenas, and what its crashes and hangs cost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from transfer_engine import needs_engine
from waiting import until

from kvstore_service.mooncake import process as under_test
from kvstore_service.mooncake.process import Duty, MooncakeProcess
from kvstore_service.mooncake.settings import MooncakeSettings
from splitpoint.arena.mapping import Arena
from splitpoint.arena.owner import OpenedArena, open_or_create_arena
from splitpoint.errors import FailedPrecondition, Unavailable
from splitpoint.shapes import ArenaLayout, DataType

pytestmark = needs_engine

LAYOUT = ArenaLayout(
    chunk_tokens=16,
    layer_count=4,
    kv_head_count=4,
    head_dim=32,
    hidden_size=64,
    data_type=DataType.FLOAT32,
    has_activations=False,
)
SETTINGS = MooncakeSettings("lo", has_transfer=True, pool=None)
SECONDS = 60.0


class Pair:
    """Two arenas, each with its process: `there` is read by `here`."""

    def __init__(self, there: OpenedArena, here: OpenedArena) -> None:
        self.there, self.here = there.arena, here.arena
        self.source = MooncakeProcess(self.there, SETTINGS)
        self.reader = MooncakeProcess(self.here, SETTINGS, Duty.READ)

    async def start(self) -> None:
        await asyncio.gather(self.source.start(), self.reader.start())
        await until_ready(self.source)

    async def read(
        self,
        sources: list[int],
        targets: list[int],
        seconds: float = SECONDS,
        cancel_seconds: float = SECONDS,
    ) -> None:
        endpoint = self.source.endpoint
        assert endpoint is not None
        await self.reader.call(
            "read",
            seconds,
            cancel_seconds=cancel_seconds,
            segment=endpoint.segment,
            address=endpoint.arena_address,
            slot_count=self.there.slot_count,
            sources=sources,
            targets=targets,
        )


async def until_ready(process: MooncakeProcess) -> None:
    await until(lambda: process.endpoint is not None)


def freeze(pid: int) -> None:
    """Stop a child of this process. Returns when all its threads have stopped.

    `os.kill` returns before that: until the thread that got the signal has had a processor, which
    takes long on a busy machine, the other threads go on, and may serve a whole read.
    """
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


def new_arena(folder: Path, slot_count: int) -> OpenedArena:
    """Return a new arena; `owner.remove` removes its folder, too."""
    folder.mkdir(mode=0o700)
    return open_or_create_arena(folder / "arena", LAYOUT, slot_count)


def fill(arena: Arena, seed: int) -> None:
    generator = np.random.default_rng(seed)
    for plane in arena.geometry.planes:
        rows = arena.plane(plane.layer, plane.tensor)
        rows[:] = generator.integers(0, 256, rows.shape, dtype=np.uint8)


@contextlib.asynccontextmanager
async def pair_of(folder: Path, there_slots: int = 40, here_slots: int = 30) -> AsyncIterator[Pair]:
    there, here = new_arena(folder / "there", there_slots), new_arena(folder / "here", here_slots)
    pair = Pair(there, here)
    fill(pair.there, 1)
    try:
        await pair.start()
        yield pair
    finally:
        await pair.source.close()
        await pair.reader.close()
        there.owner.remove()
        here.owner.remove()


async def test_slots_come_over_into_other_slots(shm_folder: Path) -> None:
    async with pair_of(shm_folder) as pair:
        sources, targets = [3, 4, 5, 30, 12], [20, 21, 22, 23, 0]
        await pair.read(sources, targets)
        for source, target in zip(sources, targets, strict=True):
            assert pair.here.checksum(target) == pair.there.checksum(source)
        untouched = set(range(30)) - set(targets)
        assert not pair.here.plane(0, "K")[list(untouched)].any()
        assert pair.source.stats.registered_bytes == 40 * LAYOUT.chunk_bytes


async def test_a_killed_source_is_told_and_comes_back(shm_folder: Path) -> None:
    async with pair_of(shm_folder) as pair:
        await pair.read([1], [1])
        pid = pair.source.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(Unavailable):
            await pair.read(list(range(20)), list(range(20)))
        await until(lambda: pair.source.stats.restart_count != 0)
        await until_ready(pair.source)
        await pair.read([7], [8])
        assert pair.here.checksum(8) == pair.there.checksum(7)
        # The reader's own process went on.
        assert pair.reader.stats.restart_count == 0


async def test_a_reader_that_is_killed_fails_its_calls(shm_folder: Path) -> None:
    async with pair_of(shm_folder) as pair:
        pid = pair.reader.pid
        assert pid is not None
        freeze(pid)
        reading = asyncio.create_task(pair.read([1], [1]))
        await asyncio.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(Unavailable):
            await reading
        assert not pair.reader.stats.is_up
        with pytest.raises(Unavailable, match="away"):
            await pair.reader.call("read", SECONDS)


async def test_a_source_that_hangs_ends_the_readers_process(shm_folder: Path) -> None:
    """Pieces may still arrive, so the slots are free only when the reading process is gone."""
    async with pair_of(shm_folder) as pair:
        await pair.read([1], [1])
        source, reader = pair.source.pid, pair.reader.pid
        assert source is not None
        assert reader is not None
        freeze(source)
        try:
            with pytest.raises(Unavailable, match="in time"):
                await pair.read([2], [2], seconds=0.5)
            assert not os.path.exists(f"/proc/{reader}")
        finally:
            os.kill(source, signal.SIGCONT)


async def test_a_segment_that_refuses_connections_costs_no_process(shm_folder: Path) -> None:
    async with pair_of(shm_folder) as pair:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            segment = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(Unavailable, match="cannot be reached"):
            await pair.reader.call(
                *("read", SECONDS),
                segment=segment,
                address=0,
                slot_count=40,
                sources=[1],
                targets=[1],
            )
        assert pair.reader.stats.restart_count == 0
        await pair.read([1], [1])


async def test_nothing_is_written_after_a_read_has_failed(
    shm_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slots of a failed read may be granted to another session at once."""
    monkeypatch.setattr(under_test, "RESTART_SECONDS", (0.05,))
    rng = random.Random(7)
    slots = list(range(0, 60, 2))  # many pieces: no two are adjacent
    failed = 0
    async with pair_of(shm_folder, there_slots=60, here_slots=60) as pair:
        for _ in range(8):
            await until_ready(pair.source)
            reading = asyncio.create_task(pair.read(slots, slots))
            await asyncio.sleep(rng.uniform(0, 0.012))
            pid = pair.source.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            try:
                await reading
            except Unavailable:
                failed += 1
            for plane in pair.here.geometry.planes:
                pair.here.plane(plane.layer, plane.tensor)[:] = 0xA5
            await asyncio.sleep(0.1)
            for plane in pair.here.geometry.planes:
                assert (pair.here.plane(plane.layer, plane.tensor) == 0xA5).all()
            async with asyncio.timeout(SECONDS):
                while pair.source.pid == pid:
                    await asyncio.sleep(0.01)
    assert failed


async def test_a_cancelled_read_ends_before_it_returns(
    shm_folder: Path,
) -> None:
    async with pair_of(shm_folder) as pair:
        source, reader = pair.source.pid, pair.reader.pid
        assert source is not None
        assert reader is not None
        await pair.read([1], [1])
        freeze(source)
        try:
            reading = asyncio.create_task(pair.read([2], [2], cancel_seconds=0.3))
            await asyncio.sleep(0.1)
            reading.cancel()
            await asyncio.sleep(0.05)
            reading.cancel()  # once more, while the first is still at work
            with pytest.raises(asyncio.CancelledError):
                await reading
            assert not os.path.exists(f"/proc/{reader}")
        finally:
            os.kill(source, signal.SIGCONT)


# A stranger's client: reads and writes what it is told, and prints what came of it.
STRANGER = """
import ctypes, sys
from mooncake.engine import TransferEngine
segment, slot, before = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
data = ctypes.create_string_buffer(b"x" * 64, 64)
address = ctypes.addressof(data)
print(engine.transfer_sync_write(segment, address, slot, 64))
print(engine.transfer_sync_read(segment, address, before, 64))
print(engine.transfer_sync_read(segment, address, slot, 64), data.raw.hex())
"""


async def test_other_hosts_can_read_payload_and_write_nothing(shm_folder: Path) -> None:
    async with pair_of(shm_folder) as pair:
        endpoint, geometry = pair.source.endpoint, pair.there.geometry
        assert endpoint is not None
        plane = geometry.planes[0]
        slot = endpoint.arena_address + plane.offset + 3 * plane.slot_bytes
        tokens = endpoint.arena_address + geometry.tokens_offset
        checksum = pair.there.checksum(3)
        stranger = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", STRANGER, endpoint.segment, str(slot), str(tokens)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        printed, _ = await stranger.communicate()
        wrote, read_tokens, read = printed.decode().splitlines()
        assert wrote == "-1"
        assert read_tokens == "-1"  # the prompts' tokens, which lie before the payload
        payload = pair.there.plane(plane.layer, plane.tensor)[3, :64].tobytes()
        assert read == f"0 {payload.hex()}"
        assert pair.there.checksum(3) == checksum
        await pair.read([3], [4])  # its engine goes on
        assert pair.here.checksum(4) == checksum


async def test_it_listens_on_its_interface_only(shm_folder: Path) -> None:
    async with pair_of(shm_folder) as pair:
        endpoint = pair.source.endpoint
        assert endpoint is not None
        port = int(endpoint.segment.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=60):
            pass
        devices = await listening_devices(pair.source)
        assert devices
        assert set(devices) == {"lo"}


async def listening_devices(process: MooncakeProcess) -> list[str]:
    """Return the devices of a process's listening sockets, as `ss` shows them: address%device."""
    pid = process.pid
    shown = await asyncio.create_subprocess_exec(
        *("ss", "-Hltnp"), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    output, _ = await shown.communicate()
    mine = [line.split() for line in output.decode().splitlines() if f"pid={pid}," in line]
    return [fields[3].rpartition(":")[0].rpartition("%")[2] for fields in mine]


async def test_an_interface_that_goes_is_told_at_the_start(shm_folder: Path) -> None:
    opened = new_arena(shm_folder / "own", 2)
    process = MooncakeProcess(opened.arena, MooncakeSettings("none0", has_transfer=True, pool=None))
    try:
        with pytest.raises(FailedPrecondition, match="no such interface"):
            await process.start()
        assert process.pid is None
    finally:
        await process.close()
        opened.owner.remove()


async def test_the_process_ends_with_the_store(shm_folder: Path) -> None:
    async with pair_of(shm_folder) as pair:
        pids = [pair.source.pid, pair.reader.pid]
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
