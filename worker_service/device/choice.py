"""The device of a worker, chosen by its name."""

from __future__ import annotations

import torch

from splitpoint.config import counted
from splitpoint.errors import InvalidArgument


def choose_device(text: str) -> torch.device:
    """Return the device of `cpu`, `cuda`, `cuda:N` or `auto` (a GPU if there is one).

    Raises InvalidArgument.
    """
    if text == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise InvalidArgument(f"{text!r} is not a device", field="device") from error
    if device.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"device {text!r} is neither cpu nor cuda", field="device")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise InvalidArgument(
                f"device {text!r} does not exist: PyTorch sees {counted(count, 'CUDA device')}",
                field="device",
            )
        return torch.device("cuda", device.index or 0)
    return device


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} {torch.cuda.get_device_name(device)}"
    threads = torch.get_num_threads()
    return f"cpu ({threads} thread{'s' if threads > 1 else ''})"
