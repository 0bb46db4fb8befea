"""A prefix's back comes from a tier while its front is computed: same text, whatever fails."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from local_stack import StackShape
from tier_store import CHUNK, TierStack, tier_stack
from tiny_models import build_tiny, clear_prompt, write_tiny
from waiting import until

from kvstore_service.sessions import ProcessIdentity
from kvstore_service.slots import places
from splitpoint.v1 import types_pb2, worker_pb2

SHARED = 400  # tokens of the prefix: 25 chunks
REFERENCE = build_tiny("llama-3")
PREFIX, _ = clear_prompt(REFERENCE, SHARED, 1)
PROMPT, WANTED = clear_prompt(REFERENCE, 9, 8, before=PREFIX)
OTHER, OTHER_WANTED = clear_prompt(REFERENCE, 11, 8, before=[*PREFIX, 7])
# Bytes per second at which loading takes 0.3 s: a busy machine computes something meanwhile.
RATE = 1e6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("llama-3", tmp_path_factory.mktemp("llama-3"))


@dataclass
class Case:
    folder: Path
    tmp_path: Path
    shm_folder: Path

    @asynccontextmanager
    async def stack(
        self, *, rate: float | None = RATE, shape: StackShape | None = None, slot_count: int = 80
    ) -> AsyncIterator[TierStack]:
        """A stack whose tier, and nothing else, holds the prefix."""
        async with tier_stack(
            self.folder,
            self.tmp_path,
            self.shm_folder,
            rate=rate,
            shape=shape,
            slot_count=slot_count,
        ) as stack:
            await stack.ask("warm", PREFIX, 1)
            await stack.assert_clean()
            await stack.evict()
            assert set(stack.keys(PREFIX)) == stack.tier.chunks.keys()
            yield stack
            await stack.assert_clean()


@pytest.fixture
def case(folder: Path, tmp_path: Path, shm_folder: Path) -> Case:
    return Case(folder, tmp_path, shm_folder)


async def meet(stack: TierStack, expected: int = SHARED // 2) -> worker_pb2.RestoreReport:
    """Let both ends of the prefix meet; return the report."""
    await stack.meet("both", PROMPT, 8, cached=SHARED, expected=expected)
    answer = await stack.answer("both")
    assert answer.tokens == WANTED
    (report,) = answer.restores
    return report


async def test_both_ends_meet_and_give_the_same_text(case: Case) -> None:
    async with case.stack() as stack:
        report = await meet(stack)
        assert report.method == types_pb2.RESTORE_METHOD_TOKENS
        assert report.cached_tokens == SHARED
        assert 0 < report.recomputed_tokens < SHARED
        assert report.recomputed_tokens + report.fetched_tokens == SHARED
        assert report.fetch_seconds > 0
        assert stack.tier.stats.read_chunk_count == report.fetched_tokens // CHUNK
        # All of it is in the arena now, for the next request.
        assert stack.cached_tokens(PREFIX) == SHARED
        other = await stack.ask("other", OTHER, 8)
        assert other.tokens == OTHER_WANTED
        assert other.restores[0].cached_tokens == SHARED


@pytest.mark.parametrize("changes", [{"shares_prefixes": True}, {"activations": "always"}])
async def test_with_shared_pages_and_with_activations(
    case: Case, changes: dict[str, bool | str]
) -> None:
    shape = StackShape(**{"workers": 1, "activations": "never", **changes})  # type: ignore[arg-type]
    async with case.stack(shape=shape) as stack:
        report = await meet(stack)
        assert report.recomputed_tokens + report.fetched_tokens == SHARED
        other = await stack.ask("other", OTHER, 8)
        assert other.tokens == OTHER_WANTED


async def test_the_serial_twin_loads_up_to_the_expected_point(case: Case) -> None:
    async with case.stack(shape=StackShape(is_serial=True, activations="never")) as stack:
        report = await meet(stack, expected=10 * CHUNK)
        assert (report.recomputed_tokens, report.fetched_tokens) == (
            10 * CHUNK,
            SHARED - 10 * CHUNK,
        )


async def test_a_prefix_that_begins_in_the_arena(case: Case) -> None:
    async with case.stack() as stack:
        begin = await stack.ask("begin", PREFIX[: 6 * CHUNK], 1)
        assert begin.finish is not None
        await stack.assert_clean()
        assert stack.cached_tokens(PREFIX) >= 6 * CHUNK
        report = await meet(stack, expected=SHARED // 2)
        assert report.recomputed_tokens + report.fetched_tokens == SHARED - 6 * CHUNK


async def test_a_load_that_need_not_begin_holds_up_no_other_request(case: Case) -> None:
    """The arena has all of it: the next request of the prefix does not wait for this one's end."""
    async with case.stack() as stack:
        await stack.ask("computes", PREFIX, 1)
        await stack.meet("long", PROMPT, 100, cached=SHARED, expected=SHARED // 2)
        await stack.meet("short", OTHER, 8, cached=SHARED, expected=SHARED // 2)
        assert (await stack.answer("short")).tokens == OTHER_WANTED
        assert stack.answers["long"].finish is None
        assert (await stack.answer("long")).tokens[:8] == WANTED
        assert stack.tier.stats.read_chunk_count == 0


async def test_a_missing_chunk_is_computed_and_what_follows_it_is_used(case: Case) -> None:
    async with case.stack() as stack:
        del stack.tier.chunks[stack.keys(PREFIX)[23]]
        report = await meet(stack)
        assert report.fetched_tokens == SHARED - 24 * CHUNK
        assert report.recomputed_tokens == 24 * CHUNK


async def test_a_damaged_chunk_is_computed_and_dropped(case: Case) -> None:
    async with case.stack() as stack:
        key = stack.keys(PREFIX)[23]
        stack.tier.damage(key)
        report = await meet(stack)
        assert report.recomputed_tokens == 24 * CHUNK
        assert stack.tier.stats.damaged_chunk_count == 1


async def test_a_damaged_chunk_leaves_the_slots_of_what_was_loaded_before_it_to_the_front(
    case: Case,
) -> None:
    """The arena has room for the prefix once, and the last chunk is damaged."""
    async with case.stack(slot_count=26) as stack:
        stack.tier.damage(stack.keys(PREFIX)[-1])
        report = await meet(stack)
        assert (report.fetched_tokens, report.recomputed_tokens) == (0, SHARED)
        assert stack.tier.stats.read_chunk_count > 1
        assert stack.cached_tokens(PREFIX) == SHARED


async def test_a_front_that_finds_the_arena_full_takes_the_slots_of_its_own_back(
    case: Case,
) -> None:
    async with case.stack(slot_count=44) as stack:
        # 24 remain: both ends do not fit beside what another client writes.
        sessions, client = stack.store.sessions, ProcessIdentity(os.getpid(), 0)
        other = sessions.attach("other", client).session_id
        taken = stack.store.grant(other, stack.store.prepare(other, 20, b""))
        report = await meet(stack)
        assert stack.tier.stats.read_chunk_count > 0
        assert report.fetched_tokens == 0
        sessions.give_up_writing(other, places(taken))


async def test_a_tier_that_goes_away_costs_only_time(case: Case) -> None:
    async with case.stack() as stack:
        stack.tier.go_away()
        report = await meet(stack)
        assert (report.fetched_tokens, report.recomputed_tokens) == (0, SHARED)
        assert stack.cached_tokens(PREFIX) == SHARED


async def test_a_tier_that_hangs_counts_as_slow(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker_service.fetching.results.LONGEST_SECONDS", 0.5)
    async with case.stack() as stack:
        stack.tier.gate.clear()
        report = await meet(stack)
        stack.tier.gate.set()
        assert (report.fetched_tokens, report.recomputed_tokens) == (0, SHARED)
        prefixes = stack.worker.runtime.prefixes
        assert prefixes is not None
        size = SHARED // CHUNK * stack.store.arena.layout.chunk_bytes
        assert 0 < prefixes.fetcher.rates.by_key["disk"] <= size / 0.5


async def test_a_request_that_is_cancelled_leaves_nothing(case: Case) -> None:
    async with case.stack(rate=2e4) as stack:
        await stack.meet("both", PROMPT, 8, cached=SHARED, expected=CHUNK)
        await until(lambda: any(session.granted for session in stack.store.sessions))
        cancel = worker_pb2.CancelCommand(request_id="both")
        await stack.stream.write(worker_pb2.RunRequest(cancel=cancel))
        answer = await stack.answer("both")
        assert answer.finish is not None
        assert answer.finish.reason == types_pb2.FINISH_REASON_CANCELLED


async def test_requests_with_one_prefix_take_turns(case: Case) -> None:
    async with case.stack() as stack:
        await stack.meet("a", PROMPT, 8, cached=SHARED, expected=SHARED // 2)
        await stack.meet("b", OTHER, 8, cached=SHARED, expected=SHARED // 2)
        assert (await stack.answer("a")).tokens == WANTED
        assert (await stack.answer("b")).tokens == OTHER_WANTED
        reads = stack.tier.stats.read_chunk_count
        assert reads <= SHARED // CHUNK, "the tier was read twice for one prefix"


async def test_an_arena_without_room_for_the_back_computes(case: Case) -> None:
    # The front fills what the back would need.
    async with case.stack(slot_count=27) as stack:
        report = await meet(stack)
        assert report.recomputed_tokens + report.fetched_tokens <= SHARED
