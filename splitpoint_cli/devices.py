"""Devices of this host for workers, found without loading a driver library or torch."""

from __future__ import annotations

import os
from pathlib import Path

from splitpoint.errors import InvalidArgument
from splitpoint.host.memory import available_cores
from splitpoint.host.openmp import spin_count
from splitpoint.host.processor import instruction_sets


def choose_devices(device: str, workers: int | None) -> tuple[str, ...]:
    """Return a device for each worker: GPUs in turn (cuda:0, cuda:1, ...), or cpu for all.

    Without a count there is one worker per GPU, or one CPU worker.
    """
    if workers is not None and workers < 1:
        raise InvalidArgument("at least one worker is needed", field="workers")
    gpus = visible_gpu_count()
    if device == "auto":
        device = "cuda" if gpus and _torch_has_cuda() else "cpu"
    if device == "cpu":
        return ("cpu",) * (workers or 1)
    if device == "cuda":
        if not gpus:
            raise InvalidArgument("there is no CUDA device here", field="device")
        return tuple(f"cuda:{i % gpus}" for i in range(workers or gpus))
    raise InvalidArgument(f"device {device!r} is not one of auto, cpu, cuda", field="device")


def visible_gpu_count() -> int:
    """Return the number of GPUs that this process may use."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([part for part in chosen.split(",") if part.strip() not in ("", "-1")])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _torch_has_cuda() -> bool:
    from importlib import metadata  # slow to load, and rarely needed

    # CPU builds say so in their version: "2.13.0+cpu".
    return not metadata.version("torch").endswith("+cpu")


def default_threads(devices: tuple[str, ...], device: str) -> int | None:
    """Return the threads of one CPU worker, a share of the cores; None for a GPU worker."""
    if device != "cpu":
        return None
    return max(1, available_cores() // devices.count("cpu"))


def worker_spin_count(threads: int, workers: int) -> str:
    """Return how often threads of CPU workers spin before they sleep (openmp.py)."""
    return spin_count(
        threads=threads,
        workers=workers,
        cores=available_cores(),
        flags=instruction_sets(),
    )
