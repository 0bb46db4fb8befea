"""Time to the first token with a shared prefix: restored from the store, and on the device.

Starts the real stack with two CPU workers over an emulated link. In each round worker 0
stores a prompt of 1,000 random tokens. Worker 1 then serves it with 64 more tokens, which
restores the prefix over the link, and again with 64 others, which finds it on the device.
A last round asks with 16 different endings at once.

    python -m benchmarks.device_prefix [--rounds N] [--dtype TYPE] [--json] [--output FILE]
"""

from __future__ import annotations

import asyncio
import os
import platform
import random
import statistics
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.harness import random_ids, run_in_rounds, serving
from splitpoint.client import AsyncClient
from splitpoint.client.answers import Completion
from splitpoint_cli.bench.harness import Progress

PREFIX_TOKENS = 1000
NEW_TOKENS = 64
REQUESTS = 16
LINK_RATE = "184MB"


async def ask(client: AsyncClient, prompt: list[int], worker: str, tokens: int) -> Completion:
    return await client.generate(
        prompt, max_tokens=tokens, ignore_eos=True, worker=worker
    ).complete()


async def one_round(client: AsyncClient, rng: random.Random) -> tuple[Completion, Completion]:
    """Return the answers with a fresh prefix restored, and with the same one on the device."""
    prefix = random_ids(rng, PREFIX_TOKENS)
    await ask(client, prefix, "0", 1)
    restored = await ask(client, [*prefix, *random_ids(rng, NEW_TOKENS)], "1", 8)
    here = await ask(client, [*prefix, *random_ids(rng, NEW_TOKENS)], "1", 8)
    for answer in (restored, here):
        if answer.usage.cached_tokens < PREFIX_TOKENS - 64 or answer.plan is None:
            raise RuntimeError(f"the prefix was stored, but {answer.usage} was found")
    return restored, here


async def together(client: AsyncClient, rng: random.Random) -> list[Completion]:
    """Return the answers to many requests at once, whose prefix is in the store only."""
    prefix = random_ids(rng, PREFIX_TOKENS)
    await ask(client, prefix, "0", 1)
    prompts = [[*prefix, *random_ids(rng, NEW_TOKENS)] for _ in range(REQUESTS)]
    return list(await asyncio.gather(*(ask(client, prompt, "1", 32) for prompt in prompts)))


async def measure(rounds: int, dtype: str, progress: Progress) -> dict[str, object]:
    rng = random.Random(0)
    found: dict[bool, list[Completion]] = {}
    pairs: list[tuple[Completion, Completion]] = []
    for is_twin in (False, True):
        progress.say("starting a store, two workers and a scheduler")
        async with serving(
            "device-prefix",
            workers=2,
            dtype=dtype,
            device_memory="512MiB",
            host_memory="1GiB",
            link_rate=LINK_RATE,
            activations="never",
            no_device_prefix_cache=is_twin,
        ) as (stack, client):
            await ask(client, random_ids(rng, 100), "1", 8)
            await together(client, rng)  # compiles kernels
            found[is_twin] = await together(client, rng)
            if not is_twin:
                await one_round(client, rng)
                for _ in progress.track("rounds", range(rounds)):
                    pairs.append(await one_round(client, rng))
    restored = [pair[0].ttft_seconds for pair in pairs]
    here = [pair[1].ttft_seconds for pair in pairs]
    seconds = {twin: max(each.seconds for each in answers) for twin, answers in found.items()}
    return {
        "benchmark": "device_prefix",
        "model": stack.name,
        "dtype": stack.shape.data_type.value,
        "link_rate": LINK_RATE,
        "prefix_tokens": PREFIX_TOKENS,
        "prompt_tokens": PREFIX_TOKENS + NEW_TOKENS,
        "least_device_tokens": min(pair[1].plan.device_tokens for pair in pairs if pair[1].plan),
        "restored_ttft_seconds": statistics.median(restored),
        "device_ttft_seconds": statistics.median(here),
        "ratio": statistics.median(h / r for r, h in zip(restored, here, strict=True)),
        "together_seconds": seconds[False],
        "together_twin_seconds": seconds[True],
        "together_ratio": seconds[False] / seconds[True],
        "rounds": rounds,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "seed": 0,
    }


def show(result: Mapping[str, Any]) -> None:
    for name in (
        *("restored_ttft_seconds", "device_ttft_seconds", "ratio", "least_device_tokens"),
        *("together_seconds", "together_twin_seconds", "together_ratio"),
    ):
        print(f"{name:<22} {result[name]:>10.4g}")


if __name__ == "__main__":
    sys.exit(run_in_rounds(__doc__, measure, show))
