"""`make monitoring-test`: rules by promtool, then every query on a real stack under load.

Needs prometheus and promtool on PATH, and no GPU: its panels are tried on a double of the
exporter. Ends with a table, then one line of JSON; exit code 1 when a query says nothing,
a rule cannot be evaluated, or an alert does not fire.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from splitpoint.errors import SplitpointError, Unavailable
from tools.monitoring.dashboards import ROOT
from tools.monitoring.trial.answers import Answer, answers
from tools.monitoring.trial.load import Load
from tools.monitoring.trial.processes import worker_process
from tools.monitoring.trial.prometheus import Series
from tools.monitoring.trial.stack import Trial, trial
from tools.monitoring.trial.troubles import firing_in_trouble, wrong_alerts

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
