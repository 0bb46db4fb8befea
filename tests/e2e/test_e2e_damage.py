"""Bits flip in a running arena: every answer is the same text as without, and it is said once."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from flipped_bits import WHERE, ArenaFile
from local_stack import LocalStack, StackShape, local_stack
from tiny_models import build_tiny, clear_prompt

from splitpoint.client.answers import Completion
from splitpoint.planning.plan import Residency
from splitpoint.v1 import kvstore_pb2

NEW_TOKENS = 12
# Nothing but what a worker reads and reports is ever read back.
SHAPE = StackShape(workers=1, verify_rate=0.0, store_arguments=("--scrub-seconds", "0"))
SCRUB_SECONDS = 0.3
RESIDENCIES = (Residency.RESIDENT, Residency.STREAMED)
# A reader has no use for the record and the token row: only the store compares them.
READERS_SEE = [where for where in WHERE if where not in ("record", "token row")]


@dataclass(frozen=True)
class Case:
    prompt: list[int]
    wanted: list[int]


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    model = build_tiny("llama")
    # Chunks of 16; the first has a tail, the second has none.
    lengths = (70, 80, 101, 131)
    return [
        Case(*clear_prompt(model, length, NEW_TOKENS, seed=seed))
        for seed, length in enumerate(lengths)
    ]


@asynccontextmanager
async def damaged_stack(
    folder: Path, sockets: Path, shape: StackShape
) -> AsyncIterator[tuple[LocalStack, ArenaFile]]:
    async with local_stack(folder, sockets, shape) as stack:
        arena = ArenaFile(stack.arena)
        try:
            yield stack, arena
        finally:
            arena.close()


async def ask(
    stack: LocalStack, case: Case, residency: Residency = Residency.RESIDENT
) -> Completion:
    return await stack.client.generate(
        case.prompt, max_tokens=NEW_TOKENS, ignore_eos=True, residency=residency
    ).complete()


async def check(
    stack: LocalStack, case: Case, residency: Residency = Residency.RESIDENT
) -> Completion:
    answer = await ask(stack, case, residency)
    assert list(answer.token_ids) == case.wanted
    return answer


def verified(stack: LocalStack) -> tuple[int, int]:
    """Chunks that the worker found intact, and damaged."""
    verifier = stack.workers[0].engine.verifier
    assert verifier is not None
    return verifier.intact_count, verifier.damaged_count


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and "starts over" in record.getMessage()
    ]


async def test_damage_before_the_first_read_is_never_served(
    folder: Path, tmp_path: Path, cases: list[Case]
) -> None:
    """A flipped bit in a chunk, full or partial, that the worker has not read yet."""
    case, tries = cases[0], list(itertools.product(RESIDENCIES, READERS_SEE))
    async with damaged_stack(folder, tmp_path, SHAPE) as (stack, arena):
        for number, (residency, where) in enumerate(tries):
            await stack.store.Evict(kvstore_pb2.EvictRequest())
            await check(stack, case)
            await stack.assert_clean()
            # In turns the third chunk and the prompt's last, partial one.
            damaged = arena.sealed()[2 if number % 2 else 4]
            arena.damage(where, damaged.slot)
            answer = await check(stack, case, residency)
            assert answer.usage.cached_tokens == 16 * damaged.chunk.chunk_index, where
            stats = await stack.store_stats()
            assert stats.damaged_chunk_count == number + 1, where
            # It is stored again, and found.
            again = await check(stack, case, residency)
            assert again.usage.cached_tokens > answer.usage.cached_tokens, where
        await stack.assert_clean()
        assert (await stack.store_stats()).damaged_chunk_count == len(tries)
        words = sum(where == "commit word" for _, where in tries)
        assert verified(stack)[1] == len(tries) - words
        assert stack.workers[0].runtime.counters.chunk_losses == len(tries)


async def test_what_shows_by_itself_is_healed_without_a_checksum(
    folder: Path, tmp_path: Path, cases: list[Case]
) -> None:
    """NaN and commit words, in a chunk that the worker compared before."""
    case, tries = cases[1], itertools.product(RESIDENCIES, ("NaN in K", "NaN in V", "commit word"))
    async with damaged_stack(folder, tmp_path, SHAPE) as (stack, arena):
        for number, (residency, where) in enumerate(tries):
            await check(stack, case)
            await check(stack, case, residency)
            before = verified(stack)
            arena.damage(where, arena.sealed()[1].slot)
            answer = await check(stack, case, residency)
            assert answer.usage.cached_tokens == 16, where
            assert verified(stack)[1] == before[1] == 0
            assert (await stack.store_stats()).damaged_chunk_count == number + 1
        await stack.assert_clean()


async def test_many_requests_on_a_damaged_chunk_say_so_once(
    folder: Path, tmp_path: Path, cases: list[Case], caplog: pytest.LogCaptureFixture
) -> None:
    case = cases[1]
    async with damaged_stack(folder, tmp_path, SHAPE) as (stack, arena):
        await check(stack, case)
        await check(stack, case)
        arena.damage("commit word", arena.sealed()[1].slot)
        async with asyncio.TaskGroup() as group:
            for _ in range(30):
                group.create_task(check(stack, case))
        assert len(warnings_of(caplog)) == 1
        assert (await stack.store_stats()).damaged_chunk_count == 1
        await stack.assert_clean()


async def test_sampling_finds_what_the_first_read_could_not(
    folder: Path, tmp_path: Path, cases: list[Case]
) -> None:
    case = cases[1]
    async with damaged_stack(folder, tmp_path, replace(SHAPE, verify_rate=1.0)) as (stack, arena):
        for residency in RESIDENCIES:
            await check(stack, case)
            await check(stack, case, residency)
            arena.damage("V row", arena.sealed()[1].slot)
            await check(stack, case, residency)
        assert (await stack.store_stats()).damaged_chunk_count == 2
        await stack.assert_clean()


@pytest.mark.parametrize("where", ["V row", "NaN in K", "commit word"])
async def test_a_streamed_request_goes_on_behind_what_it_delivered(
    folder: Path, tmp_path: Path, cases: list[Case], where: str
) -> None:
    """Its cache is damaged between two of its steps: no token comes twice, and none is wrong."""
    case = cases[3]
    shape = replace(SHAPE, verify_rate=1.0 if where == "V row" else 0.0)
    async with damaged_stack(folder, tmp_path, shape) as (stack, arena):
        await check(stack, case)
        answer: list[int] = []
        generation = stack.client.generate(
            case.prompt, max_tokens=NEW_TOKENS, ignore_eos=True, residency=Residency.STREAMED
        )
        async for event in generation:
            if isinstance(event, Completion):
                break
            if not answer:
                arena.damage(where, arena.sealed()[3].slot)
            answer += event.token_ids
        assert answer == case.wanted
        assert (await stack.store_stats()).damaged_chunk_count == 1
        await stack.assert_clean()


async def test_an_encoded_chunk_is_compared_as_it_is_stored(
    folder: Path, tmp_path: Path, cases: list[Case]
) -> None:
    case = cases[0]
    arguments = (*SHAPE.store_arguments, "--kv-encoding", "int8")
    async with damaged_stack(folder, tmp_path, replace(SHAPE, store_arguments=arguments)) as (
        stack,
        arena,
    ):
        await ask(stack, case)
        arena.damage("V row", arena.sealed()[0].slot)
        assert (await check(stack, case)).usage.cached_tokens == 0
        assert (await stack.store_stats()).damaged_chunk_count == 1


async def test_an_idle_store_finds_what_nobody_reads(
    folder: Path, tmp_path: Path, cases: list[Case]
) -> None:
    """Scrubbing: every kind of damage, within a pass; intact chunks stay."""
    case = cases[0]
    shape = replace(SHAPE, store_arguments=("--scrub-seconds", str(SCRUB_SECONDS)))
    async with damaged_stack(folder, tmp_path, shape) as (stack, arena):
        for number, where in enumerate(WHERE):
            await check(stack, case)
            await check(stack, case)
            arena.damage(where, arena.sealed()[2].slot)
            async with asyncio.timeout(60):
                while (await stack.store_stats()).damaged_chunk_count <= number:
                    await asyncio.sleep(0.05)
            assert (await check(stack, case)).usage.cached_tokens == 32, where
        assert (await stack.store_stats()).damaged_chunk_count == len(WHERE)
        assert verified(stack)[1] == stack.workers[0].runtime.counters.chunk_losses == 0
        await stack.assert_clean()


@pytest.mark.parametrize(
    ("requests", "rounds"),
    [
        (20, 2),
        pytest.param(500, 25, id="chaos", marks=[pytest.mark.chaos, pytest.mark.timeout(900)]),
    ],
)
async def test_flipped_bits_under_load(
    folder: Path, tmp_path: Path, cases: list[Case], requests: int, rounds: int
) -> None:
    """After each round of flips one verification interval passes under load; then every
    answer must be right. The interval: two passes of the scrubber at most."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    shape = replace(
        SHAPE, verify_rate=0.01, store_arguments=("--scrub-seconds", str(SCRUB_SECONDS))
    )
    must_be_right, over = asyncio.Event(), asyncio.Event()
    checked = early = early_wrong = strict = 0
    async with damaged_stack(folder, tmp_path, shape) as (stack, arena):

        async def client() -> None:
            nonlocal checked, early, early_wrong, strict
            while not over.is_set():
                case = rng.choice(cases)
                residency = rng.choice(RESIDENCIES)
                is_strict = must_be_right.is_set()
                strict += is_strict
                answer = await ask(stack, case, residency)
                strict -= is_strict
                is_right = list(answer.token_ids) == case.wanted
                if is_strict:
                    assert is_right, f"seed {seed}: wrong after the interval"
                    checked += 1
                else:
                    early += 1
                    early_wrong += not is_right

        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(client())
            for number in range(rounds):
                await asyncio.sleep(0.2)
                must_be_right.clear()
                while strict:
                    await asyncio.sleep(0.01)
                flipped = rng.sample(arena.sealed(), k=min(4, len(arena.sealed())))
                for each in flipped:
                    arena.flip_anywhere(each.slot, rng)
                # The pass under way may have seen a chunk before it changed.
                passes = (await stack.store_stats()).scrub_pass_count + 2
                while (await stack.store_stats()).scrub_pass_count < passes:
                    await asyncio.sleep(0.05)
                must_be_right.set()
                while checked * rounds < requests * (number + 1):
                    await asyncio.sleep(0.02)
            over.set()
        stats = await stack.store_stats()
        print(
            f"{checked} requests after the interval, 0 wrong; {early} within it, "
            f"{early_wrong} wrong; {stats.damaged_chunk_count} damaged chunks found"
        )
        assert stats.damaged_chunk_count > 0
        await stack.assert_clean()
