"""The monitor's threads: scrapes that do not wait, Telemetry, stops; and real processes."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from nvml_double import Card, NvmlDouble
from prometheus_client.parser import text_string_to_metric_families
from test_worker_rapl import write_zone
from waiting import wait_until

from splitpoint.observe.meters import Meters
from splitpoint.observe.metrics import (
    CPU_ENERGY_JOULES,
    GPU_UP,
    LINK_CEILING,
    Needs,
    Service,
    metrics_of,
)
from splitpoint.observe.metrics_server import metrics_served
from splitpoint.v1 import types_pb2
from worker_service.hardware.gpu import GpuWatch
from worker_service.hardware.monitor import DeviceMonitor, monitor_of
from worker_service.hardware.nvml import GpuIdentity, open_gpu
from worker_service.hardware.rapl import RaplWatch, packages

ROOT = Path(__file__).resolve().parent.parent.parent.parent


def watch_of(double: NvmlDouble) -> GpuWatch:
    uuid = double.cards[0].uuid
    return GpuWatch(lambda: open_gpu(double, GpuIdentity(uuid)), time.monotonic)


def watches() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.endswith("-watch")]


def told(monitor: DeviceMonitor) -> dict[str, float]:
    return {f"{r.metric.name}{list(r.labels)}": r.value for r in monitor.readings()}


@pytest.fixture
def double() -> NvmlDouble:
    return NvmlDouble([Card(rx_bytes=7 << 40, tx_bytes=7 << 40)])


@pytest.fixture
def monitor(double: NvmlDouble, tmp_path: Path) -> Iterator[DeviceMonitor]:
    write_zone(tmp_path, "intel-rapl:0", "package-0", 10)
    rapl = RaplWatch(packages(tmp_path), time.monotonic)
    made = DeviceMonitor(watch_of(double), rapl)
    yield made
    double.gate.set()
    made.stop()
    wait_until(lambda: not watches())


def test_it_samples_in_threads_and_lets_go_at_the_stop(
    monitor: DeviceMonitor, double: NvmlDouble
) -> None:
    monitor.start()
    wait_until(lambda: told(monitor).get("splitpoint_gpu_up[]") == 1)
    assert sorted(watches()) == ["gpu-watch", "rapl-watch"]
    monitor.stop()
    assert watches() == []
    assert double.initialised == 0
    calls = dict(double.calls)
    time.sleep(1.2)
    assert double.calls == calls
    monitor.stop()


def test_telemetry(monitor: DeviceMonitor, double: NvmlDouble, tmp_path: Path) -> None:
    monitor.start()
    wait_until(lambda: told(monitor).get("splitpoint_gpu_up[]") == 1)
    wait_until(lambda: "splitpoint_cpu_energy_joules_total['package-0']" in told(monitor))
    double.cards[0].rx_bytes += 5_000_000
    double.cards[0].tx_bytes += 70_000
    double.cards[0].millijoules += 9_500
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("4000010")

    def telemetry() -> types_pb2.Telemetry:
        message = types_pb2.Telemetry(step_count=77)
        monitor.fill(message)
        return message

    wait_until(lambda: telemetry().energy_joules == 9.5 and telemetry().cpu_energy_joules == 4)
    message = telemetry()
    assert message.step_count == 77, "what others fill in is left alone"
    assert (message.pcie_rx_bytes, message.pcie_tx_bytes) == (5_000_000, 70_000)
    assert (message.power_watts, message.power_limit_watts) == (450, 700)
    assert message.utilization_ratio == 0.87
    assert message.link_ceiling_bytes_per_second == pytest.approx(63.015e9, rel=1e-3)
    assert message.device_message == ""


def test_telemetry_of_a_worker_without_anything_to_tell() -> None:
    message = types_pb2.Telemetry()
    DeviceMonitor().fill(message)
    assert message == types_pb2.Telemetry()


def test_telemetry_of_a_gpu_that_is_not_there(monitor: DeviceMonitor, double: NvmlDouble) -> None:
    double.has_library = False
    monitor.start()
    wait_until(lambda: "nvmlInit" in double.calls)
    message = types_pb2.Telemetry()

    def is_explained() -> bool:
        monitor.fill(message)
        return "libnvidia-ml" in message.device_message

    wait_until(is_explained)
    assert not message.HasField("power_watts")
    assert not message.HasField("pcie_rx_bytes")


async def test_a_driver_that_hangs_delays_no_scrape_and_no_stop(
    monitor: DeviceMonitor, double: NvmlDouble, caplog: pytest.LogCaptureFixture
) -> None:
    """Over HTTP, through the service's own event loop, while a call never returns."""
    arguments = argparse.Namespace(
        metrics="127.0.0.1:0", metrics_open=False, tls_cert=None, tls_key=None, tls_ca=None
    )
    meters = Meters(Service.WORKER)
    meters.read(monitor.readings)
    monitor.start()
    wait_until(lambda: told(monitor).get("splitpoint_gpu_up[]") == 1)
    async with metrics_served(arguments, meters) as address:
        double.gate.clear()
        await asyncio.sleep(1.1)  # the thread is in a call now, and stays there
        for _ in range(3):
            # An answer at all: the driver's call ends only when this test is over.
            text = await asyncio.to_thread(scrape, address)
        assert "splitpoint_gpu_power_watts 450.0" in text
        monitor.stop()
        assert not double.gate.is_set()
    assert "left behind" in caplog.text


def scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def test_a_cpu_worker_has_the_cpus_energy_only_and_asks_no_driver(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    write_zone(tmp_path, "intel-rapl:0", "package-0", 10)
    monitor = monitor_of(torch.device("cpu"), tmp_path)
    monitor.start()
    try:
        wait_until(lambda: told(monitor))
        assert {reading.metric for reading in monitor.readings()} == {CPU_ENERGY_JOULES}
        assert watches() == ["rapl-watch"]
    finally:
        monitor.stop()
    nothing = monitor_of(torch.device("cpu"), tmp_path / "none")
    nothing.start()
    assert watches() == []
    assert list(nothing.readings()) == []
    nothing.stop()


# -- real processes -----------------------------------------------------------------------


def ready(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("READY "):
            return line.split()[1]
    raise AssertionError("it ended before it was ready")


def test_the_exporter_of_made_up_numbers() -> None:
    """Every GPU metric, over HTTP, with totals that grow as their gauges say."""
    command = [sys.executable, "-m", "tests.worker.gpu_exporter_double", "--metrics", "127.0.0.1:0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = ready(process)
            wait_until(lambda: "splitpoint_gpu_up 1.0" in scrape(address))
            first, began = values(scrape(address)), time.monotonic()
            time.sleep(3)
            second, ended = values(scrape(address)), time.monotonic()
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
    expected = {
        metric.name
        for metric in metrics_of(Service.WORKER)
        if metric.needs in (Needs.GPU, Needs.RAPL)
        and metric.name != "splitpoint_worker_pinned_bytes"
    }
    assert {name for name, _ in second} >= expected | {LINK_CEILING.name, GPU_UP.name}
    rx = ("splitpoint_gpu_pcie_bytes_total", "rx")
    energy = ("splitpoint_gpu_energy_joules_total", "")
    seconds = ended - began
    # 20 GB/s and 450 W, 15 % more or less, and a second of sampling at either end.
    assert 0.5 * 17e9 * seconds < second[rx] - first[rx] < 2 * 23e9 * seconds
    assert 0.5 * 380 * seconds < second[energy] - first[energy] < 2 * 520 * seconds


def values(text: str) -> dict[tuple[str, str], float]:
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_real_cpu_worker_populates_its_cache_serves_no_gpu_metrics_and_stops(
    tmp_path: Path,
) -> None:
    model = ROOT / "models" / "stdlib-llama"
    command = [
        *(sys.executable, "-m", "worker_service", "--listen", f"unix:{tmp_path}/w.sock"),
        *("--model", str(model), "--device", "cpu", "--threads", "1"),
        *("--metrics", "127.0.0.1:0", "--device-memory", "512MiB"),
    ]
    populated = ("splitpoint_worker_cache_bytes", "populated")
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    ) as process:
        try:
            ready(process)
            assert process.stderr is not None
            text = ""
            for line in process.stderr:
                if "metrics at http://" in line:
                    address = line.rpartition("http://")[2].removesuffix("/metrics\n")
                    text = scrape(address)
                    deadline = time.monotonic() + 30
                    while values(text)[populated] < 32 << 20 and time.monotonic() < deadline:
                        time.sleep(0.05)
                        text = scrape(address)
                    break
        finally:
            process.send_signal(signal.SIGTERM)
            rest = process.communicate(timeout=60)[1]
        assert process.returncode == 0, rest
    assert "splitpoint_build_info" in text
    assert "splitpoint_gpu_" not in text
    assert values(text)[populated] >= 32 << 20
