"""Records the device's work of a call, and plays it back: `torch.cuda.CUDAGraph`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from worker_service.hardware.streams import StreamUse, stream_for


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """What a call issued to the device.

    Attributes:
        replay: issues it again in the current stream: it reads what the same memory now holds.
        result: what the call returned; each replay writes it anew.
        pool_bytes: device memory by which it made the recorder's pool grow.
        own_bytes: the driver's memory for it, which ends with the recording. Measured by what is
            free on the card, so what other processes took meanwhile is in it.
    """

    replay: Callable[[], None]
    result: torch.Tensor
    pool_bytes: int
    own_bytes: int


class Recorder(Protocol):
    """Makes recordings on one device."""

    def record(self, call: Callable[[], torch.Tensor]) -> Recording:
        """Record what `call` issues. It may run any number of times meanwhile.

        Raises whatever the device says to work that cannot be recorded.
        """


class GraphRecorder:
    """Records CUDA graphs that share one pool of memory. For one thread.

    Graphs may share a pool if they never run at once and nothing but their results is read
    after them: they are played back in one stream, and every result keeps its own memory.
    `cuda` is torch.cuda, or in tests a double of it.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        # Recording is forbidden in the default stream.
        self._stream = stream_for(StreamUse.RECORD, device, cuda)
        self._pool = cuda.graph_pool_handle()

    def record(self, call: Callable[[], torch.Tensor]) -> Recording:
        """Run the call once in the stream that records, and then record it.

        The first run compiles and loads its kernels, and gives that stream the workspace of
        its products: neither may happen while a stream records.
        """
        cuda = self._cuda
        compute = cuda.current_stream(self._device)
        self._stream.wait_stream(compute)
        with cuda.stream(self._stream):
            call()
        compute.wait_stream(self._stream)
        # What `cuda.graph` gives back before it begins is not the graph's.
        cuda.synchronize(self._device)
        cuda.empty_cache()
        pool, reserved, free = self._pool_bytes(), self._reserved_bytes(), self._free_bytes()
        graph = cuda.CUDAGraph()
        # `cuda.graph` leaves its stream current if the end of the recording fails. Other threads
        # copy, allocate and ask for events meanwhile: only this one's work is recorded.
        with (
            cuda.stream(compute),
            cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ),
        ):
            result = call()
        # The driver's memory for a graph is outside of torch's, which other threads use, too.
        taken = max(0, free - self._free_bytes() - (self._reserved_bytes() - reserved))
        return Recording(graph.replay, result, self._pool_bytes() - pool, taken)

    def _pool_bytes(self) -> int:
        """Return what the graphs' pool has taken. No other allocation is in it."""
        return sum(segment["total_size"] for segment in self._cuda.memory_snapshot(self._pool))

    def _reserved_bytes(self) -> int:
        return int(self._cuda.memory_reserved(self._device))

    def _free_bytes(self) -> int:
        free, _ = self._cuda.mem_get_info(self._device)
        return int(free)
