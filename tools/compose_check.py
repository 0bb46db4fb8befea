"""Tries docker-compose.yml for real: builds, starts, asks, kills, looks, and takes it all down.

    python tools/compose_check.py [--no-build] [--keep]        (or: make compose-test)

Needs a Docker engine, Compose (v2, or v1.29 as docker-compose), and this project
installed for the Python it runs with. A project name, ports and volumes of its own keep
it away from a stack that runs already. Exit code 0: everything was as it should be.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HEALTHY_SECONDS = 120.0
BACK_SECONDS = 90.0
# Most that a change of the source may ship.
SOURCE_BYTES = 20_000_000
# Several chunks of 64 tokens, so that a second worker has something to reuse.
PROMPT = "\n".join(
    f"def add_{number}(left, right):\n    return left + right + {number}\n" for number in range(12)
)


class Failed(Exception):
    """Something was not as it should be."""


def expect(is_true: bool, what: str) -> None:
    if not is_true:
        raise Failed(what)


def run(*command: str, check: bool = True, quiet: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=quiet, text=True, cwd=ROOT)
    if check and done.returncode:
        raise Failed(f"{' '.join(command)} ended with {done.returncode}\n{done.stderr or ''}")
    return done


def until(found: Callable[[], str | None], seconds: float) -> float:
    """Wait until `found` has no complaint; the seconds it took. Raises Failed with the last."""
    start = time.monotonic()
    while (complaint := found()) is not None:
        if time.monotonic() - start > seconds:
            raise Failed(f"after {seconds:.0f} s: {complaint}")
        time.sleep(0.5)
    return time.monotonic() - start


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def compose_command() -> list[str]:
    """v2 where there is one."""
    if subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    raise Failed("neither `docker compose` nor docker-compose is here")


def can_be_had(image: str) -> bool:
    return any(
        subprocess.run(["docker", *words, image], capture_output=True).returncode == 0
        for words in (["image", "inspect"], ["pull"])
    )


class Stack:
    """One project of Compose under a name of its own."""

    def __init__(self, services: list[str]) -> None:
        self.name = f"splitpoint-check-{os.getpid()}"
        self.services = services
        self._compose = [
            *compose_command(),
            *("-p", self.name, "--profile", "cpu", "--profile", "monitoring"),
        ]

    def compose(self, *words: str, quiet: bool = True) -> str:
        return run(*self._compose, *words, quiet=quiet).stdout or ""

    def container(self, service: str) -> str:
        return self.compose("ps", "-a", "-q", service).strip()

    def state(self, service: str) -> dict[str, Any]:
        state: dict[str, Any] = self.inspect(service)["State"]
        return state

    def inspect(self, service: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = json.loads(
            run("docker", "inspect", self.container(service)).stdout
        )
        return found[0]

    def unhealthy(self) -> str | None:
        for service in self.services:
            if not self.container(service):
                return f"there is no container of {service}"
            health = self.state(service).get("Health", {}).get("Status", "without a check")
            if health != "healthy":
                return f"{service} is {health}"
        return None

    def kill(self, service: str) -> None:
        """Kill the service as a crash would: `docker kill` counts as a wanted stop."""
        image = self.inspect(service)["Image"]
        code = f"import os; os.kill({self.state(service)['Pid']}, 9)"
        isolation = ("--network", "none", "--pid", "host", "--user", "0", "--cap-add", "KILL")
        run("docker", "run", "--rm", *isolation, image, "python3", "-c", code)

    def left_overs(self) -> list[str]:
        label = f"label=com.docker.compose.project={self.name}"
        kinds = (("ps", "-a"), ("volume", "ls"), ("network", "ls"))
        found = [
            f"{kind[0]} {entry}"
            for kind in kinds
            for entry in run("docker", *kind, "-q", "--filter", label).stdout.split()
        ]
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        return found + [line for line in mounts if self.name in line]


class Caller:
    """`splitpoint` on this host, with the files that came out of the stack."""

    def __init__(self, address: str, access: Path) -> None:
        self._address = address
        self._access = access

    def __call__(self, *words: str, token: str = "client") -> subprocess.CompletedProcess[str]:
        identity = ["--ca", str(self._access / "ca.pem")]
        if token:
            identity += ["--token-file", str(self._access / f"{token}.token")]
        command = (sys.executable, "-m", "splitpoint_cli.main", *words)
        return run(*command, "--address", self._address, *identity, check=False)

    def generate(self, worker: str) -> dict[str, Any]:
        done = self("generate", PROMPT, "--max-tokens", "16", "--worker", worker, "--json")
        expect(done.returncode == 0, f"generate on {worker}: {done.stderr}")
        answer: dict[str, Any] = json.loads(done.stdout)
        expect(answer["worker"] == worker, f"{answer['worker']} answered for {worker}")
        return answer


def ask_prometheus(port: str, path: str) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{path}", timeout=10) as answer:
        return json.load(answer)["data"]


def targets_missing(port: str, wanted: set[str]) -> str | None:
    try:
        active = ask_prometheus(port, "targets?state=active")["activeTargets"]
    except OSError as error:
        return f"Prometheus: {error}"
    states = {target["labels"]["instance"]: target["health"] for target in active}
    if wanted - states.keys():
        return f"Prometheus does not know {sorted(wanted - states.keys())}"
    down = sorted(name for name, health in states.items() if health != "up")
    return f"Prometheus: not up: {down}" if down else None


def check_hardening(stack: Stack) -> None:
    for service in stack.services:
        found = stack.inspect(service)
        host = found["HostConfig"]
        expect(host["ReadonlyRootfs"], f"{service}: the root is writable")
        expect(host["CapDrop"] == ["ALL"], f"{service}: capabilities {host['CapDrop']}")
        expect(found["Config"]["User"] == "10001:10001", f"{service}: {found['Config']['User']}")
        expect("no-new-privileges" in str(host["SecurityOpt"]), f"{service}: new privileges")
        expect(host["Memory"] > 0, f"{service}: no limit on memory")
        expect(0 < host["PidsLimit"] <= 4096, f"{service}: {host['PidsLimit']} processes")
        published = {
            binding["HostIp"] for port in (host["PortBindings"] or {}).values() for binding in port
        }
        expect(published <= {"127.0.0.1"}, f"{service}: published on {published}")
    password = stack.compose("exec", "-T", "redis", "cat", "/etc/splitpoint-redis/password")
    shown = run("docker", "top", stack.container("redis")).stdout
    expect(bool(password.strip()) and password.strip() not in shown, "Redis's password is shown")
    for service in ("worker-0", "kvstore"):
        seen = stack.compose("exec", "-T", service, "ls", "-A", "/etc/splitpoint").split()
        expect(not seen, f"{service} sees secrets of the scheduler: {seen}")


# Without a shell's help: what an image holds of pip, and of the model.
LOOK = """
import importlib.util, os
for name in ("pip", "ensurepip"):
    assert importlib.util.find_spec(name) is None, name
found = [
    os.path.join(folder, "model.safetensors")
    for top in ("/models", "/opt/splitpoint", "/usr", "/var")
    for folder, _, files in os.walk(top)
    if "model.safetensors" in files
]
bundled = ("stdlib-llama", "stdlib-llama-draft")
assert set(found) == {f"/models/{name}/model.safetensors" for name in bundled}, found
assert len(found) == len(bundled), found
from splitpoint.checkpoint.resolve import resolve_model
assert resolve_model(None).samefile("/models/stdlib-llama")
"""


def check_image(image: str, said: Callable[[str], None]) -> None:
    isolated = ("docker", "run", "--rm", "--network", "none", image)
    run(*isolated, "python", "-c", LOOK)
    run(*isolated, "sh", "-c", "! command -v pip && ! /usr/bin/env python3 -m pip --version")
    labels = json.loads(run("docker", "inspect", image).stdout)[0]["Config"]["Labels"]
    for label in ("title", "description", "licenses", "version", "revision"):
        expect(f"org.opencontainers.image.{label}" in labels, f"{image}: no label {label}")
    shown = run("docker", "history", "--human=false", "--format", "{{.Size}}", image).stdout
    layers = [int(size) for size in shown.split() if int(size)]
    expect(layers[0] < SOURCE_BYTES, f"{image}: the source's layer has {layers[0]:,} bytes")
    sizes = ", ".join(f"{size / 1e6:.1f}" for size in layers)
    said(f"{image}: no pip, each model once, labels; layers of {sizes} MB, the source on top")


def check_kernels(stack: Stack, workers: list[dict[str, Any]], said: Callable[[str], None]) -> None:
    """Compare what the workers compute with; kernels were compiled in one of their containers."""
    kinds = {(worker["numerics"], worker["device"]) for worker in workers}
    expect(len(kinds) == 1, f"workers of one host compute with {sorted(kinds)}")
    ((numerics, device),) = kinds
    flags = Path("/proc/cpuinfo").read_text()
    # On other processors a measurement decides.
    is_known = "avx512f" in flags and "amx_bf16" not in flags
    expect(not is_known or numerics == "invariant", f"numerics {workers[0]['numerics_reason']}")
    compiled = compiled_count(stack)
    expect(compiled > 0, "no worker compiled a kernel")
    said(f"both workers: numerics {numerics}, {device}; {compiled} kernels compiled")


def compiled_count(stack: Stack) -> int:
    """Return how many kernels were compiled, by the logs of the workers' containers."""
    return stack.compose("logs", "--no-color", "worker-0", "worker-1").count(": compiled ")


def check_gateway(address: str, access: Path, wanted: str, said: Callable[[str], None]) -> None:
    """Ask for the same text by OpenAI's protocol, with a key and without one."""
    trusted = ssl.create_default_context(cafile=access / "ca.pem")
    body = json.dumps(
        {"model": "stdlib-llama", "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
    ).encode()
    headers = {"Content-Type": "application/json"}
    url = f"https://{address}/v1/completions"
    try:
        urllib.request.urlopen(
            urllib.request.Request(url, body, headers), timeout=30, context=trusted
        ).close()
    except urllib.error.HTTPError as error:
        expect(error.code == 401, f"the gateway without a key: {error.code}")
    else:
        raise Failed("the gateway answers without a key")
    headers["Authorization"] = f"Bearer {(access / 'client.token').read_text().strip()}"
    request = urllib.request.Request(url, body, headers)
    with urllib.request.urlopen(request, timeout=30, context=trusted) as response:
        answer = json.load(response)
    expect(answer["choices"][0]["text"] == wanted, "HTTP and gRPC answer alike")
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    said(f"the gateway answers over HTTPS, {cached} tokens cached; without a key 401")


def check(stack: Stack, caller: Caller, access: Path, said: Callable[[str], None]) -> None:
    run("docker", "cp", f"{stack.container('scheduler')}:/etc/splitpoint/access/.", str(access))
    cold = caller.generate("worker-0")
    said(
        f"worker-0 answered over TLS: {cold['usage']['completion_tokens']} tokens, first after "
        f"{cold['ttft_seconds']:.3f} s, {cold['usage']['cached_tokens']} cached"
    )

    warm: dict[str, Any] = {}

    def reuse() -> str | None:  # chunks are written back behind the answer
        nonlocal warm
        warm = caller.generate("worker-1")
        return None if warm["usage"]["cached_tokens"] else "worker-1 found nothing cached"

    until(reuse, 20.0)
    usage = warm["usage"]
    said(
        f"worker-1 reused {usage['cached_tokens']} of {usage['prompt_tokens']} tokens of "
        f"worker-0, first after {warm['ttft_seconds']:.3f} s"
    )
    expect(warm["token_ids"] == cold["token_ids"], "both workers answer alike")

    refused = caller("generate", "import os", token="")
    expect(
        refused.returncode != 0 and "UNAUTHENTICATED" in refused.stderr,
        f"without a token: {refused.stderr or refused.stdout}",
    )
    status = caller("status", "--json", token="admin")
    expect(status.returncode == 0, f"status: {status.stderr}{status.stdout}")
    answer = json.loads(status.stdout)
    expect(answer["complete"], f"status: {status.stdout}")
    workers = sorted(worker["id"] for worker in answer["workers"])
    expect(workers == ["worker-0", "worker-1"], f"status: {workers}")
    said("no answer without a token; `splitpoint status`: ready, both workers")
    check_kernels(stack, answer["workers"], said)
    check_gateway(os.environ["SPLITPOINT_HTTP_PUBLISH"], access, warm["text"], said)

    check_hardening(stack)
    said("read-only roots, no capabilities, user 10001, ports on loopback, no secret in sight")

    port = os.environ["PROMETHEUS_PUBLISH"].rpartition(":")[2]
    names = ("kvstore", "scheduler", "gateway", "worker-0", "worker-1")
    wanted = {f"{name}:9400" for name in names}
    took = until(lambda: targets_missing(port, wanted), 60.0)
    counted = 'count by (job) ({__name__=~"splitpoint_.+"})'
    query = urllib.parse.quote(counted)
    found = ask_prometheus(port, f"query?query={query}")["result"]
    series = {entry["metric"]["job"]: int(entry["value"][1]) for entry in found}
    expect(
        {"kvstore", "scheduler", "gateway", "worker"} <= series.keys(), f"series by job: {series}"
    )
    rules = sum(len(group["rules"]) for group in ask_prometheus(port, "rules")["groups"])
    said(f"Prometheus has every target up after {took:.1f} s; series: {series}; {rules} rules")

    check_kills(stack, caller, said)


def check_kills(stack: Stack, caller: Caller, said: Callable[[str], None]) -> None:
    """Kill a worker and the store: each comes back, and what was cached is reused."""
    compiled = compiled_count(stack)
    for service in ("worker-0", "kvstore"):
        restarts = stack.inspect(service)["RestartCount"]
        stack.kill(service)

        def restarted(service: str = service, restarts: int = restarts) -> str | None:
            if stack.inspect(service)["RestartCount"] > restarts:
                return None
            return f"{service} was not started again"

        until(restarted, BACK_SECONDS)
        took = until(stack.unhealthy, BACK_SECONDS)

        def served(wants_cached: bool = True) -> str | None:
            try:
                answer = caller.generate("worker-0")
            except Failed as failure:
                return str(failure)
            is_served = answer["usage"]["cached_tokens"] or not wants_cached
            return None if is_served else "nothing was cached any more"

        served_after = until(served, 30.0)
        said(
            f"{service} killed: healthy again after {took:.1f} s, reuse by worker-0 "
            f"{served_after:.1f} s later"
        )
    expect(compiled_count(stack) == compiled, "a worker that started again compiled again")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-build", action="store_true", help="the images are there")
    parser.add_argument("--keep", action="store_true", help="leave the stack of a failure running")
    options = parser.parse_args()
    start = time.monotonic()

    def said(text: str) -> None:
        print(f"{time.monotonic() - start:7.1f} s  {text}", flush=True)

    ports = {
        name: f"127.0.0.1:{free_port()}"
        for name in (
            "SPLITPOINT_PUBLISH",
            "SPLITPOINT_HTTP_PUBLISH",
            "PROMETHEUS_PUBLISH",
            "GRAFANA_PUBLISH",
        )
    }
    os.environ.update(ports)
    os.environ.setdefault("SPLITPOINT_HOST_MEMORY", "256m")
    # Of v1, for each call: a storage driver that copies whole images can take minutes.
    os.environ.setdefault("COMPOSE_HTTP_TIMEOUT", "600")
    services = ["redis", "kvstore", "worker-0", "worker-1", "scheduler", "gateway"]
    services += ["prometheus", "grafana"]
    grafana = os.environ.get("GRAFANA_IMAGE", "grafana/grafana:12.0.2")
    if not can_be_had(grafana):
        said(f"WITHOUT Grafana: its image {grafana} cannot be had here")
        services.remove("grafana")
    stack = Stack(services)
    said(f"{' '.join(compose_command())}, project {stack.name}")
    failure: Failed | None = None
    with tempfile.TemporaryDirectory() as folder:
        access = Path(folder)
        access.chmod(0o700)
        try:
            if not options.no_build:
                stack.compose("build", "setup", "worker-0")
                said("images built")
            began = time.monotonic()
            stack.compose("up", "-d", *stack.services)
            # Some storage drivers copy a whole image for each container that is made.
            said(f"containers made and started in {time.monotonic() - began:.1f} s")
            until(stack.unhealthy, HEALTHY_SECONDS)
            said(f"all {len(services)} healthy {time.monotonic() - began:.1f} s after `up`")
            for service in ("kvstore", "worker-0"):
                check_image(stack.inspect(service)["Config"]["Image"], said)
            check(stack, Caller(ports["SPLITPOINT_PUBLISH"], access), access, said)
        except (Failed, OSError) as error:
            failure = error if isinstance(error, Failed) else Failed(str(error))
            said(f"FAILED: {failure}")
            print(
                stack.compose("ps"), stack.compose("logs", "--no-color", "--tail", "40"), sep="\n"
            )
        if failure is None or not options.keep:
            try:
                stack.compose("down", "-v", "--timeout", "45")
            except Failed as error:
                said(f"down FAILED: {error}")
            left = stack.left_overs()
            said(f"down: LEFT BEHIND {left}" if left else "down: nothing is left")
            if left and failure is None:
                failure = Failed("something is left behind")
    said("failed" if failure else "passed")
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
