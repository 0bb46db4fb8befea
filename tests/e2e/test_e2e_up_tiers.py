"""`splitpoint up --tier-disk`: a stack that starts again finds what the last one left on the disk.

Each start has a new arena, so that what is found is the disk's; the secret behind the chunk keys
lies beside the chunks.
"""

from __future__ import annotations

import json
import signal
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from own_names import free_ports, instance_name
from typer.testing import CliRunner
from up_process import up_process, wait_until_up

from splitpoint.client import Client
from splitpoint.client.answers import Completion
from splitpoint.config import arena_path
from splitpoint_cli.main import app

INSTANCE = instance_name("up-tiers")
# Five chunks each, of the 10 that the arena holds.
PROMPTS = [" ".join(f"word{number}{each}" for each in range(31)) for number in range(4)]
SECONDS = 60


@contextmanager
def stack(folder: Path) -> Iterator[Client]:
    """Run a stack with a disk tier in `folder`."""
    address = f"127.0.0.1:{free_ports(1)}"
    command = [
        *(sys.executable, "-m", "splitpoint_cli", "up", "--listen", address),
        *("--device", "cpu", "--threads", "1", "--instance", INSTANCE),
        *("--host-memory", "4MiB", "--chunk-tokens", "16"),
        *("--tier-disk", str(folder), "--tier-disk-size", "256MiB"),
    ]
    with up_process(command) as process:
        summary = wait_until_up(process)
        assert f"disk tier  {folder}, at most 256 MiB" in summary
        with Client(address) as client:
            yield client
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=SECONDS)
        assert process.returncode == 0
    assert not arena_path(INSTANCE).exists()


def ask(client: Client, prompt: str) -> Completion:
    return client.generate(prompt, max_tokens=6).complete()


def test_a_stack_that_starts_again_finds_its_prefixes_on_the_disk(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    with stack(folder) as client:
        texts = [ask(client, prompt).text for prompt in PROMPTS]
        # More than the arena holds: the first has left it.
        again = ask(client, PROMPTS[0])
        assert again.plan is not None
        assert again.plan.fetch_source == "disk"
        assert again.text == texts[0]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "server.key").stat().st_mode) == 0o600
    with stack(folder) as client:
        found = ask(client, PROMPTS[1])
        assert found.plan is not None
        assert (found.plan.fetch_source, found.text) == ("disk", texts[1])
        assert found.usage.cached_tokens >= 64
        # The others' plans go by the rate that was measured then, whatever it was.
        assert [ask(client, prompt).text for prompt in PROMPTS] == texts
        told = CliRunner().invoke(app, ["status", "--address", client.address, "--json"])
        assert told.exit_code == 0, told.output
        [store] = json.loads(told.output)["stores"]
        [tier] = store["tiers"]
        assert (tier["tier"], tier["location"], tier["is_up"]) == ("disk", str(folder), True)
        assert tier["read_chunk_count"] >= 4
        assert 0 < tier["used_bytes"] <= tier["capacity_bytes"] == 256 << 20
        assert store["transfer"] is None
        shown = CliRunner().invoke(app, ["status", "--address", client.address]).output
        assert f"  disk tier {folder}: " in shown
        arguments = ["--tier-disk", str(folder), "--tier-disk-size", "256MiB", "--json"]
        looked = json.loads(CliRunner().invoke(app, ["doctor", *arguments]).output)
        [found_disk] = (each for each in looked["findings"] if each["name"] == "disk tier")
        assert found_disk["verdict"] != "problem"
