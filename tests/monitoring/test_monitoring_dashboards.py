"""Committed dashboards are what the generator writes, and Grafana can place every panel."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from typing import Any

import pytest
import yaml
from query_labels import labels_of_query

from scheduler_service.cluster.accounts import Outcome
from splitpoint.observe.metrics import Needs
from tools.monitoring.dashboards import DASHBOARDS, FOLDER, files
from tools.monitoring.grafana_json import DATASOURCE_UID, description_of, marked_title
from tools.monitoring.needs import ROOT, needs_of, panel_needs, recording_rules
from tools.monitoring.overview import OVERVIEW
from tools.monitoring.panels import Dashboard, Form, Panel, Query, Unit

RULES = recording_rules()
EVERY = pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)


def test_files_are_what_the_generator_writes() -> None:
    written = dict(files())
    assert set(FOLDER.iterdir()) == set(written)
    for path, text in written.items():
        assert path.read_text() == text, f"{path.name}: run python -m tools.monitoring.dashboards"


@EVERY
def test_panels_have_ids_of_their_own_and_do_not_overlap(dashboard: Dashboard) -> None:
    loaded = json.loads((FOLDER / f"{dashboard.name}.json").read_text())
    panels = loaded["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = set(
            itertools.product(
                range(place["x"], place["x"] + place["w"]),
                range(place["y"], place["y"] + place["h"]),
            )
        )
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_dashboards_and_panels_are_told_apart() -> None:
    assert len({dashboard.name for dashboard in DASHBOARDS}) == len(DASHBOARDS) == 5
    for dashboard in DASHBOARDS:
        titles = Counter(panel.title for panel in dashboard.panels())
        assert max(titles.values()) == 1, titles.most_common(1)


@EVERY
def test_every_panel_says_what_it_is(dashboard: Dashboard) -> None:
    for panel in dashboard.panels():
        assert panel.help.endswith((".", "?")), panel.title
        assert all(query.legend for query in panel.queries), panel.title


@EVERY
def test_legends_name_labels_of_their_answers(dashboard: Dashboard) -> None:
    for panel in dashboard.panels():
        for query in panel.queries:
            named = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
            missing = named - labels_of_query(query.plain(), RULES)
            assert not missing, f"{panel.title}: {query.legend}"


@EVERY
def test_legends_tell_series_apart(dashboard: Dashboard) -> None:
    """Two schedulers, stores or workers give two lines: their names must differ."""
    for panel in dashboard.panels():
        for query in panel.queries:
            fixed = set(re.findall(r'(\w+)="', query.expr))
            labels = labels_of_query(query.plain(), RULES) - fixed - {"job", "host"}
            if "worker" in labels:
                labels -= {"instance"}
            named = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
            assert labels <= named, f"{panel.title}: {query.legend}"


def test_workers_are_green_only_when_all_are_ready() -> None:
    panel = loaded_panel("overview", "Workers ready, of those known")
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]

    def colour(share: float) -> str:
        *_, last = (s["color"] for s in steps if s["value"] is None or s["value"] <= share)
        return str(last)

    assert [colour(share) for share in (0, 0.5, 0.99, 1)] == ["red", "orange", "orange", "green"]


def test_outcomes_have_colours_that_say_whether_they_are_good() -> None:
    panel = loaded_panel("overview", "Requests by how they ended")
    colours = {
        override["matcher"]["options"]: override["properties"][0]["value"]["fixedColor"]
        for override in panel["fieldConfig"]["overrides"]
    }
    assert set(colours) == {*(outcome.value for outcome in Outcome), "B"}
    (rejected,) = (target for target in panel["targets"] if target["refId"] == "B")
    assert rejected["legendFormat"] == "rejected"
    good = {name for name, colour in colours.items() if "green" in colour}
    assert good == {"stop", "length"}
    assert {name for name, colour in colours.items() if "red" in colour} == {"error", "B"}


@EVERY
def test_bounds_are_drawn(dashboard: Dashboard) -> None:
    for panel in dashboard.panels():
        if panel.form in (Form.LINES, Form.STACK):
            has_bounds = panel.warn is not None or panel.alarm is not None
            title = marked_title(panel, RULES)
            custom = loaded_panel(dashboard.name, title)["fieldConfig"]["defaults"]["custom"]
            assert (custom["thresholdsStyle"]["mode"] == "dashed") == has_bounds, title
    assert any(panel.alarm for panel in dashboard.panels())


def test_what_alerts_watch_has_its_bound_in_the_overview() -> None:
    """A line where the alert fires."""
    panels = {panel.title: panel for panel in OVERVIEW.panels()}
    assert panels["Time to first token"].alarm == 10
    assert panels["Queue"].alarm == 0.8


def test_the_overview_lists_alerts() -> None:
    panel = loaded_panel("overview", "Alerts")
    assert panel["type"] == "table"
    (target,) = panel["targets"]
    assert "ALERTS{" in target["expr"]
    assert target["instant"] is True
    assert target["format"] == "table"


def loaded_panel(dashboard: str, title: str) -> dict[str, Any]:
    panels: list[dict[str, Any]] = json.loads((FOLDER / f"{dashboard}.json").read_text())["panels"]
    (panel,) = (each for each in panels if each["title"] == title)
    return panel


def test_the_datasource_is_the_provisioned_one() -> None:
    folder = ROOT / "deploy" / "grafana" / "provisioning" / "datasources"
    (source,) = yaml.safe_load((folder / "splitpoint.yml").read_text())["datasources"]
    assert source["uid"] == DATASOURCE_UID
    for path, _ in files():
        variable = json.loads(path.read_text())["templating"]["list"][0]
        assert variable["current"]["value"] == DATASOURCE_UID


def test_panels_that_need_something_say_so() -> None:
    panels = [panel for dashboard in DASHBOARDS for panel in dashboard.panels()]
    for panel in panels:
        is_marked = marked_title(panel, RULES) != panel.title
        assert is_marked == bool(panel_needs(panel, RULES)), panel.title
    titles = {marked_title(panel, RULES) for panel in panels}
    assert {
        "PCIe utilisation [GPU]",
        "Joules per token, CPU [RAPL]",
        "Time to first token",
    } < titles
    assert "Redis answers [Redis]" in titles
    assert "Bytes over the link's ceiling [GPU or emulated link]" in titles


def test_a_part_of_a_panel_that_needs_more_is_named() -> None:
    (panel,) = (
        panel
        for dashboard in DASHBOARDS
        for panel in dashboard.panels()
        if panel.title == "What copies reach"
    )
    assert panel_needs(panel, RULES) == frozenset()
    assert needs_of(panel.queries[1].expr, RULES) == {Needs.EMULATED_LINK}
    assert "`ceiling {{worker}}`: needs a GPU or an emulated link." in description_of(panel, RULES)


def test_bounds_that_contradict_each_other_are_refused() -> None:
    query = (Query("up", "{{job}}"),)
    with pytest.raises(ValueError, match="wrong side"):
        Panel("p", Unit.SHARE, "h.", query, Form.NUMBER, warn=0.9, alarm=0.5)
    with pytest.raises(ValueError, match="both bounds"):
        Panel("p", Unit.SHARE, "h.", query, Form.NUMBER, warn=0.9, low_is_bad=True)
    with pytest.raises(ValueError, match="asks something"):
        Panel("p", Unit.SHARE, "h.", ())
