"""A project of Compose under a name of its own, and `splitpoint` on this host that asks it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HEALTHY_SECONDS = 120.0
BACK_SECONDS = 90.0
Said = Callable[[str], None]


class Failed(Exception):
    """Something was not as it should be."""


def expect(is_true: bool, what: str) -> None:
    if not is_true:
        raise Failed(what)


def run(
    *command: str, check: bool = True, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end. `environment` adds to this process's. Raises Failed."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        check=False,
    )
    if check and done.returncode:
        raise Failed(f"{' '.join(command)} ended with {done.returncode}\n{done.stderr}")
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
    """Return v2 where it is installed, else v1."""
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
    """One project of Compose.

    Attributes:
        services: those that are started by name; `setup` runs before them.
    """

    def __init__(self, profiles: Sequence[str], services: list[str]) -> None:
        self.name = f"splitpoint-check-{profiles[0]}-{os.getpid()}"
        self.services = services
        chosen = [word for profile in profiles for word in ("--profile", profile)]
        self._compose = [*compose_command(), "-p", self.name, *chosen]

    def compose(self, *words: str) -> str:
        return run(*self._compose, *words).stdout

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

    def unhealthy(self, *services: str) -> str | None:
        """Return what is wrong with one of these services, by default of all."""
        for service in services or self.services:
            if not self.container(service):
                return f"there is no container of {service}"
            health = self.state(service).get("Health", {}).get("Status", "without a check")
            if health != "healthy":
                return f"{service} is {health}"
        return None

    def kill(self, service: str) -> float:
        """Kill the service as a crash would, and wait until it is healthy again, in seconds.

        `docker kill` counts as a wanted stop, after which the engine starts nothing.
        """
        found = self.inspect(service)
        code = f"import os; os.kill({found['State']['Pid']}, 9)"
        isolation = ("--network", "none", "--pid", "host", "--user", "0", "--cap-add", "KILL")
        run("docker", "run", "--rm", *isolation, found["Image"], "python3", "-c", code)

        def restarted() -> str | None:
            if self.inspect(service)["RestartCount"] > found["RestartCount"]:
                return None
            return f"{service} was not started again"

        until(restarted, BACK_SECONDS)
        return until(self.unhealthy, BACK_SECONDS)

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
    """`splitpoint` on this host, with the files that came out of the stack.

    `with_certificate`: it shows a client's certificate, which the profile `cluster` wants.
    """

    def __init__(self, address: str, access: Path, *, with_certificate: bool = False) -> None:
        self._address = address
        self._access = access
        self._environment = {"SPLITPOINT_CA": str(access / "ca.pem")}
        if with_certificate:
            self._environment["SPLITPOINT_CERT"] = str(access / "client.pem")
            self._environment["SPLITPOINT_KEY"] = str(access / "client-key.pem")

    def __call__(self, *words: str, token: str = "client") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "splitpoint_cli.main", *words, "--address", self._address]
        if token:
            command += ["--token-file", str(self._access / f"{token}.token")]
        return run(*command, check=False, environment=self._environment)

    def generate(self, worker: str, prompt: str) -> dict[str, Any]:
        done = self("generate", prompt, "--max-tokens", "16", "--worker", worker, "--json")
        expect(done.returncode == 0, f"generate on {worker}: {done.stderr}")
        answer: dict[str, Any] = json.loads(done.stdout)
        expect(answer["worker"] == worker, f"{answer['worker']} answered for {worker}")
        return answer


def copy_access(stack: Stack, scheduler: str, access: Path) -> None:
    """Fetch the authority and the tokens that callers need."""
    run("docker", "cp", f"{stack.container(scheduler)}:/etc/splitpoint/access/.", str(access))


def check_hardening(stack: Stack, without_secrets: Sequence[str], said: Said) -> None:
    """Compare what every container may do with what it should."""
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
    for service in without_secrets:
        seen = stack.compose("exec", "-T", service, "sh", "-c", "ls -A /etc/splitpoint").split()
        expect(not seen, f"{service} sees secrets of the scheduler: {seen}")
    said("read-only roots, no capabilities, user 10001, ports on loopback, no secret in sight")
