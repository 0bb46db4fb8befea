"""Transfers on a CUDA device: lanes overlap and wait, nothing is pageable, bytes are right."""

from __future__ import annotations

import json
import random
import resource
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from stored_prefix import StoredPrefix, stored_prefix
from tiny_models import VOCABULARY, write_tiny

from splitpoint.checkpoint.config import read_config
from splitpoint.checkpoint.decoder import shape_from_config
from splitpoint.costs.profile import Line
from splitpoint.planning.plan import Residency
from splitpoint.planning.schedule import Lane, Schedule
from splitpoint.shapes import BUILT_IN_SHAPES, DataType, ModelShape
from splitpoint_cli.bench.limits import Peer
from splitpoint_cli.bench.offload_host import OffloadHost, Way
from splitpoint_cli.bench.offload_report import OffloadWorkload
from splitpoint_cli.bench.offload_runs import model_of
from worker_service.device.copies import copy_runs
from worker_service.device.pinning import CudaRegistrar, PinningFailed
from worker_service.lanes.cuda import StreamLanes
from worker_service.lanes.lanes import Lanes
from worker_service.lanes.select import lanes_of
from worker_service.lanes.timeline import Span
from worker_service.lanes.work import Work
from worker_service.model.decoder import Decoder
from worker_service.pipeline.executor import restore
from worker_service.pipeline.gather import GatherCosts, Gatherer, gatherer_of
from worker_service.pipeline.staging import Staging
from worker_service.pipeline.task_work import Prefix
from worker_service.pipeline.transfer import CacheTransfer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA = torch.device("cuda:0")
CPU = torch.device("cpu")
CHUNK = 16
TOKENS = 150  # the last chunk is partial
# Workspaces that libraries take from torch's allocator, outside of the budget.
LIBRARY_BYTES = 128 << 20


def token_ids() -> list[int]:
    generator = torch.Generator().manual_seed(TOKENS)
    return torch.randint(3, VOCABULARY, (TOKENS,), generator=generator).tolist()


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    made = lanes_of(CUDA)
    yield made
    made.close()


def lock(registrar: CudaRegistrar, address: int, size_bytes: int) -> None:
    """Skips where a limit of this account forbids it, which no code can change."""
    try:
        registrar.register(address, size_bytes)
    except PinningFailed as error:
        if resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != resource.RLIM_INFINITY:
            pytest.skip(f"RLIMIT_MEMLOCK is limited here, and {error}")
        raise


@pytest.fixture
def stored(tmp_path: Path, shm_folder: Path) -> Iterator[StoredPrefix]:
    """Computed on the CPU, in an arena that is locked for the GPU."""
    model = Decoder.load(write_tiny("opt", tmp_path), CPU, torch.float32)
    with stored_prefix(model, shm_folder, token_ids(), chunk_tokens=CHUNK) as prefix:
        payload = prefix.tensors.arena.payload
        registrar = CudaRegistrar(CUDA)
        lock(registrar, payload.ctypes.data, payload.nbytes)
        try:
            yield prefix
        finally:
            registrar.unregister(payload.ctypes.data)


def test_link_and_compute_run_side_by_side() -> None:
    source = torch.zeros(256 << 20, dtype=torch.uint8, pin_memory=True)
    target = torch.zeros_like(source, device=CUDA)
    left = torch.randn(8192, 8192, device=CUDA).to(torch.bfloat16)
    product = torch.empty_like(left)

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    def multiply() -> None:
        for _ in range(10):
            torch.mm(left, left, out=product)

    lanes = StreamLanes(CUDA)
    try:
        for _ in range(2):  # the first round warms up
            lanes.run(Lane.LINK_IN, Work("copy", copy, source.numel()))
            lanes.run(Lane.COMPUTE, Work("multiply", multiply))
            spans = {span.name: span for span in lanes.finish()}
    finally:
        lanes.close()
    copied, computed = spans["copy"], spans["multiply"]
    both = min(copied.end, computed.end) - max(copied.start, computed.start)
    assert both > 0.5 * min(copied.seconds, computed.seconds)


def test_work_waits_for_events_and_the_host_does_not() -> None:
    """Filled late, read, filled again: the reader sees the first filling only."""
    lanes = StreamLanes(CUDA)
    first, second = torch.ones(1 << 20, pin_memory=True), torch.zeros(1 << 20, pin_memory=True)
    slot, seen = torch.full((1 << 20,), 7.0, device=CUDA), torch.empty(1 << 20, device=CUDA)
    cycles = 200_000_000  # about a tenth of a second

    def fill(source: torch.Tensor, *, late: bool) -> None:
        if late:
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        slot.copy_(source, non_blocking=True)

    def read() -> None:
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        seen.copy_(slot)

    try:
        filled = lanes.run(Lane.LINK_IN, Work("fill", lambda: fill(first, late=True)))
        was_read = lanes.run(Lane.COMPUTE, Work("read", read), [filled])
        again = lanes.run(Lane.LINK_IN, Work("again", lambda: fill(second, late=False)), [was_read])
        assert not filled.is_done
        assert not again.is_done
        spans = {span.name: span for span in lanes.finish()}
        assert again.is_done
    finally:
        lanes.close()
    assert (seen == 1).all()
    assert (slot == 0).all()
    assert spans["fill"].end <= spans["read"].start + 1e-4
    assert spans["read"].end <= spans["again"].start + 1e-4


@pytest.fixture
def model(stored: StoredPrefix, tmp_path: Path) -> Decoder:
    """The same weights on the device."""
    return Decoder.load(tmp_path, CUDA, torch.float32)


class Arrival:
    """Poisoned device pages that a stored prefix is to arrive in."""

    def __init__(
        self, stored: StoredPrefix, model: Decoder, gatherer: Gatherer | None = None
    ) -> None:
        self._stored = stored
        self._pages = [(5 * index) % 17 for index in range(len(stored.chunks))]
        self._keys, self._values = (
            [plane.to(CUDA) for plane in planes] for planes in stored.empty_cache(17)
        )
        self._transfer = CacheTransfer(
            model, stored.tensors, Staging(stored.layout, 8, CUDA), gatherer
        )

    @torch.inference_mode()
    def restore(
        self, lanes: Lanes, split: int, schedule: Schedule = Schedule.PIPELINED
    ) -> list[Span]:
        stored = self._stored
        return restore(
            self._transfer,
            lanes,
            Prefix(stored.chunks, 0, self._pages, stored.token_ids, TOKENS, split),
            self._keys,
            self._values,
            schedule=schedule,
            tile_tokens=3 * CHUNK,
        )

    def check(self, split: int) -> None:
        """Equal to what the CPU computed and stored; bit for bit where it was loaded."""
        computed = self._stored.computed
        for layer in range(self._stored.layout.layer_count):
            for planes, wanted in (
                (self._keys, computed.keys[layer]),
                (self._values, computed.values[layer]),
            ):
                found = self._stored.rows(planes[layer], self._pages, TOKENS).cpu()
                assert torch.equal(found[split:], wanted[split:]), "loaded bytes differ"
                torch.testing.assert_close(found[:split], wanted[:split], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("schedule", [Schedule.SERIAL, Schedule.COLUMN, Schedule.PIPELINED])
def test_a_restore_brings_back_what_the_cpu_stored(
    stored: StoredPrefix, model: Decoder, lanes: Lanes, schedule: Schedule
) -> None:
    for split in (0, 1, CHUNK, 75, TOKENS):
        arrival = Arrival(stored, model)
        spans = arrival.restore(lanes, split, schedule)
        arrival.check(split)
        assert spans
        assert all(span.seconds >= 0 for span in spans)


def test_the_serial_twin_restores_the_same(stored: StoredPrefix, model: Decoder) -> None:
    arrival = Arrival(stored, model)
    arrival.restore(lanes_of(CUDA, overlapped=False), 75)
    arrival.check(75)


def test_the_arena_is_pinned_and_nothing_falls_back_to_pageable_copies(
    stored: StoredPrefix, model: Decoder, lanes: Lanes, tmp_path: Path
) -> None:
    tensors = stored.tensors
    for plane in (*tensors.keys, *tensors.values, *tensors.inputs):
        assert plane.is_pinned()
        assert plane[-1].is_pinned()
    arrival = Arrival(stored, model)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        arrival.restore(lanes, 75)
        torch.cuda.synchronize(CUDA)
    arrival.check(75)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    copies = [event for event in events if "Memcpy HtoD" in event.get("name", "")]
    pinned = [event for event in copies if "Pinned" in event["name"]]
    pageable = [event for event in copies if "Pageable" in event["name"]]
    assert sum(event["args"]["bytes"] for event in pinned) >= tensors.layout.kv_slot_bytes
    # Positions and token ids; a chunk is larger.
    assert all(event["args"]["bytes"] < tensors.layout.kv_slot_bytes for event in pageable)


def test_a_restore_makes_the_host_wait_at_its_end_only(
    stored: StoredPrefix, model: Decoder, lanes: Lanes
) -> None:
    """By events; torch raises for a copy from pageable memory, and for anything else that waits."""
    Arrival(stored, model).restore(lanes, 75)
    arrival = Arrival(stored, model)
    torch.cuda.synchronize(CUDA)
    torch.cuda.set_sync_debug_mode("error")
    try:
        arrival.restore(lanes, 75)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    arrival.check(75)


def test_memory_that_is_not_pinned_arrives_through_the_buffers(
    tmp_path: Path, shm_folder: Path, lanes: Lanes
) -> None:
    on_cpu = Decoder.load(write_tiny("opt", tmp_path), CPU, torch.float32)
    with stored_prefix(on_cpu, shm_folder, token_ids(), chunk_tokens=CHUNK) as prefix:
        assert not prefix.tensors.keys[0].is_pinned()
        arrival = Arrival(prefix, Decoder.load(tmp_path, CUDA, torch.float32))
        for split in (0, 75):
            arrival.restore(lanes, split)
            arrival.check(split)


def test_the_gather_kernel_is_compiled_once(stored: StoredPrefix) -> None:
    gatherer = gatherer_of(CUDA)
    assert gatherer is not None, "Triton could not build the kernel: see the log"
    source = stored.tensors.keys[0]
    target = torch.zeros(64, *source.shape[1:], device=CUDA)
    counts = []
    for count in (1, 2, 3, 5, 8, 9):
        gatherer.gather([(source, target)], list(range(count)), list(range(count)))
        [(cache, *_)] = gatherer.kernel.device_caches.values()
        counts.append(len(cache))
    assert counts == [counts[0]] * 6


def test_the_gather_kernel_equals_copies(
    stored: StoredPrefix, model: Decoder, lanes: Lanes
) -> None:
    gatherer = gatherer_of(CUDA)
    assert gatherer is not None, "Triton could not build the kernel: see the log"
    assert gatherer.costs.copy.rate > 1e8
    assert gatherer.costs.kernel.rate > 1e8
    rng = random.Random(0)
    for planes in (stored.tensors.keys, stored.tensors.inputs):
        source = planes[1]
        slots = rng.sample(range(len(source)), 9)
        pages = rng.sample(range(20), 9)
        by_copy = torch.full((20, *source.shape[1:]), 7.0, device=CUDA)
        by_kernel = by_copy.clone()
        copy_runs(source, by_copy, slots, pages)
        gatherer.gather([(source, by_kernel)], slots, pages)
        torch.cuda.synchronize(CUDA)
        assert torch.equal(by_copy, by_kernel)
    # A restore that gathers whatever it may.
    eager = Gatherer(
        CUDA, gatherer.kernel, GatherCosts(copy=Line(1.0, 1e9), kernel=Line(0.0, 1e12))
    )
    assert eager.is_faster([(stored.tensors.keys[0], by_kernel)], 1, [1])
    assert not eager.is_faster([(torch.zeros(4, 64), by_kernel)], 4, range(4)), "pageable memory"
    arrival = Arrival(stored, model, eager)
    arrival.restore(lanes, 75)
    arrival.check(75)


def offload(shape: ModelShape, dtype: DataType, **sizes: int) -> OffloadWorkload:
    values: Any = {"batch": 3, "prompt": 150, "new": 70, **sizes}
    return OffloadWorkload(
        shape.name,
        dtype.value,
        link_rate=None,
        repeats=1,
        device="cuda:0",
        threads=1,
        seed=0,
        **values,
    )


@pytest.mark.parametrize("case", ["opt", "qwen2"])
def test_streamed_decoding_gives_the_resident_tokens(case: str, tmp_path: Path) -> None:
    """And transformers' with its offloaded cache, by the same weights."""
    shape = shape_from_config(
        read_config(write_tiny(case, tmp_path)), name="tiny", data_type=DataType.FLOAT32
    )
    workload = offload(shape, DataType.FLOAT32)
    peer = Peer(shape, 3, CUDA)
    with closing(OffloadHost(model_of(shape, workload, peer), workload)) as host:
        assert host.store.pinning.startswith("pinned")
        host.prefill()
        resident = host.decode(workload.new, Way(residency=Residency.RESIDENT))
        assert resident.tokens == peer.decode(host.prompts, workload.new).tokens
        for split in (0, 64, 100, 150) if host.has_activations else (0,):
            for schedule in (Schedule.PIPELINED, Schedule.COLUMN, Schedule.SERIAL):
                run = host.decode(workload.new, Way(schedule, split_tokens=split))
                assert run.tokens == resident.tokens, (split, schedule)


def test_peak_memory_stays_within_the_budget() -> None:
    shape = BUILT_IN_SHAPES["opt-125m"]
    workload = offload(shape, DataType.BFLOAT16, batch=16, prompt=512, new=16)
    before = torch.cuda.memory_allocated(CUDA)
    with closing(OffloadHost(model_of(shape, workload), workload)) as host:
        host.prefill()
        torch.cuda.reset_peak_memory_stats(CUDA)
        host.decode(workload.new, Way(split_tokens=256))
        peak = torch.cuda.max_memory_allocated(CUDA) - before
        assert host.memory.weight_bytes < peak <= host.memory.budget_bytes + LIBRARY_BYTES
