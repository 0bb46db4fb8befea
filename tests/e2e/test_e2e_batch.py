"""`splitpoint batch` by real processes: killed and resumed, in prefix order, online and offline."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from small_model import small_model

from splitpoint_cli.stack.child import child_environment
from splitpoint_offline.engine import Engine
from splitpoint_offline.options import settings_of

MODEL = "small-llama"
# An arena of 42 chunks and a device of some 30 pages: about ten of the prompts' prefixes.
SMALL = {"device": "cpu", "host_memory": "6MiB", "device_memory": "29MiB", "max_batch": 8}


@dataclass(frozen=True)
class Stack:
    """A store, a worker and a scheduler in this process, for commands in others."""

    address: str


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    # Texts do not depend on what is computed together.
    settings = settings_of(small_model(), {**SMALL, "threads": 1, "numerics": "invariant"})
    engine = Engine(settings)
    engine.start()
    yield Stack(settings.scheduler_address)
    engine.close()


def prompts(
    groups: int, of_each: int, *, tokens: int, seed: int, salt: str, answer: int = 2
) -> list[dict[str, Any]]:
    """Requests whose prompts have a few prefixes, in random order."""
    rng = random.Random(seed)
    shared = [[rng.randrange(10, 1900) for _ in range(tokens)] for _ in range(groups)]
    lines = [
        {
            "custom_id": f"{group}-{index}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "model": MODEL,
                "prompt": shared[group] + [rng.randrange(10, 1900) for _ in range(16)],
                "max_tokens": answer,
                "temperature": 0,
                "ignore_eos": True,
                "cache_salt": salt,
            },
        }
        for group in range(groups)
        for index in range(of_each)
    ]
    rng.shuffle(lines)
    return lines


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def command(source: Path, target: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "splitpoint_cli", "batch", str(source), str(target), *arguments]


def run(source: Path, target: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    """Run the command to its end; return its report."""
    done = subprocess.run(
        command(source, target, "--json", *arguments),
        capture_output=True,
        text=True,
        env=child_environment({}),
        timeout=600,
    )
    assert done.returncode == code, done.stderr
    report: dict[str, Any] = json.loads(done.stdout) if done.stdout else {"stderr": done.stderr}
    return report


def killed(source: Path, target: Path, *arguments: str, lines: int) -> None:
    """Run the command and kill it once it has written this number of lines more."""
    before = size_of(target)
    process = subprocess.Popen(
        command(source, target, *arguments),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=child_environment({}),
    )
    deadline = time.monotonic() + 120
    while size_of(target) < before + lines:
        assert process.poll() is None, "it ended by itself"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()


def size_of(target: Path) -> int:
    return target.read_bytes().count(b"\n") if target.exists() else 0


def rows_of(target: Path) -> dict[str, dict[str, Any]]:
    """The answers by custom_id; each must be there once."""
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert {count for _, count in Counter(row["custom_id"] for row in rows).items()} == {1}
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["custom_id"]: row for row in rows}


def check_killed(
    tmp_path: Path, lines: list[dict[str, Any]], kills: int, *arguments: str
) -> dict[str, dict[str, Any]]:
    """Answer the lines with this number of kills on the way; return the answers."""
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    rng = random.Random(7)
    for _ in range(kills):
        killed(source, target, *arguments, lines=len(lines) // (kills + 1))
        if rng.random() < 0.5:  # at any byte: as the disk might have it after a loss of power
            whole = target.read_bytes()
            target.write_bytes(whole[: len(whole) - rng.randrange(200)])
    earlier = target.read_bytes()
    kept = earlier[: earlier.rfind(b"\n") + 1]
    report = run(source, target, *arguments)
    assert target.read_bytes().startswith(kept)
    assert report["answered_earlier"] == kept.count(b"\n")
    assert report["answered"] == len(lines) - report["answered_earlier"]
    rows = rows_of(target)
    assert rows.keys() == {line["custom_id"] for line in lines}
    assert {row["response"]["status_code"] for row in rows.values()} == {200}
    again = run(source, target, *arguments)
    assert (again["answered"], again["answered_earlier"]) == (0, len(lines))
    return rows


def texts(rows: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: row["response"]["body"]["choices"][0]["text"] for name, row in rows.items()}


def check_order(tmp_path: Path, stack: Stack, groups: int, of_each: int) -> dict[str, int]:
    """Return the prefilled tokens in each order, of the same prompts that nothing has cached."""
    found, answers = {}, {}
    for order in ("file", "prefix"):
        lines = prompts(groups, of_each, tokens=448, seed=5, salt=order)
        target = tmp_path / f"{order}.jsonl"
        report = run(
            write(tmp_path / f"{order}-in.jsonl", lines),
            target,
            *("--address", stack.address, "--order", order, "--concurrency", "16"),
        )
        assert report["prompt_tokens"] == len(lines) * 464
        found[order] = report["prefilled_tokens"]
        answers[order] = texts(rows_of(target))
    assert answers["file"] == answers["prefix"]
    figures = {"benchmark": "batch_order", "prompts": len(lines), "prefixes": groups}
    print(json.dumps({**figures, "prompt_tokens": len(lines) * 464, "prefilled_tokens": found}))
    return found


def test_a_killed_batch_answers_each_line_once(tmp_path: Path, stack: Stack) -> None:
    lines = prompts(10, 8, tokens=64, seed=1, salt="kill")
    rows = check_killed(tmp_path, lines, 2, "--address", stack.address)
    whole = tmp_path / "whole.jsonl"
    run(tmp_path / "in.jsonl", whole, "--address", stack.address)
    assert texts(rows_of(whole)) == texts(rows)


def test_prefix_order_computes_less(tmp_path: Path, stack: Stack) -> None:
    found = check_order(tmp_path, stack, groups=16, of_each=5)
    assert found["file"] >= 1.5 * found["prefix"]


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_a_thousand_prompts_with_fifty_prefixes(tmp_path: Path, stack: Stack) -> None:
    lines = prompts(50, 20, tokens=448, seed=2, salt="thousand")
    check_killed(tmp_path, lines, 8, "--address", stack.address)
    found = check_order(tmp_path, stack, groups=50, of_each=20)
    assert found["file"] >= 1.5 * found["prefix"]


def test_every_kind_of_line_has_its_answer(tmp_path: Path, stack: Stack) -> None:
    def line(name: str, url: str, **body: Any) -> dict[str, Any]:
        return {"custom_id": name, "method": "POST", "url": url, "body": {"model": MODEL, **body}}

    messages = [{"role": "user", "content": "def reverse(items):"}]
    lines: list[Any] = [
        line("text", "/v1/completions", prompt="def f(", max_tokens=3, n=2, seed=1, temperature=1),
        line("chat", "/v1/chat/completions", messages=messages, max_completion_tokens=3),
        line("response", "/v1/responses", input="def f(", max_output_tokens=16),
        line("echo", "/v1/completions", prompt=[5, 6, 7], max_tokens=2, echo=True),
        line("unknown", "/v1/completions", prompt="x", temprature=1),
        line("long", "/v1/completions", prompt=[7] * 5000),
        line("model", "/v1/completions", prompt="x") | {"body": {"model": "gpt", "prompt": "x"}},
        line("stream", "/v1/completions", prompt="x", stream=True),
        line("url", "/v1/embeddings", input="x"),
    ]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    with source.open("a") as file:
        file.write("{no json\n")
    report = run(source, target, "--address", stack.address)
    assert (report["answered"], report["failed"]) == (10, 6)
    # Two lines are no requests.
    assert report["failed_by_status"] == {"400": 5, "404": 1}
    rows = rows_of(target)
    statuses = {
        name: (row["response"] or {"status_code": None})["status_code"]
        for name, row in rows.items()
    }
    assert {name for name, status in statuses.items() if status == 200} == {
        *("text", "chat", "response", "echo")
    }
    assert [statuses[name] for name in ("unknown", "long", "stream", "model")] == [400] * 3 + [404]
    bodies = {name: row["response"]["body"] for name, row in rows.items() if row["response"]}
    assert [choice["index"] for choice in bodies["text"]["choices"]] == [0, 1]
    assert bodies["chat"]["choices"][0]["message"]["role"] == "assistant"
    assert bodies["response"]["object"] == "response"
    assert len(bodies["echo"]["choices"][0]["text"]) > 3
    assert bodies["unknown"]["error"]["param"] == "temprature"
    assert bodies["long"]["error"]["code"] == "context_length_exceeded"
    assert rows["url"]["error"]["line"] == 9
    assert rows[None]["error"]["line"] == 10  # type: ignore[index]
    again = run(source, target, "--address", stack.address)
    assert (again["answered"], again["failed_earlier"]) == (0, 6)
    # With the lines mended the errors alone are asked for again.
    lines[4:] = [line(each["custom_id"], "/v1/completions", prompt="x") for each in lines[4:]]
    write(source, [*lines, line("last", "/v1/completions", prompt="x")])
    mended = run(source, target, "--address", stack.address, "--retry-failed")
    assert (mended["answered"], mended["answered_earlier"], mended["failed"]) == (6, 4, 0)
    again_rows = rows_of(target)
    assert {row["response"]["status_code"] for row in again_rows.values()} == {200}
    assert again_rows["chat"] == rows["chat"]


def test_a_batch_without_a_scheduler_ends_and_can_go_on(tmp_path: Path, stack: Stack) -> None:
    lines = prompts(2, 3, tokens=8, seed=3, salt="away")
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    told = run(
        source, target, "--address", f"unix:{tmp_path}/no", "--retry-seconds", "0.5", code=3
    )["stderr"]
    assert "0 of 6 requests answered; the same command goes on" in told
    assert "UNAVAILABLE" in told
    assert run(source, target, "--address", stack.address)["answered"] == 6


def interrupted(source: Path, target: Path, *arguments: str, number: signal.Signals) -> int:
    """Run the command, interrupt it after some answers, and return its process id."""
    process = subprocess.Popen(
        command(source, target, *arguments, "--concurrency", "2"),
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment({}),
    )
    while size_of(target) < 5:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert "of 120 requests answered; the same command goes on" in told
    assert 5 <= size_of(target) < 120
    return process.pid


def test_an_interrupted_batch_goes_on_with_a_model_of_its_own(tmp_path: Path, stack: Stack) -> None:
    # The interruption must come before the end.
    lines = prompts(4, 30, tokens=32, seed=4, salt="offline", answer=12)
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    offline = (
        "--model",
        str(small_model()),
        "--device",
        "cpu",
        "--host-memory",
        "64MiB",
        "--threads",
        "1",
    )
    interrupted(source, target, "--address", stack.address, number=signal.SIGINT)
    pid = interrupted(source, tmp_path / "other.jsonl", *offline, number=signal.SIGTERM)
    assert not [name for name in os.listdir("/dev/shm") if f"-llm-{pid}-" in name]
    report = run(source, target, *offline, "--max-batch", "16")
    assert report["answered"] + report["answered_earlier"] == 120
    assert report["failed"] == 0
    rows_of(target)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "cpu"), "--device needs --model"),
        (("--concurrency", "0"), "greater than or equal to"),
        (("--order", "random"), "'random' is not one of prefix, file"),
        (("--model", MODEL, "--host-memory", "much"), "'much' is not a size"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    source = write(tmp_path / "in.jsonl", prompts(1, 1, tokens=4, seed=1, salt=""))
    told = run(source, tmp_path / "out.jsonl", *arguments, code=2)["stderr"]
    assert message in " ".join(told.split())
    assert not (tmp_path / "out.jsonl").exists()


def test_the_requests_are_never_overwritten(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", prompts(1, 1, tokens=4, seed=1, salt=""))
    before = source.read_bytes()
    (tmp_path / "link.jsonl").symlink_to(source)
    for target in (source, tmp_path / "link.jsonl"):
        told = run(source, target, code=2)["stderr"]
        assert "OUT is the file of the requests" in told
    assert source.read_bytes() == before
