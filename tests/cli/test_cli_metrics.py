"""The metrics in docs/monitoring.md are those of the list of metrics."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from splitpoint.observe.metrics import KAPPA_RATIO, Kind, Needs, Service, all_metrics, metrics_of

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "monitoring.md").read_text()


def rows(text: str) -> list[list[str]]:
    """The cells of each metric's row, sections in order."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| `splitpoint_")
    ]


def test_every_metric_is_listed_once_under_its_service() -> None:
    listed: dict[str, list[list[str]]] = {}
    for section in PAGE.split("\n## ")[1:]:
        listed[section.partition("\n")[0]] = rows(section)
    named = {title: [cells[0].strip("`") for cells in found] for title, found in listed.items()}
    common = named["Common to several services"]
    assert common == [each.name for each in all_metrics() if len(each.services) > 1]
    for title, service in (
        ("The store", Service.KVSTORE),
        ("Workers", Service.WORKER),
        ("The scheduler", Service.SCHEDULER),
        ("The gateway", Service.GATEWAY),
    ):
        own = [each.name for each in metrics_of(service) if each.services == (service,)]
        assert named[title] == own
    described = [
        cells for title, found in listed.items() if "Buckets" not in title for cells in found
    ]
    by_name = {cells[0].strip("`"): cells for cells in described}
    assert len(by_name) == len(described) == len(list(all_metrics()))
    for metric in all_metrics():
        _, kind, labels, meaning, needs = by_name[metric.name]
        assert (kind, meaning) == (metric.kind.value, metric.help)
        assert re.findall(r"`(\w+)`", labels) == list(metric.labels)
        assert needs == (metric.needs.value if metric.needs else "")
    histograms = [each.name for each in all_metrics() if each.kind is Kind.HISTOGRAM]
    assert named["Buckets of the histograms"] == histograms


def test_the_page_reads_as_a_table_everywhere() -> None:
    """A help text with a bar or a line break would break its row."""
    for metric in all_metrics():
        assert not set("|\n") & set(metric.help)
    assert {needs.value for needs in Needs} <= {cells[-1] for cells in rows(PAGE)}


def test_each_request_metric_has_its_row_beside_those_of_vllm_and_sglang() -> None:
    table = PAGE.partition("## Coming from vLLM or SGLang\n")[2]
    shown = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in table.splitlines()
        if line.startswith("|")
    ][2:]
    measured = {metric.name: metric for metric in all_metrics()}
    names = {"store": Service.KVSTORE, "workers": Service.WORKER, "scheduler": Service.SCHEDULER}
    replaced = set()
    for vllm, sglang, here, measured_by, _ in shown:
        assert vllm != "–" or sglang != "–"
        assert not re.search(r"vllm:|sglang:", vllm + sglang)
        metrics = [measured[name] for name in re.findall(r"`(\w+)`", here)]
        services = {service for metric in metrics for service in metric.services}
        assert {names[each] for each in re.findall(r"store|workers|scheduler", measured_by)} == (
            services
        )
        replaced |= set(metrics)
    assert {
        metric
        for metric in metrics_of(Service.SCHEDULER)
        if metric.kind is Kind.HISTOGRAM and metric is not KAPPA_RATIO
    } < replaced


def test_its_configuration_has_the_jobs_and_labels_that_rules_and_dashboards_know() -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    jobs = {each["job_name"]: each for each in yaml.safe_load(shown)["scrape_configs"]}
    assert set(jobs) == {service.value for service in Service}
    for group in jobs[Service.WORKER]["static_configs"]:
        assert set(group["labels"]) == {"worker", "host"}
