"""The processes of the trial: Redis, `splitpoint up`, a double of a GPU exporter, Prometheus."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvstore_service.mooncake.settings import how_to_install
from splitpoint.client import Client
from splitpoint.errors import DeadlineExceeded, Unavailable
from tools.monitoring.trial.processes import free_ports, running
from tools.monitoring.trial.prometheus import Prometheus, Target, scraping, wait_until

# Shared parts of the tests have plain names.
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests"))
from redis_server import RedisServer

LINK_RATE = "60MB"
CHUNK_TOKENS = 32
_START_SECONDS = 120.0
# Small, so that there is something to evict and to wait for.
_SIZES = (
    *("--host-memory", "80MiB", "--device-memory", "96MiB", "--chunk-tokens", str(CHUNK_TOKENS)),
    *("--max-batch", "4", "--queue-capacity", "8", "--max-batched-tokens", "256"),
)


@dataclass(frozen=True, slots=True)
class Trial:
    """The running processes, served and scraped."""

    address: str
    # Address of the gateway: http://HOST:PORT.
    url: str
    up: subprocess.Popen[bytes]
    redis: RedisServer
    prometheus: Prometheus


@contextmanager
def trial(folder: Path) -> Iterator[Trial]:
    """Run two CPU workers on one store over an emulated link.

    Logs lie in `folder`, whose path must be short enough for a socket. Raises
    DeadlineExceeded for what does not start, Unavailable for what ends at once.
    """
    first = free_ports(9)
    # The first five are for metrics.
    address, http, exporter = (f"127.0.0.1:{first + number}" for number in (5, 6, 7))
    with ExitStack() as cleanup:
        redis = RedisServer(folder)
        redis.start()
        cleanup.callback(redis.stop)
        up = cleanup.enter_context(
            running("up", _up(address, http, first, redis.url, folder), folder)
        )
        command = [sys.executable, "-m", "tests.worker.gpu_exporter_double", "--metrics", exporter]
        double = cleanup.enter_context(running("gpu-double", command, folder))
        _await_serving(address, up, folder)
        prometheus = cleanup.enter_context(scraping(_targets(first, exporter), first + 8, folder))
        wait_until(
            lambda: set(prometheus.targets().values()) == {"up"}, 30, "every target is scraped"
        )
        if double.poll() is not None:
            raise Unavailable(f"the GPU's double has ended, see {folder}/gpu-double.log")
        yield Trial(address, f"http://{http}", up, redis, prometheus)


def _up(address: str, http: str, metrics: int, redis: str, folder: Path) -> list[str]:
    tier = ["--tier-disk", str(folder / "tier"), "--tier-disk-size", "1GiB"]
    if not how_to_install():
        tier += ["--transfer", "mooncake", "--transfer-interface", "lo"]
    return [
        *(sys.executable, "-m", "splitpoint_cli", "up", "--listen", address, "--http", http),
        *("--device", "cpu", "--workers", "2", "--threads", "1", "--dtype", "float32"),
        *("--activations", "always", "--link-rate", LINK_RATE, *_SIZES),
        *("--metrics", str(metrics), "--redis", redis),
        *tier,
        *("--instance", f"monitoring-{secrets.token_hex(4)}"),
    ]


def _targets(first: int, exporter: str) -> list[Target]:
    """Return the targets as `splitpoint up --metrics` orders them, the gateway at last."""
    local = [f"127.0.0.1:{first + number}" for number in range(5)]
    return [
        Target("scheduler", local[0], {}),
        Target("kvstore", local[1], {}),
        *(Target("worker", local[2 + i], {"worker": str(i), "host": "local"}) for i in range(2)),
        Target("gateway", local[4], {}),
        Target("gpu-double", exporter, {"worker": "gpu", "host": "gpu"}),
    ]


def _await_serving(address: str, up: subprocess.Popen[bytes], folder: Path) -> None:
    with Client(address) as client:

        def is_serving() -> bool:
            if up.poll() is not None:
                raise Unavailable(f"splitpoint up has ended, see {folder}/up.log")
            try:
                client.wait_ready(1.0)
                return sum(worker.ready for worker in client.list_workers()) == 2
            except (DeadlineExceeded, Unavailable):
                return False

        wait_until(is_serving, _START_SECONDS, f"both workers serve, see {folder}/up.log")
