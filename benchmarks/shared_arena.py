"""Host memory of one cache that several workers map.

Starts the real stack with two CPU workers, fills the arena through both of
them, and reads the kernel's own accounting (/proc/PID/smaps): each process's
resident pages of the arena (Rss), its share of them (Pss: pages divided by the
number of processes that map them), and the machine's shared memory.

    python -m benchmarks.shared_arena [--json] [--output FILE]

One cache means: the Pss of all processes add up to the bytes written, however
many processes map them, and private copies are zero.
"""

from __future__ import annotations

import os
import platform
import random
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import finish, parser_of, random_ids, serving
from splitpoint.client import AsyncClient
from splitpoint.config import format_size
from splitpoint_cli.bench.shared.ending import run_until_signal
from splitpoint_cli.bench.shared.progress import Progress

PROMPT_TOKENS = 1500
PROMPTS = 12


@dataclass(frozen=True, slots=True)
class ArenaMapping:
    """One process's mapping of the arena, in bytes."""

    process: str
    resident_bytes: int
    share_bytes: int
    private_bytes: int


def arena_mappings(arena: Path) -> list[ArenaMapping]:
    """Return the mapping of each process that maps `arena`, from its smaps.

    By inode: the store mapped the file before it got its name.
    """
    inode = str(arena.stat().st_ino)
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            smaps = (folder / "smaps").read_text()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        totals = {"Rss": 0, "Pss": 0, "Private_Clean": 0, "Private_Dirty": 0, "Anonymous": 0}
        inside = False
        for line in smaps.splitlines():
            name, _, rest = line.partition(":")
            if name in totals and inside:
                totals[name] += int(rest.split()[0]) * 1024
            elif len(header := line.split()) >= 5 and "-" in header[0]:
                inside = header[4] == inode
        if totals["Rss"]:
            service = next((w for w in command.split() if w.endswith("_service")), command)
            found.append(ArenaMapping(service, totals["Rss"], totals["Pss"], totals["Anonymous"]))
    return sorted(found, key=lambda mapping: mapping.process)


async def fill(client: AsyncClient, progress: Progress) -> tuple[int, int]:
    """Send the same prompts to both workers; returns (tokens sent, tokens found cached)."""
    rng = random.Random(0)
    sent = cached = 0
    for index in progress.track("prompts to both workers", range(PROMPTS)):
        prompt = random_ids(rng, PROMPT_TOKENS)
        for worker in (str(index % 2), str((index + 1) % 2)):
            answer = await client.generate(
                prompt, max_tokens=2, ignore_eos=True, worker=worker
            ).complete()
            sent += answer.usage.prompt_tokens
            cached += answer.usage.cached_tokens
    return sent, cached


async def measure(progress: Progress) -> dict[str, object]:
    progress.say("starting a store, two workers and a scheduler")
    async with serving(
        "shared-arena", workers=2, device_memory="256MB", host_memory="256MB", threads=1
    ) as (stack, client):
        sent, cached = await fill(client, progress)
        mappings = arena_mappings(stack.arena)
        arena_bytes = stack.arena.stat().st_size
        shared = os.stat(stack.arena).st_blocks * 512
    return {
        "benchmark": "shared_arena",
        "model": stack.name,
        "workers": len(stack.workers),
        "arena_bytes": arena_bytes,
        "allocated_bytes": shared,
        "tokens_sent": sent,
        "tokens_found_cached": cached,
        "sum_of_rss_bytes": sum(mapping.resident_bytes for mapping in mappings),
        "sum_of_pss_bytes": sum(mapping.share_bytes for mapping in mappings),
        "private_bytes": sum(mapping.private_bytes for mapping in mappings),
        "processes": [asdict(mapping) for mapping in mappings],
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "seed": 0,
    }


def report(result: Mapping[str, Any]) -> None:
    print(f"{'process':<18} {'arena resident':>15} {'its share (Pss)':>16} {'private copy':>13}")
    for process in result["processes"]:
        print(
            f"{process['process']:<18} {format_size(process['resident_bytes']):>15} "
            f"{format_size(process['share_bytes']):>16} "
            f"{format_size(process['private_bytes']):>13}"
        )
    print(
        f"all shares together: {format_size(result['sum_of_pss_bytes'])} of an arena of "
        f"{format_size(result['arena_bytes'])}"
    )


def main() -> int:
    parser = parser_of(__doc__)
    arguments = parser.parse_args()
    result = run_until_signal(measure(Progress()))
    finish(arguments, result, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
