"""The kernels of benchmarks: those of a worker on the same host."""

from __future__ import annotations

from collections.abc import Collection

import torch

from splitpoint.options.cpu_kernels import AUTO
from splitpoint.options.worker import NUMERICS
from splitpoint.shapes import DataType, Numerics
from worker_service.device.cache import TORCH_TYPES
from worker_service.kernels.gpu_order import use_one_order
from worker_service.profiling.calibration import prefers_one_order, use_kernels


def use_worker_kernels(
    device: torch.device,
    data_type: DataType,
    head_dims: Collection[int],
    *,
    wish: str = AUTO,
    numerics: str = NUMERICS.default,
) -> str:
    """Choose as a worker does, before a model is made; return the choice for the report.

    `wish`: the worker's `--cpu-kernels`; `numerics`: its `--numerics`.
    Empty on a GPU, unless its kernels are those of one order.
    """
    if device.type != "cpu":
        is_invariant = numerics == Numerics.INVARIANT
        use_one_order(is_invariant)
        return "kernels of one order" if is_invariant else ""
    is_invariant = prefers_one_order(numerics)
    return str(
        use_kernels(TORCH_TYPES[data_type], wish, head_dims=head_dims, is_invariant=is_invariant)
    )
