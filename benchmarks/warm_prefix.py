"""Time to the first token with a shared prefix: cold, and restored from another worker.

Starts the real stack with two CPU workers. In each round worker 0 serves a
prompt of 1,000 random tokens; then worker 1 serves those and 100 more, once
under a fresh salt (nothing to find: cold) and once sharing (warm), in
alternating order.

    python -m benchmarks.warm_prefix [--rounds N] [--dtype TYPE] [--json] [--output FILE]
"""

from __future__ import annotations

import os
import platform
import random
import secrets
import statistics
import sys
from collections.abc import Mapping
from typing import Any

from benchmarks.harness import random_ids, run_in_rounds, serving
from splitpoint.client import AsyncClient
from splitpoint.client.answers import Completion
from splitpoint_cli.bench.harness import Progress

PREFIX_TOKENS = 1000
NEW_TOKENS = 100


async def one_round(
    client: AsyncClient, rng: random.Random, *, warm_first: bool
) -> tuple[Completion, Completion]:
    """Return (cold, warm) answers of one fresh prefix."""
    prefix = random_ids(rng, PREFIX_TOKENS)
    prompt = [*prefix, *random_ids(rng, NEW_TOKENS)]
    await client.generate(prefix, max_tokens=1, ignore_eos=True, worker="0").complete()

    async def serve(salt: bytes) -> Completion:
        return await client.generate(
            prompt, max_tokens=8, ignore_eos=True, worker="1", cache_salt=salt
        ).complete()

    if warm_first:
        warm = await serve(b"")
        return await serve(secrets.token_bytes(8)), warm
    cold = await serve(secrets.token_bytes(8))
    return cold, await serve(b"")


async def measure(rounds: int, dtype: str, progress: Progress) -> dict[str, object]:
    progress.say("starting a store, two workers and a scheduler")
    rng = random.Random(0)
    pairs = []
    async with serving(
        "warm-prefix", workers=2, dtype=dtype, device_memory="512MiB", host_memory="1GiB"
    ) as (stack, client):
        await one_round(client, rng, warm_first=False)
        for index in progress.track("rounds", range(rounds)):
            pairs.append(await one_round(client, rng, warm_first=index % 2 == 1))
    cold = [pair[0].ttft_seconds for pair in pairs]
    warm = [pair[1].ttft_seconds for pair in pairs]
    return {
        "benchmark": "warm_prefix",
        "model": stack.name,
        "dtype": stack.shape.data_type.value,
        "prefix_tokens": PREFIX_TOKENS,
        "prompt_tokens": PREFIX_TOKENS + NEW_TOKENS,
        "least_cached_tokens": min(pair[1].usage.cached_tokens for pair in pairs),
        "most_cached_tokens_cold": max(pair[0].usage.cached_tokens for pair in pairs),
        "cold_ttft_seconds": statistics.median(cold),
        "warm_ttft_seconds": statistics.median(warm),
        "ratio": statistics.median(w / c for c, w in zip(cold, warm, strict=True)),
        "restore_seconds": statistics.median(pair[1].restore_seconds for pair in pairs),
        "rounds": rounds,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "seed": 0,
    }


def show(result: Mapping[str, Any]) -> None:
    for name in ("cold_ttft_seconds", "warm_ttft_seconds", "ratio", "least_cached_tokens"):
        print(f"{name:<22} {result[name]:>10.4g}")


if __name__ == "__main__":
    sys.exit(run_in_rounds(__doc__, measure, show))
