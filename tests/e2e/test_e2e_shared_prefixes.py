"""Concurrent requests with one long prefix, on real processes: it is on the device once.

About 15 seconds: two stacks, one of them the twin that shares nothing.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from own_names import free_ports, instance_name
from small_model import small_model
from transformers import AutoModelForCausalLM
from up_process import up_process, wait_until_up

from splitpoint.checkpoint.decoder import read_shape
from splitpoint.client import AsyncClient
from splitpoint.client.answers import Completion
from splitpoint.shapes import chunks_of

SECONDS = 60.0
CHUNK, PREFIX, OWN, NEW, REQUESTS = 64, 1000, 24, 64, 16
# How far device memory may exceed the prefix once and each request's own part.
MOST_PAGES = 1.15 * (chunks_of(PREFIX, CHUNK) + REQUESTS * chunks_of(OWN + NEW, CHUNK))


@dataclass
class Watched:
    """Readings of worker 1's metrics, some fifty a second."""

    port: int
    most_used_pages: int = 0
    values: dict[str, float] = field(default_factory=dict)

    def read(self) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            text: str = answer.read().decode()
        for line in text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                self.values[name] = float(value)
        used = self.value("splitpoint_worker_cache_pages", 'state="used"')
        self.most_used_pages = max(self.most_used_pages, int(used))

    def value(self, name: str, *labels: str) -> float:
        return sum(
            value
            for key, value in self.values.items()
            if key.partition("{")[0] == name and all(label in key for label in labels)
        )

    async def watch(self) -> None:
        while True:
            await asyncio.to_thread(self.read)
            await asyncio.sleep(0.02)


@dataclass(frozen=True)
class Served:
    """What the sixteen requests gave, and what worker 1 did for them."""

    answers: list[Completion]
    most_used_pages: int
    link_bytes: float
    device_tokens: float


def prompts_of(model: Path) -> list[list[int]]:
    """Return prompts whose first PREFIX tokens are the same."""
    rng = random.Random(7)
    vocabulary = read_shape(model).vocabulary_size
    prefix = [rng.randrange(3, vocabulary) for _ in range(PREFIX)]
    return [[*prefix, *(rng.randrange(3, vocabulary) for _ in range(OWN))] for _ in range(REQUESTS)]


@asynccontextmanager
async def stack(name: str, *arguments: str) -> AsyncIterator[tuple[AsyncClient, Watched]]:
    port = free_ports(4)
    command = [
        *(sys.executable, "-m", "splitpoint_cli", "up", "--device", "cpu", "--threads", "1"),
        *("--model", str(small_model()), "--workers", "2", "--chunk-tokens", str(CHUNK)),
        *("--host-memory", "256MiB", "--device-memory", "512MiB", "--activations", "never"),
        *("--listen", "127.0.0.1:0", "--instance", instance_name(name)),
        *("--metrics", str(port), *arguments),
    ]
    with up_process(command) as process:
        printed = await asyncio.to_thread(wait_until_up, process)
        address = printed.partition("scheduler  ")[2].splitlines()[0]
        async with AsyncClient(address) as client:
            yield client, Watched(port + 3)
        process.send_signal(signal.SIGINT)
        await asyncio.to_thread(process.communicate, timeout=SECONDS)
        assert process.returncode == 0


async def until(condition: Callable[[], bool], watched: Watched) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():
            await asyncio.sleep(0.1)
            await asyncio.to_thread(watched.read)


async def serve(
    prompts: list[list[int]], name: str, *arguments: str, split: int | None = None
) -> Served:
    """Let worker 0 store the prefix; then ask worker 1 for all prompts at once.

    With a `split` of 0 each loads all that is cached, where a plan may compute a part of it.
    """

    async def ask(client: AsyncClient, prompt: list[int], worker: str, count: int) -> Completion:
        return await client.generate(
            prompt, max_tokens=count, ignore_eos=True, worker=worker, split=split
        ).complete()

    async with stack(name, *arguments) as (client, watched):
        await ask(client, prompts[0][:PREFIX], "0", 1)
        # Compiles kernels, and has nothing to do with the prefix.
        await ask(client, prompts[0][PREFIX:], "1", 2)
        await asyncio.to_thread(watched.read)
        before = watched.value("splitpoint_link_bytes_total", 'direction="in"')
        watched.most_used_pages = 0
        watching = asyncio.create_task(watched.watch())
        answers = await asyncio.gather(*(ask(client, prompt, "1", NEW) for prompt in prompts))
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        # The client may hear of the last token before the step's account is read.
        rest = 'state="used"'
        await until(lambda: not watched.value("splitpoint_worker_cache_pages", rest), watched)
        return Served(
            list(answers),
            watched.most_used_pages,
            watched.value("splitpoint_link_bytes_total", 'direction="in"') - before,
            watched.value("splitpoint_worker_device_cached_tokens_total"),
        )


def reference(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Return the greedy tokens of transformers, which reads the common prefix once."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor(prompts)
    found = []
    with torch.inference_mode():
        cache = model(ids[:1, :PREFIX], use_cache=True, logits_to_keep=1).past_key_values
        cache.batch_repeat_interleave(len(prompts))
        new = ids[:, PREFIX:]
        for _ in range(NEW):
            output = model(new, past_key_values=cache, use_cache=True, logits_to_keep=1)
            new = output.logits[:, -1].argmax(-1, keepdim=True)
            found.append(new)
    tokens: list[list[int]] = torch.cat(found, dim=1).tolist()
    return tokens


@pytest.mark.timeout(600)
async def test_sixteen_requests_hold_and_load_their_prefix_once() -> None:
    prompts = prompts_of(small_model())
    shared = await serve(prompts, "shared")
    twin = await serve(prompts, "twin", "--no-device-prefix-cache", split=0)
    texts = [list(answer.token_ids) for answer in shared.answers]
    assert texts == [list(answer.token_ids) for answer in twin.answers]
    assert texts == reference(small_model(), prompts)
    # The twin loads it for each request. Here the first loads it, or computes what its plan says is
    # sooner computed, and the others take it from its pages.
    _, *others = sorted(answer.usage.cached_tokens for answer in shared.answers)
    assert all(count >= PREFIX // CHUNK * CHUNK for count in others)
    prefix_bytes = twin.link_bytes / REQUESTS
    assert shared.link_bytes <= 1.05 * prefix_bytes > 0
    assert twin.device_tokens == 0
    assert shared.device_tokens >= (REQUESTS - 1) * (PREFIX // CHUNK * CHUNK)
    assert 0 < shared.most_used_pages <= MOST_PAGES
    assert twin.most_used_pages > MOST_PAGES
    print(
        f"\n{shared.most_used_pages} pages of {MOST_PAGES:.0f} allowed, "
        f"{twin.most_used_pages} without sharing; {shared.link_bytes:,.0f} bytes over the link "
        f"instead of {twin.link_bytes:,.0f}"
    )
