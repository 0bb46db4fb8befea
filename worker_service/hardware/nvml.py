"""One GPU as the NVIDIA driver reports it: NVML through its Python binding, typed.

Every call may fail. Errors are sorted into three kinds: the GPU or its driver is gone,
it never answers this question, or it did not answer this time. This module knows no
metrics and no threads; calls take microseconds to seconds. docs/lab/gpu.md lists the fields.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

# Numbers of nvml.h, because older bindings lack the names: "PCIe transmit bytes. Value can
# be wrapped.", and the same of received bytes, both seen from the GPU.
PCIE_TX_BYTES = 197
PCIE_RX_BYTES = 198
# Member of a value's union, and its bits, by valueType.
_VALUES = {
    1: ("uiVal", 32),
    2: ("ulVal", 64),
    3: ("ullVal", 64),
    4: ("sllVal", 63),
    5: ("siVal", 31),
    6: ("usVal", 16),
}
_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_TEMPERATURE_OF_DIE = 0
# NVML_ERROR_* after which the process must connect anew: not initialised, no driver, a GPU
# that fell off the bus or needs a reset, a driver that was replaced, an outdated handle.
_GONE = {1, 9, 15, 16, 18, 28}
_LIBRARY_NOT_FOUND = 12
# NVML_ERROR_* of questions that are never answered: not supported, no permission, no such
# function in this driver, or not in this version, or no longer.
_UNSUPPORTED = {3, 4, 13, 25, 26}
# As a field's nvmlReturn: this driver does not know the field's number.
_INVALID_ARGUMENT = 2


class NvmlFailure(Exception):
    """The message says why, in the driver's words."""


class GpuGone(NvmlFailure):
    """Neither this GPU nor its driver answers; connect again later."""


class FieldUnsupported(NvmlFailure):
    """This GPU, driver or account never gets an answer to this question."""


class FieldFailed(NvmlFailure):
    """No answer this time."""


@dataclass(frozen=True, slots=True)
class GpuIdentity:
    """A GPU's names, which CUDA_VISIBLE_DEVICES does not renumber.

    Attributes:
        uuid: hexadecimal, with hyphens, as CUDA has it; that of the slice (MIG) if it is one.
        pci_bus_id: domain:bus:device.function; empty if unknown.
    """

    uuid: str
    pci_bus_id: str = ""


@dataclass(frozen=True, slots=True)
class Count:
    """A counter's value, and the bits of its type."""

    value: int
    bits: int


@dataclass(frozen=True, slots=True)
class Link:
    """The PCIe link now, and its maximum under load."""

    generation: int
    lanes: int
    max_generation: int
    max_lanes: int


class Gpu:
    """One GPU of an initialised NVML. Every method may raise an NvmlFailure.

    Attributes:
        is_slice: the worker has a slice of a card (MIG). Memory is the slice's; everything
            else is the whole card's, except utilization, which slices do not have.
    """

    def __init__(self, binding: Any, device: object, card: object, *, is_slice: bool) -> None:
        self.is_slice = is_slice
        self._nvml = binding
        self._device = device
        self._card = card

    def pcie_bytes(self) -> tuple[Count, Count]:
        """Return bytes received and sent by the GPU, in one call, as it costs as much as both."""
        ids = [PCIE_RX_BYTES, PCIE_TX_BYTES]
        received, sent = self._ask(self._nvml.nvmlDeviceGetFieldValues, self._card, ids)
        return self._count(received), self._count(sent)

    def link(self) -> Link:
        return Link(
            self._ask(self._nvml.nvmlDeviceGetCurrPcieLinkGeneration, self._card),
            self._ask(self._nvml.nvmlDeviceGetCurrPcieLinkWidth, self._card),
            self._ask(self._nvml.nvmlDeviceGetMaxPcieLinkGeneration, self._card),
            self._ask(self._nvml.nvmlDeviceGetMaxPcieLinkWidth, self._card),
        )

    def power_watts(self) -> float:
        return float(self._ask(self._nvml.nvmlDeviceGetPowerUsage, self._card) / 1e3)

    def power_limit_watts(self) -> float:
        return float(self._ask(self._nvml.nvmlDeviceGetEnforcedPowerLimit, self._card) / 1e3)

    def power_default_limit_watts(self) -> float:
        """Return the limit that the card has unless it is changed.

        Raises FieldUnsupported for a slice: others share the card's limit with it.
        """
        if self.is_slice:
            raise FieldUnsupported("a slice of a card has no power limit of its own")
        limit = self._ask(self._nvml.nvmlDeviceGetPowerManagementDefaultLimit, self._card)
        return float(limit / 1e3)

    def energy_millijoules(self) -> int:
        """Return the energy used since the driver was loaded."""
        return int(self._ask(self._nvml.nvmlDeviceGetTotalEnergyConsumption, self._card))

    def utilization(self) -> float:
        """Return a ratio from 0 to 1."""
        rates = self._ask(self._nvml.nvmlDeviceGetUtilizationRates, self._device)
        return float(rates.gpu / 100)

    def memory(self) -> tuple[int, int]:
        """Return the bytes that all processes use, and the bytes of all memory."""
        memory = self._ask(self._nvml.nvmlDeviceGetMemoryInfo, self._device)
        return memory.used, memory.total

    def clocks(self) -> tuple[float, float]:
        """Return hertz of the multiprocessors and of the memory."""
        sm = self._ask(self._nvml.nvmlDeviceGetClockInfo, self._card, _CLOCK_SM)
        memory = self._ask(self._nvml.nvmlDeviceGetClockInfo, self._card, _CLOCK_MEMORY)
        return sm * 1e6, memory * 1e6

    def temperature(self) -> int:
        """Return degrees Celsius."""
        get = self._nvml.nvmlDeviceGetTemperature
        return int(self._ask(get, self._card, _TEMPERATURE_OF_DIE))

    def close(self) -> None:
        with contextlib.suppress(NvmlFailure):  # the driver may be gone
            self._ask(self._nvml.nvmlShutdown)

    def _ask(self, function: Callable[P, T], *values: P.args, **named: P.kwargs) -> T:
        return ask(self._nvml, function, *values, **named)

    def _count(self, answer: Any) -> Count:
        if answer.nvmlReturn == _INVALID_ARGUMENT:
            raise FieldUnsupported("NVML: this driver does not know the field")
        if answer.nvmlReturn != 0:
            raise failure_of(self._nvml.NVMLError(answer.nvmlReturn))
        if answer.valueType not in _VALUES:
            raise FieldUnsupported(f"a value of type {answer.valueType} is no counter")
        name, bits = _VALUES[answer.valueType]
        return Count(getattr(answer.value, name), bits)


def open_gpu(binding: Any, identity: GpuIdentity) -> Gpu:
    """Initialise NVML and find the GPU. Raises GpuGone for every failure."""
    try:
        ask(binding, binding.nvmlInit)
        try:
            return _find(binding, identity)
        except NvmlFailure:
            with contextlib.suppress(NvmlFailure):
                ask(binding, binding.nvmlShutdown)
            raise
    except NvmlFailure as error:
        raise GpuGone(str(error)) from error


def _find(binding: Any, identity: GpuIdentity) -> Gpu:
    by_uuid = binding.nvmlDeviceGetHandleByUUID
    try:
        card = ask(binding, by_uuid, f"GPU-{identity.uuid}")
        return Gpu(binding, card, card, is_slice=False)
    except NvmlFailure as error:
        unknown = error
    try:
        part = ask(binding, by_uuid, f"MIG-{identity.uuid}")
    except NvmlFailure:
        pass
    else:
        card = ask(binding, binding.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, part)
        return Gpu(binding, part, card, is_slice=True)
    if not identity.pci_bus_id:
        raise unknown
    card = ask(binding, binding.nvmlDeviceGetHandleByPciBusId, identity.pci_bus_id)
    return Gpu(binding, card, card, is_slice=False)


def ask(binding: Any, function: Callable[P, T], *values: P.args, **named: P.kwargs) -> T:
    """Call a function of the binding; raise the NvmlFailure that its NVMLError means."""
    try:
        return function(*values, **named)
    except Exception as error:
        if not isinstance(error, binding.NVMLError):
            raise
        raise failure_of(error) from error


def failure_of(error: Exception) -> NvmlFailure:
    """Sort an NVMLError by its code."""
    code = getattr(error, "value", None)
    reason = f"NVML: {error}"
    if code in _GONE:
        return GpuGone(reason)
    if code in _UNSUPPORTED:
        return FieldUnsupported(reason)
    if code == _LIBRARY_NOT_FOUND:
        return GpuGone(
            f"{reason}; a container gets the driver's libnvidia-ml.so.1 with "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        )
    return FieldFailed(reason)


def binding() -> Any:
    """Import pynvml. It loads without NVML; `nvmlInit` needs the driver's library.

    Raises GpuGone if the package is missing.
    """
    try:
        import pynvml  # only needed where there is a GPU
    except ImportError as error:
        raise GpuGone(f"the package nvidia-ml-py is missing: {error}") from error
    return pynvml


def identity_from(properties: object) -> GpuIdentity:
    """Read a GPU's names from `torch.cuda.get_device_properties`.

    PyTorch has `uuid`, and since 2.8 the place on the bus.
    """
    uuid = str(getattr(properties, "uuid", "")).removeprefix("GPU-").removeprefix("MIG-")
    place = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in place:
        return GpuIdentity(uuid)
    domain, bus, number = place
    return GpuIdentity(uuid, f"{domain:08x}:{bus:02x}:{number:02x}.0")
