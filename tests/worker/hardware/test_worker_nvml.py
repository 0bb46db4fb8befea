"""The driver's answers, one GPU at a time: what is asked, how errors are sorted, which GPU."""

from __future__ import annotations

import inspect
import re
import sys
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from nvml_double import UUID_A, UUID_B, Card, NvmlDouble, Slice, functions_of_the_double

from worker_service.hardware import nvml
from worker_service.hardware.nvml import (
    Count,
    FieldFailed,
    FieldUnsupported,
    GpuGone,
    GpuIdentity,
    Link,
    failure_of,
    identity_from,
    open_gpu,
)


def opened(card: Card, **more: Any) -> tuple[NvmlDouble, nvml.Gpu]:
    double = NvmlDouble([card], **more)
    return double, open_gpu(double, GpuIdentity(card.uuid))


# -- the double, and what is known of the binding, against the binding itself ----------


@pytest.mark.parametrize("name", functions_of_the_double())
def test_the_double_has_the_signatures_of_the_binding(name: str) -> None:
    real = inspect.signature(getattr(pynvml, name)).parameters
    double = dict(inspect.signature(functions_of_the_double()[name]).parameters)
    del double["self"]
    assert list(double) == list(real)
    assert [p.default for p in double.values()] == [p.default for p in real.values()]


def test_every_function_that_is_called_is_one_of_the_binding_and_of_the_double() -> None:
    called = set(re.findall(r"\.(nvml(?:Init|Shutdown|Device)\w*)", inspect.getsource(nvml)))
    assert called
    assert called == set(functions_of_the_double())
    assert isinstance(nvml.binding(), type(pynvml))


def test_numbers_are_those_of_the_binding() -> None:
    assert nvml.PCIE_TX_BYTES == pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES
    assert nvml.PCIE_RX_BYTES == pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES
    members = dict(pynvml.c_nvmlValue_t._fields_)
    assert {name for name, _ in nvml._VALUES.values()} | {"dVal"} == set(members)
    assert nvml._VALUES[pynvml.NVML_VALUE_TYPE_UNSIGNED_INT] == ("uiVal", 32)
    assert nvml._VALUES[pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG] == ("ullVal", 64)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("GpuIsLost", GpuGone),
        ("Uninitialized", GpuGone),
        ("DriverNotLoaded", GpuGone),
        ("ResetRequired", GpuGone),
        ("LibRmVersionMismatch", GpuGone),
        ("LibraryNotFound", GpuGone),
        ("GpuNotFound", GpuGone),
        ("NotSupported", FieldUnsupported),
        ("NoPermission", FieldUnsupported),
        ("FunctionNotFound", FieldUnsupported),
        ("Deprecated", FieldUnsupported),
        ("Unknown", FieldFailed),
        ("Timeout", FieldFailed),
        ("InvalidArgument", FieldFailed),
    ],
)
def test_errors_of_the_binding_are_sorted(name: str, kind: type[Exception]) -> None:
    failure = failure_of(getattr(pynvml, f"NVMLError_{name}")())
    assert type(failure) is kind
    assert str(failure).startswith("NVML: ")


# -- what a GPU tells ---------------------------------------------------------------------


def test_units() -> None:
    card = Card(rx_bytes=7, tx_bytes=9, milliwatts=451_500, limit_milliwatts=500_000, celsius=61)
    _, gpu = opened(card)
    assert gpu.pcie_bytes() == (Count(7, 64), Count(9, 64))
    assert gpu.link() == Link(generation=1, lanes=16, max_generation=5, max_lanes=16)
    assert gpu.power_watts() == 451.5
    assert gpu.power_limit_watts() == 500
    assert gpu.power_default_limit_watts() == 700
    assert gpu.energy_millijoules() == card.millijoules
    assert gpu.utilization() == 0.87
    assert gpu.memory() == (card.memory_used, card.memory_total)
    assert gpu.clocks() == (1980e6, 3201e6)
    assert gpu.temperature() == 61


def test_a_counters_width_is_that_of_its_type() -> None:
    card = Card(rx_bytes=(5 << 32) + 77, tx_bytes=3)
    card.value_type, card.counter_bits = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, 32
    _, gpu = opened(card)
    assert gpu.pcie_bytes() == (Count(77, 32), Count(3, 32))


def test_a_counter_that_is_no_integer_is_refused() -> None:
    _, gpu = opened(Card(value_type=pynvml.NVML_VALUE_TYPE_DOUBLE))
    with pytest.raises(FieldUnsupported, match="type 0"):
        gpu.pcie_bytes()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (pynvml.NVML_ERROR_NOT_SUPPORTED, FieldUnsupported),
        (pynvml.NVML_ERROR_NO_PERMISSION, FieldUnsupported),
        # How a driver from before these fields answers.
        (pynvml.NVML_ERROR_INVALID_ARGUMENT, FieldUnsupported),
        (pynvml.NVML_ERROR_UNKNOWN, FieldFailed),
        (pynvml.NVML_ERROR_GPU_IS_LOST, GpuGone),
    ],
)
def test_errors_of_single_fields(code: int, kind: type[Exception]) -> None:
    _, gpu = opened(Card(field_errors={nvml.PCIE_RX_BYTES: code}))
    with pytest.raises(kind, match="NVML"):
        gpu.pcie_bytes()


def test_closing_after_the_driver_has_gone_is_no_error() -> None:
    double, gpu = opened(Card())
    gpu.close()
    gpu.close()
    assert double.initialised == 0


# -- which GPU ------------------------------------------------------------------------------


def test_the_second_gpu_that_is_the_first_one_of_this_process() -> None:
    """With CUDA_VISIBLE_DEVICES=1 PyTorch's cuda:0 is what NVML has second."""
    first, second = Card(UUID_A), Card(UUID_B, "00000000:5E:00.0", milliwatts=99_000)
    double = NvmlDouble([first, second])
    assert open_gpu(double, GpuIdentity(UUID_B)).power_watts() == 99


def test_by_its_place_on_the_bus_where_the_uuid_is_unknown() -> None:
    second = Card(UUID_B, "00000000:5E:00.0", milliwatts=99_000)
    double = NvmlDouble([Card(UUID_A), second])
    gpu = open_gpu(double, GpuIdentity("unknown", "00000000:5e:00.0"))
    assert gpu.power_watts() == 99


def test_a_slice_has_its_own_memory_and_the_cards_power() -> None:
    card = Card()
    part = Slice(card)
    double = NvmlDouble([card], [part])
    gpu = open_gpu(double, GpuIdentity(part.uuid))
    assert gpu.is_slice
    assert gpu.memory() == (part.memory_used, part.memory_total)
    assert gpu.power_watts() == 450
    with pytest.raises(FieldUnsupported):
        gpu.utilization()
    with pytest.raises(FieldUnsupported, match="slice"):
        gpu.power_default_limit_watts()


def test_an_unknown_gpu_is_gone_and_nvml_is_let_go() -> None:
    double = NvmlDouble([Card()])
    with pytest.raises(GpuGone, match="Not Found"):
        open_gpu(double, GpuIdentity("unknown"))
    with pytest.raises(GpuGone, match="Not Found"):
        open_gpu(double, GpuIdentity("unknown", "00000000:99:00.0"))
    assert double.initialised == 0


def test_without_the_library_the_reason_says_what_to_do() -> None:
    with pytest.raises(GpuGone, match="NVIDIA_DRIVER_CAPABILITIES"):
        open_gpu(NvmlDouble([Card()], has_library=False), GpuIdentity(UUID_A))


def test_the_real_binding_without_a_driver() -> None:
    """An identity that no GPU has, also on a machine with a GPU."""
    with pytest.raises(GpuGone, match="NVML"):
        open_gpu(nvml.binding(), GpuIdentity("unknown"))


def test_without_the_package_the_gpu_is_gone_and_the_reason_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # what an import of nothing finds
    with pytest.raises(GpuGone, match="nvidia-ml-py"):
        nvml.binding()


def test_names_as_pytorch_has_them() -> None:
    properties = SimpleNamespace(uuid=UUID_A, pci_domain_id=0, pci_bus_id=0x5E, pci_device_id=0)
    assert identity_from(properties) == GpuIdentity(UUID_A, "00000000:5e:00.0")
    assert identity_from(SimpleNamespace(uuid=f"GPU-{UUID_A}")) == GpuIdentity(UUID_A)
