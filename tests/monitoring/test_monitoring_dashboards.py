"""Committed dashboards: formatted, laid out, described, and true to what the metrics need."""

from __future__ import annotations

import itertools
import re
from collections import Counter

import pytest
import yaml
from query_labels import labels_of_query, needs_of

from scheduler_service.requests.counters import Outcome
from splitpoint.observe.metrics import Needs
from tools.monitoring.dashboards import (
    ROOT,
    Dashboard,
    Panel,
    dashboards,
    files,
    formatted,
    recording_rules,
)

DASHBOARDS = dashboards()
RULES = recording_rules()
EVERY = pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)
# In the title of a panel that shows nothing without it.
MARKS = {
    Needs.REDIS: "Redis",
    Needs.STORE: "store",
    Needs.GPU: "GPU",
    Needs.RAPL: "RAPL",
    Needs.EMULATED_LINK: "GPU or emulated link",
    Needs.TIER: "tier",
    Needs.TRANSFER: "engine",
}


def test_files_are_formatted() -> None:
    for path in files():
        text = path.read_text()
        assert formatted(text) == text, f"{path.name}: run python -m tools.monitoring.dashboards"


def test_what_a_save_in_grafana_changes_is_not_kept() -> None:
    saved = '{"uid": "a", "id": 7, "version": 12}'
    assert formatted(saved) == '{\n  "uid": "a",\n  "version": 1\n}\n'


@EVERY
def test_panels_have_ids_of_their_own_and_do_not_overlap(dashboard: Dashboard) -> None:
    panels = dashboard.json["panels"]
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
    assert len(DASHBOARDS) == 6
    for dashboard in DASHBOARDS:
        titles = Counter(panel.title for panel in dashboard.panels())
        assert max(titles.values()) == 1, titles.most_common(1)


@EVERY
def test_every_panel_says_what_it_is(dashboard: Dashboard) -> None:
    for panel in dashboard.panels():
        assert panel.json["description"].endswith((".", "?")), panel.title
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
    panel = panel_of("overview", "Workers ready, of those known")
    steps = panel.defaults["thresholds"]["steps"]

    def colour(share: float) -> str:
        *_, last = (s["color"] for s in steps if s["value"] is None or s["value"] <= share)
        return str(last)

    assert [colour(share) for share in (0, 0.5, 0.99, 1)] == ["red", "orange", "orange", "green"]


def test_outcomes_have_colours_that_say_whether_they_are_good() -> None:
    panel = panel_of("overview", "Requests by how they ended")
    colours = {name: each["color"]["fixedColor"] for name, each in panel.overrides.items()}
    assert set(colours) == {*(outcome.value for outcome in Outcome), "B"}
    (rejected,) = (query for query in panel.queries if query.ref_id == "B")
    assert rejected.legend == "rejected"
    good = {name for name, colour in colours.items() if "green" in colour}
    assert good == {"stop", "length"}
    assert {name for name, colour in colours.items() if "red" in colour} == {"error", "B"}


def bounds_of(panel: Panel) -> list[float]:
    """Return the values at which the colour changes."""
    steps = panel.defaults["thresholds"]["steps"]
    return [step["value"] for step in steps if step["value"] is not None]


@EVERY
def test_bounds_are_drawn_in_order(dashboard: Dashboard) -> None:
    for panel in dashboard.panels():
        bounds = bounds_of(panel)
        assert bounds == sorted(bounds), panel.title
        if panel.json["type"] == "timeseries":
            style = panel.defaults["custom"]["thresholdsStyle"]["mode"]
            assert (style == "dashed") == bool(bounds), panel.title
    assert any(bounds_of(panel) for panel in dashboard.panels())


def test_what_alerts_watch_has_its_bound_in_the_overview() -> None:
    """A line where the alert fires."""
    assert bounds_of(panel_of("overview", "Time to first token"))[-1] == 10
    assert bounds_of(panel_of("overview", "Queue"))[-1] == 0.8


def test_the_overview_lists_alerts() -> None:
    panel = panel_of("overview", "Alerts").json
    assert panel["type"] == "table"
    (target,) = panel["targets"]
    assert "ALERTS{" in target["expr"]
    assert target["instant"] is True
    assert target["format"] == "table"


def panel_of(name: str, title: str) -> Panel:
    (dashboard,) = (each for each in DASHBOARDS if each.name == name)
    (panel,) = (each for each in dashboard.panels() if each.title == title)
    return panel


def test_the_datasource_is_the_provisioned_one() -> None:
    folder = ROOT / "deploy" / "grafana" / "provisioning" / "datasources"
    (source,) = yaml.safe_load((folder / "splitpoint.yml").read_text())["datasources"]
    for dashboard in DASHBOARDS:
        variable = dashboard.json["templating"]["list"][0]
        assert variable["current"]["value"] == source["uid"]


def panel_needs(panel: Panel) -> frozenset[Needs]:
    """Return what must be present for the panel to show anything at all."""
    return frozenset.intersection(*(needs_of(query.expr, RULES) for query in panel.queries))


@EVERY
def test_panels_that_need_something_say_so(dashboard: Dashboard) -> None:
    for panel in dashboard.panels():
        common = panel_needs(panel)
        if Needs.GPU in common:  # an emulated link would not be enough
            common -= {Needs.EMULATED_LINK}
        mark = re.search(r" \[(.*)\]$", panel.title)
        assert (mark[1] if mark else "") == ", ".join(MARKS[n] for n in Needs if n in common)
        description = panel.json["description"]
        if common:
            needed = " and ".join(sorted(common))
            assert panel.defaults["noValue"] == f"needs {needed}", panel.title
            assert f"No data without {needed}." in description, panel.title
        for query in panel.queries:
            if further := needs_of(query.expr, RULES) - panel_needs(panel):
                assert f"`{query.legend}`: needs {' and '.join(sorted(further))}." in description
