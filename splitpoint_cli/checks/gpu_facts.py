"""Facts about this host's GPUs from the driver, the kernel and torch.

`checks.gpu` judges them. The driver is asked through NVML, torch in a process of its own,
since loading it takes seconds.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from splitpoint_cli.checks.finding import Places, read_text

_NVIDIA = "0x10de"
_DISPLAY = "0x03"
_TORCH_SECONDS = 60.0
_ASK_FREE = (
    "import json, torch; print(json.dumps([torch.cuda.mem_get_info(index)[0] "
    "for index in range(torch.cuda.device_count())]))"
)
_ASK_TORCH = (
    "import json, torch; print(json.dumps({'version': torch.__version__, "
    "'cuda': torch.version.cuda, 'count': torch.cuda.device_count()}))"
)


@dataclass(frozen=True, slots=True)
class Link:
    """PCIe generation and lanes, now and at most; 0 if unknown."""

    generation: int
    most_generation: int
    lanes: int
    most_lanes: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; None for facts that its driver does not know, such as memory shared with the CPU."""

    index: int
    name: str
    memory_bytes: int | None
    link: Link | None


@dataclass(frozen=True, slots=True)
class Driver:
    """The driver; `error` says why it does not answer, and is empty if it does."""

    version: str = ""
    cuda_version: str = ""
    gpus: tuple[Gpu, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """A build of torch. `cuda`: its CUDA version, or None; `error`: why it cannot be asked."""

    version: str = ""
    cuda: str | None = None
    device_count: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Free bytes of each GPU, by torch's numbers; `error`: why they are unknown."""

    bytes_of: tuple[int, ...] = ()
    error: str = ""


def pci_gpu_count(places: Places) -> int:
    """Return the number of NVIDIA display devices on the bus, with or without a driver."""
    count = 0
    for device in (places.sys / "bus/pci/devices").glob("*"):
        vendor, kind = read_text(device / "vendor"), read_text(device / "class")
        count += vendor == _NVIDIA and (kind or "").startswith(_DISPLAY)
    return count


def _binding() -> Any:
    return importlib.import_module("pynvml")


def read_driver(load: Callable[[], Any] = _binding) -> Driver:
    """Return NVML's facts, through the binding that `load` returns. Does not raise."""
    try:
        nvml = load()
    except ImportError:
        return Driver(error="the package nvidia-ml-py is not installed")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Driver(error=str(error))
    try:
        cuda = int(nvml.nvmlSystemGetCudaDriverVersion())
        return Driver(
            version=str(nvml.nvmlSystemGetDriverVersion()),
            cuda_version=f"{cuda // 1000}.{cuda % 1000 // 10}",
            gpus=tuple(_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())),
        )
    except nvml.NVMLError as error:
        return Driver(error=str(error))
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    try:
        link = Link(
            generation=int(nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)),
            most_generation=int(nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
            lanes=int(nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
            most_lanes=int(nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
        )
    except nvml.NVMLError:  # virtual GPUs do not report it
        link = None
    try:
        memory_bytes = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError:
        memory_bytes = None
    return Gpu(index, str(nvml.nvmlDeviceGetName(handle)), memory_bytes, link)


def ask_torch(python: str = sys.executable) -> TorchBuild:
    """Import torch in another process. Does not raise."""
    told, error = _told(python, _ASK_TORCH)
    if error:
        return TorchBuild(error=error)
    return TorchBuild(told["version"], told["cuda"], told["count"])


def ask_free_memory(python: str = sys.executable) -> FreeMemory:
    """Ask the GPUs by torch in another process, which has a context on each. Does not raise."""
    told, error = _told(python, _ASK_FREE)
    if not error and not told:
        error = "torch sees no GPU"
    return FreeMemory(error=error) if error else FreeMemory(tuple(told))


def _told(python: str, script: str) -> tuple[Any, str]:
    """Return the JSON that a script prints in a process of its own, or why there is none."""
    try:
        done = subprocess.run(
            [python, "-c", script],
            capture_output=True,
            text=True,
            timeout=_TORCH_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None, f"importing it takes more than {_TORCH_SECONDS:g} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return None, lines[-1] if lines else f"exit code {done.returncode}"
    return json.loads(done.stdout), ""
