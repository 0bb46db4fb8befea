"""The device on which a thread's kernels run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch


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
