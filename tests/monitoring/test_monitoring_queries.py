"""Every query asks for metrics and labels that exist, and no metric goes unseen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import yaml
from query_labels import TARGET_LABELS, BadQuery, labels_of_query, metrics_in

from splitpoint.observe.metrics import Metric, Service, all_metrics
from tools.monitoring.dashboards import ROOT, dashboards, recording_rules

PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = recording_rules()


def alerts() -> Iterator[tuple[str, str]]:
    """Yield names and expressions."""
    groups = yaml.safe_load((PROMETHEUS / "rules" / "alerts.yml").read_text())["groups"]
    return ((rule["alert"], rule["expr"]) for group in groups for rule in group["rules"])


def queries() -> Iterator[tuple[str, str]]:
    """Yield (place, expression) of all queries."""
    yield from RULES.items()
    yield from alerts()
    for dashboard in dashboards():
        for panel in dashboard.panels():
            for query in panel.queries:
                yield f"{dashboard.name}: {panel.title}: {query.legend}", query.plain()


@pytest.mark.parametrize(("place", "query"), list(queries()))
def test_metrics_and_labels_of_a_query_exist(place: str, query: str) -> None:
    labels_of_query(query, RULES)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("splitpoint_no_such_metric", "no service has a metric splitpoint_no_such_metric"),
        ("store:no_such_rule:ratio", "no rule records"),
        ('splitpoint_store_slots{worker="0"}', "has no label worker"),
        ("sum by (direction) (splitpoint_store_slots)", "no label direction"),
        ("splitpoint_ttft_seconds", "no service has a metric splitpoint_ttft_seconds"),
        (
            "splitpoint_gpu_power_watts / sum by (worker) (splitpoint_gpu_power_limit_watts)",
            "match nothing",
        ),
        (
            "splitpoint_store_slots / on (worker) splitpoint_worker_running_requests",
            "both sides need",
        ),
        ("histogram_quantile(0.5, rate(splitpoint_generated_tokens_total[1m]))", "without le"),
    ],
)
def test_a_wrong_query_is_found(query: str, message: str) -> None:
    with pytest.raises(BadQuery, match=message):
        labels_of_query(query, RULES)


def test_no_metric_goes_unseen() -> None:
    seen: set[Metric] = set()
    for _, query in queries():
        seen |= metrics_in(query, RULES)
    unseen = {metric.name for metric in all_metrics()} - {metric.name for metric in seen}
    assert unseen == set(), "in no panel, rule or alert"


def test_every_recorded_series_is_looked_at() -> None:
    others = [query for place, query in queries() if place not in RULES]
    for name in RULES:
        assert any(name in query for query in others), f"no panel or alert reads {name}"


def test_targets_add_the_labels_that_queries_count_on() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    for service in Service:
        added = {"job", "instance"}
        added |= {rule["target_label"] for rule in jobs[service].get("relabel_configs", ())}
        if service is Service.WORKER:
            (group,) = yaml.safe_load((PROMETHEUS / "targets" / "workers.yml").read_text())
            added |= set(group["labels"])
        assert added == TARGET_LABELS[service]
