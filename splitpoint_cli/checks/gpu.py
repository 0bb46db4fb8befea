"""GPUs: present, driven, usable by this torch, and on a link of full width.

Facts come from the driver, the kernel and torch. The driver is asked through NVML, torch in a
process of its own, since loading it takes seconds.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from splitpoint.config import format_rate, format_size
from splitpoint.costs.pcie import link_ceiling
from splitpoint_cli.checks.finding import Finding, Places, Verdict, read_text

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


_TORCH_ADVICE = (
    "Install its CUDA build: python -m pip install --force-reinstall torch "
    "(from the default index, not the CPU one)"
)


def check_presence(device: str, on_bus: int, visible: int) -> Finding:
    """Check the device that workers will use.

    Args:
        device: the value of --device: auto, cpu or cuda.
        on_bus: NVIDIA devices that the kernel sees.
        visible: those that this process may use.
    """
    name = "GPU"
    if device == "cpu":
        unused = f"; {visible} GPUs stay unused" if visible else ""
        return Finding(name, Verdict.OK, f"not asked for (--device cpu){unused}")
    if visible:
        return Finding(name, Verdict.OK, f"{visible} to use")
    lost = Verdict.PROBLEM if device == "cuda" else Verdict.WARNING
    if on_bus:
        return Finding(
            name,
            lost,
            f"{on_bus} on the bus, but none may be used from here",
            "Is the driver loaded (nvidia-smi), is CUDA_VISIBLE_DEVICES right, was the container "
            "started with them (docker run --gpus all)?",
        )
    if device == "cuda":
        return Finding(
            name,
            Verdict.PROBLEM,
            "there is none, and --device cuda asks for one",
            "Run on the CPU: --device cpu",
        )
    return Finding(name, Verdict.OK, "none: workers run on the CPU")


def check_driver(driver: Driver) -> Iterator[Finding]:
    """Check the driver, and memory and link of each GPU."""
    name = "driver"
    if driver.error:
        yield Finding(
            name,
            Verdict.WARNING,
            f"it does not answer: {driver.error}",
            "See what nvidia-smi says; without it power, PCIe and energy are not measured",
        )
        return
    yield Finding(name, Verdict.OK, f"{driver.version}, for CUDA {driver.cuda_version} and older")
    for gpu in driver.gpus:
        yield check_link(gpu)


def check_link(gpu: Gpu) -> Finding:
    """Check lanes and generation of the link; an idle GPU lowers its generation."""
    name = f"GPU {gpu.index}"
    found = gpu.name + ("" if gpu.memory_bytes is None else f", {format_size(gpu.memory_bytes)}")
    link = gpu.link
    if link is None:
        return Finding(name, Verdict.NOTE, f"{found}; its PCIe link is unknown")
    now = f"{found}, PCIe {link.generation} x{link.lanes}{_ceiling(link)}"
    if link.lanes < link.most_lanes:
        return Finding(
            name,
            Verdict.WARNING,
            f"{now}, of x{link.most_lanes}: {link.lanes / link.most_lanes:.0%} of the bandwidth, "
            "which limits every restore",
            "Look into the slot, riser and firmware settings (bifurcation); dmesg names a link "
            "that was trained down",
        )
    if link.generation < link.most_generation:
        return Finding(
            name,
            Verdict.NOTE,
            f"{now} now, up to generation {link.most_generation}: an idle GPU lowers it",
            "Look again under load: splitpoint top shows the link's ceiling",
        )
    return Finding(name, Verdict.OK, now)


def _ceiling(link: Link) -> str:
    """Return the rate of these lanes at the best generation, if it is known."""
    try:
        return f" (up to {format_rate(link_ceiling(link.most_generation, link.lanes))})"
    except ValueError:
        return ""


def check_torch(torch: TorchBuild, driver: Driver) -> Finding:
    """Check that this torch can use the GPU."""
    name = "torch"
    if torch.error:
        return Finding(
            name, Verdict.PROBLEM, f"it cannot be imported: {torch.error}", _TORCH_ADVICE
        )
    if torch.cuda is None:
        return Finding(
            name,
            Verdict.PROBLEM,
            f"{torch.version} is built for the CPU only, and there is a GPU",
            f"{_TORCH_ADVICE}; or leave the GPU alone: --device cpu",
        )
    found = f"{torch.version}, built for CUDA {torch.cuda}"
    if not torch.device_count:
        older = f", the driver takes {driver.cuda_version} and older" if driver.cuda_version else ""
        return Finding(
            name,
            Verdict.PROBLEM,
            f"{found}, finds no device{older}",
            "Update the driver, or install a build of torch for an older CUDA "
            '(pytorch.org, "previous versions")',
        )
    return Finding(name, Verdict.OK, f"{found}, finds {torch.device_count}")
