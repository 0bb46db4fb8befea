"""Streams and threads of a GPU: no two purposes share a stream, and no thread strays to GPU 0."""

from __future__ import annotations

import ast
import random
from pathlib import Path

import pytest
import torch
from stream_double import POOLED_STREAMS, Stream, StreamDouble

from splitpoint.planning.schedule import Lane
from worker_service.device.pinning import probe_copies
from worker_service.hardware.streams import StreamUse, device_thread, make_current, stream_for
from worker_service.lanes.cuda import StreamLanes
from worker_service.lanes.groups import Group, Piece
from worker_service.lanes.work import Work

ROOT = Path(__file__).resolve().parents[3]
CPU, CUDA = torch.device("cpu"), torch.device("cuda:1")


def double() -> StreamDouble:
    return StreamDouble(random.Random(0))


@pytest.mark.parametrize("pieces", [27, 28, 30, 31, 60])
def test_no_purposes_share_a_stream_however_many_pieces_are_pinned(pieces: int) -> None:
    """The probe of each piece took a stream: after 28 write-back's was the lane's again."""
    cuda = double()
    lanes = StreamLanes(CPU, cuda)
    source = torch.arange(8.0)
    for _ in range(pieces):
        probe_copies(source, CPU, cuda)
    handles = [stream_for(use, CPU, cuda).cuda_stream for use in StreamUse]
    assert len(set(handles)) == len(StreamUse) < POOLED_STREAMS
    # The lane's stream is that of its use, also for what asks later.
    seen: list[Stream] = []
    lanes.run(Lane.LINK_IN, Work("copy", lambda: seen.append(cuda.current)))
    assert seen == [stream_for(StreamUse.LINK_IN, CPU, cuda)]
    lanes.close()


def test_streams_of_two_devices_are_not_the_same() -> None:
    cuda = double()
    first, second = (
        stream_for(StreamUse.RECORD, torch.device("cuda", index), cuda) for index in (0, 1)
    )
    assert first is not second
    assert first is stream_for(StreamUse.RECORD, torch.device("cuda"), cuda)


def test_a_pool_that_gives_one_stream_twice_is_refused() -> None:
    class Small(StreamDouble):
        def Stream(self, device: torch.device) -> Stream:
            return self.default

    with pytest.raises(RuntimeError, match="one CUDA stream of cuda:1 twice"):
        stream_for(StreamUse.LINK_IN, CUDA, Small(random.Random(0)))


def test_nothing_else_takes_a_stream_of_the_pool() -> None:
    """The 33rd that anything took would be the first again."""
    takers = [
        str(path.relative_to(ROOT))
        for folder in ("worker_service", "splitpoint_cli", "splitpoint_offline", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("cuda.Stream")
    ]
    assert takers == ["worker_service/hardware/streams.py"]


def test_a_thread_of_a_device_begins_with_it() -> None:
    cuda = double()
    side = stream_for(StreamUse.LINK_OUT, CUDA, cuda)

    def copies() -> None:
        with cuda.stream(side):
            pass

    thread = device_thread(CUDA, "copies", cuda)
    thread.submit(copies).result()
    assert cuda.contexts == {1}
    thread.shutdown()


def test_the_threads_of_lanes_make_no_context_on_the_first_device() -> None:
    cuda = double()
    make_current(CUDA, cuda)
    lanes = StreamLanes(CUDA, cuda)
    left, done = list(range(4)), list[int]()

    def work(number: int) -> Work:
        return Work("piece", lambda: cuda.launch(lambda: done.append(number), 1.0))

    def ended() -> None:
        return

    group = Group(lambda: Piece(work(left.pop()), ended) if left else None)
    lanes.attach(group)
    for number, lane in enumerate((Lane.COMPUTE, Lane.WEIGHTS_IN)):
        lanes.run_piece(lane, group, Piece(work(10 + number), ended))
    with group.changed:
        assert group.changed.wait_for(lambda: len(done) == 6, 30)
    group.wait_quiet()
    lanes.close()
    assert cuda.contexts == {1}
