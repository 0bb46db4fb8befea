"""The CUDA streams that a process keeps, one for each purpose; and the device of a thread.

PyTorch hands out 32 streams of a GPU in turn, so every 33rd is the first one again. Copies on a
stream that records a graph are recorded instead of executed, and two directions of the link on one
stream wait for each other. So all streams are taken at once, and nothing else takes any.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch


class StreamUse(enum.Enum):
    """What a stream is for. LINK_IN and WEIGHTS_IN are the lanes of these names.

    LINK_OUT copies chunks that are written back, DECODE decodes encoded chunks, RECORD records
    graphs, PROBE checks copies from pinned memory, and CALIBRATE times gathering.
    """

    LINK_IN = enum.auto()
    WEIGHTS_IN = enum.auto()
    LINK_OUT = enum.auto()
    DECODE = enum.auto()
    RECORD = enum.auto()
    PROBE = enum.auto()
    CALIBRATE = enum.auto()


_taking = threading.Lock()
_taken: dict[tuple[Any, int], Mapping[StreamUse, Any]] = {}


def stream_for(use: StreamUse, device: torch.device, cuda: Any = torch.cuda) -> Any:
    """Return the process's stream of this use on a GPU. The first call takes those of all uses.

    `cuda` is torch.cuda, or in tests a double of its streams.

    Raises RuntimeError if two of them are the same.
    """
    index = device.index or 0
    with _taking:
        if (cuda, index) not in _taken:
            _taken[cuda, index] = _all_of(device, cuda)
        return _taken[cuda, index][use]


def _all_of(device: torch.device, cuda: Any) -> Mapping[StreamUse, Any]:
    streams = {use: cuda.Stream(device) for use in StreamUse}
    if len({stream.cuda_stream for stream in streams.values()}) < len(streams):
        raise RuntimeError(f"PyTorch gave one CUDA stream of {device} twice")
    return streams


# -- the device of a thread -----------------------------------------------------------


def make_current(device: torch.device, cuda: Any = torch.cuda) -> None:
    """Make a GPU the current one of this thread; nothing for a CPU.

    torch's operators go where their tensors are, but Triton launches on the thread's device.
    `cuda` is torch.cuda, or in tests a double of it.
    """
    if device.type == "cuda":
        cuda.set_device(device)


def device_thread(device: torch.device, name: str, cuda: Any = torch.cuda) -> ThreadPoolExecutor:
    """Return an executor of one thread, whose current device is this one.

    A thread begins with GPU 0. Each `torch.cuda.stream` block of another GPU would end with
    making GPU 0 current again, for which the driver makes a context of some 0.5 GB there.
    """
    return ThreadPoolExecutor(
        1, thread_name_prefix=name, initializer=partial(make_current, device, cuda)
    )
