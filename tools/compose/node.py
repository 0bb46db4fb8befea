"""The profiles `cpu` and `monitoring`: a store, two workers, scheduler, gateway, Prometheus."""

from __future__ import annotations

import json
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from splitpoint.shapes import Numerics
from tools.compose.images import check_image
from tools.compose.stack import (
    Caller,
    Failed,
    Said,
    Stack,
    can_be_had,
    check_hardening,
    copy_access,
    expect,
    until,
)
from worker_service.profiling.calibration import prefers_one_order

PROFILES = ("cpu", "monitoring")
# A service for each image that is built.
BUILT = ("setup", "worker-0")
# Several chunks of 64 tokens, so that a second worker has something to reuse.
PROMPT = "\n".join(
    f"def add_{number}(left, right):\n    return left + right + {number}\n" for number in range(12)
)
ENVIRONMENT = {"SPLITPOINT_HOST_MEMORY": "256m"}


def services(said: Said) -> list[str]:
    """Return what is started: without Grafana where its image cannot be had."""
    wanted = ["redis", "kvstore", "worker-0", "worker-1", "scheduler", "gateway", "prometheus"]
    grafana = os.environ.get("GRAFANA_IMAGE", "grafana/grafana:12.0.2")
    if can_be_had(grafana):
        return [*wanted, "grafana"]
    said(f"WITHOUT Grafana: its image {grafana} cannot be had here")
    return wanted


def check(stack: Stack, access: Path, said: Said) -> None:
    for service in ("kvstore", "worker-0"):
        check_image(stack, service, said)
    caller = Caller(os.environ["SPLITPOINT_PUBLISH"], access)
    check_answers(stack, caller, access, said)
    check_hardening(stack, ("worker-0", "kvstore"), said)
    check_prometheus(said)
    check_kills(stack, caller, said)


def check_answers(stack: Stack, caller: Caller, access: Path, said: Said) -> None:
    """Ask both workers, with a token and without one, by gRPC and by HTTPS."""
    copy_access(stack, "scheduler", access)
    cold = caller.generate("worker-0", PROMPT)
    said(
        f"worker-0 answered over TLS: {cold['usage']['completion_tokens']} tokens, first after "
        f"{cold['ttft_seconds']:.3f} s, {cold['usage']['cached_tokens']} cached"
    )

    warm: dict[str, Any] = {}

    def reuse() -> str | None:  # chunks are written back behind the answer
        nonlocal warm
        warm = caller.generate("worker-1", PROMPT)
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


def check_kernels(stack: Stack, workers: list[dict[str, Any]], said: Said) -> None:
    """Compare what the workers compute with; kernels were compiled in one of their containers."""
    kinds = {(worker["numerics"], worker["device"]) for worker in workers}
    expect(len(kinds) == 1, f"workers of one host compute with {sorted(kinds)}")
    ((numerics, device),) = kinds
    # Where the rule does not decide, a measurement does.
    expect(
        not prefers_one_order("auto") or numerics == Numerics.INVARIANT,
        f"numerics {workers[0]['numerics_reason']}",
    )
    compiled = compiled_count(stack)
    expect(compiled > 0, "no worker compiled a kernel")
    said(f"both workers: numerics {numerics}, {device}; {compiled} kernels compiled")


def compiled_count(stack: Stack) -> int:
    """Return how many kernels were compiled, by the logs of the workers' containers."""
    return stack.compose("logs", "--no-color", "worker-0", "worker-1").count(": compiled ")


def check_gateway(address: str, access: Path, wanted: str, said: Said) -> None:
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


def check_prometheus(said: Said) -> None:
    """Wait until Prometheus reads all services, and count what it has of them."""
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


def check_kills(stack: Stack, caller: Caller, said: Said) -> None:
    """Kill a worker and the store: each comes back, and what was cached is reused."""
    compiled = compiled_count(stack)

    def served() -> str | None:
        try:
            answer = caller.generate("worker-0", PROMPT)
        except Failed as failure:
            return str(failure)
        return None if answer["usage"]["cached_tokens"] else "nothing was cached any more"

    for service in ("worker-0", "kvstore"):
        took = stack.kill(service)
        served_after = until(served, 30.0)
        said(
            f"{service} killed: healthy again after {took:.1f} s, reuse by worker-0 "
            f"{served_after:.1f} s later"
        )
    expect(compiled_count(stack) == compiled, "a worker that started again compiled again")
