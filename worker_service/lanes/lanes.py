"""Chooses the lanes of a device, and is the module to import lanes from.

Lanes are ordered queues of work that run side by side: CUDA streams on a GPU, threads on
a CPU. Compute runs in the caller's own stream or thread. Events order the work of
different lanes; nothing stops the whole device. `SerialLanes` is the serial twin: the
same calls, each done before the next.
"""

from __future__ import annotations

import torch

from splitpoint.errors import InvalidArgument
from worker_service.lanes.base import (
    EmulatedLink,
    Event,
    Lanes,
    Reached,
    SerialLanes,
    Source,
    Step,
    Work,
)
from worker_service.lanes.cpu import PRODUCTS_AHEAD, ThreadLanes, passed
from worker_service.lanes.cuda import StreamLanes

__all__ = [
    "PRODUCTS_AHEAD",
    "EmulatedLink",
    "Event",
    "Lanes",
    "Reached",
    "SerialLanes",
    "Source",
    "Step",
    "StreamLanes",
    "ThreadLanes",
    "Work",
    "lanes_of",
    "passed",
]


def lanes_of(
    device: torch.device, *, overlapped: bool = True, link: EmulatedLink | None = None
) -> Lanes:
    """Return a worker's lanes; `overlapped=False` gives the serial twin.

    Raises InvalidArgument for an emulated link on a GPU.
    """
    if not overlapped:
        return SerialLanes(device, link)
    if device.type == "cuda":
        if link is not None:
            raise InvalidArgument("a link rate can only be emulated on a CPU", field="link_rate")
        return StreamLanes(device)
    return ThreadLanes(device, link)
