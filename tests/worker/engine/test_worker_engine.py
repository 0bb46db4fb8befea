"""Test the engine without a store: parity, batching, memory, and contained failures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_runner import Transcript, admission, make_engine, own_decoder, run_all
from long_runs import scaled
from tiny_models import CASES, VOCABULARY, build_tiny, clear_prompt, write_tiny

from splitpoint.errors import Internal, ResourceExhausted
from worker_service.device.cache import PageAllocator
from worker_service.engine.messages import Cancel, SetPaused
from worker_service.engine.sampling import Sampling

GREEDY_64 = Sampling(max_tokens=64, ignore_eos=True)
# Below, at and above chunk (16) and step budget (64) borders.
LENGTHS = (1, 15, 16, 17, 64, 65, 130, 200)
# Grouped queries, shards, tied; windows below full layers. Borders are the engine's, and the same
# for all: other checkpoints have a short prompt, one of two steps, and one beyond their windows.
AT_ALL_LENGTHS = CASES if scaled(0, chaos=1) else ("llama-3", "gemma3")
SOME_LENGTHS = (1, 17, 130)
# As many as in tests/e2e/test_e2e_parity.py: references are shared.
NEW_TOKENS = scaled(18, chaos=64)
GREEDY = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("llama-3", tmp_path_factory.mktemp("llama"))


@pytest.mark.scaled
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_equal_transformers_alone_and_together(case: str, tmp_path: Path) -> None:
    folder = write_tiny(case, tmp_path)
    reference = build_tiny(case)
    lengths = LENGTHS if case in AT_ALL_LENGTHS else SOME_LENGTHS
    prompts, wanted = zip(*(clear_prompt(reference, n, NEW_TOKENS) for n in lengths), strict=True)
    engine = make_engine(folder)
    together = run_all(
        engine,
        [admission(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts)],
    )
    assert [together.tokens[str(i)] for i in range(len(prompts))] == list(wanted)
    for i in (0, 3, 6) if case in AT_ALL_LENGTHS else (2,):
        alone = run_all(engine, [admission("alone", prompts[i], GREEDY)])
        assert alone.tokens["alone"] == wanted[i]
    assert engine.cache.pages.used_count == 0
    assert engine.cache.claims.promised_count == 0


def test_more_requests_than_memory_wait_their_turn_and_are_right(llama: Path) -> None:
    """Run 50 requests in a cache for about 8, in order of arrival."""
    reference = build_tiny("llama-3")
    checked = {i: clear_prompt(reference, 20 + i % 7, 20, seed=i) for i in range(0, 50, 7)}
    prompts = [checked[i][0] if i in checked else prompt_of(20 + i % 7, i) for i in range(50)]
    sampling = Sampling(max_tokens=20, ignore_eos=True)
    engine = make_engine(llama, cache_pages=8 * 3)
    transcript = run_all(
        engine, [admission(str(i), prompt, sampling) for i, prompt in enumerate(prompts)]
    )
    for i, (_, wanted) in checked.items():
        assert transcript.tokens[str(i)] == wanted
    assert len(transcript.finishes) == 50
    assert engine.cache.pages.used_count == engine.cache.claims.promised_count == 0


@pytest.mark.parametrize("is_short", [True, False])
def test_memory_for_8_of_the_longest_answers_runs_more_that_are_short(
    llama: Path, is_short: bool
) -> None:
    """Of requests that could take 6 pages run 1.5 times as many if they end within 2."""
    count = 24
    eos = (5,) if is_short else ()
    sampling = Sampling(max_tokens=70, ignore_eos=not is_short, logit_bias={5: 100.0})
    roomy = make_engine(llama, eos_token_ids=eos)
    engine = make_engine(llama, cache_pages=8 * 6, eos_token_ids=eos, max_batch_size=count)
    requests = [
        admission(str(i), prompt_of(20 + i % 7, i), replace(sampling, min_tokens=i % 6))
        for i in range(count)
    ]
    assert {engine.page_manager.claim_of(each) for each in requests} == {6}
    peak = 0
    transcript = Transcript()
    for each in requests:
        engine.admit(each)
    while not (transcript.tokens and engine.is_idle):
        output = engine.step()
        transcript.add(output)
        peak = max(peak, output.running_count)
    assert len(transcript.finishes) == count
    assert all(finish.error is None for finish in transcript.finishes.values())
    assert peak >= 1.5 * 8
    for each in requests[::10]:
        name = each.request_id
        assert run_all(roomy, [each]).tokens[name] == transcript.tokens[name]
    assert engine.cache.pages.used_count == engine.cache.claims.promised_count == 0


def test_what_never_fits_is_refused_with_its_numbers(llama: Path) -> None:
    engine = make_engine(llama, cache_pages=16)
    transcript = run_all(engine, [admission("big", prompt_of(250), Sampling(max_tokens=60))])
    error = transcript.finishes["big"].error
    assert isinstance(error, ResourceExhausted)
    assert int(error.metadata["needed_bytes"]) > int(error.metadata["capacity_bytes"])


def test_delivered_tokens_are_forced_and_numbering_goes_on(llama: Path) -> None:
    prompt = prompt_of(30)
    engine = make_engine(llama)
    whole = run_all(engine, [admission("a", prompt, GREEDY_64)]).tokens["a"]
    again = run_all(engine, [admission("a", prompt, GREEDY_64, delivered=whole[:25], attempt=1)])
    assert again.first_index["a"] == 25
    assert whole[:25] + again.tokens["a"] == whole


def test_sampled_tokens_do_not_depend_on_the_batch(llama: Path) -> None:
    sampling = Sampling(temperature=0.9, top_p=0.95, seed=7, max_tokens=30, ignore_eos=True)
    engine = make_engine(llama)
    alone = run_all(engine, [admission("x", prompt_of(12), sampling)]).tokens["x"]
    crowd = [
        admission(str(i), prompt_of(10 + i), Sampling(temperature=1.0, seed=i, max_tokens=25))
        for i in range(6)
    ]
    together = run_all(engine, [*crowd, admission("x", prompt_of(12), sampling)])
    assert together.tokens["x"] == alone
    other = Sampling(temperature=0.9, top_p=0.95, seed=8, max_tokens=30, ignore_eos=True)
    assert run_all(engine, [admission("x", prompt_of(12), other)]).tokens["x"] != alone


def test_end_of_sequence_stop_tokens_and_min_tokens(llama: Path) -> None:
    engine = make_engine(llama)
    free = run_all(engine, [admission("x", prompt_of(9), GREEDY_64)]).tokens["x"]
    stop = free[10]
    first = free.index(stop)
    sampling = Sampling(max_tokens=64, stop_token_ids=(stop,), ignore_eos=True)
    transcript = run_all(engine, [admission("x", prompt_of(9), sampling)])
    assert transcript.tokens["x"] == free[: first + 1]
    assert transcript.finishes["x"].reason == "stop"
    patient = Sampling(max_tokens=64, stop_token_ids=(stop,), ignore_eos=True, min_tokens=40)
    assert len(run_all(engine, [admission("x", prompt_of(9), patient)]).tokens["x"]) >= 40
    with_eos = make_engine(llama, eos_token_ids=(stop,))
    ended = run_all(with_eos, [admission("x", prompt_of(9), Sampling(max_tokens=64))])
    assert ended.tokens["x"] == free[: first + 1]


def test_cancel_and_pause_touch_only_their_request(llama: Path) -> None:
    engine = make_engine(llama)
    reference = build_tiny("llama-3")
    clear = {name: clear_prompt(reference, 20, 64, seed=len(name)) for name in ("kept", "paused")}
    for name in ("kept", "cancelled", "paused"):
        prompt, _ = clear.get(name, (prompt_of(20), None))
        engine.admit(admission(name, prompt, GREEDY_64))
    transcript = Transcript()
    for _ in range(5):
        transcript.add(engine.step())
    engine.post(Cancel(("cancelled", 0, 0)))
    engine.post(SetPaused(("paused", 0, 0), True))
    before = len(transcript.tokens["paused"])
    for _ in range(100):
        transcript.add(engine.step())
    assert transcript.finishes["cancelled"].reason == "cancelled"
    assert len(transcript.tokens["cancelled"]) <= 5
    assert len(transcript.tokens["paused"]) == before
    assert transcript.finishes["kept"].reason == "length"
    engine.post(SetPaused(("paused", 0, 0), False))
    while not engine.is_idle:
        transcript.add(engine.step())
    for name, (_, wanted) in clear.items():
        assert transcript.tokens[name] == wanted


@pytest.mark.parametrize("length", [10, 150])
def test_nan_fails_its_own_request_only(llama: Path, length: int) -> None:
    """Poison an embedding row: requests that use it fail, at once or chunks later."""
    engine = make_engine(llama)
    poisoned = 5
    own_decoder(engine)._embedding[poisoned] = float("nan")
    bad = prompt_of(length)
    bad[length // 3] = poisoned
    good = [token if token != poisoned else 6 for token in prompt_of(40)]
    sampling = Sampling(max_tokens=8, ignore_eos=True, logit_bias={poisoned: -100.0})
    transcript = run_all(
        engine, [admission("bad", bad, sampling), admission("good", good, sampling)]
    )
    assert isinstance(transcript.finishes["bad"].error, Internal)
    assert "bad" not in transcript.tokens
    assert transcript.finishes["good"].reason == "length"


def test_pages_come_lowest_first_and_only_once() -> None:
    pages = PageAllocator(3)
    taken = [pages.allocate(), pages.allocate(), pages.allocate()]
    assert taken == [0, 1, 2]
    with pytest.raises(ResourceExhausted):
        pages.allocate()
    pages.free(1)
    with pytest.raises(ValueError, match="not in use"):
        pages.free(1)
    assert pages.allocate() == 1
