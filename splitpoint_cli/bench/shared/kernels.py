"""The kernels of benchmarks: those of a worker on the same host."""

from __future__ import annotations

from collections.abc import Collection

import torch

from splitpoint.options.cpu_kernels import AUTO
from splitpoint.shapes import DataType
from worker_service.device.cache import TORCH_TYPES
from worker_service.profiling.calibration import use_kernels


def use_worker_kernels(
    device: torch.device,
    data_type: DataType,
    head_dims: Collection[int],
    *,
    wish: str = AUTO,
    is_invariant: bool = False,
) -> str:
    """Choose as a worker does, before a model is made; return the choice for the report.

    `wish`: the worker's `--cpu-kernels`; `is_invariant`: its numerics must be.
    Empty on a GPU, which has other kernels.
    """
    if device.type != "cpu":
        return ""
    return str(
        use_kernels(TORCH_TYPES[data_type], wish, head_dims=head_dims, is_invariant=is_invariant)
    )
