"""Long texts beside running streams: how long a stream stands still at most.

pytest -m chaos tests/e2e/test_e2e_text_storm.py -s
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from own_names import instance_name
from up_process import up_process, wait_until_up

from splitpoint.client import AsyncClient
from splitpoint.client.answers import Tokens
from splitpoint_cli.stack.child import child_environment

CALLS = 60
MOST_GAP_SECONDS = 0.2
STREAMS = 4

# In a process of its own: what it computes must not look like a stream that stands still.
STORM = """
import asyncio, collections, sys
from splitpoint.client import AsyncClient
from splitpoint.errors import SplitpointError

async def main(address, calls):
    said, places = collections.Counter(), asyncio.Semaphore(12)
    async with AsyncClient(address, timeout=120) as client:
        async def one(number):
            unit = f"def read{number}(path): return open(path).read() or {number}\\n"
            text = (unit * (4_190_000 // len(unit) + 1))[:4_190_000]
            async with places:
                try:
                    if number % 2:
                        await client.tokenize(text)
                    else:
                        await client.generate(text, max_tokens=1).complete()
                    said["OK"] += 1
                except SplitpointError as error:
                    said[error.reason] += 1
        await asyncio.gather(*(one(number) for number in range(calls)))
    print(dict(said))

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


class Gaps:
    """The longest time between two messages of a stream, while `is_open`."""

    def __init__(self) -> None:
        self.longest, self.tokens = 0.0, 0

    def restart(self) -> None:
        self.longest, self.tokens = 0.0, 0

    async def watch(self, client: AsyncClient, number: int) -> None:
        while True:
            last = 0.0
            generation = client.generate(
                f"import os  # {number}\n", max_tokens=400, ignore_eos=True
            )
            async for event in generation:
                now = time.monotonic()
                if isinstance(event, Tokens):
                    self.tokens += 1
                    self.longest = max(self.longest, now - last if last else 0.0)
                    last = now


def long_context(folder: Path, bundled: Path) -> Path:
    """The bundled model with room for texts of 4 MB, so that they are tokenized indeed."""
    shutil.copytree(bundled, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 131_072}))
    return folder


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("context", ["4,096 tokens", "131,072 tokens"])
async def test_streams_go_on_beside_texts_of_4_mb(
    tmp_path: Path, bundled_model: Path, context: str
) -> None:
    model = bundled_model
    if context == "131,072 tokens":
        model = long_context(tmp_path / "long", bundled_model)
    command: list[str | Path] = [
        *(sys.executable, "-m", "splitpoint_cli", "up", "--device", "cpu", "--threads", "1"),
        *("--workers", "1", "--host-memory", "128MiB", "--device-memory", "256MiB"),
        *("--model", model, "--listen", "127.0.0.1:0", "--instance", instance_name("storm")),
    ]
    gaps = Gaps()
    with up_process(command) as process:
        printed = await asyncio.to_thread(wait_until_up, process)
        address = printed.partition("scheduler  ")[2].splitlines()[0]
        async with AsyncClient(address) as client:
            streams = [asyncio.create_task(gaps.watch(client, n)) for n in range(STREAMS)]
            await asyncio.sleep(3)
            gaps.restart()
            await asyncio.sleep(5)
            quiet = gaps.longest
            gaps.restart()
            storm = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", STORM, address, str(CALLS)),
                stdout=subprocess.PIPE,
                env=child_environment({}),
            )
            said, _ = await storm.communicate()
            stormy, tokens = gaps.longest, gaps.tokens
            for stream in streams:
                assert not stream.done()
                stream.cancel()
    print(
        f"\ncontext of {context}: longest gap of {STREAMS} streams {quiet:.3f} s without, "
        f"{stormy:.3f} s beside {CALLS} texts of 4 MB ({tokens} tokens); {said.decode().strip()}"
    )
    assert storm.returncode == 0
    assert tokens
    assert stormy <= MOST_GAP_SECONDS
