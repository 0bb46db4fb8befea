"""`make monitoring-test`: rules by promtool, then every query on a real stack under load.

Needs prometheus and promtool on PATH, and no GPU: its panels are tried on a double of the
exporter. Ends with a table, then one line of JSON; exit code 1 when a query says nothing,
a rule cannot be evaluated, or an alert does not fire.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import math
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from kvstore_service.opening import missing_engine
from splitpoint.client import AsyncClient, Client
from splitpoint.client.requests import GenerateOptions
from splitpoint.errors import DeadlineExceeded, SplitpointError, Unavailable
from splitpoint.options.store import ENGINE, TRANSFER
from splitpoint.planning.plan import FORCED_METHODS, Residency
from tools.monitoring.dashboards import ROOT, dashboards, recording_rules

# Shared parts of the tests have plain names.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from redis_server import RedisServer

# -- processes -----------------------------------------------------------------------------

_STOP_SECONDS = 30.0
_TRIES = 50


@contextmanager
def running(name: str, command: Sequence[str], logs: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`command`, its output in `logs`/NAME.log; SIGTERM at the end, and SIGKILL if need be."""
    with (logs / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_ports(count: int) -> int:
    """Return the first of this many neighbouring ports of this host that are free now."""
    for _ in range(_TRIES):
        with ExitStack() as held:
            first = _bound(held, 0)
            try:
                for port in range(first + 1, first + count):
                    _bound(held, port)
            except (OSError, OverflowError):
                continue
            return first
    raise Unavailable(f"no {count} neighbouring ports are free")


def _bound(held: ExitStack, port: int) -> int:
    listener = held.enter_context(socket.socket())
    listener.bind(("127.0.0.1", port))
    number: int = listener.getsockname()[1]
    return number


def worker_process(parent: int, worker_id: str) -> int:
    """Process id of a worker that `splitpoint up` (process `parent`) has started."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    for child in children:
        arguments = Path(f"/proc/{child}/cmdline").read_bytes().decode().split("\0")
        if "worker_service" in arguments and f"--worker-id\0{worker_id}\0" in "\0".join(arguments):
            return int(child)
    raise Unavailable(f"up has no worker {worker_id}")


@contextmanager
def frozen(process: int) -> Iterator[None]:
    """SIGSTOP for the length of the context."""
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


# -- Prometheus ----------------------------------------------------------------------------

CONFIGURATION = ROOT / "deploy" / "prometheus" / "prometheus.yml"
# Faster than shipped: the trial lasts a minute.
_INTERVAL = "1s"
_CALL_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Target:
    """One address to scrape, and the labels that its target adds."""

    job: str
    address: str
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Series:
    """`points`: seconds since the epoch, and values that are numbers."""

    labels: Mapping[str, str]
    points: Sequence[tuple[float, float]]


class Prometheus:
    """One server. Raises OSError while it is away."""

    def __init__(self, address: str) -> None:
        self._base = f"http://{address}"

    def series(self, query: str, start: float, end: float, step: float) -> list[Series]:
        """Query a range; leave out series without any number."""
        result = self._get("/api/v1/query_range", query=query, start=start, end=end, step=step)[
            "result"
        ]
        found = []
        for each in result:
            points = [(float(at), float(text)) for at, text in each["values"]]
            numbers = [(at, value) for at, value in points if math.isfinite(value)]
            if numbers:
                found.append(Series(each["metric"], numbers))
        return found

    def targets(self) -> dict[str, str]:
        """Return health (up, down, unknown) by scrape address."""
        active = self._get("/api/v1/targets")["activeTargets"]
        return {f"{each['labels']['job']} {each['scrapeUrl']}": each["health"] for each in active}

    def firing(self) -> Counter[tuple[str, str]]:
        """Count the firing alerts by name and severity."""
        return Counter(
            (alert["labels"]["alertname"], alert["labels"]["severity"])
            for alert in self._get("/api/v1/alerts")["alerts"]
            if alert["state"] == "firing"
        )

    def unhealthy_rules(self) -> dict[str, str]:
        """Return errors by the names of rules that could not be evaluated."""
        return {
            rule["name"]: rule["lastError"]
            for group in self._get("/api/v1/rules")["groups"]
            for rule in group["rules"]
            if rule["health"] == "err"
        }

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._base}/-/ready", timeout=_CALL_SECONDS):
                return True
        except OSError:
            return False

    def _get(self, path: str, **arguments: object) -> Any:
        url = f"{self._base}{path}?{urllib.parse.urlencode(arguments)}"
        with urllib.request.urlopen(url, timeout=_CALL_SECONDS) as answer:
            return json.load(answer)["data"]


@contextmanager
def scraping(targets: Sequence[Target], port: int, folder: Path) -> Iterator[Prometheus]:
    """Run a server at 127.0.0.1:`port` that reads `targets`, with a new database in `folder`."""
    configuration = folder / "prometheus.yml"
    # JSON is YAML.
    configuration.write_text(json.dumps(configuration_for(targets)))
    address = f"127.0.0.1:{port}"
    command = [
        "prometheus",
        f"--config.file={configuration}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    prometheus = Prometheus(address)
    with running("prometheus", command, folder):
        wait_until(prometheus.is_ready, 30, "Prometheus is ready")
        yield prometheus


def configuration_for(targets: Sequence[Target]) -> dict[str, Any]:
    """Return the shipped configuration with other addresses, intervals, and further jobs."""
    shipped: dict[str, Any] = yaml.safe_load(CONFIGURATION.read_text())
    shipped["global"] = {
        "scrape_interval": _INTERVAL,
        "scrape_timeout": _INTERVAL,
        "evaluation_interval": _INTERVAL,
    }
    shipped["rule_files"] = [str(CONFIGURATION.parent / name) for name in shipped["rule_files"]]
    known = {job["job_name"]: job for job in shipped["scrape_configs"]}
    shipped["scrape_configs"] = [
        _job(known.get(name, {"job_name": name}), [each for each in targets if each.job == name])
        for name in dict.fromkeys(target.job for target in targets)
    ]
    return shipped


def _job(shipped: Mapping[str, Any], targets: Sequence[Target]) -> dict[str, Any]:
    """Return the shipped job, with its relabelling, for these targets."""
    job = {key: value for key, value in shipped.items() if key != "file_sd_configs"}
    job["static_configs"] = [_static(target) for target in targets]
    return job


def _static(target: Target) -> dict[str, Any]:
    return {"targets": [target.address], "labels": dict(target.labels)}


def wait_until(is_true: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait until the condition holds. Raises DeadlineExceeded."""
    deadline = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"not within {seconds:g} s: {what}")
        time.sleep(0.5)


# -- the stack -----------------------------------------------------------------------------

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
    if not missing_engine():
        tier += [TRANSFER.flag, ENGINE, "--transfer-interface", "lo"]
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


# -- the load ------------------------------------------------------------------------------

_FAMILIES = 6
_SHARED_TOKENS = 640
_STEADY = 5
_BURST = 24
_BURST_EVERY = 12.0
_REQUEST_SECONDS = 60.0


class Load:
    """Sends requests until `seconds` are over. `ends`: how many ended in which way.

    `address` is the scheduler's, `url` the gateway's.
    """

    def __init__(self, address: str, url: str, seconds: float, seed: int = 0) -> None:
        self.ends: Counter[str] = Counter()
        self._address = address
        self._url = url
        self._seconds = seconds
        self._random = random.Random(seed)
        self._families = [self._tokens(_SHARED_TOKENS) for _ in range(_FAMILIES)]

    async def run(self) -> None:
        self._until = time.monotonic() + self._seconds
        async with AsyncClient(self._address) as client:
            await asyncio.gather(
                *(self._steadily(client) for _ in range(_STEADY)),
                self._in_bursts(client),
                self._by_http(),
            )

    async def _steadily(self, client: AsyncClient) -> None:
        while time.monotonic() < self._until:
            await self._one(client)

    async def _in_bursts(self, client: AsyncClient) -> None:
        """More at once than may run and wait."""
        while time.monotonic() < self._until:
            await asyncio.gather(*(self._one(client) for _ in range(_BURST)))
            await asyncio.sleep(_BURST_EVERY)

    async def _by_http(self) -> None:
        """Streams, one at a time, of which some are left early."""
        while time.monotonic() < self._until:
            prompt = [*self._families[0][:300], *self._tokens(self._random.randrange(8, 80))]
            leaves = self._random.random() < 0.1
            status = await asyncio.to_thread(self._stream, prompt, leaves)
            self.ends["left" if leaves else f"HTTP {status}"] += 1
            if status != http.client.OK:
                await asyncio.sleep(0.5)

    def _stream(self, prompt: list[int], leaves: bool) -> int:
        """Return the status of a stream; it is read to its end, or to its first line."""
        body = {"model": "stdlib-llama", "prompt": prompt, "max_tokens": 24, "stream": True}
        connection = http.client.HTTPConnection(
            self._url.removeprefix("http://"), timeout=_REQUEST_SECONDS
        )
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            answer.readline()
            if not leaves:
                answer.read()
            return answer.status
        finally:
            connection.close()

    async def _one(self, client: AsyncClient) -> None:
        chosen = self._random
        # One family is asked for by half of all, the others take turns.
        family = self._families[chosen.choice((0, 0, 0, *range(_FAMILIES)))]
        leaves = chosen.random() < 0.05
        options: GenerateOptions = {"max_tokens": chosen.randrange(8, 40), "ignore_eos": True}
        options["timeout"] = _REQUEST_SECONDS
        if chosen.random() < 0.3:
            options["residency"] = Residency.STREAMED
        elif chosen.random() < 0.5:
            # Only what is restored to the device has a choice of how.
            options["residency"] = Residency.RESIDENT
            options["restore"] = chosen.choice(FORCED_METHODS)
        new = self._tokens(chosen.randrange(8, 80))
        prompt = family[: chosen.randrange(300, _SHARED_TOKENS)] + new
        generation = client.generate(prompt, **options)
        try:
            async for _ in generation:
                if leaves:
                    self.ends["left"] += 1
                    await generation.close()
                    return
            self.ends["complete"] += 1
        except SplitpointError as error:
            self.ends[error.reason] += 1
            # As a polite caller does.
            await asyncio.sleep(0.5)

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(3, _VOCABULARY) for _ in range(count)]


# -- what every query answers --------------------------------------------------------------

Ask = Callable[[str], Sequence[Series]]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one query. `sample`: latest value of the first series; None if empty."""

    place: str
    panel: str
    legend: str
    series_count: int
    sample: float | None


def answers(ask: Ask) -> Iterator[Answer]:
    """Yield one for each query of each panel, then one for each recorded series."""
    for dashboard in dashboards():
        for panel in dashboard.panels():
            for query in panel.queries:
                yield _answer(dashboard.name, panel.title, query.legend, ask(query.plain()))
    for name in recording_rules():
        yield _answer("recording rules", name, "", ask(name))


def _answer(place: str, panel: str, legend: str, found: Sequence[Series]) -> Answer:
    sample = found[0].points[-1][1] if found else None
    return Answer(place, panel, legend, len(found), sample)


# -- trouble, made on purpose --------------------------------------------------------------

# One of each, and nothing critical: the other worker serves.
EXPECTED_ALERTS = frozenset(
    (f"Splitpoint{name}", "warning")
    for name in ("ArenaFull", "RedisAway", "ScrapeFailing", "WorkerLost")
)
_SECONDS = 120.0
_VOCABULARY = 4096


def firing_in_trouble(running: Trial) -> Counter[tuple[str, str]]:
    """Count the alerts that fire within two minutes, by name and severity."""
    asyncio.run(_fill_arena(running))
    running.redis.kill()
    with frozen(worker_process(running.up.pid, "0")):
        try:
            wait_until(
                lambda: running.prometheus.firing().keys() >= EXPECTED_ALERTS, _SECONDS, "alerts"
            )
        except DeadlineExceeded:
            pass  # the caller reports what is missing
        return running.prometheus.firing()


def wrong_alerts(firing: Counter[tuple[str, str]]) -> Iterator[str]:
    """Yield missing alerts, repeated ones, and critical ones."""
    for name, severity in sorted(EXPECTED_ALERTS):
        if firing[name, severity] != 1:
            yield f"{name} ({severity}) fires {firing[name, severity]} times, not once"
    for name, severity in sorted(firing):
        if severity == "critical":
            yield f"{name} is critical, although requests are served"


async def _fill_arena(running: Trial) -> None:
    """Fill the arena by a streamed request; resident ones beside it find no free slot."""
    now = time.time()
    (slots,) = running.prometheus.series("sum(splitpoint_store_slots)", now - 1, now, 1)
    tokens = int(slots.points[-1][1] - 1) * CHUNK_TOKENS
    async with AsyncClient(running.address) as client:
        streamed = client.generate(
            _tokens(tokens),
            max_tokens=CHUNK_TOKENS - 1,
            ignore_eos=True,
            residency=Residency.STREAMED,
            timeout=_SECONDS,
        )
        await anext(streamed)
        await asyncio.gather(
            *(
                client.generate(
                    _tokens(8 * CHUNK_TOKENS),
                    max_tokens=1,
                    residency=Residency.RESIDENT,
                    timeout=_SECONDS,
                ).complete()
                for _ in range(2)
            )
        )
        await streamed.close()


def _tokens(count: int) -> list[int]:
    return [random.randrange(3, _VOCABULARY) for _ in range(count)]


# -- the trial -----------------------------------------------------------------------------

_STEP_SECONDS = 1.0

console = Console(width=None if sys.stdout.isatty() else 150, highlight=False)


def main() -> None:
    arguments = _parse()
    missing = [tool for tool in ("prometheus", "promtool") if shutil.which(tool) is None]
    if missing:
        sys.exit(
            f"{' and '.join(missing)} missing: install Prometheus (Debian: apt install prometheus)"
        )
    _check_rules()
    with tempfile.TemporaryDirectory(prefix="sp-mon-") as name:
        try:
            is_well = _try_on_a_stack(Path(name), arguments.seconds)
        except SplitpointError as error:
            for log in sorted(Path(name).glob("*.log")):
                console.print(
                    f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}", markup=False
                )
            sys.exit(f"error: {error}")
    sys.exit(not is_well)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.monitoring.trial", description=__doc__)
    parser.add_argument("--seconds", type=float, default=75.0, help="of load (default 75)")
    return parser.parse_args()


def _check_rules() -> None:
    """Syntax of everything, and the unit tests of rules. Exits when promtool is not content."""
    folder = ROOT / "deploy" / "prometheus"
    tests = sorted(str(path) for path in (folder / "tests").glob("*.yml"))
    for command in (
        ["promtool", "check", "config", str(folder / "prometheus.yml")],
        ["promtool", "test", "rules", *tests],
    ):
        if subprocess.run(command, check=False).returncode:
            sys.exit(f"failed: {' '.join(command)}")


def _try_on_a_stack(folder: Path, seconds: float) -> bool:
    began = time.time()
    console.print("starting Redis, two workers, a store, a scheduler, a gateway, Prometheus ...")
    with trial(folder) as running:
        loaded = time.time()
        load = Load(running.address, running.url, seconds)
        asyncio.run(_under_load(load, running, seconds))
        ended = time.time()
        console.print(f"load: {dict(sorted(load.ends.items()))}")
        if load.ends["INTERNAL"] or not load.ends["complete"] or not load.ends["HTTP 200"]:
            raise Unavailable("requests fail that should not; what the logs say is above")

        def ask(query: str) -> Sequence[Series]:
            return running.prometheus.series(query, loaded, ended, _STEP_SECONDS)

        found = list(answers(ask))
        unhealthy = running.prometheus.unhealthy_rules()
        targets = running.prometheus.targets()
        console.print("the arena is filled, Redis killed, worker 0 frozen: waiting for alerts ...")
        firing = firing_in_trouble(running)
    _print(found)
    silent = [answer for answer in found if answer.sample is None]
    for answer in silent:
        console.print(f"[red]no data[/]: {answer.place}: {answer.panel}: {answer.legend}")
    for name, error in unhealthy.items():
        console.print(f"[red]rule[/] {name}: {error}", markup=True)
    wrong = list(wrong_alerts(firing))
    for each in wrong:
        console.print(f"[red]alert[/]: {each}")
    summary = {
        "queries": len(found),
        "without_data": len(silent),
        "panels": len({(answer.place, answer.panel) for answer in found}),
        "rules_in_error": sorted(unhealthy),
        "targets": targets,
        "requests": dict(load.ends),
        "alerts_fired": {
            f"{name} ({severity})": firing[name, severity] for name, severity in firing
        },
        "seconds": round(time.time() - began),
    }
    print(json.dumps(summary))
    return not silent and not unhealthy and not wrong


async def _under_load(load: Load, running: Trial, seconds: float) -> None:
    """Two thirds in, a worker is killed; `up` starts it again, its requests move."""
    loading = asyncio.create_task(load.run())
    await asyncio.sleep(seconds * 2 / 3)
    os.kill(worker_process(running.up.pid, "1"), signal.SIGKILL)
    await loading


def _print(found: Sequence[Answer]) -> None:
    table = Table(title="What every query answered", title_justify="left")
    for column in ("dashboard", "panel", "query"):
        table.add_column(column, overflow="fold")
    table.add_column("series", justify="right")
    table.add_column("a value", justify="right")
    for answer in found:
        value = "[red]none[/]" if answer.sample is None else f"{answer.sample:.4g}"
        legend = answer.legend.replace("[", r"\[")
        panel = answer.panel.replace("[", r"\[")
        table.add_row(answer.place, panel, legend, str(answer.series_count), value)
    console.print(table)


if __name__ == "__main__":
    main()
