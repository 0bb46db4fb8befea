"""Lanes: ordered queues of work that run side by side on one device.

On a GPU a lane is a CUDA stream, on a CPU a thread; compute is the caller's own
stream or thread. What must wait for what is said with events, never by stopping the
whole device. `SerialLanes` is the serial twin: the same calls, each carried out
before the next. This module chooses among them, and is what others import.
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
    """The lanes a worker uses; `overlapped=False` is the serial twin.

    Raises InvalidArgument for an emulated link on a GPU.
    """
    if not overlapped:
        return SerialLanes(device, link)
    if device.type == "cuda":
        if link is not None:
            raise InvalidArgument("a link rate can only be emulated on a CPU", field="link_rate")
        return StreamLanes(device)
    return ThreadLanes(device, link)
