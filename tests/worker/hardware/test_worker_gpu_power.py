"""A real GPU's driver counts the traffic that the test makes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from splitpoint.observe.metrics import GPU_MEMORY_BYTES
from splitpoint.v1 import types_pb2
from worker_service.hardware.gpu import PERIOD_SECONDS
from worker_service.hardware.monitor import DeviceMonitor, monitor_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

COPIED_BYTES = 4 << 30
BUFFER_BYTES = 1 << 30


@pytest.fixture
def monitor() -> Iterator[DeviceMonitor]:
    made = monitor_of(torch.device("cuda:0"))
    made.start()
    deadline = time.monotonic() + 30
    while telemetry(made).device_message == "the GPU was not asked yet":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield made
    made.stop()


def telemetry(monitor: DeviceMonitor) -> types_pb2.Telemetry:
    message = types_pb2.Telemetry()
    monitor.fill(message)
    return message


def settled(monitor: DeviceMonitor) -> types_pb2.Telemetry:
    """After everything was sampled that happened until now."""
    time.sleep(2.5 * PERIOD_SECONDS)
    return telemetry(monitor)


def test_it_is_this_gpu(monitor: DeviceMonitor) -> None:
    message = telemetry(monitor)
    print(message)
    total = [
        reading.value
        for reading in monitor.readings()
        if reading.metric is GPU_MEMORY_BYTES and reading.labels == ("total",)
    ]
    assert total == [pytest.approx(torch.cuda.mem_get_info(0)[1], rel=0.03)]
    assert message.HasField("link_ceiling_bytes_per_second")


@pytest.mark.parametrize("direction", ["rx", "tx"])
def test_copies_are_counted_in_their_direction(monitor: DeviceMonitor, direction: str) -> None:
    """4 GiB of pinned memory: at least these bytes, at most what headers add to them."""
    before = settled(monitor)
    if not before.HasField("pcie_rx_bytes"):
        pytest.skip(f"this driver does not count PCIe bytes: {before.device_message}")
    host = torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(BUFFER_BYTES, dtype=torch.uint8, device="cuda:0")
    source, target = (host, device) if direction == "rx" else (device, host)
    started = time.monotonic()
    for _ in range(COPIED_BYTES // BUFFER_BYTES):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    rate = COPIED_BYTES / (time.monotonic() - started)
    after = settled(monitor)
    name = f"pcie_{direction}_bytes"
    counted = getattr(after, name) - getattr(before, name)
    ceiling = after.link_ceiling_bytes_per_second
    print(f"{direction}: {counted / COPIED_BYTES:.4f} of what was copied, at {rate / ceiling:.3f}")
    assert 0.9 * COPIED_BYTES < counted < 1.1 * COPIED_BYTES
    assert rate < ceiling


def test_power_and_energy(monitor: DeviceMonitor) -> None:
    before = settled(monitor)
    if not before.HasField("energy_joules"):
        pytest.skip(f"this driver does not count energy: {before.device_message}")
    started = time.monotonic()
    matrix = torch.randn(4096, 4096, device="cuda:0")
    while time.monotonic() - started < 2:
        matrix = (matrix @ matrix).clamp(-1, 1)
        torch.cuda.synchronize()
    after = settled(monitor)
    seconds = time.monotonic() - started
    joules = after.energy_joules - before.energy_joules
    print(f"{joules:.0f} J in {seconds:.1f} s, {after.power_watts:.0f} W now")
    assert 0 < before.power_watts <= 1.5 * before.power_limit_watts
    assert 5 * seconds < joules < 1.5 * before.power_limit_watts * seconds
