"""Pinning in pieces: order, rollback, limits, a new arena; with a driver double, and on a GPU."""

from __future__ import annotations

import logging
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from splitpoint.arena.mapping import Arena
from splitpoint.arena.owner import open_or_create_arena
from splitpoint.shapes import ArenaLayout, DataType
from worker_service.device.copies import are_pinned, copy_runs, runs
from worker_service.device.pinning import (
    PROBE_BYTES,
    CudaRegistrar,
    Piece,
    Pinning,
    PinningFailed,
    copy_fault,
    piece_slots,
    pieces_of,
    refusal,
)
from worker_service.hardware.streams import StreamUse, stream_for

LAYOUT = ArenaLayout(
    chunk_tokens=16,
    layer_count=3,
    kv_head_count=2,
    head_dim=16,
    hidden_size=32,
    data_type=DataType.FLOAT32,
    has_activations=True,
    model_fingerprint=b"pinning",
)


class Driver:
    """Registers whatever does not overlap, until `room` bytes are locked."""

    def __init__(self, room: int | None = None) -> None:
        self.room = room
        self.locked: dict[int, int] = {}
        self.most_locked = 0
        self.fault: str | None = None
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def register(self, address: int, size_bytes: int) -> None:
        assert self.may_go_on.wait(30)
        assert address % 4096 == size_bytes % 4096 == 0
        for other, size in self.locked.items():
            assert address + size_bytes <= other or other + size <= address
        if self.room is not None and sum(self.locked.values()) + size_bytes > self.room:
            raise PinningFailed("CUDA error 2")
        self.locked[address] = size_bytes
        self.most_locked = max(self.most_locked, sum(self.locked.values()))

    def unregister(self, address: int) -> None:
        del self.locked[address]

    def fault_of(self, address: int, size_bytes: int) -> str | None:
        assert self.locked[address] == size_bytes
        return self.fault


@pytest.fixture
def arena(shm_folder: Path) -> Iterator[Arena]:
    opened = open_or_create_arena(shm_folder / "store" / "arena", LAYOUT, 8)
    yield opened.arena
    opened.arena.close()
    opened.owner.remove()


def payload_bytes(arena: Arena) -> int:
    return sum(plane.slot_bytes * arena.slot_count for plane in arena.geometry.planes)


# Bytes of K or V in LAYOUT: two slots are a memory page.
SLOT_BYTES = 2 * 16 * 16 * 4
PLANE_BYTES = 8 * SLOT_BYTES


def test_pieces_end_where_planes_or_slots_end(arena: Arena) -> None:
    planes, start = arena.geometry.planes, arena.geometry.payload_offset
    borders = {plane.offset - start for plane in planes}
    for piece_bytes in (PLANE_BYTES, 40_000, 100_000, 1 << 40):
        pieces = pieces_of(planes, 8, start, piece_bytes=piece_bytes)
        assert {piece.offset for piece in pieces} <= borders
        assert sum(piece.size_bytes for piece in pieces) == payload_bytes(arena)
        assert all(piece.size_bytes <= piece_bytes for piece in pieces)
    assert pieces_of(planes, 8, start) == [Piece(0, payload_bytes(arena))]
    assert pieces_of(planes, 8, start, limit_bytes=0) == []
    first = planes[0].slot_bytes * 8
    assert pieces_of(planes, 8, start, limit_bytes=first + 1) == [Piece(0, first)]


def test_a_plane_that_is_larger_is_cut_between_slots_and_memory_pages(arena: Arena) -> None:
    planes, start = arena.geometry.planes, arena.geometry.payload_offset
    for piece_bytes, slots in ((1, 2), (3 * SLOT_BYTES, 2), (6 * SLOT_BYTES + 1, 6)):
        pieces = pieces_of(planes, 8, start, piece_bytes=piece_bytes)
        assert piece_slots(SLOT_BYTES, piece_bytes) == slots
        ends = [piece.offset + piece.size_bytes for piece in pieces]
        assert [piece.offset for piece in pieces[1:]] == ends[:-1]
        assert ends[-1] == payload_bytes(arena)
        assert all(piece.offset % 4096 == 0 for piece in pieces)
        cuts = {number * slots * SLOT_BYTES for number in range(-(-8 // slots))}
        assert {piece.offset % PLANE_BYTES for piece in pieces} == cuts
    # An encoded slot is rarely a multiple of a memory page.
    assert piece_slots(64 * 8 * 130, 1 << 30) * 64 * 8 * 130 % 4096 == 0


def test_no_copy_crosses_a_piece() -> None:
    """As write-back and restores cut their runs."""
    slots = [3, 4, 5, 6, 7, 12, 13]
    pages = list(range(10, 17))
    assert list(runs(slots, pages)) == [(0, 5), (5, 2)]
    assert list(runs(slots, pages, first_cut=4)) == [(0, 1), (1, 4), (5, 2)]
    assert list(runs(pages, slots, second_cut=4)) == [(0, 1), (1, 4), (5, 2)]
    source, target = torch.arange(40.0).view(20, 2), torch.zeros(20, 2)
    copy_runs(source, target, slots, pages, source_cut=4)
    assert torch.equal(target[10:17], source[slots])
    assert not target[:10].any()


async def test_everything_is_locked_and_unlocked_again(arena: Arena) -> None:
    driver = Driver()
    pinning = Pinning(driver, piece_bytes=PLANE_BYTES)
    pinning.attach(arena)
    await pinning.idle()
    assert len(driver.locked) == len(arena.geometry.planes)
    assert pinning.pinned_bytes == sum(driver.locked.values()) == payload_bytes(arena)
    assert pinning.description.startswith("pinned ")
    await pinning.close()
    assert (driver.locked, pinning.pinned_bytes) == ({}, 0)


async def test_the_log_says_how_far_it_is(arena: Arena, caplog: pytest.LogCaptureFixture) -> None:
    pinning = Pinning(Driver(), piece_bytes=PLANE_BYTES, progress_seconds=1e-9)
    with caplog.at_level(logging.INFO, "worker_service.device.pinning"):
        pinning.attach(arena)
        await pinning.idle()
    planes = len(arena.geometry.planes)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.startswith("pinning: ") for line in lines] == [True] * (planes - 1) + [False]
    assert lines[-1].startswith("pinned ")
    await pinning.close()


async def test_a_refusal_rolls_everything_back_and_says_why(arena: Arena) -> None:
    driver = Driver(room=payload_bytes(arena) // 2)
    pinning = Pinning(driver, piece_bytes=PLANE_BYTES)
    pinning.attach(arena)
    await pinning.idle()
    assert driver.most_locked > 0
    assert (driver.locked, pinning.pinned_bytes) == ({}, 0)
    assert "CUDA error 2" in pinning.description
    assert "RLIMIT_MEMLOCK" in pinning.description
    await pinning.close()


async def test_a_new_arena_replaces_the_old_one_midway(arena: Arena, shm_folder: Path) -> None:
    """The old mapping is unlocked before the new one is locked, however far it was."""
    other = open_or_create_arena(shm_folder / "other" / "arena", LAYOUT, 4)
    driver = Driver()
    driver.may_go_on.clear()
    pinning = Pinning(driver, piece_bytes=PLANE_BYTES)
    pinning.attach(arena)
    pinning.attach(other.arena)
    arena.close()  # what is being locked stays mapped all the same
    driver.may_go_on.set()
    await pinning.idle()
    assert pinning.pinned_bytes == sum(driver.locked.values()) == payload_bytes(other.arena)
    assert min(driver.locked) == other.arena.payload.ctypes.data
    await pinning.close()
    assert driver.locked == {}
    other.arena.close()
    other.owner.remove()


async def test_a_limit_locks_whole_planes_below_it(arena: Arena) -> None:
    driver = Driver()
    pinning = Pinning(driver, limit_bytes=payload_bytes(arena) // 2)
    pinning.attach(arena)
    await pinning.idle()
    assert 0 < pinning.pinned_bytes <= payload_bytes(arena) // 2
    assert "--pin-limit" in pinning.description
    await pinning.close()


async def test_locked_memory_that_does_not_help_is_told(arena: Arena) -> None:
    driver = Driver()
    driver.fault = "copies from it are not asynchronous"
    pinning = Pinning(driver, piece_bytes=PLANE_BYTES)
    pinning.attach(arena)
    await pinning.idle()
    assert pinning.pinned_bytes == payload_bytes(arena)
    assert pinning.description.startswith("pinned ")
    assert pinning.description.endswith(", but copies from it are not asynchronous")
    await pinning.close()


def test_one_copy_that_returns_early_proves_them_asynchronous() -> None:
    waited = (0.9e-3, 1e-3)
    assert copy_fault([(1e-5, 1e-3), waited]) is None
    assert copy_fault([waited, waited, (1e-5, 1e-3)]) is None
    assert copy_fault([waited, (2e-3, 3e-3)]) == (
        "copies from it are not asynchronous: a call takes 900 µs, the copy 1000 µs"
    )


def test_a_low_memlock_limit_is_named_with_its_remedy() -> None:
    before, most = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, most))
    try:
        told = refusal(PinningFailed("CUDA error 2"), 1 << 30, 2 << 30)
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (before, most))
    assert "locking 1 GiB of 2 GiB failed (CUDA error 2)" in told
    assert "RLIMIT_MEMLOCK is 0 B; raise it with `ulimit -l unlimited`" in told


class RefusingRuntime:
    """CUDA's runtime: it refuses to register, and keeps the error until a launch asks for it."""

    def __init__(self) -> None:
        self.last_error = 0
        self.current = "cuda:0"

    def cudart(self) -> RefusingRuntime:
        return self

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, str(device)
        try:
            yield
        finally:
            self.current = before

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
        assert self.current == "cuda:1"
        self.last_error = 712
        return self.last_error

    def launch(self, device: torch.device) -> None:
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}: of an earlier call")


def test_a_refused_registration_leaves_no_error_for_the_next_launch() -> None:
    cuda, device = RefusingRuntime(), torch.device("cuda:1")
    registrar = CudaRegistrar(device, cuda, cuda.launch)
    with pytest.raises(PinningFailed, match="CUDA error 712"):
        registrar.register(4096, 4096)
    cuda.launch(device)
    assert cuda.current == "cuda:0"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_kernel_runs_after_a_registration_that_the_driver_refused() -> None:
    locked = torch.zeros(1 << 20, dtype=torch.uint8, pin_memory=True)
    registrar = CudaRegistrar(torch.device("cuda:0"))
    with pytest.raises(PinningFailed):
        registrar.register(locked.data_ptr(), locked.numel())
    assert torch.ones(8, device="cuda:0").sum().item() == 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("pieces", [28, 30])
def test_streams_on_a_card_stay_apart_after_the_probes(pieces: int) -> None:
    device = torch.device("cuda:0")
    source = torch.zeros(PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
    registrar = CudaRegistrar(device)
    for _ in range(pieces):
        assert registrar.fault_of(source.data_ptr(), PROBE_BYTES) is None
    handles = [stream_for(use, device).cuda_stream for use in StreamUse]
    assert len(set(handles)) == len(StreamUse)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
async def test_the_cuda_driver_locks_and_unlocks(arena: Arena) -> None:
    pinning = Pinning(CudaRegistrar(torch.device("cuda:0")), piece_bytes=1)
    tensor = torch.from_numpy(arena.plane(1, "K"))
    pinning.attach(arena)
    await pinning.idle()
    is_limited = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != resource.RLIM_INFINITY
    if is_limited and not pinning.pinned_bytes:
        pytest.skip(pinning.description)
    assert pinning.pinned_bytes == payload_bytes(arena), pinning.description
    assert "but" not in pinning.description
    assert tensor.is_pinned()
    # Pieces of two slots: a copy within each is right, however many there are.
    target = torch.zeros_like(tensor, device="cuda:0")
    tensor.random_()
    slots = list(range(len(tensor)))
    copy_runs(tensor, target, slots, slots, source_cut=piece_slots(SLOT_BYTES, 1))
    assert are_pinned(tensor, slots, piece_slots(SLOT_BYTES, 1))
    assert torch.equal(target.cpu(), tensor)
    await pinning.close()
    assert not tensor.is_pinned()
