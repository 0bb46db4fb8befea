"""Measure whether the memory of each service stays flat under mixed load.

Starts the real stack with two CPU workers and sends them what clients send: short and long
prompts as text and token ids, shared prefixes and salted ones, resident and streamed, every
restore method, splits, sampling, cancelled requests, and requests that are refused. The arena
is small, so the store evicts all the time. Each sample reads every process's private
anonymous memory (/proc/PID/smaps): the arena, files and code are shared and not counted.

    python -m benchmarks.soak [--minutes M] [--every S] [--cores C] [--dtype TYPE]
        [--json] [--output FILE]

Exits with 1 if a process grew by more than 5 % after the first five minutes, by means of five
minutes. `--cores` limits the stack's processor time: requests are sent only while the stack has
used less than that many cores since the start.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import secrets
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.process_memory import Memory, children_of, memory_of, processor_seconds
from benchmarks.shared import finish, parser_of, random_ids, serving
from splitpoint.client import AsyncClient
from splitpoint.errors import SplitpointError
from splitpoint.planning.plan import Residency, RestoreMethod
from splitpoint_cli.bench.shared.ending import run_until_signal
from splitpoint_cli.bench.shared.progress import Progress
from splitpoint_cli.bench.shared.report import commit, hardware

CLIENTS = 6
PREFIXES = 24
LONGEST_PROMPT = 2000
LONGEST_ANSWER = 64
# From here on memory has to be flat: caches that fill on purpose are full.
SETTLED_MINUTES = 5.0
MOST_GROWTH = 1.05
PACE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Sample:
    """All processes at one moment, `minutes` after the load began."""

    minutes: float
    requests: int
    processor_seconds: float
    memory: dict[str, Memory]


class Load:
    """Clients that draw one request after the other, as fast as the pace allows."""

    def __init__(self, client: AsyncClient, pids: Mapping[int, str], cores: float) -> None:
        self._client = client
        self._pids = pids
        self._cores = cores
        self._began = time.monotonic()
        self._used = self.processor_seconds
        self.outcomes: Counter[str] = Counter()
        rng = random.Random(0)
        self._prefixes = [
            random_ids(rng, rng.randrange(16, LONGEST_PROMPT)) for _ in range(PREFIXES)
        ]

    @property
    def processor_seconds(self) -> float:
        return sum(map(processor_seconds, self._pids))

    async def run(self, seed: int) -> None:
        rng = random.Random(seed)
        while True:
            elapsed = time.monotonic() - self._began
            if self.processor_seconds - self._used > self._cores * elapsed:
                await asyncio.sleep(PACE_SECONDS)
                continue
            try:
                self.outcomes[await self._one(rng)] += 1
            except SplitpointError as error:
                self.outcomes[type(error).__name__] += 1

    async def _one(self, rng: random.Random) -> str:
        prompt, options = draw(rng, self._prefixes)
        if rng.random() < 0.02:
            options["worker"] = "no such worker"
        generation = self._client.generate(prompt, **options)
        if rng.random() < 0.1:
            left = rng.randrange(1, 8)
            async with generation:
                async for _ in generation:
                    left -= 1
                    if not left:
                        return "cancelled"
            return "completed"
        await generation.complete()
        return "completed"


def draw(rng: random.Random, prefixes: list[list[int]]) -> tuple[list[int] | str, dict[str, Any]]:
    """Draw one request of the mix: its prompt and its options."""
    options: dict[str, Any] = {
        "max_tokens": rng.randrange(1, LONGEST_ANSWER),
        "ignore_eos": rng.random() < 0.5,
    }
    if rng.random() < 0.3:
        options |= {"temperature": 0.8, "top_p": 0.9, "seed": rng.randrange(1 << 30)}
    if rng.random() < 0.1:
        options["logprobs"] = 3
    if rng.random() < 0.1:
        options["cache_salt"] = secrets.token_bytes(8)
    if rng.random() < 0.1:
        words = [str(rng.randrange(1000)) for _ in range(rng.randrange(1, 400))]
        return "values = [" + ", ".join(words), options
    prefix = rng.choice(prefixes)
    kept = prefix[: rng.randrange(1, len(prefix) + 1)]
    tail = random_ids(rng, rng.randrange(1, 100))
    choice = rng.random()
    if choice < 0.2:
        options["residency"] = Residency.STREAMED
    elif choice < 0.4:
        options["residency"] = Residency.RESIDENT
        options["split"] = rng.randrange(0, len(kept) + 1)
    elif choice < 0.6:
        options["residency"] = Residency.RESIDENT
        options["restore"] = rng.choice((RestoreMethod.LOAD, RestoreMethod.TOKENS))
    return [*kept, *tail], options


async def measure(arguments: argparse.Namespace) -> dict[str, object]:
    progress = Progress()
    samples: list[Sample] = []
    async with serving(
        "soak",
        workers=2,
        dtype=arguments.dtype,
        device_memory="256MiB",
        host_memory="192MiB",
        activations="always",
        threads=1,
        metrics=arguments.metrics,
    ) as (stack, client):
        pids = children_of(os.getpid())
        load = Load(client, pids, arguments.cores)
        began = time.monotonic()
        running = [asyncio.create_task(load.run(seed)) for seed in range(CLIENTS)]
        while True:
            minutes = (time.monotonic() - began) / 60
            memory = {name: memory_of(pid) for pid, name in sorted(pids.items())}
            requests = load.outcomes.total()
            samples.append(Sample(minutes, requests, load.processor_seconds, memory))
            progress.say(f"{row(samples[-1])}; of {arguments.minutes:g} min")
            broken = next((task for task in running if task.done()), None)
            if broken is not None:
                broken.result()
            if minutes >= arguments.minutes:
                break
            await asyncio.sleep(min(arguments.every, 60 * (arguments.minutes - minutes) + 0.1))
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return {
        "benchmark": "soak",
        "model": stack.name,
        "dtype": stack.shape.data_type.value,
        "cores": arguments.cores,
        "outcomes": dict(load.outcomes),
        "growth": growth(samples),
        "is_flat": max(growth(samples).values()) <= MOST_GROWTH,
        "samples": [asdict(sample) for sample in samples],
        "commit": commit(),
        "hardware": hardware(),
        "seed": 0,
    }


def growth(samples: list[Sample]) -> dict[str, float]:
    """Return each process's mean anonymous memory of the last five minutes, over the mean of the
    first five after the settling time. Single samples differ by malloc's free memory."""
    end = samples[-1].minutes
    early = [s for s in samples if SETTLED_MINUTES <= s.minutes <= 2 * SETTLED_MINUTES]
    late = [s for s in samples if s.minutes >= end - SETTLED_MINUTES]
    return {
        name: _mean(late, name) / _mean(early or samples[-1:], name) for name in samples[-1].memory
    }


def _mean(samples: list[Sample], name: str) -> float:
    return sum(sample.memory[name].anonymous for sample in samples) / len(samples)


def row(sample: Sample) -> str:
    parts = (
        f"{name} {memory.anonymous / 2**20:.0f} ({memory.malloc / 2**20:.0f})"
        for name, memory in sample.memory.items()
    )
    return (
        f"{sample.minutes:6.1f} min {sample.requests:6} requests "
        f"{sample.processor_seconds:6.0f} s  MiB (of malloc): {', '.join(parts)}"
    )


def show(result: Mapping[str, Any]) -> None:
    print(f"flat: {'yes' if result['is_flat'] else 'no'}")
    for name, ratio in result["growth"].items():
        print(f"{name:<14} {ratio:>8.3f} x")


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two samples")
    parser.add_argument("--cores", type=float, default=0.5, help="processor time to use, in cores")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--metrics", type=int, help="first port of metrics; absent: none")
    arguments = parser.parse_args()
    result = run_until_signal(measure(arguments))
    finish(arguments, result, show)
    return 0 if result["is_flat"] else 1


if __name__ == "__main__":
    sys.exit(main())
