"""A real Prometheus with the configuration that is shipped, and questions to its HTTP API."""

from __future__ import annotations

import json
import math
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from splitpoint.errors import DeadlineExceeded
from tools.monitoring.dashboards import ROOT
from tools.monitoring.trial.processes import running

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
