"""Every alert says what to do, and has tests in which it fires and in which it does not."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from query_labels import labels_of_query

from tools.monitoring.dashboards import ROOT, recording_rules

PROMETHEUS = ROOT / "deploy" / "prometheus"
ALERTS: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((PROMETHEUS / "rules" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
EVERY = pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])


@EVERY
def test_an_alert_says_how_bad_it_is_and_what_to_do(alert: dict[str, Any]) -> None:
    assert alert["alert"].startswith("Splitpoint")
    assert alert["labels"]["severity"] in ("info", "warning", "critical")
    assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
    numbers = re.search(r"\d|\$value", alert["annotations"]["description"])
    assert numbers, "a description has numbers"


@EVERY
def test_its_runbook_is_there(alert: dict[str, Any]) -> None:
    path, _, anchor = alert["annotations"]["runbook_url"].partition("#")
    assert anchor == alert["alert"].lower()
    entry = rf'^- <a id="{anchor}"></a>\*\*(\w+)\*\* \(([^)]*)\)'
    ((name, severities),) = re.findall(entry, (ROOT / path).read_text(), re.MULTILINE)
    assert name == alert["alert"]
    assert alert["labels"]["severity"] in severities


@EVERY
def test_its_texts_name_labels_that_it_has(alert: dict[str, Any]) -> None:
    labels = labels_of_query(alert["expr"], recording_rules())
    for text in alert["annotations"].values():
        named = set(re.findall(r"\$labels\.(\w+)", text))
        assert named <= labels, text


@EVERY
def test_it_is_tested_both_ways(alert: dict[str, Any]) -> None:
    tests = [
        test
        for path in (PROMETHEUS / "tests").glob("*.yml")
        for case in yaml.safe_load(path.read_text())["tests"]
        for test in case.get("alert_rule_test", ())
        if test["alertname"] == alert["alert"]
    ]
    fired = [each["exp_labels"] for test in tests for each in test.get("exp_alerts", ())]
    severity = alert["labels"]["severity"]
    assert any(labels["severity"] == severity for labels in fired), "no test in which it fires"
    assert any(not test.get("exp_alerts") for test in tests), "no test in which it is silent"


def test_the_page_has_no_other_alerts() -> None:
    rows = re.findall(r'<a id="(\w+)"></a>', (ROOT / "docs" / "monitoring.md").read_text())
    assert len(set(rows)) == len(rows)
    assert set(rows) == {alert["alert"].lower() for alert in ALERTS}


def test_one_lost_worker_is_not_critical() -> None:
    """Alerts on single workers are critical only if the store's data or requests are at stake."""
    critical = {
        alert["alert"]
        for alert in ALERTS
        if alert["labels"]["severity"] == "critical"
        and re.search(r'splitpoint_worker_|job=~?"[^"]*worker', alert["expr"])
    }
    # No worker at all; and a worker that serves without its store.
    assert critical == {"SplitpointNoWorkerReady", "SplitpointStoreAway"}
