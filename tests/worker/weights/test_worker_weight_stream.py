"""Weights that take turns in slots: right bytes for every reader, in whatever order lanes run."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from stream_double import StreamDouble
from test_worker_pinning import Driver

from splitpoint.planning.schedule import Lane, RestoreWork, Schedule, TaskKind, restore_tasks
from splitpoint.planning.weight_schedule import LAYER_PIECES, WeightOrder, WeightPiece
from worker_service.kernels.choice import Layout
from worker_service.lanes.cpu import ThreadLanes
from worker_service.lanes.cuda import StreamLanes
from worker_service.lanes.lanes import Event, Lanes, SerialLanes
from worker_service.lanes.work import Work
from worker_service.model.linear import Linear
from worker_service.weights.host import HostUnit, Slot, host_memory
from worker_service.weights.lock import WeightLock
from worker_service.weights.matrices import MatrixShape
from worker_service.weights.stream import LentMatrix, WeightStream

CPU = torch.device("cpu")
# oneDNN has no layout of its own for it: matrices are plain, and one value says whose.
DTYPE = torch.float64
SHAPES = [
    MatrixShape(piece.name, piece, ((piece.name, 2),), in_features=3) for piece in LAYER_PIECES
]


class DeferredLanes(StreamLanes):
    """On the double of CUDA's streams: copies, too, happen whenever their stream's turn is."""

    def __init__(self, seed: int) -> None:
        self.double = StreamDouble(random.Random(seed))
        super().__init__(CPU, self.double)

    def run(self, lane: Lane, work: Work, after: Sequence[Event] = ()) -> Event:
        later = replace(work, call=lambda: self.double.launch(work.call, 1e-3))
        return super().run(lane, later, after)


def value_of(key: int, piece: WeightPiece) -> float:
    return 10.0 * key + LAYER_PIECES.index(piece)


def make_stream(
    lanes: Lanes, keys: Sequence[int], order: WeightOrder = WeightOrder.FINE, slots: int = 2
) -> WeightStream:
    def unit(key: int) -> HostUnit:
        memory = host_memory(4 * 48)
        parts = dict(zip(LAYER_PIECES, torch.split(memory, 48), strict=True))
        for piece, part in parts.items():
            part.view(DTYPE).fill_(value_of(key, piece))
        return HostUnit({piece: [part] for piece, part in parts.items()}, memory)

    stream = WeightStream(
        {key: unit(key) for key in keys},
        [Slot.empty(SHAPES, CPU, DTYPE) for _ in range(slots)],
        order.portions,
    )
    stream.lanes = lanes
    return stream


class Reader:
    """Reads as compute does: later, from the memory that it was given now."""

    def __init__(self, stream: WeightStream, lanes: Lanes) -> None:
        self.stream = stream
        self.lanes = lanes
        self.wrong: list[tuple[int, WeightPiece, torch.Tensor]] = []
        self.count = 0

    def read(self, key: int, pieces: Sequence[WeightPiece]) -> None:
        for piece in pieces:
            weight = self.stream.matrix(key, piece.name, piece)

            def look(weight: torch.Tensor = weight, piece: WeightPiece = piece) -> None:
                self.count += 1
                if not (weight == value_of(key, piece)).all():
                    self.wrong.append((key, piece, weight.clone()))

            if isinstance(self.lanes, DeferredLanes):
                self.lanes.double.launch(look, 1e-3)
            else:
                look()


@pytest.mark.parametrize("order", WeightOrder)
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_every_reader_finds_its_own_weights_in_any_order_of_the_streams(
    order: WeightOrder, slots: int
) -> None:
    """Passes, passes that break off, restores, and waits now and then."""
    read = 0
    for seed in range(15):
        rng = random.Random(seed)
        lanes = DeferredLanes(seed)
        keys = sorted(rng.sample(range(12), rng.randint(1, 6)))
        stream = make_stream(lanes, keys, order, min(slots, len(keys)))
        reader = Reader(stream, lanes)
        for _ in range(6):
            stream.look_ahead()
            upto = rng.choice([len(keys), rng.randint(0, len(keys))])
            for key in keys[:upto]:
                with stream.reading(key):
                    reader.read(key, LAYER_PIECES)
            what = rng.random()
            if what < 0.3:
                restore(stream, lanes, reader, rng)
            elif what < 0.6:
                spans = lanes.collect()
                assert all(span.end >= span.start for span in spans)
            elif what < 0.8:
                lanes.finish()
        lanes.finish()
        lanes.record_event().wait()
        assert reader.wrong == []
        read += reader.count
        lanes.close()
    assert read > 300


def restore(stream: WeightStream, lanes: Lanes, reader: Reader, rng: random.Random) -> None:
    """Restores load W_K and W_V as their task lists say."""
    layers = max(stream.keys) + 1
    work = RestoreWork(
        layers,
        0,
        rng.randint(0, 6),
        6,
        1,
        rng.randint(1, 3),
        host_layers=frozenset(stream.keys),
        weight_slots=stream.slot_count,
    )
    tasks = restore_tasks(work, rng.choice(list(Schedule)))
    lanes.finish()
    slots: dict[int, int] = {}
    steps = []
    for task in tasks:
        call = Work(task.kind.value, lambda: None)
        if task.kind is TaskKind.WEIGHTS:
            assert task.slot is not None
            slots[task.layer] = task.slot
            call = stream.piece_work(task.layer, WeightPiece.KEY_VALUE, task.slot)
        elif task.kind is TaskKind.REBUILD and task.layer in slots:
            call = Work("rebuild", lent_read(stream, reader, task.layer, slots[task.layer]))
        steps.append((task.lane, call, task.after))
    events: list[Event] = []
    for lane, call, after in steps:
        give = lanes.run
        if isinstance(lanes, DeferredLanes) and lane is Lane.COMPUTE:
            # Its products are given at once, as a worker gives them; what they read is read later.
            give = super(DeferredLanes, lanes).run
        events.append(give(lane, call, [events[index] for index in after]))
    lanes.finish()


def lent_read(stream: WeightStream, reader: Reader, key: int, slot: int):  # type: ignore[no-untyped-def]
    def call() -> None:
        with stream.lent(key, WeightPiece.KEY_VALUE, slot):
            reader.read(key, [WeightPiece.KEY_VALUE])

    return call


@pytest.mark.parametrize("make", [ThreadLanes, SerialLanes])
def test_threads_and_the_serial_twin_find_them_too(make: type[Lanes]) -> None:
    lanes = make(CPU)
    stream = make_stream(lanes, range(5))
    reader, rng = Reader(stream, lanes), random.Random(1)
    for _ in range(20):
        for key in stream.keys[: rng.randint(1, 5)]:
            with stream.reading(key):
                reader.read(key, LAYER_PIECES)
        restore(stream, lanes, reader, rng)
    assert reader.wrong == []
    assert reader.count > 100
    lanes.close()


def test_what_is_there_does_not_come_again() -> None:
    """As many units as slots are loaded once; more are loaded in each pass."""
    lanes = SerialLanes(CPU)
    few, many = make_stream(lanes, [3, 4]), make_stream(lanes, [0, 1, 2])
    for stream, wanted in ((few, 2), (many, 12)):
        for _ in range(4):
            for key in stream.keys:
                with stream.reading(key):
                    pass
        came = [span for span in lanes.finish() if span.name == "W_K W_V"]
        # Behind the last pass the next one begins.
        assert len(came) - wanted in ((0,) if stream is few else (2,))
    assert few.bytes_of() == 2 * 4 * 48
    assert few.bytes_of(WeightPiece.QUERY) == 2 * 48
    assert few.slot_bytes == 2 * 4 * 48
    lanes.close()


def test_a_linear_layer_multiplies_with_lent_weights() -> None:
    lanes = ThreadLanes(CPU)
    stream = make_stream(lanes, range(4))
    linear = Linear(LentMatrix(stream, 2, "QUERY", WeightPiece.QUERY, 2, Layout.PLAIN))
    rows = torch.ones((1, 3), dtype=DTYPE)
    with pytest.raises(RuntimeError, match="weights 2 are read out of turn"):
        linear(rows)
    with stream.reading(2):
        assert linear(rows).tolist() == [[63.0, 63.0]]
    lanes.close()


def test_weights_are_locked_whole_pages_at_a_time_and_unlocked() -> None:
    memory = [host_memory(size) for size in (4096, 5000, 12)]
    driver = Driver()
    lock = WeightLock(driver, memory)
    lock.wait()
    assert driver.locked == {
        each.data_ptr(): size for each, size in zip(memory, (4096, 8192, 4096), strict=True)
    }
    assert lock.locked_bytes == 4096 * 4
    lock.close()
    assert (driver.locked, lock.locked_bytes) == ({}, 0)
    # What the driver refuses stays as it is; what it took before is given back.
    driver = Driver(room=4096)
    lock = WeightLock(driver, memory)
    lock.wait()
    assert lock.locked_bytes == 4096
    lock.close()
    assert driver.locked == {}


# -- lanes --------------------------------------------------------------------------------


def test_collecting_waits_for_no_copy_and_says_what_failed() -> None:
    lanes = ThreadLanes(CPU)
    may_end = threading.Event()
    lanes.run(Lane.LINK_IN, Work("done", lambda: None)).wait()
    pending = lanes.run(Lane.WEIGHTS_IN, Work("late", lambda: assert_true(may_end.wait(30))))
    lanes.run(Lane.COMPUTE, Work("product", lambda: None))
    assert sorted(span.name for span in lanes.collect()) == ["done", "product"]
    assert lanes.collect() == []
    may_end.set()
    lanes.wait_event(pending)
    assert [span.name for span in lanes.finish()] == ["late"]
    failed = lanes.run(Lane.WEIGHTS_IN, Work("fails", lambda: assert_true(False)))
    with pytest.raises(AssertionError):
        lanes.wait_event(failed)
    with pytest.raises(AssertionError):
        lanes.collect()
    assert lanes.finish() == []
    lanes.close()


def assert_true(value: bool) -> None:
    assert value
