"""Which metrics a query asks for, and what must be there for it to have an answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import yaml

from splitpoint.observe.metrics import Kind, Metric, Needs, all_metrics
from tools.monitoring.panels import Panel

ROOT = Path(__file__).resolve().parent.parent.parent
RECORDING_RULES = ROOT / "deploy" / "prometheus" / "rules" / "recording.yml"

_NAME = re.compile(r"\b(?:[a-z]+:[a-z_]+:[a-z0-9_]+|splitpoint_[a-z0-9_]+)")
_METRICS = {metric.name: metric for metric in all_metrics()}


def recording_rules(path: Path = RECORDING_RULES) -> dict[str, str]:
    """Expressions by the names they are recorded under."""
    groups = yaml.safe_load(path.read_text())["groups"]
    return {rule["record"]: rule["expr"] for group in groups for rule in group["rules"]}


def metrics_in(expr: str, rules: Mapping[str, str]) -> frozenset[Metric]:
    """Of a query, through recording rules. Raises KeyError for a name nobody knows."""
    found: set[Metric] = set()
    for name in _NAME.findall(expr):
        found |= metrics_in(rules[name], rules) if ":" in name else {metric_of(name)}
    return frozenset(found)


def metric_of(name: str) -> Metric:
    """Of a series: a histogram's parts have names of their own. Raises KeyError."""
    for suffix in ("_bucket", "_sum", "_count"):
        base = _METRICS.get(name.removesuffix(suffix))
        if base is not None and name.endswith(suffix) and base.kind is Kind.HISTOGRAM:
            return base
    metric = _METRICS[name]
    if metric.kind is Kind.HISTOGRAM:
        raise KeyError(f"{name} is a histogram: ask for its _bucket, _sum or _count")
    return metric


def needs_of(expr: str, rules: Mapping[str, str]) -> frozenset[Needs]:
    """Everything that must be there."""
    return frozenset(m.needs for m in metrics_in(expr, rules) if m.needs is not None)


def panel_needs(panel: Panel, rules: Mapping[str, str]) -> frozenset[Needs]:
    """What must be there for the panel to show anything at all."""
    return frozenset.intersection(*(needs_of(query.expr, rules) for query in panel.queries))
