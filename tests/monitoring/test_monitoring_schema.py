"""Grafana reads every committed dashboard: its schema's keys, types and units, and no others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from grafana_schema import UNITS, is_unit, problems

from tools.monitoring.dashboards import FOLDER, files

FILES = files()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_dashboard_is_one_by_grafanas_schema(path: Path) -> None:
    assert problems(path.read_text()) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_units_are_known_to_grafana(path: Path) -> None:
    found = list(units_in(json.loads(path.read_text())))
    assert found
    assert [unit for unit in found if not is_unit(unit)] == []


def units_in(value: Any) -> Iterator[str]:
    """Yield the units of panels and of overrides."""
    if isinstance(value, list):
        for each in value:
            yield from units_in(each)
    elif isinstance(value, dict):
        if value.get("id") == "unit":
            yield value["value"]
        for key, each in value.items():
            if key == "unit":
                yield each
            else:
                yield from units_in(each)


def test_known_units() -> None:
    assert len(UNITS) > 200
    assert {"s", "bytes", "percentunit", "bool_yes_no"} < UNITS
    assert is_unit("si:tok/s")
    for wrong in ("suffix: tok/s", "tok/s", "seconds", "si:", ""):
        assert not is_unit(wrong), wrong


Panel = dict[str, Any]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda panel: panel.update(datasorce={}), "/panels/datasorce: Grafana has no such key"),
        (lambda panel: panel.update(title=5), "/panels/title: 5 is not"),
        (lambda panel: panel["options"].update(graphMode="areas"), "'areas' is not"),
        (lambda panel: panel["options"].update(colour="value"), "/panels/options/colour"),
        (lambda panel: panel["fieldConfig"]["defaults"].update(min="0"), "'0' is not"),
        (lambda panel: panel["fieldConfig"]["defaults"].update(units="s"), "/defaults/units"),
        (lambda panel: panel["targets"][0].update(query="up"), "/panels/targets/query"),
        (lambda panel: panel["targets"][0].update(format="tables"), "'tables' is not"),
        (lambda panel: panel["gridPos"].update(w="4"), "'4' is not"),
    ],
)
def test_a_mistake_is_found(change: Callable[[Panel], None], message: str) -> None:
    dashboard = json.loads((FOLDER / "overview.json").read_text())
    change(next(panel for panel in dashboard["panels"] if panel["type"] == "stat"))
    found = problems(json.dumps(dashboard))
    assert any(message in problem for problem in found), found
