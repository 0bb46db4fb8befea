"""The whole stack as a user runs it: `up`, `generate`, `status`, Ctrl-C.

The bundled model is the subject of tests/e2e/test_e2e_readme.py.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from own_names import instance_name
from redis_server import RedisServer
from small_model import small_model
from splitpoint_command import splitpoint
from up_process import up_process, wait_until_up

from splitpoint.client import Client
from splitpoint.config import arena_path, runtime_path
from splitpoint.discovery.entries import STORES, WORKERS
from splitpoint_cli.demo import prompts
from splitpoint_cli.stack.child import child_environment

COMMAND = [sys.executable, "-m", "splitpoint_cli"]
ROOT = Path(__file__).resolve().parents[2]
UP_SECONDS = 120


@contextmanager
def stack(address: str, instance: str, *more: str) -> Iterator[subprocess.Popen[str]]:
    """`splitpoint up` with two CPU workers, from the moment it says that it serves."""
    with up_process(
        [
            *(*COMMAND, "up", "--device", "cpu", "--workers", "2", "--threads", "1"),
            *("--model", str(small_model())),
            *("--dtype", "float32", "--host-memory", "256MiB", "--device-memory", "256MiB"),
            *("--listen", address, "--instance", instance, *more),
        ]
    ) as process:
        yield process


def service_processes(instance: str) -> dict[int, str]:
    """Process id → module of every living service of one stack, found by its socket or arena."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # Another program's arguments may be no UTF-8.
            command = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if any(f"/{instance}/" in part or f"-{instance}/" in part for part in command):
            found[int(entry.name)] = next(
                (part for part in command if part.endswith("_service")), "splitpoint_cli"
            )
    return found


def scheduler_of(instance: str, address: str) -> int:
    """Process id of the scheduler that listens at this address."""
    port = int(address.rpartition(":")[2])
    services = service_processes(instance).items()
    [found] = [pid for pid, name in services if name == "scheduler_service" and listens(pid, port)]
    return found


def listens(process: int, port: int) -> bool:
    """Return True if the process has a socket that listens at this port."""
    nodes = {
        line.split()[9]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()[1:]
        if line.split()[3] == "0A" and int(line.split()[1].rpartition(":")[2], 16) == port
    }
    links = (os.readlink(link) for link in Path(f"/proc/{process}/fd").iterdir())
    return any(link == f"socket:[{node}]" for link in links for node in nodes)


def assert_nothing_left(instance: str) -> None:
    assert service_processes(instance) == {}
    assert not arena_path(instance).parent.exists()
    assert not runtime_path(instance).exists()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One stack for the tests that only talk to it."""
    instance = instance_name("cli")
    address = f"unix:{tmp_path_factory.mktemp('up')}/public.sock"
    with stack(address, instance) as process:
        printed = wait_until_up(process)
        assert address in printed
        assert "splitpoint generate" in printed
        yield address
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    assert_nothing_left(instance)


def generate(address: str, *arguments: str) -> dict[str, Any]:
    done = splitpoint("generate", "--address", address, "--json", *arguments)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_generate_json(address: str) -> None:
    answer = generate(address, "def main():", "--max-tokens", "8", "--ignore-eos")
    assert set(answer) == {
        *("token_ids", "text", "finish_reason", "usage", "worker", "plan"),
        *("restore_seconds", "step_seconds", "ttft_seconds", "seconds"),
        *("request_id", "seed", "matched_stop", "logprobs"),
    }
    assert len(answer["token_ids"]) == answer["usage"]["completion_tokens"] == 8
    assert answer["finish_reason"] == "length"
    assert answer["worker"] in ("0", "1")
    assert set(answer["plan"]) == {
        *("residency", "split_tokens", "method", "schedule", "reason", "reason_details"),
        *("device_tokens", "fetched_tokens", "fetch_source", "fetch_transfer"),
        *("recomputed_tokens", "resident_tokens", "predicted_restore_seconds"),
        *("predicted_load_seconds", "predicted_recompute_seconds", "predicted_step_seconds"),
    }
    assert 0 < answer["ttft_seconds"] <= answer["seconds"]


def test_streamed_text_equals_the_json_text(address: str) -> None:
    prompt = ("import asyncio", "--max-tokens", "12", "--worker", "1")
    done = splitpoint("generate", "--address", address, *prompt)
    assert done.returncode == 0, done.stderr
    assert done.stdout == generate(address, *prompt)["text"] + "\n"


def test_the_other_worker_finds_the_prefix(address: str) -> None:
    short, long = prompts()
    cold = generate(address, long, "--max-tokens", "8", "--worker", "1", "--cache-salt", "alone")
    assert cold["usage"]["cached_tokens"] == 0
    generate(address, short, "--max-tokens", "2", "--worker", "0")
    warm = generate(address, long, "--max-tokens", "8", "--worker", "1")
    assert warm["usage"]["cached_tokens"] > 0.5 * warm["usage"]["prompt_tokens"]
    assert warm["token_ids"] == cold["token_ids"]
    for split in (0, 64, 100_000):
        again = generate(
            address,
            *(long, "--max-tokens", "8", "--worker", "0", "--split", str(split)),
        )
        cached = again["usage"]["cached_tokens"]
        assert again["token_ids"] == cold["token_ids"]
        assert again["plan"]["split_tokens"] == min(split, cached)


def test_a_chat_finds_its_earlier_turns_in_the_cache(address: str) -> None:
    questions = ["Read a file and return its lines.", "Count the words.", "Sort them.", "Again."]
    done = subprocess.run(
        [*COMMAND, "chat", "--address", address, "--max-tokens", "24", "--json"],
        input="\n".join(questions),
        capture_output=True,
        text=True,
        timeout=UP_SECONDS,
        env=child_environment({}),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    said = [message["content"] for message in told["messages"] if message["role"] == "user"]
    assert said == questions
    usages = [turn["usage"] for turn in told["turns"]]
    for before, after in itertools.pairwise(usages):
        assert after["cached_tokens"] >= 0.9 * before["prompt_tokens"]
    assert all(turn["plan"]["reason"] for turn in told["turns"])


def test_errors_reach_the_user_by_name(address: str) -> None:
    for arguments, name, code in (
        (("",), "INVALID_ARGUMENT", 2),
        (("--prompt-ids", "5000"), "INVALID_ARGUMENT", 2),
        (("x", "--max-tokens", "5000"), "INVALID_ARGUMENT", 2),
        (("x", "--worker", "7"), "NOT_FOUND", 2),
        (("x", "--model", "other"), "NOT_FOUND", 2),
        (("x", "--timeout", "0.000001"), "DEADLINE_EXCEEDED", 4),
    ):
        done = splitpoint("generate", "--address", address, *arguments)
        assert done.returncode == code, (arguments, done.stderr)
        assert done.stderr.startswith(f"splitpoint: {name}: "), done.stderr
    for option, value in (("--max-tokens", "0"), ("--top-p", "2")):
        done = splitpoint("generate", "--address", address, "x", option, value)
        assert done.returncode == 2, (option, done.stderr)
        assert option in done.stderr


def test_doctor_beside_a_healthy_stack(address: str) -> None:
    asked = ("doctor", "--instance", instance_name("cli"), "--host-memory", "64MiB", "--json")
    done = splitpoint(*asked, "--listen", address)
    findings = json.loads(done.stdout)["findings"]
    assert done.returncode == 0, findings
    [told] = [finding for finding in findings if finding["name"] == "instance"]
    assert told["verdict"] == "ok"
    assert told["found"].startswith("a stack of this instance is running: ")
    assert told["found"].endswith(f"serves at {address}")
    assert not [finding for finding in findings if finding["name"] == "listen"]
    # Where it does not serve it would be another stack of this name, which is refused.
    done = splitpoint(*asked, "--listen", f"{address}.other")
    assert done.returncode == 1
    problems = [f for f in json.loads(done.stdout)["findings"] if f["verdict"] == "problem"]
    assert [problem["name"] for problem in problems] == ["instance"]


def test_status(address: str) -> None:
    done = splitpoint("status", "--address", address, "--wait", "10", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["serves"]
    assert answer["complete"]
    assert [worker["id"] for worker in answer["workers"]] == ["0", "1"]
    store = answer["stores"][0]
    assert store["quarantined_slot_count"] == store["writing_slot_count"] == 0
    assert store["data_type"] == "float32"
    assert splitpoint("status", "--address", address).returncode == 0


def test_a_measured_profile_fits_plan(address: str, tmp_path: Path) -> None:
    with Client(address) as client:
        profile = client.list_workers()[0].profile
    assert profile is not None
    (tmp_path / "profile.json").write_text(profile.to_json())
    done = splitpoint(
        *("plan", "--model", "opt-6.7b", "--cached", "1000", "--new", "10"),
        *("--profile", str(tmp_path / "profile.json")),
    )
    assert done.returncode == 0, done.stderr


def test_the_guides_python_example_runs(address: str) -> None:
    """Those of README.md are in tests/e2e/test_e2e_readme.py."""
    text = (ROOT / "docs" / "usage.md").read_text()
    (block,) = re.findall(r"```python\n(import asyncio\n.*?)```", text, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", block.replace("AsyncClient()", f"AsyncClient({address!r})")],
        capture_output=True,
        text=True,
        timeout=60,
        env=child_environment({}),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_a_killed_worker_stops_everything_and_leaves_nothing(tmp_path: Path) -> None:
    instance = instance_name("kill")
    with stack(f"unix:{tmp_path}/p.sock", instance, "--workers", "1", "--no-restart") as process:
        wait_until_up(process)
        services = service_processes(instance)
        assert set(services.values()) >= {"kvstore_service", "worker_service", "scheduler_service"}
        worker = next(pid for pid, name in services.items() if name == "worker_service")
        os.kill(worker, signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "UNAVAILABLE: worker 0 ended by SIGKILL" in errors
    assert_nothing_left(instance)


def test_services_end_when_up_itself_is_killed(tmp_path: Path) -> None:
    instance = instance_name("orphan")
    with stack(f"unix:{tmp_path}/p.sock", instance, "--workers", "1") as process:
        wait_until_up(process)
        services = service_processes(instance)
        process.kill()
        process.communicate()
    assert len(services) == 3
    # At once: it waits for the arena, and neither disturbs the other.
    address = f"unix:{tmp_path}/again.sock"
    with stack(address, instance, "--workers", "1") as process:
        wait_until_up(process)
        assert not services.keys() & service_processes(instance).keys()
        status = splitpoint("status", "--address", address, "--json")
        assert status.returncode == 0, status.stderr
        assert json.loads(status.stdout)["stores"][0]["slot_count"] > 0
        services |= service_processes(instance)
        process.kill()
        process.communicate()
    deadline = time.monotonic() + 60
    # A process that ends has no command any more while it still holds its files.
    while any(Path(f"/proc/{each}").exists() for each in services):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert service_processes(instance) == {}
    assert not arena_path(instance).exists(), "the store takes its arena away by itself"
    # What only `up` could remove goes with `down`, or with the next `up` of that name.
    down = splitpoint("down", "--instance", instance)
    assert down.returncode == 0, down.stderr
    assert_nothing_left(instance)


def test_options_reach_the_services(tmp_path: Path, redis_server: RedisServer) -> None:
    instance = instance_name("never")
    address = f"unix:{tmp_path}/p.sock"
    options = (
        *("--workers", "1", "--activations", "never", "--eviction", "counter"),
        *("--evict-above", "0.9", "--admission", "second-use", "--lease-seconds", "5"),
        *("--huge-pages", "never", "--numa-node", "none", "--pin-limit", "0"),
        *("--redis", redis_server.url),
    )
    with stack(address, instance, *options) as process:
        wait_until_up(process)
        status = splitpoint("status", "--address", address, "--json")
        assert json.loads(status.stdout)["stores"][0]["eviction_policy"] == "counter"
        with redis_server.client() as client:
            assert client.scard(STORES) == client.scard(WORKERS) == 1
        done = splitpoint("generate", "x", "--address", address, "--split", "1")
        assert done.returncode == 2
        assert "INVALID_ARGUMENT" in done.stderr
        assert "activations" in done.stderr
        stopped = splitpoint("down", "--instance", instance)
        assert stopped.returncode == 0, stopped.stderr
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert_nothing_left(instance)
