"""Measure whether memory and descriptors of each service stay flat under mixed load.

Starts the real stack with two CPU workers and sends them what clients send: short and long
prompts as text and token ids, shared prefixes and salted ones, resident and streamed, every
restore method, splits, sampling, cancelled requests, and requests that are refused. The arena
is small, so the store evicts all the time. Each sample reads every process's private
anonymous memory (/proc/PID/smaps): the arena, files and code are shared and not counted. At the
end come a thousand requests that are cancelled, and the descriptors before and after them.

    python -m benchmarks.soak [--minutes M] [--every S] [--cores C] [--dtype TYPE] [--double]
        [--json] [--output FILE]

`--double`: a scheduler and one worker with a double in place of its model
(`benchmarks.double_worker`), without a store: hundreds of times as many tokens.

Exits with 1 if a process grew by more than 5 % after the first fifth, at most five minutes, by
means of as many minutes, or if the cancelled requests left it more than two descriptors more or
fewer. `--cores` limits the stack's processor time: requests are sent only while the stack has used
less than that many cores since the start.
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
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.harness import (
    Memory,
    children_of,
    finish,
    memory_of,
    parser_of,
    processor_seconds,
    random_ids,
    serving,
)
from benchmarks.streams import running
from splitpoint.client import AsyncClient
from splitpoint.errors import SplitpointError
from splitpoint.planning.plan import Residency, RestoreMethod
from splitpoint_cli.bench.ending import run_until_signal
from splitpoint_cli.bench.harness import Progress

CLIENTS = 6
CLIENTS_OF_DOUBLE = 64
DOUBLE_STEP_MS = 10.0
# So little that its pages have all been used within the first minutes.
DOUBLE_DEVICE_MEMORY = "768MiB"
PREFIXES = 24
LONGEST_PROMPT = 2000
LONGEST_ANSWER = 64
# From here on memory has to be flat: caches that fill on purpose are full. Also the length of the
# two spans that are compared.
SETTLED_MINUTES = 5.0
SETTLED_SHARE = 0.2
MOST_GROWTH = 1.05
CANCELS = 1000
CANCELS_AT_ONCE = 50
# Until what a cancelled request held is given back.
CANCELLED_SECONDS = 5.0
MOST_DESCRIPTORS = 2
PACE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Sample:
    """All processes at one moment, `minutes` after the load began."""

    minutes: float
    requests: int
    processor_seconds: float
    memory: dict[str, Memory]
    descriptors: dict[str, int]


class Load:
    """Clients that draw one request after the other, as fast as the pace allows."""

    def __init__(
        self, client: AsyncClient, pids: Mapping[int, str], cores: float, *, has_store: bool
    ) -> None:
        self._client = client
        self._has_store = has_store
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
        prompt, options = draw(rng, self._prefixes, has_store=self._has_store)
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


def draw(
    rng: random.Random, prefixes: list[list[int]], *, has_store: bool
) -> tuple[list[int] | str, dict[str, Any]]:
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
    choice = rng.random() if has_store else 1.0
    if choice < 0.2:
        options["residency"] = Residency.STREAMED
    elif choice < 0.4:
        options["residency"] = Residency.RESIDENT
        options["split"] = rng.randrange(0, len(kept) + 1)
    elif choice < 0.6:
        options["residency"] = Residency.RESIDENT
        options["restore"] = rng.choice((RestoreMethod.LOAD, RestoreMethod.TOKENS))
    return [*kept, *tail], options


@asynccontextmanager
async def stack_of(arguments: argparse.Namespace) -> AsyncIterator[AsyncClient]:
    """Run the stack, and a client of it."""
    if arguments.double:
        async with (
            running(DOUBLE_STEP_MS, device_memory=DOUBLE_DEVICE_MEMORY) as (address, _),
            AsyncClient(address) as client,
        ):
            yield client
        return
    async with serving(
        "soak",
        workers=2,
        dtype=arguments.dtype,
        device_memory="256MiB",
        host_memory="192MiB",
        activations="always",
        threads=1,
        metrics=arguments.metrics,
    ) as (_, client):
        yield client


async def measure(arguments: argparse.Namespace) -> dict[str, object]:
    progress = Progress()
    async with stack_of(arguments) as client:
        model = await client.get_model()
        pids = children_of(os.getpid())
        load = Load(client, pids, arguments.cores, has_store=not arguments.double)
        count = CLIENTS_OF_DOUBLE if arguments.double else CLIENTS
        clients = [asyncio.create_task(load.run(seed)) for seed in range(count)]
        samples = await sampled(load, pids, clients, arguments, progress)
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        await asyncio.sleep(CANCELLED_SECONDS)
        before = descriptors_of(pids)
        await cancel_many(client)
        await asyncio.sleep(CANCELLED_SECONDS)
        after = descriptors_of(pids)
        status = await client.scheduler_status()
    grown = growth(samples)
    return {
        "benchmark": "soak",
        "model": model.name,
        "is_double": arguments.double,
        "dtype": model.shape.data_type.value,
        "cores": arguments.cores,
        "outcomes": dict(load.outcomes),
        "generated_tokens": status.generated_token_count,
        "growth": grown,
        "cancelled_requests": CANCELS,
        "descriptors_before": before,
        "descriptors_after": after,
        "is_flat": max(grown.values()) <= MOST_GROWTH
        and all(abs(after[name] - before[name]) <= MOST_DESCRIPTORS for name in before),
        "samples": [asdict(sample) for sample in samples],
        "seed": 0,
    }


async def sampled(
    load: Load,
    pids: Mapping[int, str],
    clients: list[asyncio.Task[None]],
    arguments: argparse.Namespace,
    progress: Progress,
) -> list[Sample]:
    """Sample the processes until the time is over; raise what ended a client."""
    samples: list[Sample] = []
    began = time.monotonic()
    while True:
        minutes = (time.monotonic() - began) / 60
        memory = {name: memory_of(pid) for pid, name in sorted(pids.items())}
        requests = load.outcomes.total()
        used = load.processor_seconds
        samples.append(Sample(minutes, requests, used, memory, descriptors_of(pids)))
        progress.say(f"{row(samples[-1])}; of {arguments.minutes:g} min")
        broken = next((task for task in clients if task.done()), None)
        if broken is not None:
            broken.result()
        if minutes >= arguments.minutes:
            return samples
        await asyncio.sleep(min(arguments.every, 60 * (arguments.minutes - minutes) + 0.1))


def descriptors_of(pids: Mapping[int, str]) -> dict[str, int]:
    """Return the open descriptors of each process."""
    return {name: len(os.listdir(f"/proc/{pid}/fd")) for pid, name in sorted(pids.items())}


async def cancel_many(client: AsyncClient) -> None:
    """Cancel this many requests, each after its first message."""
    rng = random.Random(1)
    places = asyncio.Semaphore(CANCELS_AT_ONCE)

    async def cancel() -> None:
        async with places:
            prompt = random_ids(rng, 32)
            async with client.generate(prompt, max_tokens=200, ignore_eos=True) as generation:
                await anext(generation)

    await asyncio.gather(*(cancel() for _ in range(CANCELS)))


def growth(samples: list[Sample]) -> dict[str, float]:
    """Return each process's mean anonymous memory at the end, over the mean after the settling
    time, of equally long spans. Single samples differ by malloc's free memory."""
    end = samples[-1].minutes
    span = min(SETTLED_MINUTES, SETTLED_SHARE * end)
    early = [s for s in samples if span <= s.minutes <= 2 * span]
    late = [s for s in samples if s.minutes >= end - span]
    return {
        name: _mean(late, name) / _mean(early or samples[-1:], name) for name in samples[-1].memory
    }


def _mean(samples: list[Sample], name: str) -> float:
    return sum(sample.memory[name].anonymous for sample in samples) / len(samples)


def row(sample: Sample) -> str:
    parts = (
        f"{name} {memory.anonymous / 2**20:.0f} ({memory.malloc / 2**20:.0f}), "
        f"{sample.descriptors[name]} descriptors"
        for name, memory in sample.memory.items()
    )
    return (
        f"{sample.minutes:6.1f} min {sample.requests:6} requests "
        f"{sample.processor_seconds:6.0f} s  MiB (of malloc): {'; '.join(parts)}"
    )


def show(result: Mapping[str, Any]) -> None:
    print(f"flat: {'yes' if result['is_flat'] else 'no'}")
    before, after = result["descriptors_before"], result["descriptors_after"]
    for name, ratio in result["growth"].items():
        print(f"{name:<14} {ratio:>8.3f} x {before[name]:>6} -> {after[name]} descriptors")


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two samples")
    parser.add_argument("--cores", type=float, default=0.5, help="processor time to use, in cores")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--double", action="store_true", help="one worker, without a model")
    parser.add_argument("--metrics", type=int, help="first port of metrics; absent: none")
    arguments = parser.parse_args()
    result = run_until_signal(measure(arguments))
    finish(arguments, result, show)
    return 0 if result["is_flat"] else 1


if __name__ == "__main__":
    sys.exit(main())
