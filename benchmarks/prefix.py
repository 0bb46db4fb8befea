"""Time to the first token of a shared prefix, by the place where it is found.

    python -m benchmarks.prefix warm|device|disk [--rounds N] [--dtype TYPE] [--folder DIR] [--json]
        [--output FILE]

Each starts the real stack on the CPU. Prompts are random tokens.

- `warm`: worker 0 serves a prompt of 1,000 tokens; then worker 1 serves those and 100 more, once
  under a fresh salt (nothing to find: cold) and once sharing (warm), in alternating order.
- `device`: two workers over an emulated link. Worker 0 stores a prompt of 1,000 tokens. Worker 1
  serves it with 64 more tokens, which restores the prefix over the link, and again with 64 others,
  which finds it on the device. A last round asks with 16 different endings at once, beside a twin
  of the stack that keeps no prefixes on its devices.
- `disk`: an arena of 64 MiB and a disk tier; the stack computes 512 MiB of prefixes, of which the
  arena keeps the last few. In each round the prefix that was used longest ago is asked for with 16
  new tokens, once as it is, so that it comes from the disk, and once under a fresh salt, so that it
  is computed, in alternating order. The kernel's cache of the tier's files is dropped before.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import secrets
import statistics
import sys
import tempfile
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import finish, parser_of, random_ids, serving
from splitpoint.client import AsyncClient
from splitpoint.client.answers import Completion
from splitpoint.tiers import Tier
from splitpoint.transport.channels import open_channel
from splitpoint.transport.convert import layout_from_proto
from splitpoint.v1 import kvstore_pb2, kvstore_pb2_grpc, worker_pb2, worker_pb2_grpc
from splitpoint_cli.bench.ending import run_until_signal
from splitpoint_cli.bench.harness import Progress
from splitpoint_cli.stack.plan import Stack

PREFIX_TOKENS = 1000
WARM_NEW_TOKENS, DEVICE_NEW_TOKENS = 100, 64
REQUESTS_AT_ONCE = 16
LINK_RATE = "184MB"

DISK_PREFIX_TOKENS, DISK_NEW_TOKENS = 1024, 16
ARENA_BYTES = 64 << 20
PREFIX_BYTES = 512 << 20
# Chunks of the rounds' own requests go to the disk, too.
TIER_BYTES = 2 << 30


async def ask(
    client: AsyncClient, prompt: Sequence[int], worker: str, tokens: int = 8, salt: bytes = b""
) -> Completion:
    return await client.generate(
        prompt, max_tokens=tokens, ignore_eos=True, worker=worker, cache_salt=salt
    ).complete()


async def both_ways(
    client: AsyncClient, prompt: Sequence[int], worker: str, *, found_first: bool
) -> tuple[Completion, Completion]:
    """Return the answers with the prefix found, and computed under a fresh salt."""
    fresh = secrets.token_bytes(8)
    if found_first:
        found = await ask(client, prompt, worker)
        return found, await ask(client, prompt, worker, salt=fresh)
    computed = await ask(client, prompt, worker, salt=fresh)
    return await ask(client, prompt, worker), computed


def facts_of(stack: Stack, rounds: int, prefix: int, new: int) -> dict[str, Any]:
    return {
        "model": stack.name,
        "dtype": stack.shape.data_type.value,
        "prefix_tokens": prefix,
        "prompt_tokens": prefix + new,
        "rounds": rounds,
        "seed": 0,
    }


def medians(pairs: Sequence[tuple[Completion, Completion]], names: Sequence[str]) -> dict[str, Any]:
    """Return the median seconds to the first token of both answers, and of their ratios."""
    seconds = [[answer.ttft_seconds for answer in pair] for pair in pairs]
    return {
        **{
            f"{name}_ttft_seconds": statistics.median(s[n] for s in seconds)
            for n, name in enumerate(names)
        },
        "ratio": statistics.median(one / other for one, other in seconds),
    }


# -- from another worker ----------------------------------------------------------------


async def warm(rounds: int, dtype: str, progress: Progress) -> dict[str, Any]:
    rng = random.Random(0)
    pairs = []
    async with serving(
        "warm-prefix", workers=2, dtype=dtype, device_memory="512MiB", host_memory="1GiB"
    ) as (stack, client):
        for index in progress.track("rounds, and one to warm up", range(rounds + 1)):
            prefix = random_ids(rng, PREFIX_TOKENS)
            prompt = [*prefix, *random_ids(rng, WARM_NEW_TOKENS)]
            await ask(client, prefix, "0", 1)
            pairs.append(await both_ways(client, prompt, "1", found_first=index % 2 == 0))
    del pairs[0]
    return {
        **facts_of(stack, rounds, PREFIX_TOKENS, WARM_NEW_TOKENS),
        "least_cached_tokens": min(pair[0].usage.cached_tokens for pair in pairs),
        "most_cached_tokens_cold": max(pair[1].usage.cached_tokens for pair in pairs),
        **medians(pairs, ("warm", "cold")),
        "restore_seconds": statistics.median(pair[0].restore_seconds for pair in pairs),
    }


# -- on the device ----------------------------------------------------------------------


async def restored_and_here(
    client: AsyncClient, rng: random.Random
) -> tuple[Completion, Completion]:
    """Return the answers with a fresh prefix on the device, and with the same one restored."""
    prefix = random_ids(rng, PREFIX_TOKENS)
    await ask(client, prefix, "0", 1)
    restored = await ask(client, [*prefix, *random_ids(rng, DEVICE_NEW_TOKENS)], "1")
    here = await ask(client, [*prefix, *random_ids(rng, DEVICE_NEW_TOKENS)], "1")
    for answer in (restored, here):
        if answer.usage.cached_tokens < PREFIX_TOKENS - 64 or answer.plan is None:
            raise RuntimeError(f"the prefix was stored, but {answer.usage} was found")
    return here, restored


async def together(client: AsyncClient, rng: random.Random) -> float:
    """Return the seconds of many requests at once, whose prefix is in the store only."""
    prefix = random_ids(rng, PREFIX_TOKENS)
    await ask(client, prefix, "0", 1)
    prompts = [[*prefix, *random_ids(rng, DEVICE_NEW_TOKENS)] for _ in range(REQUESTS_AT_ONCE)]
    answers = await asyncio.gather(*(ask(client, prompt, "1", 32) for prompt in prompts))
    return max(each.seconds for each in answers)


async def device(rounds: int, dtype: str, progress: Progress) -> dict[str, Any]:
    rng = random.Random(0)
    seconds: dict[bool, float] = {}
    pairs: list[tuple[Completion, Completion]] = []
    for is_twin in (False, True):
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
            await ask(client, random_ids(rng, 100), "1")
            await together(client, rng)  # compiles kernels
            seconds[is_twin] = await together(client, rng)
            if not is_twin:
                await restored_and_here(client, rng)
                for _ in progress.track("rounds", range(rounds)):
                    pairs.append(await restored_and_here(client, rng))
    return {
        **facts_of(stack, rounds, PREFIX_TOKENS, DEVICE_NEW_TOKENS),
        "link_rate": LINK_RATE,
        "least_device_tokens": min(pair[0].plan.device_tokens for pair in pairs if pair[0].plan),
        **medians(pairs, ("device", "restored")),
        "together_seconds": seconds[False],
        "together_twin_seconds": seconds[True],
        "together_ratio": seconds[False] / seconds[True],
    }


# -- on the disk ------------------------------------------------------------------------


def drop_page_cache(folder: Path) -> None:
    """Let the next reads of the tier's files come from the disk."""
    for path in folder.glob("*/*.segment"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


async def disk(rounds: int, dtype: str, folder: Path, progress: Progress) -> dict[str, Any]:
    rng = random.Random(0)
    async with (
        serving(
            "disk-tier",
            workers=1,
            dtype=dtype,
            device_memory="256MiB",
            host_memory=str(ARENA_BYTES),
            no_device_prefix_cache=True,
            tier_disk=str(folder),
            tier_disk_size=str(TIER_BYTES),
        ) as (stack, client),
        open_channel(stack.store_address) as to_store,
        open_channel(stack.worker_addresses[0]) as to_worker,
    ):
        store: Any = kvstore_pb2_grpc.KvStoreServiceStub(to_store)
        worker: Any = worker_pb2_grpc.WorkerServiceStub(to_worker)
        layout = layout_from_proto((await worker.GetInfo(worker_pb2.GetInfoRequest())).layout)
        prefix_bytes = DISK_PREFIX_TOKENS * layout.chunk_bytes // layout.chunk_tokens
        count = -(-PREFIX_BYTES // prefix_bytes)
        prefixes = deque(random_ids(rng, DISK_PREFIX_TOKENS) for _ in range(count))
        for prefix in progress.track("prefixes", prefixes):
            await ask(client, prefix, "")
        pairs = []
        for index in progress.track("rounds", range(rounds)):
            prompt = [*prefixes[0], *random_ids(rng, DISK_NEW_TOKENS)]
            prefixes.rotate(-1)
            drop_page_cache(folder)
            pairs.append(await both_ways(client, prompt, "", found_first=index % 2 == 0))
        stats = await store.GetStats(kvstore_pb2.GetStatsRequest(check_integrity=True))
    [tier] = stats.tiers
    return {
        **facts_of(stack, rounds, DISK_PREFIX_TOKENS, DISK_NEW_TOKENS),
        "arena_bytes": ARENA_BYTES,
        "prefix_count": count,
        "prefix_bytes": count * prefix_bytes,
        "chunk_bytes": layout.chunk_bytes,
        **medians(pairs, ("disk", "computed")),
        "rounds_from_disk": sum(is_from_disk(pair[0]) for pair in pairs),
        "most_cached_tokens_computed": max(pair[1].usage.cached_tokens for pair in pairs),
        "different_answers": sum(pair[0].token_ids != pair[1].token_ids for pair in pairs),
        "tier_read_bytes": tier.read_bytes,
        "tier_read_bytes_per_second": tier.read_bytes_per_second,
        "tier_written_bytes": tier.written_bytes,
        "tier_dropped_chunks": tier.dropped_chunk_count,
        "integrity_violations": list(stats.integrity_violations),
    }


def is_from_disk(answer: Completion) -> bool:
    """Return True if the whole prefix was loaded from the disk."""
    plan = answer.plan
    return plan is not None and plan.fetch_source == Tier.DISK and plan.fetched_tokens > 0


# -- the program ------------------------------------------------------------------------


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    progress, given = Progress(), (arguments.rounds, arguments.dtype)
    if arguments.place == "warm":
        return await warm(*given, progress)
    if arguments.place == "device":
        return await device(*given, progress)
    with tempfile.TemporaryDirectory(prefix="disk-tier-", dir=arguments.folder) as folder:
        return await disk(*given, Path(folder) / "tier", progress)


def show(result: Mapping[str, Any]) -> None:
    for name, value in result.items():
        if isinstance(value, float | int):
            print(f"{name:<28} {value:>12.4g}")


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("place", choices=("warm", "device", "disk"))
    parser.add_argument("--rounds", type=int, help="default: 7, of disk 9")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--folder", type=Path, help="parent of the tier's folder; absent: /tmp")
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (9 if arguments.place == "disk" else 7)
    result = run_until_signal(measure(arguments))
    finish(arguments, {"benchmark": f"{arguments.place}_prefix", **result}, show)
    return 0


if __name__ == "__main__":
    sys.exit(main())
