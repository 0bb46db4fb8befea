"""Sequences that share device pages: texts, page counts, waiting, eviction and damage.

About 25 seconds. The texts are those of transformers, or of the twin that shares nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_runner import CPU, Transcript, admission, make_engine, run_all
from store_runner import StoreRunner, store_runner
from tiny_models import VOCABULARY, build_tiny, clear_prompt, write_tiny

from splitpoint.errors import Internal
from splitpoint.keys import chunk_keys
from splitpoint.shapes import ArenaLayout, chunks_of
from worker_service.engine.engine import Engine
from worker_service.engine.messages import Cancel, RestoreEvent, SetPaused, StepOutput
from worker_service.engine.sampling import Sampling
from worker_service.engine.sequence import Admission
from worker_service.model.decoder import Decoder
from worker_service.store.arena_tensors import StoredChunk
from worker_service.store.verifier import Verifier

CHUNK = 16
GREEDY = Sampling(max_tokens=12, ignore_eos=True)
CASES = ("llama-3", "gemma3", "opt")


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCABULARY) for _ in range(length)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return Decoder.load(write_tiny("llama-3", tmp_path_factory.mktemp("m")), CPU, torch.float32)


@pytest.fixture(params=[False, True], ids=["without X", "with X"])
def runner(request: pytest.FixtureRequest, model: Decoder, tmp_path: Path) -> Iterator[StoreRunner]:
    layout = ArenaLayout.of(model.shape, chunk_tokens=CHUNK, has_activations=request.param)
    with store_runner(layout, tmp_path, 256) as opened:
        yield opened


def engine_of(model: Decoder, runner: StoreRunner, *, shares_prefixes: bool = True) -> Engine:
    return make_engine(
        model,
        has_activations=runner.layout.has_activations,
        verifier=Verifier(0.0),
        shares_prefixes=shares_prefixes,
    )


def check(engine: Engine) -> None:
    shared = engine.page_manager.shared
    assert shared is not None
    shared.prefixes.check_integrity()


def run_checked(
    engine: Engine, admissions: Sequence[Admission]
) -> tuple[Transcript, list[RestoreEvent], int]:
    """Run all at once; return the transcript, the restores and the most pages in use."""
    transcript, restores, most = Transcript(), [], 0
    for each in admissions:
        engine.admit(each)
    for _ in range(2000):
        output = engine.step()
        transcript.add(output)
        restores += output.restores
        most = max(most, engine.cache.pages.used_count)
        check(engine)
        if engine.is_idle:
            return transcript, restores, most
    raise AssertionError("not idle after 2000 steps")


@pytest.mark.parametrize("case", CASES)
def test_requests_with_one_prefix_hold_it_once_and_have_transformers_texts(
    case: str, tmp_path: Path
) -> None:
    """Windows, grouped and plain heads; the second round takes what the first one left."""
    reference = build_tiny(case)
    prefix = prompt_of(6 * CHUNK + 5, 1)
    texts = [clear_prompt(reference, 10 + i, 12, before=prefix, seed=i) for i in range(5)]
    engine = make_engine(write_tiny(case, tmp_path))
    own = sum(chunks_of(len(prompt) + 12, CHUNK) - 6 for prompt, _ in texts)
    for number in range(2):
        transcript, restores, most = run_checked(
            engine,
            [admission(f"{number}-{i}", prompt, GREEDY) for i, (prompt, _) in enumerate(texts)],
        )
        for i, (_, wanted) in enumerate(texts):
            assert transcript.tokens[f"{number}-{i}"] == wanted
        assert most <= 6 + own
        here = [event.device_tokens for event in restores]
        if number == 0:
            assert sorted(here)[0] == 0, "the first one computes it"
            assert sorted(here)[1:] == [6 * CHUNK] * 4
        else:
            # The next chunk begins with the prefix's last tokens, which are copied.
            assert all(count >= len(prefix) for count in here)
        assert engine.cache.pages.used_count == 0
        assert engine.cache.pages.cached_count > 0


def test_tenants_and_the_twin_share_nothing(model: Decoder) -> None:
    prompt = prompt_of(5 * CHUNK, 2)
    engine = make_engine(model)
    both = [replace(admission(name, prompt, GREEDY), salt=name.encode()) for name in "ab"]
    transcript, restores, most = run_checked(engine, both)
    assert [event.device_tokens for event in restores] == [0, 0]
    assert transcript.tokens["a"] == transcript.tokens["b"]
    assert most == 2 * chunks_of(len(prompt) + 11, CHUNK)
    twin = make_engine(model, shares_prefixes=False)
    alone = run_all(twin, [admission("x", prompt, GREEDY), admission("y", prompt, GREEDY)])
    assert alone.tokens["x"] == alone.tokens["y"] == transcript.tokens["a"]
    assert twin.cache.pages.cached_count == 0


def test_a_request_takes_over_if_the_one_it_waits_for_ends_or_pauses(model: Decoder) -> None:
    prompt = prompt_of(20 * CHUNK, 3)
    wanted = run_all(make_engine(model), [admission("x", prompt, GREEDY)]).tokens["x"]
    for how in ("ends", "pauses"):
        engine = make_engine(model)
        for name in ("first", "second"):
            engine.admit(admission(name, prompt, GREEDY))
        output = engine.step()
        assert [event.request_id for event in output.restores] == ["first"]
        assert len(engine.queues.running) == 2
        engine.post(Cancel(("first", 0, 0)) if how == "ends" else SetPaused(("first", 0, 0), True))
        transcript, taken = Transcript(), -1
        while not transcript.finishes.get("second"):
            output = engine.step()
            transcript.add(output)
            check(engine)
            taken = max([taken, *(event.device_tokens for event in output.restores)])
        assert transcript.tokens["second"] == wanted
        # What the first one had computed until then is taken all the same.
        assert taken == 64
        engine.post(SetPaused(("first", 0, 0), False))
        while not engine.is_idle:
            transcript.add(engine.step())
        assert transcript.tokens.get("first", wanted) == wanted


@pytest.mark.parametrize("seed", range(4))
def test_any_history_of_requests_has_the_twins_texts_and_conserves_pages(
    model: Decoder, seed: int
) -> None:
    """A tree of prompts on few pages: cached pages are evicted, requests are cancelled."""
    rng = random.Random(seed)
    roots = [prompt_of(rng.randrange(1, 90), 10 * seed + i) for i in range(3)]
    admissions = []
    for number in range(40):
        root = rng.choice(roots)
        prompt = [
            *root[: rng.randrange(1, len(root) + 1)],
            *prompt_of(rng.randrange(40), number % 7),
        ]
        sampling = Sampling(max_tokens=rng.randrange(1, 30), ignore_eos=True)
        salt = rng.choice([b"", b"", b"other"])
        admissions.append(replace(admission(str(number), prompt, sampling), salt=salt))
    cancelled = {str(number) for number in range(0, 40, 9)}
    engine = make_engine(model, cache_pages=40)
    waiting, transcript, step = list(admissions), Transcript(), 0
    while waiting or not engine.is_idle:
        if waiting and rng.random() < 0.4:
            engine.admit(waiting.pop(0))
        if rng.random() < 0.1:
            engine.post(Cancel((rng.choice(sorted(cancelled)), 0, 0)))
        transcript.add(engine.step())
        check(engine)
        step += 1
        assert step < 3000
    assert engine.cache.pages.used_count == 0
    twin = make_engine(model, shares_prefixes=False)
    expected = run_all(twin, admissions)
    for each in admissions:
        name = each.request_id
        tokens, whole = transcript.tokens.get(name, []), expected.tokens[name]
        finish = transcript.finishes[name]
        assert tokens == (whole if finish.reason != "cancelled" else whole[: len(tokens)])
        assert finish.reason == "length" or name in cancelled


# -- beside a store ---------------------------------------------------------------------------


def salted(name: str, prompt: Sequence[int]) -> Admission:
    return replace(admission(name, prompt, GREEDY), salt=b"s")


def restores_of(runner: StoreRunner) -> list[RestoreEvent]:
    found: list[RestoreEvent] = []

    def note(output: StepOutput) -> None:
        found.extend(output.restores)

    runner.after_step = note
    return found


def test_only_the_first_of_many_restores_the_prefix(model: Decoder, runner: StoreRunner) -> None:
    prefix = prompt_of(8 * CHUNK, 4)
    runner.run(engine_of(model, runner), [salted("stores", prefix)])
    prompts = [[*prefix, *prompt_of(20 + i, 50 + i)] for i in range(6)]
    engine = engine_of(model, runner)
    events = restores_of(runner)
    transcript = runner.run(engine, [salted(str(i), prompt) for i, prompt in enumerate(prompts)])
    assert sum(event.brought_tokens for event in events) == len(prefix)
    assert sorted(event.device_tokens for event in events) == [0] + [len(prefix)] * 5
    assert all(event.cached_tokens == len(prefix) for event in events)
    twin = engine_of(model, runner, shares_prefixes=False)
    expected = runner.run(twin, [salted(f"twin {i}", prompt) for i, prompt in enumerate(prompts)])
    for i in range(6):
        assert transcript.tokens[str(i)] == expected.tokens[f"twin {i}"]
    check(engine)


def test_cold_requests_wait_for_one_prefill_and_store_it_once(
    model: Decoder, runner: StoreRunner
) -> None:
    prefix = prompt_of(9 * CHUNK, 5)
    prompts = [[*prefix, *prompt_of(20 + i, 60 + i)] for i in range(5)]
    engine = engine_of(model, runner)
    engine.max_batched_tokens = 3 * CHUNK
    events, computed = restores_of(runner), 0
    for i, prompt in enumerate(prompts):
        runner.admit(engine, salted(str(i), prompt))
    transcript = Transcript()
    while len(transcript.finishes) < 5:
        output = runner.step(engine)
        transcript.add(output)
        check(engine)
        computed += output.step.prefilled_tokens if output.step is not None else 0
    own = sum(map(len, prompts)) - 5 * len(prefix)
    assert computed <= len(prefix) + own
    assert sum(event.brought_tokens for event in events) <= 4 * CHUNK, "partial chunks at most"
    assert runner.store.counters.duplicates <= 5, "no chunk of the prefix is written again"
    twin = engine_of(model, runner, shares_prefixes=False)
    runner.after_step = lambda _: None
    expected = run_all(twin, [salted(f"twin {i}", prompt) for i, prompt in enumerate(prompts)])
    for i in range(5):
        assert transcript.tokens[str(i)] == expected.tokens[f"twin {i}"]


def stored_chunk(runner: StoreRunner, tokens: Sequence[int], index: int) -> StoredChunk:
    session = runner.connection.session_id
    found = runner.store.match(session, b"s", tokens)
    runner.store.sessions.release(session, [found.lease_id], [])
    entry = found.entries[index]
    return StoredChunk(entry.slot, entry.generation, entry.token_count, entry.key, entry.checksum)


def damage(runner: StoreRunner, chunk: StoredChunk) -> None:
    for plane in runner.connection.tensors.values:
        plane[chunk.slot] += 1


def test_all_that_share_a_damaged_chunk_start_over(model: Decoder, runner: StoreRunner) -> None:
    """The store finds damage while they decode; nothing after the chunk stays on the device."""
    prefix = prompt_of(4 * CHUNK, 6)
    runner.run(engine_of(model, runner), [salted("stores", prefix)])
    victim = stored_chunk(runner, prefix, 1)
    prompts = [[*prefix, *prompt_of(14 + i, 70 + i)] for i in range(3)]
    long = replace(GREEDY, max_tokens=3 * CHUNK)
    engine, losses, found = engine_of(model, runner), 0, 0

    def note(output: StepOutput) -> None:
        nonlocal losses, found
        losses += output.loss_count
        if not found and len(output.tokens) == 3:
            assert engine.cache.pages.references(engine.queues.running[0].page(1)) == 3
            damage(runner, victim)
            found = runner.scrub()

    runner.after_step = note
    listed = [replace(salted(str(i), prompt), sampling=long) for i, prompt in enumerate(prompts)]
    transcript = runner.run(engine, listed)
    assert (found, losses) == (1, 3)
    check(engine)
    shared = engine.page_manager.shared
    assert shared is not None
    expected = run_all(make_engine(model, shares_prefixes=False), listed)
    assert transcript.tokens == expected.tokens
    # They computed it again, and it is in the store and on the device under the same key.
    events = restores_of(runner)
    again = runner.run(engine, [replace(salted("again", prompts[0]), sampling=long)])
    assert again.tokens["again"] == expected.tokens["0"]
    assert events[0].device_tokens >= len(prefix)
    assert engine.cache.pages.used_count == 0


def test_a_chunk_that_was_not_compared_is_used_only_while_the_store_has_it(
    model: Decoder, runner: StoreRunner
) -> None:
    """A damaged chunk that was read unnoticed is not used after the store dropped it."""
    prompt = prompt_of(4 * CHUNK + 9, 7)
    verifier = Verifier(0.0)

    def engine_of_reader() -> Engine:
        has_activations = runner.layout.has_activations
        return make_engine(model, has_activations=has_activations, verifier=verifier)

    wanted = runner.run(engine_of_reader(), [salted("stores", prompt)]).tokens["stores"]
    runner.run(engine_of_reader(), [salted("compares", prompt)])
    damage(runner, stored_chunk(runner, prompt, 1))
    engine, events = engine_of_reader(), restores_of(runner)
    wrong = runner.run(engine, [salted("wrong", prompt)])
    assert (events[-1].device_tokens, events[-1].cached_tokens > 4 * CHUNK) == (0, True)
    assert wrong.tokens["wrong"] != wanted, "the test damages what matters"
    runner.run(engine, [salted("while it is there", prompt)])
    assert events[-1].device_tokens == 4 * CHUNK
    assert runner.scrub() == 1
    right = runner.run(engine, [salted("right", prompt)])
    assert events[-1].device_tokens == CHUNK
    assert right.tokens["right"] == wanted
    check(engine)
    verifier.close()


def test_a_page_with_nan_leaves_the_index_and_is_cleared(model: Decoder) -> None:
    prompt = prompt_of(4 * CHUNK + 9, 8)
    engine = make_engine(model)
    wanted = run_all(engine, [admission("first", prompt, GREEDY)]).tokens["first"]
    shared = engine.page_manager.shared
    assert shared is not None
    page = shared.prefixes.pages_of(sequence_keys(engine, prompt))[2]
    engine.cache.keys[1][page] = float("nan")
    failed = run_all(engine, [admission("failed", prompt, GREEDY)])
    assert isinstance(failed.finishes["failed"].error, Internal)
    assert all(plane.isfinite().all() for plane in (*engine.cache.keys, *engine.cache.values))
    check(engine)
    again = run_all(engine, [admission("again", prompt, GREEDY)])
    assert again.tokens["again"] == wanted


def sequence_keys(engine: Engine, tokens: Sequence[int]) -> list[bytes]:
    return list(chunk_keys(engine.cache.layout.layout_hash, b"", tokens, CHUNK))
