"""Monitors the hardware under a worker: link, power and energy, for /metrics and Telemetry.

Each source is read in a thread of its own, so that a driver that takes seconds delays
neither a scrape nor a step; readers get the latest sample. A CPU worker reads only the
CPU's energy, where permitted, and no GPU driver.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import torch

from splitpoint.observe.meters import Reading
from splitpoint.observe.metrics import (
    GPU_ENERGY_JOULES,
    GPU_PCIE_BYTES,
    GPU_POWER_DEFAULT_LIMIT_WATTS,
    GPU_POWER_LIMIT_WATTS,
    GPU_POWER_WATTS,
    GPU_UTILIZATION,
    LINK_CEILING,
    Metric,
)
from splitpoint.v1 import types_pb2
from worker_service.hardware.gpu import GpuWatch
from worker_service.hardware.nvml import binding, identity_from, open_gpu
from worker_service.hardware.rapl import POWERCAP, RaplWatch, packages

log = logging.getLogger(__name__)

# A driver's call that hangs cannot be interrupted: its thread ends with the process.
STOP_SECONDS = 2.0
# Telemetry's fields that are readings.
_RATES: dict[tuple[Metric, tuple[str, ...]], str] = {
    (LINK_CEILING, ()): "link_ceiling_bytes_per_second",
    (GPU_POWER_WATTS, ()): "power_watts",
    (GPU_POWER_LIMIT_WATTS, ()): "power_limit_watts",
    (GPU_POWER_DEFAULT_LIMIT_WATTS, ()): "power_default_limit_watts",
    (GPU_ENERGY_JOULES, ()): "energy_joules",
    (GPU_UTILIZATION, ()): "utilization_ratio",
}
_COUNTS: dict[tuple[Metric, tuple[str, ...]], str] = {
    (GPU_PCIE_BYTES, ("rx",)): "pcie_rx_bytes",
    (GPU_PCIE_BYTES, ("tx",)): "pcie_tx_bytes",
}


class _Watch(Protocol):
    """A source that one thread reads again and again."""

    def step(self) -> float:
        """Read the source; return the seconds until the next call."""

    def close(self) -> None:
        """Release the source, in the thread of `step`."""


class DeviceMonitor:
    """Watches a GPU, the CPU's packages, both or neither, from `start` to `stop`."""

    def __init__(
        self,
        gpu: GpuWatch | None = None,
        rapl: RaplWatch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gpu = gpu
        self._rapl = rapl
        self._clock = clock
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        watches: dict[str, _Watch | None] = {"gpu-watch": self._gpu, "rapl-watch": self._rapl}
        for name, watch in watches.items():
            if watch is not None:
                thread = threading.Thread(target=self._run, args=(watch,), name=name, daemon=True)
                self._threads.append(thread)
                thread.start()

    def stop(self) -> None:
        """Stop within STOP_SECONDS; the latest sample can still be read."""
        self._stopping.set()
        deadline = time.monotonic() + STOP_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                log.warning("%s waits for its driver and is left behind", thread.name)
        self._threads.clear()

    def readings(self) -> Iterator[Reading]:
        """Yield the readings of the latest sample; never waits."""
        if self._gpu is not None:
            yield from self._gpu.sample.readings(self._clock())
        if self._rapl is not None:
            yield from self._rapl.readings()

    def fill(self, telemetry: types_pb2.Telemetry) -> None:
        """Set the fields of the message that the hardware reports."""
        if self._gpu is not None:
            sample, now = self._gpu.sample, self._clock()
            for reading in sample.readings(now):
                key = reading.metric, reading.labels
                if key in _RATES:
                    setattr(telemetry, _RATES[key], reading.value)
                elif key in _COUNTS:
                    setattr(telemetry, _COUNTS[key], int(reading.value))
            telemetry.device_message = sample.message_at(now)
        if self._rapl is not None and self._rapl.joules:
            telemetry.cpu_energy_joules = sum(self._rapl.joules.values())

    def _run(self, watch: _Watch) -> None:
        while not self._stopping.wait(watch.step()):
            pass
        watch.close()


def monitor_of(device: torch.device, powercap: Path = POWERCAP) -> DeviceMonitor:
    """Return the monitor of a worker on `device`, not started yet."""
    clock = time.monotonic
    zones = packages(powercap)
    rapl = RaplWatch(zones, clock) if zones else None
    if device.type != "cuda":
        return DeviceMonitor(rapl=rapl, clock=clock)
    identity = identity_from(torch.cuda.get_device_properties(device))
    return DeviceMonitor(GpuWatch(lambda: open_gpu(binding(), identity), clock), rapl, clock)
