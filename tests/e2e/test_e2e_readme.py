"""What README.md says about use runs as it stands there, against real processes."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from own_names import free_ports, instance_name
from up_process import up_process, wait_until_up

from splitpoint_cli.stack.child import child_environment

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
CURLS = re.findall(r"^    curl .*?[^\\]\n", README, re.M | re.S)


@pytest.fixture(scope="module")
def ports() -> Iterator[tuple[int, int]]:
    """Ports of the scheduler and of the gateway of a running stack."""
    first = free_ports(2)
    command = [
        *(sys.executable, "-m", "splitpoint_cli", "up", "--device", "cpu"),
        *("--listen", f"127.0.0.1:{first}", "--http", f"127.0.0.1:{first + 1}"),
        *("--instance", instance_name("readme"), "--host-memory", "64MiB"),
    ]
    with up_process(command) as process:
        wait_until_up(process)
        yield first, first + 1
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def here(text: str, ports: tuple[int, int]) -> str:
    """The text with the ports of this stack."""
    return text.replace(":50050", f":{ports[0]}").replace(":8000", f":{ports[1]}")


@pytest.mark.parametrize("block", BLOCKS)
def test_the_python_runs(block: str, ports: tuple[int, int]) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", here(block, ports)],
        capture_output=True,
        text=True,
        timeout=120,
        env=child_environment({}),
    )
    assert (done.returncode, done.stderr) == (0, "")
    if "openai" in block:
        answer, _, cached = done.stdout.rpartition(" ")
        assert 0 <= json.loads(answer)["n"] <= 99
        assert int(cached) >= 0
    else:
        assert len(done.stdout.splitlines()) >= 2


def test_every_way_of_use_is_there() -> None:
    wanted = ("from openai", "splitpoint.LLM", "splitpoint.client")
    assert [[word in block for word in wanted].index(True) for block in BLOCKS] == [0, 1, 2]


def test_the_request_by_curl_is_answered(ports: tuple[int, int]) -> None:
    """Sent without curl, which a machine need not have."""
    (command,) = CURLS
    program, url, *options = shlex.split(here(command, ports).replace("\\\n", ""))
    given = dict(zip(options[::2], options[1::2], strict=True))
    assert (program, set(given)) == ("curl", {"-H", "-d"})
    name, _, value = given["-H"].partition(": ")
    request = urllib.request.Request(url, given["-d"].encode(), {name: value})
    with urllib.request.urlopen(request, timeout=60) as response:
        assert json.load(response)["usage"]["completion_tokens"] > 0
