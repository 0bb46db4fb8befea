"""`splitpoint up --http`: a gateway that outlives schedulers, comes back itself, and drains."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from own_names import instance_name
from small_model import small_model
from test_e2e_cli import assert_nothing_left
from up_process import up_process, wait_until_up

from splitpoint.client import Client
from splitpoint_cli.request.observed import read_status
from splitpoint_cli.stack.child import child_environment

SECONDS = 60
PROMPT = "import asyncio\n\n\nclass Queue:\n"


def body(**more: Any) -> bytes:
    wanted = {"model": "small-llama", "prompt": PROMPT, "temperature": 0, "ignore_eos": True}
    return json.dumps({**wanted, **more}).encode()


def post(url: str, **more: Any) -> http.client.HTTPResponse:
    request = urllib.request.Request(f"{url}/v1/completions", body(**more))
    request.add_header("Content-Type", "application/json")
    response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=SECONDS)
    return response


def text_of(url: str, max_tokens: int) -> str:
    with post(url, max_tokens=max_tokens) as response:
        text: str = json.load(response)["choices"][0]["text"]
    return text


def pieces(response: http.client.HTTPResponse) -> Iterator[str]:
    """Texts of a stream, which must end as OpenAI's do."""
    for line in response:
        if line.startswith(b"data: [DONE]"):
            return
        if line.startswith(b"data: "):
            event = json.loads(line.removeprefix(b"data: "))
            assert "error" not in event, event
            yield "".join(choice["text"] for choice in event["choices"])
    raise AssertionError("the stream ended without [DONE]")


def services(process: subprocess.Popen[str], module: str) -> list[int]:
    """Ids of the children of `up` that run this module, in the order of their start."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    found = []
    for child in children:
        command = Path(f"/proc/{child}/cmdline").read_bytes().decode(errors="replace").split("\0")
        if module in command:
            found.append(int(child))
    return sorted(found)


def wait_healthy(url: str) -> None:
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            assert time.monotonic() < deadline, "the gateway did not come back"
            time.sleep(0.05)


def test_a_gateway_outlives_schedulers_and_is_kept_alive() -> None:
    instance = instance_name("http")
    command = [
        *(sys.executable, "-m", "splitpoint_cli", "up", "--device", "cpu", "--threads", "1"),
        *("--model", str(small_model()), "--workers", "1", "--host-memory", "64MiB"),
        *("--device-memory", "128MiB", "--schedulers", "2", "--grace", "20"),
        *("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--instance", instance),
    ]
    with up_process(command) as process:
        summary = wait_until_up(process)
        [url] = re.findall(r"gateway    (http://127\.0\.0\.1:\d+)/v1 ", summary)
        assert process.stderr is not None
        wait_healthy(url)
        wanted = text_of(url, 200)
        [address, *_] = re.findall(r"scheduler  (127\.0\.0\.1:\d+)", summary)
        with Client(address) as client:
            [gateway] = read_status(client).gateways
        assert (gateway.url, gateway.is_serving) == (url, True)
        assert gateway.counts is not None
        assert gateway.counts.request_count == 1

        # Whichever scheduler it asks is lost: the other one goes on at the next token.
        with post(url, max_tokens=200, stream=True) as response:
            stream = pieces(response)
            text = next(stream)
            for scheduler in services(process, "scheduler_service")[:1]:
                os.kill(scheduler, signal.SIGKILL)
            assert text + "".join(stream) == wanted
        for line in process.stderr:
            if "scheduler 0" in line and "ready again" in line:
                break

        [victim] = services(process, "gateway_service")
        os.kill(victim, signal.SIGKILL)
        for line in process.stderr:
            if "gateway" in line and "ready again" in line:
                break
        assert services(process, "gateway_service") != [victim]
        wait_healthy(url)  # at the same port, although that was any free one
        assert text_of(url, 200) == wanted

        # A stop lets the answer end, and nothing new begin.
        with post(url, max_tokens=200, stream=True) as response:
            stream = pieces(response)
            text = next(stream)
            process.send_signal(signal.SIGINT)
            told: list[str] = []
            reader = threading.Thread(target=lambda: told.append(process.communicate()[1]))
            reader.start()
            assert text + "".join(stream) == wanted
        reader.join(SECONDS)
        assert process.returncode == 0, told
    assert_nothing_left(instance)


def test_a_taken_port_is_said_before_anything_starts(free_port: int) -> None:
    command = [sys.executable, "-m", "splitpoint_cli", "up", "--instance", instance_name("taken")]
    addresses = ("--listen", "127.0.0.1:0", "--http", f"127.0.0.1:{free_port}")
    with socket.create_server(("127.0.0.1", free_port)):
        done = subprocess.run(
            [*command, *addresses],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env=child_environment({}),
            check=False,
        )
    assert done.returncode == 3
    assert f"something listens at 127.0.0.1:{free_port}" in done.stderr
    assert "--http 127.0.0.1:" in done.stderr
    assert_nothing_left(instance_name("taken"))
