"""Devices of this host for workers, found without loading torch in this process."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from splitpoint.errors import InvalidArgument
from splitpoint.host.memory import available_cores, memory_facts
from splitpoint.host.processor import instruction_sets, spin_count
from splitpoint.options.worker import CPU_MEMORY_SHARE, GPU_MEMORY_SHARE
from splitpoint_cli.checks.gpu import Driver, FreeMemory, ask_free_memory, read_driver

# The driver's own memory for each process on a GPU.
_CONTEXT_BYTES = 512 << 20
_VISIBLE = "CUDA_VISIBLE_DEVICES"


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


def cpu_memory(weight_bytes: int, arena_bytes: int) -> int:
    """Return the bytes of device memory for each CPU worker of a stack.

    They are measured once: a worker that starts later or again would find other memory free.

    Args:
        weight_bytes: weights of one worker.
        arena_bytes: what the stack's arena will take of the memory that is free now.
    """
    usable = max(0, memory_facts().usable_bytes - arena_bytes)
    return weight_bytes + int(CPU_MEMORY_SHARE * usable)


def gpu_memory_shares(
    devices: Sequence[str], ask: Callable[[], FreeMemory] = ask_free_memory
) -> tuple[int | None, ...]:
    """Return the bytes of device memory for each worker; None: it has its device for itself.

    Workers start at once: of a GPU that several use, each would take what is free before any
    other has loaded. `ask` says what is free; it is not asked if no GPU is shared.

    Raises InvalidArgument if that cannot be found out.
    """
    counts = Counter(devices)
    if all(count == 1 for count in counts.values()):
        return (None,) * len(devices)
    found = ask()
    if found.error:
        raise InvalidArgument(
            f"several workers share a GPU, and its free memory is unknown ({found.error}); "
            "give each its part by --device-memory",
            field="device_memory",
        )

    def share(device: str) -> int | None:
        count = counts[device]
        if count < 2:
            return None
        free = found.bytes_of[int(device.removeprefix("cuda:"))] - (count - 1) * _CONTEXT_BYTES
        return max(0, int(GPU_MEMORY_SHARE * free) // count)

    return tuple(share(device) for device in devices)


def visible_gpu_count(
    folder: Path = Path("/dev"), driver: Callable[[], Driver] = read_driver
) -> int:
    """Return the number of GPUs that this process may use.

    WSL2 has one device file for all GPUs of any vendor; there the driver is asked.
    """
    chosen = _chosen_gpus()
    if chosen is not None:
        return len(chosen)
    count = len(list(folder.glob("nvidia[0-9]*")))
    return count or (len(driver().gpus) if (folder / "dxg").exists() else 0)


def _chosen_gpus() -> list[str] | None:
    """Return the names in CUDA_VISIBLE_DEVICES. None if it is not set: all GPUs are visible."""
    chosen = os.environ.get(_VISIBLE)
    if chosen is None:
        return None
    return [name for part in chosen.split(",") if (name := part.strip()) not in ("", "-1")]


def alone_visible(device: str) -> tuple[str, dict[str, str]]:
    """Return a device's name in a process that sees no other GPU, and its environment.

    CUDA makes a context of some 0.5 GB on the first GPU for each process that sees it, also if it
    computes on another one.
    """
    if device == "cpu":
        return device, {}
    index, chosen = int(device.removeprefix("cuda:")), _chosen_gpus()
    return "cuda:0", {_VISIBLE: str(index) if chosen is None else chosen[index]}


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
    """Return how often threads of CPU workers spin before they sleep."""
    return spin_count(
        threads=threads,
        workers=workers,
        cores=available_cores(),
        flags=instruction_sets(),
    )
