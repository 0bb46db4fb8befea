"""A worker's GPU metrics without a GPU, to look at dashboards and alerts with.

    python -m tests.worker.gpu_exporter_double --metrics 127.0.0.1:9100

The real meters, monitor and HTTP port, over a made-up card whose numbers move: a PCIe 5
x16 link with 20 GB/s to the GPU, counters of 32 bits that wrap as some drivers' do, about
450 W of 700. Of a worker's other metrics two stand beside it: arena memory locked for the
card, and generated tokens, which joules per token divide by. Prints READY and the address; SIGTERM
and Ctrl-C end it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pynvml

from splitpoint.observe import metrics
from splitpoint.observe.meters import Meters, Reading
from splitpoint.observe.metrics import Service
from splitpoint.observe.metrics_server import metrics_served
from splitpoint.options.option import parser_of
from splitpoint.options.service import METRICS_SECTION
from splitpoint.service import announce_ready, stop_on_signals
from worker_service.hardware.gpu import GpuWatch
from worker_service.hardware.monitor import DeviceMonitor
from worker_service.hardware.nvml import GpuIdentity, open_gpu
from worker_service.hardware.rapl import RaplWatch, Zone

# Started with -m from the root: the doubles beside this file have plain names.
sys.path.insert(0, str(Path(__file__).parent))
from nvml_double import UUID_A, Card, NvmlDouble

# Everything swings by this share, once in this many seconds.
SWING = 0.15
PERIOD = 60.0
TOKENS_PER_SECOND = 900.0


def swing(seconds: float) -> float:
    return 1 + SWING * math.sin(2 * math.pi * seconds / PERIOD)


def swung(seconds: float) -> float:
    """What `swing` sums up to, over seconds from 0: counters follow their gauges exactly."""
    turn = 2 * math.pi / PERIOD
    return seconds + SWING / turn * (1 - math.cos(turn * seconds))


class MovingCard(Card):
    """A card whose values are of the moment in which they are asked for."""

    def move(self, seconds: float) -> None:
        self.rx_bytes = int(20e9 * swung(seconds))
        self.tx_bytes = int(1.5e9 * swung(seconds))
        self.milliwatts = int(450_000 * swing(seconds))
        self.millijoules = int(450_000 * swung(seconds))
        self.utilization_percent = int(80 * swing(seconds))
        self.memory_used = int(100e9 * swing(seconds / 10))
        self.celsius = int(58 * swing(seconds - 10))
        self.generation = 5


@dataclass
class MovingNvml(NvmlDouble):
    """Moves its cards before each question about one."""

    began: float = 0.0

    def _card(self, function: str, handle: object) -> Card:
        card = super()._card(function, handle)
        assert isinstance(card, MovingCard)
        card.move(time.monotonic() - self.began)
        return card


@dataclass(frozen=True)
class MovingZone(Zone):
    """A CPU package of 180 W."""

    began: float

    def read(self) -> int:
        return int(180e6 * swung(time.monotonic() - self.began)) % self.range_microjoules


def monitor(began: float) -> DeviceMonitor:
    card = MovingCard(counter_bits=32, value_type=pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, generation=5)
    double = MovingNvml([card], began=began)
    clock: Callable[[], float] = time.monotonic
    gpu = GpuWatch(lambda: open_gpu(double, GpuIdentity(UUID_A)), clock)
    zone = MovingZone("package-0", Path("/none"), 262_143_328_850, began)
    return DeviceMonitor(gpu, RaplWatch([zone], clock), clock)


def beside(began: float) -> Iterator[Reading]:
    """What a worker with this card would count itself."""
    yield Reading(metrics.WORKER_PINNED_BYTES, 64 << 30)
    seconds = time.monotonic() - began
    yield Reading(metrics.WORKER_GRAPHS, 6, ("none",))
    yield Reading(metrics.WORKER_GRAPH_BYTES, 200 << 20)
    yield Reading(metrics.WORKER_GRAPH_STEPS, int(100 * seconds), ("replayed",))
    yield Reading(metrics.WORKER_GRAPH_STEPS, int(seconds), ("eager",))
    tokens = int(TOKENS_PER_SECOND * swung(time.monotonic() - began))
    yield Reading(metrics.WORKER_GENERATED_TOKENS, tokens)


async def serve(arguments: argparse.Namespace) -> None:
    stop = asyncio.Event()
    stop_on_signals(stop)
    meters = Meters(Service.WORKER)
    began = time.monotonic()
    watched = monitor(began)
    meters.read(watched.readings)
    meters.read(lambda: beside(began))
    watched.start()
    try:
        async with metrics_served(arguments, meters) as address:
            announce_ready(address)
            await stop.wait()
    finally:
        watched.stop()


def main() -> None:
    parser = parser_of("gpu_exporter", "a worker's GPU metrics without a GPU", [METRICS_SECTION])
    parser.set_defaults(metrics="127.0.0.1:0", tls_cert=None, tls_key=None, tls_ca=None)
    logging.basicConfig(level=logging.INFO)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
