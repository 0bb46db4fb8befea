"""NVML without a GPU: the functions of `pynvml` that a worker calls, over cards made up here.

Names, arguments, ctypes structures and errors are the binding's own, which loads without
the driver's library; test_worker_nvml.py compares the signatures.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pynvml

UUID_A = "0a1b2c3d-0000-1111-2222-333344445555"
UUID_B = "feedbeef-0000-1111-2222-333344445555"


@dataclass
class Card:
    """A GPU. Counters are what the driver has; the double wraps them to the type's width.

    Attributes:
        value_type: NVML_VALUE_TYPE_* that byte counters come as.
        counter_bits: after which they wrap, whatever their type.
        errors: NVML_ERROR_* by function name, raised instead of an answer.
        field_errors: NVML_ERROR_* by field id, as the field's `nvmlReturn`.
    """

    uuid: str = UUID_A
    pci_bus_id: str = "00000000:3B:00.0"
    rx_bytes: int = 0
    tx_bytes: int = 0
    value_type: int = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
    counter_bits: int = 64
    milliwatts: int = 450_000
    limit_milliwatts: int = 700_000
    default_milliwatts: int = 700_000
    millijoules: int = 123_456_789
    utilization_percent: int = 87
    memory_used: int = 100 << 30
    memory_total: int = 141 << 30
    sm_megahertz: int = 1980
    memory_megahertz: int = 3201
    celsius: int = 54
    generation: int = 1  # of an idle link
    max_generation: int = 5
    lanes: int = 16
    errors: dict[str, int] = field(default_factory=dict)
    field_errors: dict[int, int] = field(default_factory=dict)


@dataclass
class Slice:
    """A MIG instance of a card."""

    card: Card
    uuid: str = "51ce51ce-0000-1111-2222-333344445555"
    memory_used: int = 7 << 30
    memory_total: int = 18 << 30


@dataclass
class NvmlDouble:
    """Stands in for the module `pynvml`.

    Attributes:
        has_library: whether the driver's library can be loaded.
        failing: NVML_ERROR_* that every call about a device ends in.
        gate: every call waits for it: a driver that hangs while it is clear.
        calls: how often each function was called.
    """

    cards: list[Card]
    slices: list[Slice] = field(default_factory=list)
    has_library: bool = True
    failing: int | None = None
    gate: threading.Event = field(default_factory=threading.Event)
    calls: dict[str, int] = field(default_factory=dict)
    initialised: int = 0

    NVMLError = pynvml.NVMLError

    def __post_init__(self) -> None:
        self.gate.set()

    def nvmlInit(self) -> None:
        self._called("nvmlInit")
        if not self.has_library:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        if self.failing == pynvml.NVML_ERROR_DRIVER_NOT_LOADED:
            raise pynvml.NVMLError(self.failing)
        self.initialised += 1

    def nvmlShutdown(self) -> None:
        self._called("nvmlShutdown")
        if not self.initialised:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        self.initialised -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object:
        self._called("nvmlDeviceGetHandleByUUID")
        known: dict[str, Card | Slice] = {f"GPU-{card.uuid}": card for card in self.cards}
        known |= {f"MIG-{part.uuid}": part for part in self.slices}
        return self._found(known, uuid)

    def nvmlDeviceGetHandleByPciBusId(self, pciBusId: str) -> object:
        self._called("nvmlDeviceGetHandleByPciBusId")
        return self._found({card.pci_bus_id.lower(): card for card in self.cards}, pciBusId.lower())

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, migDevice: object) -> object:
        self._called("nvmlDeviceGetDeviceHandleFromMigDeviceHandle")
        if not isinstance(migDevice, Slice):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return migDevice.card

    def nvmlDeviceGetFieldValues(self, handle: object, fieldIds: Sequence[int]) -> Any:
        card = self._card("nvmlDeviceGetFieldValues", handle)
        counters = {
            pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES: card.rx_bytes,
            pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES: card.tx_bytes,
        }
        values = (pynvml.c_nvmlFieldValue_t * len(fieldIds))()
        for value, number in zip(values, fieldIds, strict=True):
            value.fieldId = number
            value.nvmlReturn = card.field_errors.get(
                number,
                pynvml.NVML_SUCCESS if number in counters else pynvml.NVML_ERROR_INVALID_ARGUMENT,
            )
            if value.nvmlReturn == pynvml.NVML_SUCCESS:
                value.valueType = card.value_type
                kept = counters[number] % (1 << card.counter_bits)
                if card.value_type == pynvml.NVML_VALUE_TYPE_UNSIGNED_INT:
                    value.value.uiVal = kept
                else:
                    value.value.ullVal = kept
        return values

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: object) -> int:
        return self._card("nvmlDeviceGetCurrPcieLinkGeneration", handle).generation

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: object) -> int:
        return self._card("nvmlDeviceGetMaxPcieLinkGeneration", handle).max_generation

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: object) -> int:
        return self._card("nvmlDeviceGetCurrPcieLinkWidth", handle).lanes

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: object) -> int:
        return self._card("nvmlDeviceGetMaxPcieLinkWidth", handle).lanes

    def nvmlDeviceGetPowerUsage(self, handle: object) -> int:
        return self._card("nvmlDeviceGetPowerUsage", handle).milliwatts

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: object) -> int:
        return self._card("nvmlDeviceGetEnforcedPowerLimit", handle).limit_milliwatts

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle: object) -> int:
        return self._card("nvmlDeviceGetPowerManagementDefaultLimit", handle).default_milliwatts

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: object) -> int:
        return self._card("nvmlDeviceGetTotalEnergyConsumption", handle).millijoules

    def nvmlDeviceGetUtilizationRates(self, handle: object) -> Any:
        card = self._card("nvmlDeviceGetUtilizationRates", handle)
        return pynvml.c_nvmlUtilization_t(gpu=card.utilization_percent, memory=0)

    def nvmlDeviceGetMemoryInfo(self, handle: object, version: int | None = None) -> Any:
        self._card("nvmlDeviceGetMemoryInfo", handle)
        assert isinstance(handle, Card | Slice)
        free = handle.memory_total - handle.memory_used
        return pynvml.c_nvmlMemory_t(total=handle.memory_total, free=free, used=handle.memory_used)

    def nvmlDeviceGetClockInfo(self, handle: object, type: int) -> int:
        card = self._card("nvmlDeviceGetClockInfo", handle)
        clocks = {
            pynvml.NVML_CLOCK_SM: card.sm_megahertz,
            pynvml.NVML_CLOCK_MEM: card.memory_megahertz,
        }
        return clocks[type]

    def nvmlDeviceGetTemperature(self, handle: object, sensor: int) -> int:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return self._card("nvmlDeviceGetTemperature", handle).celsius

    # -- below the binding's functions ------------------------------------------------

    def _called(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        assert self.gate.wait(60), "the gate stayed closed"

    def _found(self, known: dict[str, Any], name: str) -> object:
        self._check()
        if name not in known:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return known[name]

    def _card(self, function: str, handle: object) -> Card:
        self._called(function)
        self._check()
        if isinstance(handle, Slice):  # slices have memory, and little else
            if function != "nvmlDeviceGetMemoryInfo":
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            handle = handle.card
        assert isinstance(handle, Card)
        if function in handle.errors:
            raise pynvml.NVMLError(handle.errors[function])
        return handle

    def _check(self) -> None:
        if not self.initialised:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNINITIALIZED)
        if self.failing is not None:
            raise pynvml.NVMLError(self.failing)


def functions_of_the_double() -> dict[str, Callable[..., object]]:
    """By their names in the binding."""
    return {name: getattr(NvmlDouble, name) for name in vars(NvmlDouble) if name.startswith("nvml")}
