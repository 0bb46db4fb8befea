"""The compose file and what `splitpoint compose` adds to it, read as Compose reads them.

No engine is needed: variables are put in as Compose would, and each command goes
through the parser of the service that gets it.
"""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from splitpoint.config import parse_size
from splitpoint.errors import InvalidArgument
from splitpoint.options import store as store_options
from splitpoint_cli.compose import Node, override_file, targets_file
from splitpoint_cli.main import app

ROOT = Path(__file__).resolve().parents[3]
OWN = ("kvstore", "worker-0", "worker-1", "worker-gpu-0", "scheduler")
ONCE = ("setup",)
CLUSTER = ("store-a", "store-b", "worker-a", "worker-b", "cluster-scheduler")
_VARIABLE = re.compile(r"\$\$|\$\{(\w+)(?:(:?-)([^}]*))?\}")


def interpolated(text: str, **environment: str) -> str:
    """`${NAME}`, `${NAME-default}`, `${NAME:-default}` and `$$`, as Compose does it."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        given = environment.get(match[1])
        if given is None or (not given and match[2] == ":-"):
            return match[3] or ""
        return given

    return _VARIABLE.sub(value, text)


def read(text: str, **environment: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(interpolated(text, **environment))
    return content


def base(**environment: str) -> dict[str, Any]:
    return read((ROOT / "docker-compose.yml").read_text(), **environment)


def override(node: Node, **environment: str) -> dict[str, Any]:
    return read(override_file(node, "./targets.yml"), **environment)


def parsed(command: str) -> Any:
    """What the service itself understands of its command. SystemExit: nothing."""
    python, flag, package, *arguments = shlex.split(command)
    assert (python, flag) == ("python", "-m")
    return importlib.import_module(f"{package}.__main__").parse_arguments(arguments)


def mounts(service: dict[str, Any]) -> dict[str, bool]:
    """Where something is mounted, and whether it can be written."""
    found = {}
    for entry in service.get("volumes", ()):
        if isinstance(entry, dict):
            found[entry["target"]] = not entry.get("read_only", False)
        else:
            _, target, *options = entry.split(":")
            found[target] = options != ["ro"]
    return found


@pytest.mark.parametrize("name", base()["services"])
def test_every_service_is_confined_and_watched(name: str) -> None:
    service = base()["services"][name]
    assert service["user"] == "10001:10001"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["logging"]["options"]["max-size"] == "10m"
    assert parse_size(service["mem_limit"]) >= 256 << 20
    assert 256 <= service["pids_limit"] <= 4096
    assert service["profiles"]
    assert service["restart"] == ("no" if name in ONCE else "unless-stopped")
    if name in ONCE:
        assert service["network_mode"] == "none"
    else:
        assert service["healthcheck"]["test"][0] in ("CMD", "CMD-SHELL")
        assert service["stop_grace_period"]
        assert service["depends_on"]["setup"] == {"condition": "service_completed_successfully"}


def test_the_gateway_reaches_the_scheduler_and_asks_for_tokens() -> None:
    services = base()["services"]
    gateway, scheduler = (parsed(services[name]["command"]) for name in ("gateway", "scheduler"))
    assert gateway.scheduler == f"scheduler:{scheduler.listen.rpartition(':')[2]}"
    # One certificate for both, made for both names.
    assert gateway.tls_cert == gateway.scheduler_cert == scheduler.tls_cert
    assert (gateway.tls_key, gateway.tokens) == (scheduler.tls_key, scheduler.tokens)
    assert "for host in scheduler gateway " in (ROOT / "deploy" / "setup").read_text()
    assert (gateway.metrics, gateway.metrics_open) == ("0.0.0.0:9400", True)
    assert set(services["gateway"]["networks"]) == {"front", "metrics"}
    assert set(services["gateway"]["profiles"]) == {"cpu", "gpu"}
    assert mounts(services["gateway"]) == {"/etc/splitpoint": False}
    _, python, flag, module, url, *options = services["gateway"]["healthcheck"]["test"]
    assert (python, flag, module) == ("python", "-m", "splitpoint_cli.request.probe")
    assert url == f"https://127.0.0.1:{gateway.listen.rpartition(':')[2]}/health"
    assert options == ["--server-cert", gateway.tls_cert]


def test_what_a_health_check_asks_is_what_the_service_serves() -> None:
    """By the address it listens at, or loopback for one that is on all."""
    for name in OWN:
        service = base()["services"][name]
        _, python, flag, module, address, *options = service["healthcheck"]["test"]
        assert (python, flag, module) == ("python", "-m", "splitpoint_cli.request.probe")
        assert address == parsed(service["command"]).listen.replace("0.0.0.0", "127.0.0.1")
        package = shlex.split(service["command"])[2]
        main = importlib.import_module(f"{package}.server")
        asked = options[options.index("--service") + 1]
        assert asked == getattr(main, "SERVICE_NAME", "splitpoint.v1.InferenceService")


def test_the_commands_agree_with_each_other() -> None:
    services = base()["services"]
    commands = {name: parsed(services[name]["command"]) for name in OWN}
    assert len({str(command.model) for command in commands.values()}) == 1
    assert {command.redis for command in commands.values()} == {"redis://splitpoint@redis:6379"}
    for name, command in commands.items():
        assert command.metrics == "0.0.0.0:9400"
        assert command.metrics_open
        assert "metrics" in services[name]["networks"]
        assert mounts(services[name])[str(command.model)] is False
        assert mounts(services[name])["/etc/splitpoint-redis"] is False
        if name.startswith("worker"):
            assert command.worker_id == name
            assert command.kvstore == commands["kvstore"].listen
    # Only Redis's network and Prometheus's: no other network reaches the open metrics.
    assert all(base()["networks"][name] == {"internal": True} for name in ("control", "metrics"))
    with_secrets = {name for name in services if "/etc/splitpoint" in mounts(services[name])}
    assert with_secrets == {"setup", "scheduler", "gateway", *CLUSTER}


def test_the_arena_fits_its_file_system() -> None:
    for memory in ("2g", "512m"):
        content = base(SPLITPOINT_HOST_MEMORY=memory)
        wanted = parsed(content["services"]["kvstore"]["command"])
        options = content["volumes"]["arena"]["driver_opts"]["o"].split(",")
        assert f"size={memory}" in options
        # No second one would fit, beside one that workers map until the store is back.
        assert wanted.keep_arena
        assert parse_size(wanted.host_memory) == parse_size(memory)
        assert mounts(content["services"]["kvstore"])[str(wanted.arena.parent)] is True
    store = base()["services"]["kvstore"]
    assert parse_size(store["mem_limit"]) >= parse_size(parsed(store["command"]).host_memory) + (
        1 << 30
    )


def test_the_files_version_is_one_that_compose_v1_reads() -> None:
    """1.29 refuses a top-level `name`: `.env` names the project for every version."""
    content = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    assert {key for key in content if not key.startswith("x-")} == {
        "services",
        "networks",
        "volumes",
    }
    lines = (ROOT / ".env").read_text().splitlines()
    settings = [line for line in lines if line and not line.startswith("#")]
    assert "COMPOSE_PROJECT_NAME=splitpoint" in settings
    assert "COMPOSE_PROJECT_NAME" not in (ROOT / "Makefile").read_text()


def test_ports_are_published_on_loopback_only() -> None:
    services = base()["services"]
    published = {name: s["ports"] for name, s in services.items() if "ports" in s}
    assert sorted(published) == [
        *("cluster-scheduler", "gateway", "grafana", "prometheus", "scheduler")
    ]
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)


# -- the profile cluster ----------------------------------------------------------------


def test_the_profile_cluster_starts_what_it_needs_and_nothing_else() -> None:
    services = base()["services"]
    started = {name for name, each in services.items() if "cluster" in each["profiles"]}
    master = parsed(services["store-a"]["command"]).tier_pool.rpartition(":")[0]
    assert started == {*CLUSTER, "setup", "redis", master}
    for name in started:
        needed = services[name].get("depends_on", {})
        assert set(needed) <= started, name
    # Nothing else reaches what the transfer engine trusts, and nothing gets out.
    assert base()["networks"]["cluster"] == {"internal": True}
    assert {name for name, each in services.items() if "cluster" in each.get("networks", ())} == {
        *started - {"setup"}
    }


@pytest.mark.parametrize("host", ["a", "b"])
def test_each_host_of_the_cluster_has_its_store_and_its_worker(host: str) -> None:
    content = base(SPLITPOINT_HOST_MEMORY="512m")
    services = content["services"]
    store, worker = (parsed(services[f"{name}-{host}"]["command"]) for name in ("store", "worker"))
    assert store.advertise == worker.kvstore == f"store-{host}:50060"
    assert (worker.advertise, worker.worker_id) == (f"worker-{host}:50070", f"worker-{host}")
    # Mapped by both, and by no other host.
    arena = f"arena-{host}:{store.arena.parent}"
    assert arena in services[f"store-{host}"]["volumes"]
    assert arena in services[f"worker-{host}"]["volumes"]
    assert "size=512m" in content["volumes"][f"arena-{host}"]["driver_opts"]["o"].split(",")
    assert f"tier-{host}:{store.tier_disk}" in services[f"store-{host}"]["volumes"]
    assert parse_size(store.tier_disk_size) == 4 << 30
    assert store.keep_arena
    # By the only network of its container, which is therefore eth0.
    assert services[f"store-{host}"]["networks"] == ["cluster"]
    assert (store.transfer, store.transfer_interface) == (
        store_options.ENGINE,
        "eth0",
    )
    assert store.trusted_network
    master, _, port = store.tier_pool.rpartition(":")
    assert f"--rpc_port={port}" in services[master]["command"]
    # By HTTP it tells all keys to whatever asks.
    assert "--metrics_host=127.0.0.1" in services[master]["command"]
    # Two hosts and two copies: what one computed outlives it.
    assert store.tier_pool_replicas == 2
    assert "image" in services[master]
    assert services[master]["image"] == services[f"store-{host}"]["image"]
    # The folder is in the image, so that a new volume belongs to the services' user.
    assert str(store.tier_disk) in (ROOT / "deploy" / "Dockerfile").read_text()
    memory = parse_size(store.host_memory) + parse_size(store.tier_pool_memory)
    assert parse_size(services[f"store-{host}"]["mem_limit"]) >= memory + (2 << 30)


def test_the_services_of_the_cluster_prove_who_they_are() -> None:
    setup = (ROOT / "deploy" / "setup").read_text()
    for name in CLUSTER:
        service = base()["services"][name]
        command = parsed(service["command"])
        environment = service["environment"]
        assert environment == {
            "SPLITPOINT_CA": command.tls_ca,
            "SPLITPOINT_CERT": command.tls_cert,
            "SPLITPOINT_KEY": command.tls_key,
            "SPLITPOINT_SERVER_NAME": command.tls_server_name,
        }
        assert f"for host in {command.tls_server_name} " in setup
        assert command.tokens == "/etc/splitpoint/tokens.toml"
        assert f"> {command.token_file.removeprefix('/etc/splitpoint/')}" in setup
        _, python, flag, module, address, *_ = service["healthcheck"]["test"]
        assert (python, flag, module) == ("python", "-m", "splitpoint_cli.request.probe")
        assert address == command.listen.replace("0.0.0.0", "127.0.0.1")
        assert command.redis == "redis://splitpoint@redis:6379"
        # No Prometheus is in that network.
        assert command.metrics is None


def test_a_disk_tier_has_a_volume_to_lie_on() -> None:
    folder = "/var/lib/splitpoint-tier"
    given = f"--tier-disk {folder} --tier-disk-size 100g"
    content = base(SPLITPOINT_KVSTORE_ARGS=given)
    store = content["services"]["kvstore"]
    assert str(parsed(store["command"]).tier_disk) == folder
    assert mounts(store)[folder] is True
    assert content["volumes"]["tier"] is None  # on disk, unlike the arena
    assert given in (ROOT / "docs" / "deployment.md").read_text()


def test_further_arguments_come_last_and_win() -> None:
    content = base(SPLITPOINT_WORKER_ARGS="--threads 2 --max-batch 4")
    command = parsed(content["services"]["worker-1"]["command"])
    assert (command.threads, command.max_batch) == (2, 4)


@pytest.mark.parametrize("name", ["worker-0", "worker-1", "worker-gpu-0", "worker-gpu-1"])
def test_numerics_and_the_format_of_weights_are_variables(name: str) -> None:
    def commands(**environment: str) -> tuple[Any, Any]:
        services = base(**environment)["services"]
        services |= override(Node(2), **environment)["services"]
        return parsed(services[name]["command"]), parsed(services["kvstore"]["command"])

    worker, store = commands()
    assert (worker.numerics, worker.weights, store.weights) == ("auto", "native", "native")
    worker, store = commands(SPLITPOINT_NUMERICS="invariant", SPLITPOINT_WEIGHTS="int8")
    assert (worker.numerics, worker.weights, store.weights) == ("invariant", "int8", "int8")


def test_cpu_workers_share_a_writable_folder_of_kernels() -> None:
    content = base()
    stages = (ROOT / "deploy" / "Dockerfile").read_text()
    (folder,) = re.findall(r"^ENV SPLITPOINT_KERNEL_CACHE=(\S+)$", stages, re.M)
    for name in ("worker-0", "worker-1"):
        assert f"kernels:{folder}" in content["services"][name]["volumes"]
    # No tmpfs: what was compiled outlives the containers, and Docker's are mounted noexec.
    assert content["volumes"]["kernels"] is None


@pytest.mark.parametrize("gpus", [1, 4, 8])
def test_a_worker_for_each_gpu(gpus: int) -> None:
    node = Node(gpus, host_memory_bytes=64 << 30, device_memory_bytes=70 << 30, max_batch=48)
    content, services = override(node), base()["services"]
    names = [f"worker-gpu-{gpu}" for gpu in range(gpus)]
    assert [name for name in content["services"] if name.startswith("worker")] == names
    devices = []
    for name in names:
        service = {**services.get(name, {}), **content["services"][name]}
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        devices += device["device_ids"]
        assert service["ulimits"]["memlock"] == {"soft": -1, "hard": -1}
        command = parsed(service["command"])
        assert (command.device, command.worker_id) == ("cuda:0", name)
        assert parse_size(command.device_memory) == 70 << 30
        assert command.max_batch == 48
        assert service["healthcheck"]["test"][4] == command.listen
    assert devices == [str(gpu) for gpu in range(gpus)]
    scheduler = parsed(content["services"]["scheduler"]["command"])
    assert scheduler.worker == [f"unix:/run/splitpoint/{name}.sock" for name in names]
    assert f"size={64 << 30}" in content["volumes"]["arena"]["driver_opts"]["o"]
    assert parsed(content["services"]["kvstore"]["command"]).host_memory == str(64 << 30)
    assert content["services"]["kvstore"]["mem_limit"] == 66 << 30
    (targets,) = yaml.safe_load(targets_file(node))
    assert targets["targets"] == [f"{name}:9400" for name in names]
    (replaced,) = yaml.safe_load((ROOT / "deploy/prometheus/targets/workers.yml").read_text())
    assert replaced["targets"] == ["worker-0:9400", "worker-1:9400"]
    assert targets["labels"] == replaced["labels"]


def test_without_options_the_override_repeats_the_compose_file() -> None:
    content, services = override(Node(2)), base()["services"]
    for name in ("kvstore", "worker-gpu-0"):
        assert content["services"][name]["command"] == services[name]["command"]
    without_workers = re.sub(r" --worker \S+", "", content["services"]["scheduler"]["command"])
    assert without_workers == services["scheduler"]["command"]
    second, first = content["services"]["worker-gpu-1"], services["worker-gpu-0"]
    renamed = re.sub("worker-gpu-1", "worker-gpu-0", yaml.safe_dump(second))
    again = yaml.safe_load(renamed)
    again["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] = ["0"]
    assert again == first
    assert "volumes" not in content


@pytest.mark.parametrize(
    "wrong",
    [
        {"gpus": 0},
        {"gpus": 65},
        {"gpus": 1, "host_memory_bytes": 64},
        {"gpus": 1, "device_memory_bytes": 70},
        {"gpus": 1, "max_batch": 0},
    ],
)
def test_nonsense_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument):
        Node(**wrong)


def test_the_command_writes_twice_the_same_and_nothing_over_others(tmp_path: Path) -> None:
    runner, output = CliRunner(), tmp_path / "node.yml"
    command = ["compose", "--gpus", "4", "--host-memory", "64GiB", "--output", str(output)]
    assert runner.invoke(app, command).exit_code == 0
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(first) == ["node.targets.yml", "node.yml"]
    assert runner.invoke(app, command).exit_code == 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first
    (mount,) = read(output.read_text())["services"]["prometheus"]["volumes"]
    assert mount == f"{tmp_path}/node.targets.yml:/etc/prometheus/targets/workers.yml:ro"
    output.write_text("services: {}\n")
    assert runner.invoke(app, command).exit_code != 0
    assert output.read_text() == "services: {}\n"


def test_what_goes_into_an_image_is_named() -> None:
    """A list of what may, so that nothing secret slips in; with every package of the wheel."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    assert {f"!{package}" for package in packages} <= set(rules)
    for rule in rules:
        if rule.startswith("!"):
            assert not rule.startswith("!.")
            assert (ROOT / rule[1:]).exists(), rule


def test_the_images_end_without_rights() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    stages = re.findall(r"^FROM (\S+) AS (\S+)$(.*?)(?=^FROM |\Z)", text, re.M | re.S)
    bodies = {name: (parent, body) for parent, name, body in stages}
    images = [body for parent, body in bodies.values() if parent == "runtime"]
    assert len(images) == 4
    for body in images:
        users = re.findall(r"^USER (\S+)$", body, re.M)
        assert users == [] or users[-1] == "10001:10001"
    assert "USER 10001:10001" in bodies["runtime"][1]
    # What engines without BuildKit do not know.
    assert "--mount=" not in text
    assert "<<" not in text


@pytest.mark.parametrize(("arguments", "forgets"), [("", False), ("-v", True), ("--volumes", True)])
def test_compose_down_with_volumes_forgets_what_was_fetched_from_them(
    arguments: str, forgets: bool
) -> None:
    command = ("make", "-n", "compose-down", "COMPOSE=docker-compose", f"ARGS={arguments}")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ("rm -rf access" in done.stdout) is forgets


# -- the profile vllm -------------------------------------------------------------------


def test_the_profile_vllm_is_a_store_of_pages_that_engines_can_map() -> None:
    content = base(SPLITPOINT_HOST_MEMORY="512m")
    services = content["services"]
    started = {name for name, each in services.items() if "vllm" in each["profiles"]}
    assert started == {"setup", "page-store"}
    service = services["page-store"]
    store = parsed(service["command"])
    assert (store.page_size, store.model, store.layout) == ("auto", None, None)
    assert parse_size(store.host_memory) == 512 << 20
    assert store.keep_arena
    # What an engine mounts at the same paths, as docs/deployment.md says.
    page = (ROOT / "docs" / "deployment.md").read_text()
    section = page.partition("\n## A store for vLLM\n")[2].partition("\n## ")[0]
    socket = store.listen.removeprefix("unix:")
    assert f"--store {store.listen}" in section
    assert f"--user {service['user']}" in section
    for volume, path in (("sockets", Path(socket).parent), ("arena", store.arena.parent)):
        assert f"{volume}:{path}" in service["volumes"]
        assert f"-v splitpoint_{volume}:{path}" in section
    *_, address, flag, name = service["healthcheck"]["test"]
    assert (address, flag, name) == (store.listen, "--service", "splitpoint.v1.KvStoreService")
    # Prometheus finds it where it finds the store of other profiles.
    assert services["page-store"]["networks"] == {"metrics": {"aliases": ["kvstore"]}}
    assert store.metrics_open
