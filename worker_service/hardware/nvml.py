"""What the NVIDIA driver tells about one GPU: NVML through its Python binding, typed.

Every question may be answered by an error. They are sorted into three: the GPU or the
driver is gone, it cannot tell this, or it did not tell this time. Knows neither metrics
nor threads; calls take microseconds to seconds. docs/gpu.md lists what is asked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, cast

import torch

T = TypeVar("T")

# Of nvml.h, by number: older bindings lack the names. "PCIe transmit bytes. Value can be
# wrapped.", and the same of received ones, both as the GPU sees it.
PCIE_TX_BYTES = 197
PCIE_RX_BYTES = 198
# What of a value's union is set, by its valueType; and its bits.
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
# NVML_ERROR_*. The process must connect anew: not initialised, no driver, a GPU that fell
# off the bus or wants a reset, a driver that was exchanged under it, a handle of before.
_GONE = {1, 9, 15, 16, 18, 28}
_LIBRARY_NOT_FOUND = 12
# It will not tell, however often it is asked: not supported, no permission, no such
# function in this driver, or not in this version, or no longer.
_UNTOLD = {3, 4, 13, 25, 26}
# Of a field's value: this driver does not know the field's number.
_INVALID_ARGUMENT = 2


class NvmlFailure(Exception):
    """The message says why, in the driver's words."""


class GpuGone(NvmlFailure):
    """Neither this GPU nor its driver answers; connect again later."""


class FieldUnsupported(NvmlFailure):
    """This GPU, driver or account never gets an answer to this question."""


class FieldFailed(NvmlFailure):
    """No answer this time."""


class _Utilization(Protocol):
    gpu: int


class _Memory(Protocol):
    total: int
    used: int


class _FieldValue(Protocol):
    valueType: int
    nvmlReturn: int
    value: object  # a ctypes union


class Binding(Protocol):
    """The functions of `pynvml` that are called here; errors are its NVMLError."""

    NVMLError: Callable[[int], Exception]

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object: ...
    def nvmlDeviceGetHandleByPciBusId(self, pciBusId: str) -> object: ...
    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, migDevice: object) -> object: ...
    def nvmlDeviceGetFieldValues(
        self, handle: object, fieldIds: Sequence[int]
    ) -> Sequence[_FieldValue]: ...
    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: object) -> int: ...
    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: object) -> int: ...
    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: object) -> int: ...
    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: object) -> int: ...
    def nvmlDeviceGetPowerUsage(self, handle: object) -> int: ...
    def nvmlDeviceGetEnforcedPowerLimit(self, handle: object) -> int: ...
    def nvmlDeviceGetTotalEnergyConsumption(self, handle: object) -> int: ...
    def nvmlDeviceGetUtilizationRates(self, handle: object) -> _Utilization: ...
    def nvmlDeviceGetMemoryInfo(self, handle: object) -> _Memory: ...
    def nvmlDeviceGetClockInfo(self, handle: object, type: int) -> int: ...
    def nvmlDeviceGetTemperature(self, handle: object, sensor: int) -> int: ...


@dataclass(frozen=True, slots=True)
class GpuIdentity:
    """Which GPU, in names that CUDA_VISIBLE_DEVICES does not renumber.

    Attributes:
        uuid: hexadecimal, with hyphens, as CUDA has it; of a slice (MIG) where it is one.
        pci_bus_id: domain:bus:device.function; empty: unknown.
    """

    uuid: str
    pci_bus_id: str = ""


@dataclass(frozen=True, slots=True)
class Count:
    """A counter's value, and the bits of the type that it came as."""

    value: int
    bits: int


@dataclass(frozen=True, slots=True)
class Link:
    """The PCIe link now, and what it may become under load."""

    generation: int
    lanes: int
    max_generation: int
    max_lanes: int


class Gpu:
    """One GPU of an initialised NVML. Every method raises an NvmlFailure, or answers.

    Attributes:
        is_slice: the worker has a slice of a card (MIG): memory is the slice's, all else
            but the utilisation, which slices have none of, is the whole card's.
    """

    def __init__(self, binding: Binding, device: object, card: object, *, is_slice: bool) -> None:
        self.is_slice = is_slice
        self._nvml = binding
        self._device = device
        self._card = card

    def pcie_bytes(self) -> tuple[Count, Count]:
        """Received by the GPU, and sent by it. Together: a call costs as much as both."""
        ids = [PCIE_RX_BYTES, PCIE_TX_BYTES]
        received, sent = self._ask(lambda: self._nvml.nvmlDeviceGetFieldValues(self._card, ids))
        return self._count(received), self._count(sent)

    def link(self) -> Link:
        nvml, card = self._nvml, self._card
        return self._ask(
            lambda: Link(
                nvml.nvmlDeviceGetCurrPcieLinkGeneration(card),
                nvml.nvmlDeviceGetCurrPcieLinkWidth(card),
                nvml.nvmlDeviceGetMaxPcieLinkGeneration(card),
                nvml.nvmlDeviceGetMaxPcieLinkWidth(card),
            )
        )

    def power_watts(self) -> float:
        return self._ask(lambda: self._nvml.nvmlDeviceGetPowerUsage(self._card)) / 1e3

    def power_limit_watts(self) -> float:
        return self._ask(lambda: self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._card)) / 1e3

    def energy_millijoules(self) -> int:
        """Since the driver was loaded."""
        return self._ask(lambda: self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._card))

    def utilization(self) -> float:
        """0 to 1."""
        return self._ask(lambda: self._nvml.nvmlDeviceGetUtilizationRates(self._device)).gpu / 100

    def memory(self) -> tuple[int, int]:
        """Bytes in use, by whomever, and of all."""
        memory = self._ask(lambda: self._nvml.nvmlDeviceGetMemoryInfo(self._device))
        return memory.used, memory.total

    def clocks(self) -> tuple[float, float]:
        """Hertz of the multiprocessors and of the memory."""
        nvml, card = self._nvml, self._card
        sm = self._ask(lambda: nvml.nvmlDeviceGetClockInfo(card, _CLOCK_SM))
        memory = self._ask(lambda: nvml.nvmlDeviceGetClockInfo(card, _CLOCK_MEMORY))
        return sm * 1e6, memory * 1e6

    def temperature(self) -> int:
        """Degrees Celsius."""
        return self._ask(
            lambda: self._nvml.nvmlDeviceGetTemperature(self._card, _TEMPERATURE_OF_DIE)
        )

    def close(self) -> None:
        with contextlib.suppress(NvmlFailure):  # a driver that is gone needs no goodbye
            self._ask(self._nvml.nvmlShutdown)

    def _ask(self, question: Callable[[], T]) -> T:
        return ask(self._nvml, question)

    def _count(self, answer: _FieldValue) -> Count:
        if answer.nvmlReturn == _INVALID_ARGUMENT:
            raise FieldUnsupported("NVML: this driver does not know the field")
        if answer.nvmlReturn != 0:
            raise failure_of(self._nvml.NVMLError(answer.nvmlReturn))
        if answer.valueType not in _VALUES:
            raise FieldUnsupported(f"a value of type {answer.valueType} is no counter")
        name, bits = _VALUES[answer.valueType]
        return Count(getattr(answer.value, name), bits)


def open_gpu(binding: Binding, identity: GpuIdentity) -> Gpu:
    """Initialises NVML and finds the GPU. Raises GpuGone, whatever is in the way."""
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


def _find(binding: Binding, identity: GpuIdentity) -> Gpu:
    try:
        card = ask(binding, lambda: binding.nvmlDeviceGetHandleByUUID(f"GPU-{identity.uuid}"))
        return Gpu(binding, card, card, is_slice=False)
    except NvmlFailure as error:
        unknown = error
    try:
        part = ask(binding, lambda: binding.nvmlDeviceGetHandleByUUID(f"MIG-{identity.uuid}"))
    except NvmlFailure:
        pass
    else:
        card = ask(binding, lambda: binding.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part))
        return Gpu(binding, part, card, is_slice=True)
    if not identity.pci_bus_id:
        raise unknown
    card = ask(binding, lambda: binding.nvmlDeviceGetHandleByPciBusId(identity.pci_bus_id))
    return Gpu(binding, card, card, is_slice=False)


def ask(binding: Binding, question: Callable[[], T]) -> T:
    """The answer, or the NvmlFailure that the binding's error means."""
    try:
        return question()
    except Exception as error:
        if not isinstance(error, cast(type[Exception], binding.NVMLError)):
            raise
        raise failure_of(error) from error


def failure_of(error: Exception) -> NvmlFailure:
    """Of an NVMLError, by its code."""
    code = getattr(error, "value", None)
    reason = f"NVML: {error}"
    if code in _GONE:
        return GpuGone(reason)
    if code in _UNTOLD:
        return FieldUnsupported(reason)
    if code == _LIBRARY_NOT_FOUND:
        return GpuGone(
            f"{reason}; a container gets the driver's libnvidia-ml.so.1 with "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        )
    return FieldFailed(reason)


def binding() -> Binding:
    """The real one. It loads without NVML; `nvmlInit` is what needs the driver's library.

    Raises GpuGone where the package is missing.
    """
    try:
        import pynvml  # only where there is a GPU to ask about
    except ImportError as error:
        raise GpuGone(f"the package nvidia-ml-py is missing: {error}") from error
    return cast(Binding, pynvml)


def identity_of(device: torch.device) -> GpuIdentity:
    """Of a CUDA device of this process, as PyTorch numbers them."""
    return identity_from(torch.cuda.get_device_properties(device))


def identity_from(properties: object) -> GpuIdentity:
    """Of what PyTorch says of a device: its `uuid`, and since 2.8 its place on the bus."""
    uuid = str(getattr(properties, "uuid", "")).removeprefix("GPU-").removeprefix("MIG-")
    place = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in place:
        return GpuIdentity(uuid)
    domain, bus, number = place
    return GpuIdentity(uuid, f"{domain:08x}:{bus:02x}:{number:02x}.0")
