"""Sizes of graphs, which of them are kept, and the calls that record one; 3 s."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from graph_double import RecorderDouble, span_kernels

from splitpoint.shapes import ArenaLayout, DataType
from worker_service.device.cache import DeviceCache
from worker_service.device.memory import MemoryPlan
from worker_service.device.upload import Upload
from worker_service.graphs import decode_graphs
from worker_service.graphs.decode_graphs import (
    DecodeGraphs,
    GraphKey,
    GraphSlot,
    row_bucket,
    span_bucket,
    span_count,
    spans_by_window,
    table_bytes,
)
from worker_service.graphs.recorder import GraphRecorder
from worker_service.kernels.choice import use_one_order
from worker_service.model.attention_plan import DecodePlan
from worker_service.model.span_attention import SpanView

CPU = torch.device("cpu")
CHUNK = 16


def test_rows_have_few_sizes() -> None:
    sizes = [row_bucket(count) for count in range(1, 600)]
    assert sorted(set(sizes))[:10] == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56]
    assert sizes == sorted(sizes)
    assert all(size >= count for count, size in enumerate(sizes, 1))
    assert all(size <= 1.25 * count for count, size in enumerate(sizes, 1) if count > 32)
    assert len(set(sizes)) < 25


def seen_rows(length: int, window: int | None, chunk: int) -> tuple[list[int], Any]:
    """The chunks of a query at position length - 1 of which it sees a row, and those rows."""
    behind = length - 1 - np.arange(-(-length // chunk) * chunk).reshape(-1, chunk)
    seen = (behind >= 0) & (behind < (window or length))
    chunks = np.flatnonzero(seen.any(axis=1))
    return chunks.tolist(), seen[chunks]


@pytest.mark.parametrize("in_one_order", [False, True])
@pytest.mark.parametrize("chunk", [4, 16, 64, 512])
def test_padded_tables_have_room_and_hold_the_same(
    chunk: int, request: pytest.FixtureRequest, *, in_one_order: bool
) -> None:
    """Also with units for spans: 128 rows of a page, or all of a smaller one."""
    use_one_order(in_one_order)
    request.addfinalizer(lambda: use_one_order(False))
    rng = random.Random(chunk)
    for _ in range(40):
        lengths = [rng.choice([1, 2, 255, 256, 257, rng.randrange(1, 4000)]) for _ in range(5)]
        key = GraphKey(8, span_bucket(span_count(lengths, chunk), 8))
        windows = [None, 1, 2, rng.randrange(1, 2000)]
        padded = spans_by_window(key, windows, chunk)
        block = torch.empty(table_bytes(key, padded, chunk), dtype=torch.uint8)
        upload = Upload(CPU, into=block, pin_memory=False)
        views: list[tuple[int, SpanView, SpanView]] = []
        for _ in range(8):
            upload.table([0] * key.rows)
        for window in sorted(set(windows), key=lambda each: each or 0):
            rows = [seen_rows(length, window, chunk) for length in lengths]
            owners = np.repeat(np.arange(5), [len(chunks) for chunks, _ in rows])
            numbers = np.concatenate([chunks for chunks, _ in rows])
            seen = np.concatenate([each for _, each in rows])
            places = (numbers, owners, numbers * chunk, seen)
            wide = SpanView.of(*places, 8, upload, padded[window])
            views.append((padded[window], wide, SpanView.of(*places, 8, Upload(CPU))))
        upload.send()
        for count, wide, plain in views:
            assert len(wide.owners) == count
            assert torch.equal(wide.firsts, plain.firsts)
            spans = len(plain.owners)
            assert torch.equal(wide.owners[:spans], plain.owners)
            assert torch.equal(wide.starts[: spans + 1], plain.starts)
            # A padding span is empty.
            assert (wide.starts[spans:] == len(plain.units)).all()
            for name in ("units", "lows", "highs"):
                ours, theirs = getattr(wide, name), getattr(plain, name)
                assert torch.equal(ours[: len(theirs)], theirs)


def test_more_spans_than_a_size_has_are_refused() -> None:
    chunks, seen = seen_rows(3000, None, CHUNK)
    owners = np.zeros(len(chunks), dtype=np.int64)
    with pytest.raises(ValueError, match="negative"):
        SpanView.of(np.array(chunks), owners, np.array(chunks) * CHUNK, seen, 1, Upload(CPU), 2)


def test_tables_keep_to_the_memory_they_were_given() -> None:
    upload = Upload(CPU, into=torch.empty(64, dtype=torch.uint8), pin_memory=False)
    first, second = upload.table([1, 2, 3]), upload.table([4], np.int32)
    upload.send()
    assert (first.tolist(), second.tolist()) == ([1, 2, 3], [4])
    assert second.data_ptr() - first.data_ptr() == 32
    with pytest.raises(ValueError, match="64 bytes"):
        upload.table(range(9))


def test_padded_plans_are_not_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tables vary in size, and would move those behind them."""
    monkeypatch.setattr("worker_service.model.attention_plan.library_of", lambda _: object())
    with span_kernels():
        choices: list[dict[int | None, int] | None] = [None, {None: 8}]
        for padded in choices:
            plan = DecodePlan.of_sequences(
                [[0, 1], [2]],
                [20, 3],
                chunk_tokens=CHUNK,
                windows=[None],
                device=CPU,
                padded_spans=padded,
            )
            assert bool(plan.whole) == (padded is None)


# -- which graphs are kept --------------------------------------------------------------------


def graphs_of(recorder: RecorderDouble, most_rows: int = 64) -> DecodeGraphs:
    layout = ArenaLayout(
        model_fingerprint=b"",
        layer_count=1,
        kv_head_count=1,
        head_dim=4,
        hidden_size=4,
        chunk_tokens=CHUNK,
        data_type=DataType.FLOAT32,
        has_activations=False,
    )
    plan = MemoryPlan(1 << 20, 0, 0, 512, 4, 0, graph_bytes=1 << 20)
    return DecodeGraphs(DeviceCache(layout, plan, CPU), [None], recorder, most_rows=most_rows)


def step(graphs: DecodeGraphs, length: int, rows: int = 1) -> tuple[GraphSlot, torch.Tensor]:
    """A step whose result is the sum of its table."""
    slot = graphs.slot([length] * rows)
    assert slot is not None
    table = slot.upload.table(slot.padded([length] * rows, 0))
    slot.upload.send()
    return slot, graphs.run(slot, [table], lambda: table.to(torch.float32).sum())


def test_the_second_step_of_a_size_is_recorded_and_later_ones_are_played_back() -> None:
    recorder = RecorderDouble()
    graphs = graphs_of(recorder)
    results = [step(graphs, length)[1].item() for length in (5, 6, 7, 900)]
    assert results == [5, 6, 7, 900]
    assert recorder.recorded == 1
    assert (graphs.counts.eager, graphs.counts.replayed) == (1, 3)


def test_larger_steps_have_no_slot() -> None:
    graphs = graphs_of(RecorderDouble(), most_rows=3)
    assert graphs.slot([1] * 3) is not None
    assert graphs.slot([1] * 4) is None


def test_the_graph_used_least_recently_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_graphs, "MOST_GRAPHS", 3)
    recorder = RecorderDouble(pool_bytes=10, own_bytes=7)
    graphs = graphs_of(recorder)
    for rows in (1, 2, 4):
        for _ in range(2):
            step(graphs, 5, rows)
    step(graphs, 5, 1)
    for _ in range(2):
        step(graphs, 5, 8)
    assert (graphs.graph_count, recorder.recorded) == (3, 4)
    # The pool keeps what it has; the driver's memory of two rows' graph is free again.
    assert graphs.size_bytes == 4 * 10 + 3 * 7
    # Two rows were used least recently: they are recorded at their fourth further step.
    for expected in (4, 4, 4, 5):
        step(graphs, 5, 2)
        assert recorder.recorded == expected


def test_tables_of_sizes_without_a_graph_are_not_kept_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_graphs, "_MOST_SIZES", 4)
    graphs = graphs_of(RecorderDouble())
    for length in (1000 << power for power in range(8)):
        step(graphs, length)
        assert len(graphs._sizes) <= 4
    assert step(graphs, 5)[1].item() == 5


def test_a_graph_whose_tables_moved_is_not_played_back() -> None:
    graphs = graphs_of(RecorderDouble())
    for _ in range(2):
        slot, _ = step(graphs, 5)
    with pytest.raises(RuntimeError, match="not where its graph reads"):
        graphs.run(slot, [torch.zeros(1)], lambda: torch.zeros(1))


# -- the calls that record one ----------------------------------------------------------------


class CudaDouble:
    """What `GraphRecorder` uses of torch.cuda: streams by name, and memory by count."""

    def __init__(
        self, fails_at: str = "", *, other_thread: int = 0, other_process: int = 0
    ) -> None:
        self.current = "compute"
        self.log: list[str] = []
        self.reserved, self.free = 100, 1000
        self.cached = 30
        self.pooled = 0
        # What another thread, and another process, take while this one records.
        self.other_thread, self.other_process = other_thread, other_process
        self.fails_at = fails_at
        self.streams = 0

    def Stream(self, device: torch.device) -> Any:
        self.streams += 1
        return SimpleNamespace(
            cuda_stream=self.streams,
            name="side",
            wait_stream=lambda other: self.log.append(f"side waits {other.name}"),
        )

    def current_stream(self, device: torch.device) -> Any:
        return SimpleNamespace(
            name=self.current,
            wait_stream=lambda other: self.log.append(f"compute waits {other.name}"),
        )

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    def graph_pool_handle(self) -> str:
        return "pool"

    def synchronize(self, device: torch.device) -> None:
        self.log.append("synchronize")

    def empty_cache(self) -> None:
        self.reserved, self.free, self.cached = (
            self.reserved - self.cached,
            self.free + self.cached,
            0,
        )

    def memory_reserved(self, device: torch.device) -> int:
        return self.reserved

    def memory_snapshot(self, pool: str) -> list[dict[str, int]]:
        assert pool == "pool"
        return [{"total_size": 10}, {"total_size": self.pooled - 10}] if self.pooled else []

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return self.free, 2000

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(replay=lambda: self.log.append(f"replay in {self.current}"))

    def graph(self, graph: Any, **options: Any) -> Any:
        assert options.pop("stream").name == "side"
        assert options == {"pool": "pool", "capture_error_mode": "thread_local"}
        return _Recording(self)


class _Recording:
    """As torch.cuda.graph: if the end of a recording fails, its stream stays the current one."""

    def __init__(self, cuda: CudaDouble) -> None:
        self._cuda = cuda

    def __enter__(self) -> None:
        self._cuda.empty_cache()
        self._cuda.current = "side"

    def __exit__(self, *_: object) -> None:
        if self._cuda.fails_at:
            raise RuntimeError(self._cuda.fails_at)
        self._cuda.current = "compute"
        self._cuda.pooled += 40
        self._cuda.reserved += 40 + self._cuda.other_thread
        self._cuda.free -= 55 + self._cuda.other_thread + self._cuda.other_process


def call_of(cuda: CudaDouble) -> Callable[[], torch.Tensor]:
    def call() -> torch.Tensor:
        cuda.log.append(f"call in {cuda.current}")
        return torch.ones(1)

    return call


def test_a_call_runs_once_in_the_stream_that_then_records_it() -> None:
    cuda = CudaDouble()
    recording = GraphRecorder(CPU, cuda).record(call_of(cuda))
    assert cuda.log == [
        "side waits compute",
        "call in side",
        "compute waits side",
        "synchronize",
        "call in side",
    ]
    # Memory that was only cached before is not the graph's.
    assert (recording.pool_bytes, recording.own_bytes) == (40, 15)
    recording.replay()
    assert cuda.log[-1] == "replay in compute"


def test_what_others_take_meanwhile_is_not_the_graphs() -> None:
    """Of other processes only the driver's part can have something: its median is counted."""
    found = [
        GraphRecorder(CPU, cuda).record(call_of(cuda))
        for cuda in (CudaDouble(other_thread=500), CudaDouble(other_process=300))
    ]
    assert [each.pool_bytes for each in found] == [40, 40]
    assert [each.own_bytes for each in found] == [15, 315]


def test_one_allocation_of_another_process_does_not_end_graphs() -> None:
    recorder = RecorderDouble(pool_bytes=10, own_bytes=7)
    graphs = graphs_of(recorder)
    for rows in (1, 2):
        for _ in range(2):
            step(graphs, 5, rows)
    recorder.own_bytes = 1 << 40
    for _ in range(2):
        step(graphs, 5, 4)
    assert (graphs.graph_count, graphs.is_full) == (3, False)
    assert graphs.size_bytes == 3 * 10 + 3 * 7


def test_a_recording_that_did_not_fit_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the first one, with which nothing can be compared; and ever more rarely."""
    monkeypatch.setattr(decode_graphs, "_RETRY_STEPS", 3)
    recorder = RecorderDouble(own_bytes=1 << 40)
    graphs = graphs_of(recorder)
    recorded = []
    for _ in range(12):
        step(graphs, 5)
        recorded.append(recorder.recorded)
    assert recorded == [0, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3]
    assert (graphs.graph_count, graphs.is_full) == (0, True)
    # What was taken meanwhile is free again, and counts no more.
    recorder.own_bytes = 7
    for _ in range(12):
        step(graphs, 5)
    assert (graphs.graph_count, graphs.is_full, recorder.recorded) == (1, False, 4)
    assert graphs.size_bytes == 7


def test_after_a_failure_the_stream_is_that_of_before() -> None:
    cuda = CudaDouble(fails_at="invalid capture")
    with pytest.raises(RuntimeError, match="invalid capture"):
        GraphRecorder(CPU, cuda).record(call_of(cuda))
    assert cuda.current == "compute"


def test_the_reason_is_what_could_not_be_recorded() -> None:
    """The error of the end of a recording hides the one that made it fail."""
    recorder = RecorderDouble()
    try:
        try:
            raise ValueError("a page table on the host")
        finally:
            raise RuntimeError("invalid capture")
    except RuntimeError as error:
        recorder.error = error
    graphs = graphs_of(recorder)
    for _ in range(2):
        step(graphs, 5)
    assert graphs.obstacle is not None
    assert "a page table on the host" in graphs.obstacle
