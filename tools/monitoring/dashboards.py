"""Read the committed Grafana dashboards; run as a program: format their files.

To change one, edit it in Grafana, save its JSON over the file, then run
`python -m tools.monitoring.dashboards`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "deploy" / "grafana" / "dashboards"
RECORDING_RULES = ROOT / "deploy" / "prometheus" / "rules" / "recording.yml"

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Query:
    """One expression of PromQL. `legend` is Grafana's, with {{label}}."""

    ref_id: str
    expr: str
    legend: str

    def plain(self, window: str = "1m") -> str:
        """Return the expression without variables: every worker, rates over `window`."""
        return self.expr.replace("$__rate_interval", window).replace("$worker", ".*")


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel; `json` is the object as Grafana reads it."""

    json: Json

    @property
    def title(self) -> str:
        return str(self.json["title"])

    @property
    def defaults(self) -> Json:
        """Unit, thresholds and form of all series."""
        defaults: Json = self.json["fieldConfig"]["defaults"]
        return defaults

    @property
    def overrides(self) -> dict[str, dict[str, Any]]:
        """Properties by the query's letter or by the legend they are for."""
        return {
            override["matcher"]["options"]: {
                each["id"]: each["value"] for each in override["properties"]
            }
            for override in self.json["fieldConfig"]["overrides"]
        }

    @property
    def queries(self) -> list[Query]:
        return [
            Query(target["refId"], target["expr"], target["legendFormat"])
            for target in self.json["targets"]
        ]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard; `name` is the name of its file."""

    name: str
    json: Json

    def panels(self) -> Iterator[Panel]:
        """Yield the panels without the rows; a folded row holds its panels itself."""
        for panel in self.json["panels"]:
            inside = panel["panels"] if panel["type"] == "row" else [panel]
            yield from (Panel(each) for each in inside)


def dashboards() -> list[Dashboard]:
    """Return all dashboards, by name."""
    return [Dashboard(path.stem, json.loads(path.read_text())) for path in files()]


def files() -> list[Path]:
    return sorted(FOLDER.glob("*.json"))


def formatted(text: str) -> str:
    """Return a dashboard's JSON without what each save in Grafana changes."""
    dashboard = json.loads(text)
    dashboard.pop("id", None)
    dashboard["version"] = 1
    return json.dumps(dashboard, indent=2, ensure_ascii=False) + "\n"


def recording_rules() -> dict[str, str]:
    """Return the recording rules' expressions by the names of their series."""
    groups = yaml.safe_load(RECORDING_RULES.read_text())["groups"]
    return {rule["record"]: rule["expr"] for group in groups for rule in group["rules"]}


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m tools.monitoring.dashboards",
        description="Format the dashboards in deploy/grafana/dashboards, in place.",
    ).parse_args()
    for path in files():
        path.write_text(formatted(path.read_text()))


if __name__ == "__main__":
    main()
