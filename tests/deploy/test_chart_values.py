"""What values the chart takes, and the parts of it that keep a cluster in order."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from splitpoint.options import scheduler, store, worker
from tools.render_chart import CASES, CHART, RULES, rendered_of, without_rules

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
EVERYTHING = CASES / "everything.values.yaml"


def merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """As Helm lays values over those of the chart."""
    result = copy.deepcopy(under)
    for key, value in over.items():
        below = result.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            result[key] = merged(below, value)
        else:
            result[key] = value
    return result


def validate(values: dict[str, Any]) -> None:
    jsonschema.validate(values, SCHEMA, jsonschema.Draft202012Validator)


def manifests(case: str, kind: str) -> dict[str, dict[str, Any]]:
    documents = yaml.safe_load_all(rendered_of(CASES / f"{case}.values.yaml").read_text())
    return {each["metadata"]["name"]: each for each in documents if each and each["kind"] == kind}


def test_the_schema_takes_the_charts_own_values() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    validate(DEFAULTS)
    validate(merged(DEFAULTS, yaml.safe_load(EVERYTHING.read_text())))


def test_the_schema_knows_every_value() -> None:
    def unknown(values: dict[str, Any], schema: dict[str, Any], path: str) -> list[str]:
        if schema.get("additionalProperties") is not False:
            return []  # labels, resources: the user's own
        wrong = [f"{path}{key}" for key in schema["properties"].keys() ^ values.keys()]
        for key in schema["properties"].keys() & values.keys():
            if isinstance(values[key], dict):
                wrong += unknown(values[key], schema["properties"][key], f"{path}{key}.")
        return wrong

    # Helm sets `global` in every chart.
    assert unknown(DEFAULTS, SCHEMA, "") == ["global"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"worker": {"replica": 2}},
        {"worker": {"replicas": "2"}},
        {"worker": {"replicas": -1}},
        {"worker": {"resources": {"limits": []}}},
        {"worker": {"spread": [{"maxSkew": 1, "topologyKey": "zone"}]}},
        {"model": {"dtype": "float8"}},
        {"model": {"path": "../other"}},
        {"model": {"weights": "int4"}},
        {"worker": {"numerics": "exact"}},
        {"worker": {"kernelCache": "kernels"}},
        {"kvstore": {"encoding": "int2"}},
        {"kvstore": {"hostMemory": 64}},
        {"kvstore": {"hostMemory": "much"}},
        {"kvstore": {"tierDisk": {"folder": "chunks"}}},
        {"kvstore": {"tierDisk": {"size": 500}}},
        {"kvstore": {"tierDisk": {"admission": "always"}}},
        {"mooncake": {"enabled": True}},  # without trustedNetwork
        {"mooncake": {"pool": {"replicas": 0}}},
        {"mooncake": {"pool": {"memory": "some"}}},
        {"scheduler": {"port": 70000}},
        {"scheduler": {"service": {"type": "Loadbalancer"}}},
        {"gateway": {"enabled": "no"}},
        {"gateway": {"service": {"type": "Ingress"}}},
        {"redis": {"url": "redis.example.org:6379"}},
        {"metrics": {"prometheusRule": {"enabled": "yes"}}},
        {"image": {"control": ""}},
        {"uid": 0},
    ],
)
def test_the_schema_refuses_what_the_chart_would_misread(wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        validate(merged(DEFAULTS, wrong))


def test_the_schema_has_the_choices_and_bounds_of_the_options() -> None:
    model, kvstore, mooncake, workers, scheduling = (
        SCHEMA["properties"][part]["properties"]
        for part in ("model", "kvstore", "mooncake", "worker", "scheduler")
    )
    assert tuple(model["dtype"]["enum"]) == store.DTYPE.choices
    assert tuple(model["weights"]["enum"]) == store.WEIGHTS.choices
    assert tuple(workers["numerics"]["enum"]) == worker.NUMERICS.choices
    assert tuple(kvstore["encoding"]["enum"]) == store.KV_ENCODING.choices
    tier, pool = kvstore["tierDisk"]["properties"], mooncake["pool"]["properties"]
    assert tuple(tier["admission"]["enum"]) == store.TIER_ADMISSION.choices
    assert DEFAULTS["kvstore"]["tierDisk"]["admission"] == store.TIER_ADMISSION.default
    assert DEFAULTS["mooncake"]["pool"]["replicas"] == store.TIER_POOL_REPLICAS.default
    for value, option in (
        (pool["replicas"], store.TIER_POOL_REPLICAS),
        (kvstore["chunkTokens"], store.CHUNK_TOKENS),
        (workers["maxBatch"], worker.MAX_BATCH),
        (scheduling["queueCapacity"], scheduler.QUEUE_CAPACITY),
    ):
        assert (value["minimum"], value.get("maximum")) == (option.least, option.most)
    for part, value, default in (
        ("model", "dtype", store.DTYPE.default),
        ("model", "weights", store.WEIGHTS.default),
        ("worker", "numerics", worker.NUMERICS.default),
        ("kvstore", "chunkTokens", store.CHUNK_TOKENS.default),
        ("kvstore", "encoding", store.KV_ENCODING.default),
        ("worker", "maxBatch", worker.MAX_BATCH.default),
        ("scheduler", "queueCapacity", scheduler.QUEUE_CAPACITY.default),
    ):
        assert DEFAULTS[part][value] == default


def test_a_drain_takes_one_pod_of_each_kind_at_a_time() -> None:
    deployments = manifests("defaults", "Deployment")
    budgets = manifests("defaults", "PodDisruptionBudget")
    assert set(budgets) == {"splitpoint-worker", "splitpoint-scheduler", "splitpoint-gateway"}
    for name, budget in budgets.items():
        # With `minAvailable: 1` a single replica would keep its node from being drained.
        assert budget["spec"]["maxUnavailable"] == 1
        assert budget["spec"]["selector"] == deployments[name]["spec"]["selector"]
    assert manifests("everything", "PodDisruptionBudget") == {}


def test_pods_spread_over_nodes() -> None:
    for case, spread in (
        ("defaults", {"worker": 1, "scheduler": 2, "gateway": 1}),
        ("everything", {"worker": 0}),
    ):
        deployments = manifests(case, "Deployment")
        for component, count in spread.items():
            deployment = deployments[f"splitpoint-{component}"]
            constraints = deployment["spec"]["template"]["spec"].get(
                "topologySpreadConstraints", []
            )
            assert len(constraints) == count
            for constraint in constraints:
                assert constraint["labelSelector"] == deployment["spec"]["selector"]
                # A cluster of one node, or one full of GPUs in use, still runs all pods.
                assert constraint["whenUnsatisfiable"] == "ScheduleAnyway"


def test_prometheus_rules_are_the_files_of_deploy_prometheus() -> None:
    rules = {path.stem for path in RULES.glob("*.yml")}
    links = {path.stem: path for path in (CHART / "rules").iterdir()}
    assert set(links) == rules
    for path in links.values():
        assert path.is_symlink()
        assert path.resolve().parent == RULES
    rendered = manifests("everything", "PrometheusRule")
    assert set(rendered) == {f"splitpoint-{name}" for name in rules}
    assert all(rule["metadata"]["labels"]["release"] == "prometheus" for rule in rendered.values())
    assert manifests("defaults", "PrometheusRule") == {}


def test_rendering_refuses_rules_that_are_not_those_of_the_files() -> None:
    head = "kind: PrometheusRule\nmetadata: {name: x-alerts}\n"
    path = RULES / "alerts.yml"
    spec = "".join(f"  {line}\n" for line in path.read_text().splitlines())
    assert without_rules(f"{head}spec:\n{spec}") == (
        f"{head.rstrip()}\n# spec: {Path('deploy/prometheus/rules/alerts.yml')}"
    )
    with pytest.raises(SystemExit, match="x-alerts is not"):
        without_rules(f"{head}spec:\n  groups: []\n")
