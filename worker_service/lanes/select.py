"""Chooses the lanes of a device."""

from __future__ import annotations

import torch

from splitpoint.errors import InvalidArgument
from worker_service.lanes.cpu import ThreadLanes
from worker_service.lanes.cuda import StreamLanes
from worker_service.lanes.lanes import EmulatedLink, Lanes, SerialLanes


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
