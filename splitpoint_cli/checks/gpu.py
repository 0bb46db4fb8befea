"""GPUs: present, driven, usable by this torch, and on a link of full width."""

from __future__ import annotations

from collections.abc import Iterator

from splitpoint.config import format_rate, format_size
from splitpoint.costs.pcie import link_ceiling
from splitpoint_cli.checks.finding import Finding, Verdict
from splitpoint_cli.checks.gpu_facts import Driver, Gpu, Link, TorchBuild

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
