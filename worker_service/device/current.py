"""The device on which a thread's kernels run."""

from __future__ import annotations

import torch


def make_current(device: torch.device) -> None:
    """Make a GPU the current one of this thread; nothing for a CPU.

    torch's operators go where their tensors are, but Triton launches on the thread's device.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
