"""Find the metrics of a query and the labels of its answer, as Prometheus would.

The catalogue (splitpoint/observe/metrics.py) has each metric's own labels, the scrape configuration
those of its target. Any other name is a mistake, which Prometheus answers with no data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import promql_parser as promql

from splitpoint.observe.metrics import Kind, Metric, Needs, Service, all_metrics

_NAME = re.compile(r"\b(?:[a-z]+:[a-z_]+:[a-z0-9_]+|splitpoint_[a-z0-9_]+)")
_METRICS = {metric.name: metric for metric in all_metrics()}

# What a target adds to everything that it is asked for (deploy/prometheus/prometheus.yml).
TARGET_LABELS = {
    Service.KVSTORE: frozenset({"job", "instance"}),
    Service.SCHEDULER: frozenset({"job", "instance"}),
    Service.GATEWAY: frozenset({"job", "instance"}),
    Service.WORKER: frozenset({"job", "instance", "worker", "host"}),
}
# Made by Prometheus itself.
_OWN = {
    "up": frozenset({"job", "instance", "worker", "host"}),
    # Those of the rule, and what is left of those of the series that it asks for.
    "ALERTS": frozenset({"alertname", "alertstate", "severity", "worker", "instance"}),
}
_SETS = ("and", "or", "unless")


class BadQuery(Exception):
    """The query names a metric or label that does not exist."""


def metrics_in(expr: str, rules: Mapping[str, str]) -> frozenset[Metric]:
    """Return the metrics of a query, through recording rules. Raises KeyError if unknown."""
    found: set[Metric] = set()
    for name in _NAME.findall(expr):
        found |= metrics_in(rules[name], rules) if ":" in name else {metric_of(name)}
    return frozenset(found)


def metric_of(name: str) -> Metric:
    """Return the metric of a series; a histogram's parts have their own names. Raises KeyError."""
    for suffix in ("_bucket", "_sum", "_count"):
        base = _METRICS.get(name.removesuffix(suffix))
        if base is not None and name.endswith(suffix) and base.kind is Kind.HISTOGRAM:
            return base
    metric = _METRICS[name]
    if metric.kind is Kind.HISTOGRAM:
        raise KeyError(f"{name} is a histogram: ask for its _bucket, _sum or _count")
    return metric


def needs_of(expr: str, rules: Mapping[str, str]) -> frozenset[Needs]:
    """Return what must be present for the query to have an answer."""
    return frozenset(m.needs for m in metrics_in(expr, rules) if m.needs is not None)


def labels_of_query(query: str, rules: Mapping[str, str]) -> frozenset[str]:
    """Return the answer's labels. Raises BadQuery. `rules`: recorded expressions by name."""
    return _labels(promql.parse(query), rules)


def _labels(expr: promql.Expr, rules: Mapping[str, str]) -> frozenset[str]:
    match expr:
        case promql.VectorSelector():
            return _selected(expr, rules)
        case promql.MatrixSelector():
            return _selected(expr.vector_selector, rules)
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            return _labels(expr.expr, rules)
        case promql.AggregateExpr():
            return _aggregated(expr, rules)
        case promql.Call():
            inner = frozenset().union(*(_labels(argument, rules) for argument in expr.args))
            if expr.func.name != "histogram_quantile":
                return inner
            if "le" not in inner:
                raise BadQuery(f"a quantile without le: {expr}")
            return inner - {"le"}
        case promql.BinaryExpr():
            return _joined(expr, rules)
        case promql.NumberLiteral() | promql.StringLiteral():
            return frozenset()
        case _:
            raise BadQuery(f"an unknown kind of expression: {expr!r}")


def _selected(selector: promql.VectorSelector, rules: Mapping[str, str]) -> frozenset[str]:
    name = selector.name
    assert name is not None
    available = _carried(name, rules)
    unknown = {matcher.name for matcher in selector.matchers.matchers} - available
    if unknown:
        raise BadQuery(f"{name} has no label {', '.join(sorted(unknown))}")
    return available


def _carried(name: str, rules: Mapping[str, str]) -> frozenset[str]:
    if name in _OWN:
        return _OWN[name]
    if ":" in name:
        if name not in rules:
            raise BadQuery(f"no rule records {name}")
        return labels_of_query(rules[name], rules)
    try:
        metric = metric_of(name)
    except KeyError as error:
        raise BadQuery(f"no service has a metric {name}") from error
    own = frozenset(metric.labels)
    if metric.kind is Kind.HISTOGRAM and name.endswith("_bucket"):
        own |= {"le"}
    return own.union(*(TARGET_LABELS[service] for service in metric.services))


def _aggregated(expr: promql.AggregateExpr, rules: Mapping[str, str]) -> frozenset[str]:
    inner = _labels(expr.expr, rules)
    if expr.modifier is None:
        return frozenset()
    named = frozenset(expr.modifier.labels)
    if named - inner:
        raise BadQuery(f"no label {', '.join(sorted(named - inner))} in {expr.expr}")
    return named if expr.modifier.type == promql.AggModifierType.By else inner - named


def _joined(expr: promql.BinaryExpr, rules: Mapping[str, str]) -> frozenset[str]:
    left, right = _labels(expr.lhs, rules), _labels(expr.rhs, rules)
    operator = str(expr.op)
    scalars = (promql.NumberLiteral, promql.StringLiteral)
    if isinstance(expr.lhs, scalars) or isinstance(expr.rhs, scalars):
        return left | right
    modifier = expr.modifier
    matching = None if modifier is None else modifier.matching
    if modifier is None or matching is None:
        if left != right and operator != "or":
            raise BadQuery(f"{sorted(left)} and {sorted(right)} match nothing: {expr}")
        return left | right
    on = frozenset(matching.labels)
    if (on - left) or (on - right):
        raise BadQuery(f"both sides need {sorted(on)}: {expr}")
    if operator in _SETS:
        return left
    is_many = "Many" in str(modifier.card)
    return left if is_many else on
