"""The chart's manifests: valid for Kubernetes, and what the services understand.

They were rendered by tools/render_chart.py, since neither helm nor a cluster is needed
to run the tests; a digest tells when the chart has changed since.
"""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import gateway_service.__main__ as gateway
import kvstore_service.__main__ as kvstore
import scheduler_service.__main__ as scheduler
import worker_service.__main__ as worker
from splitpoint.config import parse_size
from tools.render_chart import CASES, HEADER, ROOT, digest_of, render, rendered_of
from worker_service.server import DRAIN_SECONDS
from worker_service.store.write_back import CLOSE_SECONDS

PARSERS: dict[str, Callable[[list[str]], argparse.Namespace]] = {
    "kvstore_service": kvstore.parse_arguments,
    "worker_service": worker.parse_arguments,
    "scheduler_service": scheduler.parse_arguments,
    "gateway_service": gateway.parse_arguments,
}
VALUES = sorted(CASES.glob("*.values.yaml"))
Manifest = dict[str, Any]


@functools.cache
def manifests(case: Path) -> list[Manifest]:
    """Return a case's manifests. Every collection reads all: PyYAML's own parser takes seconds."""
    text = rendered_of(case).read_text()
    return [each for each in yaml.load_all(text, yaml.CSafeLoader) if each]


def pods() -> Iterator[tuple[str, Manifest]]:
    """Name and pod spec of everything that runs something, in every case."""
    for case in VALUES:
        for manifest in manifests(case):
            if manifest["kind"] in {"Deployment", "DaemonSet"}:
                name = f"{case.name.partition('.')[0]}-{manifest['metadata']['name']}"
                yield name, manifest["spec"]["template"]["spec"]


def containers() -> Iterator[tuple[str, Manifest]]:
    for name, pod in pods():
        for container in pod["containers"]:
            yield name, container


@pytest.mark.parametrize("case", VALUES, ids=lambda case: case.name)
def test_the_manifests_are_those_of_the_chart(case: Path) -> None:
    first = rendered_of(case).read_text().partition("\n")[0]
    assert first == f"{HEADER}{digest_of(case)}", "the chart changed: run `make chart`"


@pytest.mark.parametrize("case", VALUES, ids=lambda case: case.name)
def test_kubernetes_takes_them(case: Path) -> None:
    kinds = []
    for manifest in manifests(case):
        kinds.append(manifest["kind"])
        if manifest["apiVersion"].startswith("monitoring.coreos.com"):
            continue  # its schema is the operator's
        kubernetes_validate.validate(manifest, "1.30", strict=True)
    names = [(each["kind"], each["metadata"]["name"]) for each in manifests(case)]
    assert len(names) == len(set(names))
    assert {"DaemonSet", "Deployment", "Service", "NetworkPolicy"} <= set(kinds)


def test_optional_parts_come_and_go() -> None:
    kinds = {
        case.name.partition(".")[0]: {
            (each["kind"], each["metadata"]["name"]) for each in manifests(case)
        }
        for case in VALUES
    }
    assert ("Deployment", "splitpoint-redis") in kinds["defaults"]
    assert ("Deployment", "splitpoint-redis") not in kinds["everything"]
    assert ("Deployment", "splitpoint-gateway") in kinds["defaults"]
    assert not any(name == "splitpoint-gateway" for _, name in kinds["everything"])
    assert ("ServiceMonitor", "splitpoint") in kinds["everything"]
    assert ("ServiceMonitor", "splitpoint") not in kinds["defaults"]


@pytest.mark.parametrize(("name", "container"), list(containers()))
def test_services_understand_their_arguments(name: str, container: Manifest) -> None:
    if container["name"] in ("redis", "mooncake-master"):
        return
    python, flag, module = container["command"]
    assert (python, flag) == ("python", "-m")
    known = {each["name"] for each in container["env"]}
    arguments = container["args"]
    for argument in arguments:
        for variable in ("HOST_IP", "POD_IP", "POD_NAME"):
            if f"$({variable})" in argument:
                assert variable in known
    parsed = PARSERS[module](arguments)
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert parsed.listen == f"0.0.0.0:{ports['http' if container['name'] == 'gateway' else 'grpc']}"
    assert parsed.metrics == f"0.0.0.0:{ports['metrics']}"
    # A port that others reach wants both; see docs/security.md.
    assert parsed.tls_cert
    assert parsed.tokens
    assert parsed.tls_server_name == "splitpoint"


@pytest.mark.parametrize(("name", "container"), list(containers()))
def test_containers_may_do_nothing_beyond_their_work(name: str, container: Manifest) -> None:
    context = container["securityContext"]
    assert context["allowPrivilegeEscalation"] is False
    assert context["readOnlyRootFilesystem"] is True
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert "memory" in container["resources"]["limits"]
    assert {"cpu", "memory"} <= set(container["resources"]["requests"])


@pytest.mark.parametrize(("name", "pod"), list(pods()))
def test_pods_run_as_one_plain_user(name: str, pod: Manifest) -> None:
    context = pod["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["runAsUser"] == context["runAsGroup"] == context["fsGroup"] == 10001
    assert pod["automountServiceAccountToken"] is False
    mounted = {each["name"] for c in pod["containers"] for each in c["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    for volume in pod["volumes"]:
        if "secret" in volume:
            assert volume["secret"]["defaultMode"] == 0o440


@pytest.mark.parametrize(("name", "container"), list(containers()))
def test_probes_ask_the_service_at_its_own_port(name: str, container: Manifest) -> None:
    if container["name"] in ("redis", "mooncake-master"):
        (port,) = container["ports"]
        assert container["readinessProbe"]["tcpSocket"] == {"port": port["name"]}
        return
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    if container["name"] == "gateway":
        # One whose scheduler has no worker must not be killed for it.
        for kind, path in (
            ("startup", "/health/live"),
            ("readiness", "/health"),
            ("liveness", "/health/live"),
        ):
            asked = container[f"{kind}Probe"]["httpGet"]
            assert asked == {"path": path, "port": ports["http"], "scheme": "HTTPS"}
        return
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container[kind]
        command = probe["exec"]["command"]
        assert command[:3] == ["python", "-m", "splitpoint_cli.request.probe"]
        assert command[3] == f"127.0.0.1:{ports['grpc']}"
        # The command's own limit ends it, not the kubelet's kill.
        assert float(command[command.index("--timeout") + 1]) < probe["timeoutSeconds"]
    alive = container["livenessProbe"]["exec"]["command"]
    # A worker that loads, or a scheduler without workers, must not be killed for it.
    assert alive[alive.index("--service") + 1] == ""


def rights_in(text: str) -> set[str]:
    """Of the Redis user that a configuration, or the documentation, makes."""
    (line,) = (line for line in text.splitlines() if "splitpoint" in line and " ~sp:* +" in line)
    return {word for word in line.split() if word[0] in "~+"}


def test_redis_has_one_user_with_the_documented_rights() -> None:
    # Redis before 7.2 does not know client|setinfo.
    documented = rights_in((ROOT / "docs" / "tiers.md").read_text()) - {"+client|setinfo"}
    assert rights_in((ROOT / "docker-compose.yml").read_text()) == documented
    (redis,) = (container for _, container in containers() if container["name"] == "redis")
    (script,) = redis["args"]
    assert rights_in(script) == documented
    assert "user default off" in script
    for name, container in containers():
        if name.startswith("defaults") and container["name"] not in ("redis", "gateway"):
            parsed = PARSERS[container["command"][2]](container["args"])
            assert parsed.redis == "redis://splitpoint@splitpoint-redis:6379/0"


def test_what_drains_is_not_killed_meanwhile() -> None:
    for name, pod in pods():
        (container,) = pod["containers"]
        grace = pod.get("terminationGracePeriodSeconds", 30)
        if container["name"] in ("scheduler", "gateway"):
            parsed = PARSERS[container["command"][2]](container["args"])
            drain = getattr(parsed, "drain_seconds", 0)
            assert (drain > 0) is (container["name"] == "gateway"), name
            assert grace >= drain + parsed.grace_seconds + 10, name
        if container["name"] == "worker":
            assert grace >= DRAIN_SECONDS + CLOSE_SECONDS + 10, name


def test_only_workers_carry_torch() -> None:
    images = {(c["name"], c["image"]) for _, c in containers() if c["name"] != "redis"}
    assert images == {
        ("gateway", "splitpoint-control:0.1.0"),
        ("kvstore", "splitpoint-control:0.1.0"),
        ("kvstore", "splitpoint-mooncake:0.1.0"),
        ("mooncake-master", "splitpoint-mooncake:0.1.0"),
        ("scheduler", "splitpoint-control:0.1.0"),
        ("worker", "splitpoint-cuda:0.1.0"),
    }


def test_without_a_volume_the_images_model_is_served() -> None:
    dockerfile = (CASES.parents[2] / "deploy" / "Dockerfile").read_text()
    assert "COPY models/stdlib-llama /models/stdlib-llama\n" in dockerfile
    served = {
        argument
        for name, container in containers()
        for argument in container.get("args", [])
        if name.startswith("defaults") and argument.startswith("--model=")
    }
    assert served == {"--model=/models/stdlib-llama"}


def test_the_store_may_hold_its_arena() -> None:
    for name, container in containers():
        if container["name"] != "kvstore":
            continue
        parsed = kvstore.parse_arguments(container["args"])
        # What the store gives to Mooncake's pool is its memory, too.
        arena = parse_size(parsed.host_memory) + parse_size(parsed.tier_pool_memory)
        limit = parse_size(container["resources"]["limits"]["memory"].replace("Gi", "GiB"))
        assert limit >= arena + (2 << 30), name
        assert (
            container["resources"]["requests"]["memory"]
            == (container["resources"]["limits"]["memory"])
        ), "shared memory cannot be taken back: what is promised must be there"
        mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        assert str(parsed.arena) == f"{mounts['arena']}/arena"
        # Else another model.claim would leave the store refusing its node's old arena for ever.
        assert parsed.replace_arena
        assert parsed.keep_arena is name.startswith("defaults")


def test_tiers_of_the_store() -> None:
    found = {
        name.partition("-")[0]: (pod, kvstore.parse_arguments(pod["containers"][0]["args"]))
        for name, pod in pods()
        if name.endswith("-kvstore")
    }
    pod, parsed = found["defaults"]
    assert (parsed.tier_disk, parsed.tier_pool, parsed.transfer) == (None, None, "grpc")
    assert "tier" not in {each["name"] for each in pod["volumes"]}
    pod, parsed = found["everything"]
    assert (parsed.tier_disk_size, parsed.tier_admission) == ("500GiB", "second-use")
    (folder,) = (each["hostPath"] for each in pod["volumes"] if each["name"] == "tier")
    assert folder["path"] == "/var/lib/splitpoint-tier"
    (container,), (first,) = pod["containers"], pod["initContainers"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert str(parsed.tier_disk) == mounts["tier"]
    # Made private, as the arena's folder is.
    made = {each["name"]: each["mountPath"] for each in first["volumeMounts"]}
    assert first["command"][-2:] == [made["arena"], made["tier"]]
    # A store that is reached by tokens gives its pool to a network that the user trusts.
    assert (parsed.transfer, parsed.transfer_interface) == ("mooncake", "eth0")
    assert parsed.trusted_network
    assert (parsed.tier_pool_memory, parsed.tier_pool_replicas) == ("8GiB", 2)


def test_stores_alone_reach_mooncake() -> None:
    (case,) = (case for case in VALUES if case.name.startswith("everything"))
    found = {(each["kind"], each["metadata"]["name"]): each for each in manifests(case)}
    service = found["Service", "splitpoint-mooncake-master"]["spec"]["ports"][0]
    master = found["Deployment", "splitpoint-mooncake-master"]["spec"]["template"]["spec"]
    (container,) = master["containers"]
    assert f"--rpc_port={service['port']}" in container["command"]
    # By HTTP it tells all keys to whatever asks.
    assert "--metrics_host=127.0.0.1" in container["command"]
    (store,) = (pod for name, pod in pods() if name == "everything-splitpoint-kvstore")
    given = kvstore.parse_arguments(store["containers"][0]["args"])
    assert given.tier_pool == f"splitpoint-mooncake-master:{service['port']}"
    stores = found["DaemonSet", "splitpoint-kvstore"]["spec"]["selector"]["matchLabels"]
    for name in ("splitpoint-kvstore", "splitpoint-mooncake-master"):
        rules = found["NetworkPolicy", name]["spec"]["ingress"]
        from_stores = [
            rule for rule in rules if rule.get("from") == [{"podSelector": {"matchLabels": stores}}]
        ]
        assert len(from_stores) == 1, name
    assert not any(
        "mooncake" in each["metadata"]["name"]
        for other in VALUES
        if other != case
        for each in manifests(other)
    )


def test_a_worker_reaches_the_store_of_its_node() -> None:
    for case in VALUES:
        running = [each for each in manifests(case) if each["kind"] in {"DaemonSet", "Deployment"}]
        found = {each["metadata"]["name"]: each for each in running}
        store = found["splitpoint-kvstore"]["spec"]["template"]["spec"]
        its_worker = found["splitpoint-worker"]["spec"]["template"]["spec"]
        port = store["containers"][0]["ports"][0]
        assert port["hostPort"] == port["containerPort"]
        arguments = its_worker["containers"][0]["args"]
        assert f"--kvstore=$(HOST_IP):{port['hostPort']}" in arguments
        paths = [
            next(each["hostPath"]["path"] for each in pod["volumes"] if each["name"] == "arena")
            for pod in (store, its_worker)
        ]
        assert paths[0] == paths[1]
        assert its_worker["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
        assert found["splitpoint-worker"]["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 0


def test_a_worker_compiles_into_a_folder_of_its_own() -> None:
    """Kubernetes' volumes may be written by their group: a worker refuses such a folder."""
    for case, volume in (
        ("defaults", {"emptyDir": {}}),
        (
            "everything",
            {"hostPath": {"path": "/var/lib/splitpoint-kernels", "type": "Directory"}},
        ),
    ):
        (pod,) = (spec for name, spec in pods() if name == f"{case}-splitpoint-worker")
        assert {"name": "kernels", **volume} in pod["volumes"]
        (container,) = pod["containers"]
        environment = {each["name"]: each.get("value") for each in container["env"]}
        mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        assert Path(environment["SPLITPOINT_KERNEL_CACHE"] or "").parent == Path(mounts["kernels"])


def test_the_format_of_weights_is_one_for_store_and_workers() -> None:
    for case, weights, numerics in (
        ("defaults", "native", "auto"),
        ("everything", "int8", "invariant"),
    ):
        parsed = {
            container["name"]: PARSERS[container["command"][2]](container["args"])
            for name, container in containers()
            if name.startswith(case) and container["name"] in ("kvstore", "worker")
        }
        assert parsed["kvstore"].weights == parsed["worker"].weights == weights
        assert parsed["worker"].numerics == numerics


def test_policies_name_the_ports_of_their_pods() -> None:
    for case in VALUES:
        found = manifests(case)
        policies = {e["metadata"]["name"]: e for e in found if e["kind"] == "NetworkPolicy"}
        for manifest in found:
            if manifest["kind"] not in {"Deployment", "DaemonSet"}:
                continue
            ports = {
                port["containerPort"]
                for container in manifest["spec"]["template"]["spec"]["containers"]
                for port in container["ports"]
            }
            policy = policies[manifest["metadata"]["name"]]
            rules = policy["spec"]["ingress"]
            allowed = {port["port"] for rule in rules for port in rule.get("ports", ())}
            assert allowed == ports
            labels = manifest["spec"]["template"]["metadata"]["labels"]
            assert policy["spec"]["podSelector"]["matchLabels"] == labels


def test_rendering_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="neither helm nor go"):
        render(VALUES[0])


def test_only_targets_of_workers_get_a_workers_labels() -> None:
    """The scheduler's metrics have a label `worker`, which a target's would displace."""
    (case,) = (case for case in VALUES if case.name.startswith("everything"))
    (monitor,) = (each for each in manifests(case) if each["kind"] == "ServiceMonitor")
    (endpoint,) = monitor["spec"]["endpoints"]
    rules = endpoint["relabelings"]
    assert {rule["targetLabel"] for rule in rules} == {"worker", "host"}
    for rule in rules:
        assert rule["sourceLabels"][0].endswith("_app_kubernetes_io_component")
        found = re.fullmatch(rule["regex"], "worker;pod-1")
        assert found is not None
        assert found[1] == "pod-1"
        assert not re.fullmatch(rule["regex"], "scheduler;pod-2")


def test_a_gateway_reaches_the_scheduler_and_sees_none_of_its_secrets() -> None:
    (case,) = (case for case in VALUES if case.name.startswith("defaults"))
    services = {e["metadata"]["name"]: e for e in manifests(case) if e["kind"] == "Service"}
    (pod,) = (pod for name, pod in pods() if name.endswith("-gateway"))
    (container,) = pod["containers"]
    parsed = gateway.parse_arguments(container["args"])
    (port,) = services["splitpoint-scheduler"]["spec"]["ports"]
    assert parsed.scheduler == f"splitpoint-scheduler:{port['port']}"
    # The scheduler wants a certificate of its own authority, and shows one of that name.
    assert (parsed.ca, parsed.tls_server_name) == ("/tls/ca.crt", "splitpoint")
    (access,) = (each for each in pod["volumes"] if each["name"] == "access")
    assert access["secret"]["items"] == [{"key": "tokens.toml", "path": "tokens.toml"}]
