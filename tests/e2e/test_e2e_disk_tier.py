"""A store that keeps what leaves its arena on a disk: kills, damage, a full disk, the same texts.

pytest -m chaos tests/e2e/test_e2e_disk_tier.py -s    # 50 kills of the store under load

SPLITPOINT_CHAOS_SEED is the seed of all choices; it is printed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from fleet import Fleet, Load, Question, fleet, until
from small_model import WIDE, small_model

from splitpoint.client import AsyncClient
from splitpoint.transport.channels import open_channel
from splitpoint.v1 import kvstore_pb2, kvstore_pb2_grpc, types_pb2

SEED = int(os.environ.get("SPLITPOINT_CHAOS_SEED", "1818"))
BOUND = 12 << 20
# Holds 58 chunks; each question has 17. Without layer inputs loading pays on a busy machine, too.
ARENA = ("--host-memory", "4MiB", "--activations", "never")
# Keys and values of 16 tokens in 2 layers, float32.
CHUNK_BYTES = 64 << 10
SHARED = "import asyncio\nimport collections\nimport contextlib\n"
WORDS = ("stream", "buffer", "reader", "writer", "parser", "format", "number", "window")
FIRST = ("def", "import", "class", "for", "if", "try", "with", "while", "return", "print", "0", "#")


def tier_options(folder: Path, bound: int = BOUND) -> tuple[str, ...]:
    return (*ARENA, "--tier-disk", str(folder), "--tier-disk-size", str(bound))


def asked(count: int) -> list[Question]:
    """Return long prompts with different first tokens, of few tokens to come."""
    made = []
    for number in range(count):
        body = "".join(f"    def {word}{number}(self):\n        pass\n\n" for word in WORDS)
        parts = (f"class {part}{number}:\n{body}\n{SHARED}\n" for part in ("One", "Two", "Six"))
        prompt = f"{FIRST[number]} " + "".join(parts)
        options: dict[str, Any] = {"max_tokens": 6 + number % 5, "ignore_eos": True}
        if number % 3 == 2:
            options |= {"temperature": 0.8, "seed": number}
        made.append(Question(prompt, options))
    return made


@contextmanager
def one(store_options: tuple[str, ...] = ARENA, workers: int = 1) -> Iterator[Fleet]:
    """A fleet whose workers keep no prefix themselves."""
    options = ("--no-device-prefix-cache",)
    with fleet(
        *(workers, 1),
        model=small_model(**WIDE),
        store_options=store_options,
        worker_options=options,
    ) as running:
        yield running


async def store_stats(running: Fleet) -> kvstore_pb2.GetStatsResponse:
    async with open_channel(running.address("k")) as channel:
        stub: Any = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        stats: kvstore_pb2.GetStatsResponse = await stub.GetStats(
            kvstore_pb2.GetStatsRequest(check_integrity=True), wait_for_ready=True
        )
    assert list(stats.integrity_violations) == []
    return stats


async def tier_stats(running: Fleet) -> kvstore_pb2.TierStats:
    [tier] = (await store_stats(running)).tiers
    assert tier.tier == types_pb2.TIER_DISK
    return tier


async def restart_store(running: Fleet, *, is_new_arena: bool = False) -> None:
    """kill -9, and start again; return when all workers are attached."""
    running.store.kill()
    if is_new_arena:
        running.arena.unlink()
    await asyncio.to_thread(running.start_store().wait_ready)
    await attached(running)


async def attached(running: Fleet) -> None:
    async def is_attached() -> bool:
        return (await store_stats(running)).session_count == running.worker_count

    await until(is_attached)


def disk_bytes(folder: Path) -> int:
    """Return what `du` counts: the files may vanish while they are counted."""
    found = subprocess.run(
        ["du", "-s", "-B1", str(folder)], capture_output=True, text=True, check=False
    )
    return int(found.stdout.split()[0])


async def watch_bound(folder: Path, bound: int, sizes: list[int]) -> None:
    while True:
        sizes.append(await asyncio.to_thread(disk_bytes, folder))
        assert sizes[-1] <= bound
        await asyncio.sleep(0.05)


async def ask_all(load: Load, client: AsyncClient) -> None:
    for question in load.truths:
        await load.ask(client, question)


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.segment"))


async def undisturbed(running: Fleet, questions: list[Question]) -> Load:
    """Ask for the texts of a store without the tier, then start it anew with the tier."""
    async with AsyncClient(running.addresses[0]) as client:
        return await Load.of(client, questions, SEED, salts=[""])


async def test_prefixes_come_back_from_the_disk_after_a_new_arena(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    with one() as running:
        load = await undisturbed(running, asked(6))
        running.store_options = tier_options(tier)
        await restart_store(running, is_new_arena=True)
        async with AsyncClient(running.addresses[0]) as client:
            await ask_all(load, client)

            async def is_written() -> bool:
                return (await tier_stats(running)).written_chunk_count >= 40

            await until(is_written)
            await restart_store(running, is_new_arena=True)
            held = (await tier_stats(running)).chunk_count
            assert held >= 40
            answers = [
                await client.generate(question.prompt, **question.options).complete()
                for question in load.truths
            ]
            for question, answer in zip(load.truths, answers, strict=True):
                assert answer.token_ids == load.truths[question].token_ids
            assert (await tier_stats(running)).read_chunk_count > 0
            fetched = [
                (answer.usage.cached_tokens, answer.plan.fetched_tokens)
                for answer in answers
                if answer.plan is not None and answer.plan.fetch_source == "disk"
            ]
            assert fetched
            assert all(cached >= loaded > 100 for cached, loaded in fetched)

            # One byte of every record: each chunk is computed again, and nothing wrong is said.
            running.store.kill()
            for path in segments(tier):
                damage(path)
            running.arena.unlink()
            await asyncio.to_thread(running.start_store().wait_ready)
            # A busy machine may have measured that loading does not pay; a new worker tries it.
            running.workers[0].kill()
            await running.all_ready()
            await attached(running)
            await ask_all(load, client)
            found = await tier_stats(running)
            assert found.damaged_chunk_count > 0
        await running.store_is_clean()


def damage(path: Path) -> None:
    """Flip a bit in each 16 KiB: in the payload of every record."""
    content = bytearray(path.read_bytes())
    for place in range(20_000, len(content), 16 << 10):
        content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "kills", [3, pytest.param(50, marks=[pytest.mark.chaos, pytest.mark.timeout(900)])]
)
async def test_the_store_is_killed_under_load(tmp_path: Path, kills: int) -> None:
    print(f"SPLITPOINT_CHAOS_SEED={SEED}")
    rng, tier, sizes = random.Random(SEED), tmp_path / "tier", list[int]()
    written = read = new_arenas = 0
    with one() as running:
        load = await undisturbed(running, asked(12))
        running.store_options = tier_options(tier)
        await restart_store(running, is_new_arena=True)
        watching = asyncio.create_task(watch_bound(tier, BOUND, sizes))
        keeping = asyncio.create_task(load.keep(running.addresses, 2))
        for number in range(kills):
            before = load.finished
            await until(lambda: load.finished > before + 4 or keeping.done())  # noqa: B023
            await asyncio.sleep(rng.uniform(0.0, 0.3))
            found = await tier_stats(running)
            written, read = written + found.written_chunk_count, read + found.read_chunk_count
            assert found.damaged_chunk_count == 0
            running.store.kill()
            if number % 5 == 2:
                running.arena.unlink()
                new_arenas += 1
            await asyncio.to_thread(running.start_store().wait_ready)
            assert not keeping.done()
        load.is_over = True
        await keeping
        await attached(running)
        async with AsyncClient(running.addresses[0]) as client:
            await ask_all(load, client)
        found = await tier_stats(running)
        read += found.read_chunk_count
        watching.cancel()
        await asyncio.wait([watching])
        assert watching.cancelled(), "the bound was exceeded"
        await running.store_is_clean()
    assert written > 0
    assert read > 0
    print(
        json.dumps(
            {
                "test": "kills of a store with a disk tier",
                "seed": SEED,
                "kills": kills,
                "new_arenas": new_arenas,
                "finished": load.finished,
                "written_chunks": written,
                "read_chunks": read,
                "most_disk_bytes": max(sizes),
                "bound": BOUND,
            }
        )
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts file systems")
async def test_a_full_disk_costs_reuse_not_requests(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    tier.mkdir(mode=0o700)
    mount = ("mount", "-t", "tmpfs", "-o", "size=2560k,mode=700", "tmpfs", str(tier))
    if await run(*mount) != 0:
        pytest.skip("this container mounts no file system")
    try:
        other, rest = tier / "other", tier / "rest"
        other.write_bytes(bytes(5 << 18))
        with one(tier_options(tier)) as running:
            async with AsyncClient(running.addresses[0]) as client:
                # The disk is full long before the bound is reached.
                load = await Load.of(client, asked(8), SEED, salts=[""])
                for _ in range(2):
                    await ask_all(load, client)
                found = await tier_stats(running)
                assert found.is_up
                assert 0 < found.used_bytes <= 5 << 18
                assert found.written_chunk_count * CHUNK_BYTES > 5 << 18
                # Now nothing can be written at all.
                other.unlink()
                fill(rest)
                before = (await tier_stats(running)).written_chunk_count
                await ask_all(load, client)
                rest.unlink()

                async def is_written() -> bool:
                    await ask_all(load, client)
                    return (await tier_stats(running)).written_chunk_count > before + 8

                await until(is_written)
                assert load.finished >= 4 * len(load.truths)
            await running.store_is_clean()
    finally:
        assert await run("umount", "-l", str(tier)) == 0


def fill(path: Path) -> None:
    """Write until the file system is full."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(64 << 10)):
            pass


async def run(*command: str) -> int:
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.DEVNULL)
    return await process.wait()
