"""Time to the first token of a prefix that only the disk tier holds, beside recomputing it.

Starts the real stack with an arena of 64 MiB and a disk tier, and has it compute 512 MiB of
prefixes, of which the arena keeps the last few. In each round the prefix that was used longest ago
is asked for with 16 new tokens: once as it is, so that it comes from the disk, and once under a
fresh salt, so that it is computed, in alternating order. The kernel's cache of the tier's files is
dropped before each round.

    python -m benchmarks.disk_tier [--rounds N] [--dtype TYPE] [--folder DIR] [--json]
        [--output FILE]
"""

from __future__ import annotations

import os
import random
import secrets
import statistics
import sys
import tempfile
import time
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
from splitpoint_cli.bench.harness import Progress, commit, hardware

ARENA_BYTES = 64 << 20
PREFIX_BYTES = 512 << 20
# Chunks of the rounds' own requests go to the disk, too.
TIER_BYTES = 2 << 30
PREFIX_TOKENS = 1024
NEW_TOKENS = 16
ANSWER_TOKENS = 8
DEVICE_MEMORY = "256MiB"


def drop_page_cache(folder: Path) -> None:
    """Let the next reads of the tier's files come from the disk."""
    for path in folder.glob("*/*.segment"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


async def serve(client: AsyncClient, prompt: Sequence[int], salt: bytes) -> Completion:
    return await client.generate(
        prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True, cache_salt=salt
    ).complete()


async def one_round(
    client: AsyncClient, prompt: Sequence[int], folder: Path, *, disk_first: bool
) -> tuple[Completion, Completion]:
    """Return the answers (from the disk, computed)."""
    drop_page_cache(folder)
    fresh = secrets.token_bytes(8)
    if disk_first:
        loaded = await serve(client, prompt, b"")
        return loaded, await serve(client, prompt, fresh)
    computed = await serve(client, prompt, fresh)
    return await serve(client, prompt, b""), computed


async def measure(rounds: int, dtype: str, folder: Path) -> dict[str, Any]:
    progress, rng = Progress(), random.Random(0)
    progress.say("starting a store with a disk tier, a worker and a scheduler")
    async with (
        serving(
            "disk-tier",
            workers=1,
            dtype=dtype,
            device_memory=DEVICE_MEMORY,
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
        info = await worker.GetInfo(worker_pb2.GetInfoRequest())
        layout = layout_from_proto(info.layout)
        token_bytes = layout.chunk_bytes // layout.chunk_tokens
        count = -(-PREFIX_BYTES // (PREFIX_TOKENS * token_bytes))
        prefixes = deque(random_ids(rng, PREFIX_TOKENS) for _ in range(count))
        for prefix in progress.track("prefixes", prefixes):
            await serve(client, prefix, b"")
        pairs = []
        for index in progress.track("rounds", range(rounds)):
            prompt = [*prefixes[0], *random_ids(rng, NEW_TOKENS)]
            prefixes.rotate(-1)
            pairs.append(await one_round(client, prompt, folder, disk_first=index % 2 == 0))
        stats = await store.GetStats(kvstore_pb2.GetStatsRequest(check_integrity=True))
    [tier] = stats.tiers
    from_disk = [pair for pair in pairs if is_from_disk(pair[0])]
    loaded = [pair[0].ttft_seconds for pair in pairs]
    computed = [pair[1].ttft_seconds for pair in pairs]
    return {
        "benchmark": "disk_tier",
        "model": stack.name,
        "dtype": stack.shape.data_type.value,
        "commit": commit(),
        "hardware": hardware(),
        "arena_bytes": ARENA_BYTES,
        "prefix_count": count,
        "prefix_bytes": count * PREFIX_TOKENS * token_bytes,
        "prefix_tokens": PREFIX_TOKENS,
        "prompt_tokens": PREFIX_TOKENS + NEW_TOKENS,
        "chunk_bytes": layout.chunk_bytes,
        "disk_ttft_seconds": statistics.median(loaded),
        "computed_ttft_seconds": statistics.median(computed),
        "ratio": statistics.median(a / b for a, b in zip(loaded, computed, strict=True)),
        "rounds": rounds,
        "rounds_from_disk": len(from_disk),
        "most_cached_tokens_computed": max(pair[1].usage.cached_tokens for pair in pairs),
        "different_answers": sum(pair[0].token_ids != pair[1].token_ids for pair in pairs),
        "tier_read_bytes": tier.read_bytes,
        "tier_read_bytes_per_second": tier.read_bytes_per_second,
        "tier_written_bytes": tier.written_bytes,
        "tier_dropped_chunks": tier.dropped_chunk_count,
        "integrity_violations": list(stats.integrity_violations),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seed": 0,
    }


def is_from_disk(answer: Completion) -> bool:
    """Return True if the whole prefix was loaded from the disk."""
    plan = answer.plan
    return plan is not None and plan.fetch_source == Tier.DISK and plan.fetched_tokens > 0


def show(result: Mapping[str, Any]) -> None:
    for name in (
        "prefix_bytes",
        "disk_ttft_seconds",
        "computed_ttft_seconds",
        "ratio",
        "rounds_from_disk",
        "tier_read_bytes_per_second",
    ):
        print(f"{name:<28} {result[name]:>12.4g}")


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--folder", type=Path, help="parent of the tier's folder; absent: /tmp")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="disk-tier-", dir=arguments.folder) as folder:
        work = measure(arguments.rounds, arguments.dtype, Path(folder) / "tier")
        finish(arguments, run_until_signal(work), show)
    return 0


if __name__ == "__main__":
    sys.exit(main())
