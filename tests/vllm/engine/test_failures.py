"""Loads that fail, stores that are away and slow links cost time, never text."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from engines import ENGINE_QUESTIONS, Answer, Store, engine, prompt, settle
from test_answers import check_equal
from waiting import wait_until

pytestmark = pytest.mark.timeout(600)

SHARED = prompt(1, 640)
PROMPTS = [prompt(10 + number, 100, after=SHARED) for number in range(6)]


@pytest.fixture(scope="module")
def expected(models: Path) -> list[Answer]:
    """The answers of an engine without a connector."""
    with engine(models / "llama", None) as plain:
        return plain.generate(*PROMPTS)


@pytest.fixture
def filled(models: Path, store: Store) -> Store:
    """A store that has the pages of all prompts."""
    with engine(models / "llama", store.address) as first:
        first.generate(*PROMPTS)
    return store


def failing_loads(every: int) -> Callable[[], None]:
    """Fail every n-th load, with garbage in its blocks."""

    def prepare() -> None:
        from splitpoint_vllm.worker import LoadJob, Transfers

        copy, numbers = Transfers._copy_load, count(1)

        def fail(self: Transfers, job: LoadJob) -> tuple[int, str]:
            found = copy(self, job)
            if next(numbers) % every:
                return found
            for group in self._parts._groups:
                for part in group:
                    part.rows[job.block_ids.tolist()] = 7
            return 0, "it was told to"

        Transfers._copy_load = fail  # type: ignore[method-assign]

    return prepare


@pytest.mark.parametrize("every", [1, 2])
def test_failed_loads_are_computed(
    models: Path, filled: Store, expected: list[Answer], every: int
) -> None:
    with engine(models / "llama", filled.address, prepare=failing_loads(every)) as broken:
        reasons = set()
        for _ in range(3):
            answers = broken.generate(*PROMPTS)
            check_equal(answers, expected)
            reasons |= {each.reason for each in answers}
            assert broken.ask("forget")
        assert reasons - {"miss", "local"} == ({"failed"} if every == 1 else {"failed", "loaded"})
        assert broken.ask("metrics")["failed"] >= 3 // every


def flip_every_page(store: Store) -> None:
    """Change a byte of each slot of the arena's file."""
    from splitpoint.arena.mapping import open_arena, read_superblock

    fd = open_arena(store.arena)
    try:
        geometry = read_superblock(fd).geometry
        (plane,) = geometry.planes
        for slot in range(geometry.slot_count):
            place = plane.offset + slot * plane.slot_bytes + 1000
            os.pwrite(fd, bytes([os.pread(fd, 1, place)[0] ^ 0x10]), place)
    finally:
        os.close(fd)


def test_damaged_pages_are_computed_and_stored_again(
    models: Path, filled: Store, expected: list[Answer]
) -> None:
    flip_every_page(filled)
    with engine(models / "llama", filled.address) as second:
        answers = second.generate(PROMPTS[0])
    check_equal(answers, expected[:1])
    assert answers[0].reason == "failed"
    stats = filled.stats()
    assert int(stats["damaged_chunk_count"]) >= 5
    with engine(models / "llama", filled.address) as third:
        answers = third.generate(PROMPTS[0])
    check_equal(answers, expected[:1])
    assert answers[0].reason == "loaded"


def test_preempted_requests_have_the_same_text(
    models: Path, filled: Store, expected: list[Answer]
) -> None:
    with engine(models / "llama", None) as plain:
        long = plain.generate(*PROMPTS, tokens=150)
    tight: dict[str, Any] = {"num_gpu_blocks_override": 15, "max_model_len": 1024}
    with engine(
        *(models / "llama", filled.address),
        prepare=failing_loads(3),
        extra={"offload_prompt_only": False},
        **tight,
    ) as busy:
        check_equal(busy.generate(*PROMPTS, tokens=150), long)
        assert busy.ask("preemptions") > 0
    stats = filled.stats()
    assert stats["integrity_violations"] == []
    assert stats["writing_slot_count"] == stats["leased_slot_count"] == 0


def test_a_store_that_comes_late_and_goes_again(
    models: Path, tmp_path: Path, expected: list[Answer]
) -> None:
    store = Store(tmp_path)
    with engine(models / "llama", store.address, waits=False) as lonely:

        def ask(number: int) -> Answer:
            """Return the answer to a prompt that the engine's own cache lacks."""
            assert lonely.ask("forget")
            (answer,) = lonely.generate(PROMPTS[number])
            check_equal([answer], expected[number : number + 1])
            return answer

        assert ask(0).reason == "away"
        with store:
            wait_until(lambda: ask(1).reason != "away")
            wait_until(lambda: ask(1).reason == "loaded")
            store.signal(signal.SIGSTOP)
            for number in range(4):
                assert ask(number).reason == "late"
            store.signal(signal.SIGCONT)
            wait_until(lambda: ask(1).reason == "loaded")
            store.kill()
            wait_until(lambda: ask(1).reason == "away")
            store.start()
            wait_until(lambda: ask(1).reason == "loaded")


def test_a_slow_link_is_not_used(models: Path, filled: Store, expected: list[Answer]) -> None:
    """Loading takes many seconds there, computing does not. An aborted load ends all the same."""
    with engine(models / "llama", filled.address, extra={"link_rate": 0.1e6}) as far:
        # Nothing was measured before it.
        assert far.ask("abort while loading") == {"blocks in use": 0, "requests": 0}
        for seed in (98, 99):
            assert far.generate(prompt(seed, 700))[0].reason == "miss"  # steps are measured
        for number in range(2):
            assert far.ask("forget")
            answers = far.generate(PROMPTS[number])
            check_equal(answers, expected[number : number + 1])
            assert answers[0].reason == "slower"
            told = answers[0].splitpoint
            assert told is not None
            assert told["found_tokens"] >= 640 > told["loaded_tokens"] == 0
            assert told["predicted_load_seconds"] > told["predicted_compute_seconds"] > 0
        assert far.ask("metrics") == {"miss": 2, "slower": 2}


def _remeasure_at_once() -> None:
    import splitpoint_vllm.plan

    splitpoint_vllm.plan.REMEASURE_SECONDS = 0.0


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_link_that_is_too_slow_is_measured_again(models: Path, store: Store, family: str) -> None:
    """Of a model with windows nothing less than what was found can be loaded."""
    retention = {"prefix_cache_retention_interval": 256}
    options: dict[str, Any] = retention if family == "gemma3" else {}
    with engine(models / family, None, **options) as plain:
        expected = plain.generate(PROMPTS[0])
    with engine(models / family, store.address, **options) as first:
        first.generate(PROMPTS[0], PROMPTS[0][:600])
    slow: dict[str, Any] = {"link_rate": 0.5e6}
    with engine(
        models / family, store.address, prepare=_remeasure_at_once, extra=slow, **options
    ) as far:
        for seed in (98, 99):
            far.generate(prompt(seed, 700))
        assert far.generate(PROMPTS[0][:600])[0].reason == "loaded"
        assert far.ask("forget")
        answers = far.generate(PROMPTS[0])
        check_equal(answers, expected)
        told = answers[0].splitpoint
        assert told is not None
        assert told["reason"] == "remeasured"
        most = told["found_tokens"] if family == "gemma3" else 128
        assert told["loaded_tokens"] == most > 0


def _metrics(llm: Any) -> dict[str, int]:
    """Return how often each reason was counted."""
    return {
        metric.labels["reason"]: int(metric.value)
        for metric in llm.get_metrics()
        if metric.name == "vllm:splitpoint_requests"
    }


def _preemptions(llm: Any) -> int:
    return sum(
        int(metric.value) for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"
    )


def _forget(llm: Any) -> bool:
    """Empty the engine's own cache."""
    return bool(llm.reset_prefix_cache())


def _abort_while_loading(llm: Any) -> dict[str, int]:
    """Abort a request while its pages are loaded. Return what is left when the engine is idle."""
    from vllm.sampling_params import SamplingParams

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    sampling = SamplingParams(max_tokens=1, detokenize=False)
    llm.llm_engine.add_request("gone", {"prompt_token_ids": PROMPTS[5][:150]}, sampling)
    (request,) = scheduler.requests.values()
    deadline = time.monotonic() + 60.0
    while request.status.name != "WAITING_FOR_REMOTE_KVS":
        llm.llm_engine.step()
        assert time.monotonic() < deadline, request.status
    llm.llm_engine.abort_request(["gone"])
    settle(llm)
    pool = scheduler.kv_cache_manager.block_pool
    used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    return {"blocks in use": used, "requests": len(scheduler.connector._manager._requests)}


ENGINE_QUESTIONS |= {
    "metrics": _metrics,
    "preemptions": _preemptions,
    "forget": _forget,
    "abort while loading": _abort_while_loading,
}


def test_another_dtype_shares_no_pages(models: Path, filled: Store) -> None:
    def outcomes() -> dict[str, str]:
        """What the engine's scheduler told the store."""
        (found,) = (
            each["outcomes"]
            for each in filled.stats()["sessions"]
            if each["client_name"].startswith("vllm-scheduler-") and not each["is_orphaned"]
        )
        return dict(found)

    with engine(models / "llama", filled.address, dtype="bfloat16") as other:
        assert other.generate(PROMPTS[0])[0].reason == "miss"
        wait_until(lambda: outcomes() == {"miss": "1"})


def test_options_that_cannot_be_used_cost_the_store_only(
    models: Path, store: Store, expected: list[Answer]
) -> None:
    options = {"token_file": str(store.folder / "missing")}
    with engine(models / "llama", store.address, waits=False, extra=options) as alone:
        answers = alone.generate(*PROMPTS)
    check_equal(answers, expected)
    assert {each.reason for each in answers} == {"disabled"}
