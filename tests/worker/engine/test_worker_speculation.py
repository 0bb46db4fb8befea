"""Test that drafts change the time and never the text: resident sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
import torch
from drafter_doubles import Change, KnowingDrafter, sometimes_wrong, wrong
from engine_runner import CPU, Transcript, admission, make_engine, run_all
from long_runs import scaled
from tiny_models import FAMILY_CASES, VOCABULARY, write_tiny
from tokenizers import decoders, models

from splitpoint.checkpoint.text import Tokenizer
from splitpoint.speculation import DraftMethod, Speculation
from worker_service.engine.engine import Engine
from worker_service.engine.messages import Cancel
from worker_service.engine.sampling import Sampling
from worker_service.engine.sequence import Admission
from worker_service.model.decoder import Decoder

NEW = scaled(40, chaos=64)
CHUNK = 16
CHANGES: dict[str, Callable[[], Change]] = {
    "right": lambda: list,
    "wrong": lambda: wrong(VOCABULARY),
    "mixed": lambda: sometimes_wrong(VOCABULARY, 1),
}

pytestmark = [pytest.mark.scaled, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return Decoder.load(write_tiny("llama-3", tmp_path_factory.mktemp("llama")), CPU, torch.float32)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def plain(llama: Decoder) -> Transcript:
    """What eight requests of the first family give without drafts."""
    return run_all(make_engine(llama), eight())


def speculating(requests: Sequence[Admission], k: int) -> list[Admission]:
    """Return the requests with drafts of `k` tokens by the doubles' method."""
    speculation = Speculation(DraftMethod.MODEL, num_speculative_tokens=k)
    return [replace(each, speculation=speculation) for each in requests]


def eight(**changes: object) -> list[Admission]:
    """Return 8 requests, greedy and sampled, of lengths around chunk borders."""
    lengths = (1, 15, 16, 17, 40, 64, 65, 100)
    greedy = Sampling(max_tokens=NEW, ignore_eos=True)
    drawn = replace(greedy, temperature=0.8)
    return [
        admission(
            str(index),
            prompt_of(length),
            replace(drawn if index % 2 else greedy, seed=index, **changes),  # type: ignore[arg-type]
        )
        for index, length in enumerate(lengths)
    ]


def same(found: Transcript, plain: Transcript) -> None:
    assert found.tokens == plain.tokens
    assert {name: finish.reason for name, finish in found.finishes.items()} == {
        name: finish.reason for name, finish in plain.finishes.items()
    }


DRAFTS = ((0, "right"), (1, "mixed"), (3, "wrong"), (3, "mixed"), (8, "right"))
# Some right and some wrong, in the middle of a page and across its end.
MIXED = ((3, "mixed"),)


@pytest.mark.parametrize(
    ("case", "drafts"),
    [
        (FAMILY_CASES[0], DRAFTS),
        *((case, MIXED) for case in FAMILY_CASES[1:]),
        *(pytest.param(case, DRAFTS, marks=pytest.mark.chaos) for case in FAMILY_CASES[1:]),
    ],
)
def test_texts_are_those_of_plain_decoding(
    case: str, drafts: Sequence[tuple[int, str]], tmp_path: Path
) -> None:
    """Decode 8 requests at once, with drafts that are right, wrong, and both."""
    model = Decoder.load(write_tiny(case, tmp_path), CPU, torch.float32)
    plain = run_all(make_engine(model), eight())
    assert all(len(tokens) == NEW for tokens in plain.tokens.values())
    for k, kind in drafts:
        double = KnowingDrafter(plain.tokens, CHANGES[kind]())
        engine = make_engine(model, drafters={DraftMethod.MODEL: double})
        found = run_all(engine, speculating(eight(), k))
        same(found, plain)
        assert engine.cache.pages.used_count == engine.cache.claims.promised_count == 0
        right = sum(event.accepted for event in found.drafts)
        tried = sum(event.drafted for event in found.drafts)
        if k == 0:
            assert not double.asked
        elif kind == "right":
            assert right == tried > 8 * NEW * 15 / 32
            assert found.steps < 0.4 * plain.steps
        elif kind == "wrong":
            assert right == 0 < tried
        else:
            assert 0 < right < tried


@pytest.mark.parametrize(("pages", "second"), [(None, [8, 8, 2]), (3, [3, 8, 6])])
def test_drafts_cross_the_end_of_a_page_if_another_one_is_spare(
    llama: Decoder, pages: int | None, second: list[int]
) -> None:
    """Draft 7 of 8 tokens right; of three pages for two requests the first one takes two."""
    sampling = Sampling(max_tokens=20, ignore_eos=True)
    requests = [admission(name, prompt_of(12, seed), sampling) for seed, name in enumerate("01")]
    plain = run_all(make_engine(llama), requests)

    def nearly_right(tokens: Sequence[int]) -> list[int]:
        return [*tokens[:7], *wrong(VOCABULARY)(tokens[7:])]

    double = KnowingDrafter(plain.tokens, nearly_right)
    engine = make_engine(llama, drafters={DraftMethod.MODEL: double}, cache_pages=pages)
    for each in speculating(requests, 8):
        engine.admit(each)
    found = Transcript()
    while not (found.tokens and engine.is_idle):
        found.add(engine.step())
        # What no text is in is free between steps.
        for sequence in engine.queues.running:
            assert len(sequence.pages) == -(-sequence.computed // CHUNK)
    same(found, plain)
    drafted: dict[str, list[int]] = {"0": [], "1": []}
    for event in found.drafts:
        drafted[event.key[0]].append(event.drafted)
    # The answer's last token needs no row.
    assert drafted == {"0": [8, 8, 2], "1": second}


def test_drafts_evict_no_cached_prefix(llama: Decoder) -> None:
    """Ask for drafts across a page's end while the other pages hold an earlier request's prompt."""
    double = KnowingDrafter({"0": [], "1": [1, 2, 3, 4, 5, 6, 7, 8, 9]})
    engine = make_engine(llama, drafters={DraftMethod.MODEL: double}, cache_pages=5, room_pages=0)
    run_all(engine, [admission("0", prompt_of(4 * CHUNK, 1), Sampling(max_tokens=2))])
    double.asked.clear()
    (second,) = speculating([admission("1", prompt_of(CHUNK - 4, 2), Sampling(max_tokens=20))], 8)
    engine.admit(second)
    for _ in range(2):
        engine.step()
    assert double.asked == [[3]], "one of four free rows is the newest token's own"
    assert engine.cache.pages.cached_count == 4


def test_rows_that_do_not_speculate_run_beside_those_that_do(
    llama: Decoder, plain: Transcript
) -> None:
    double = KnowingDrafter(plain.tokens, sometimes_wrong(VOCABULARY, 2))
    requests = eight()
    mixed = [*speculating(requests[:3], 4), *requests[3:]]
    found = run_all(make_engine(llama, drafters={DraftMethod.MODEL: double}), mixed)
    same(found, plain)
    assert {event.key[0] for event in found.drafts} == {"0", "1", "2"}
    assert sorted(double.forgotten) == [("0", 0, 0), ("1", 0, 0), ("2", 0, 0)]


def test_rows_of_sequences_that_share_a_prefix_read_its_pages_together(llama: Decoder) -> None:
    """Share pages by requests that draft and requests that do not."""
    requests = [replace(each, prompt=(*prompt_of(64, 9), *each.prompt[:20])) for each in eight()]
    plain = run_all(make_engine(llama, shares_prefixes=False), requests)
    double = KnowingDrafter(plain.tokens, sometimes_wrong(VOCABULARY, 7))
    engine = make_engine(llama, drafters={DraftMethod.MODEL: double})
    found = run_all(engine, [*speculating(requests[:5], 6), *requests[5:]])
    same(found, plain)
    assert found.drafts


def test_a_step_verifies_no_more_drafts_than_its_memory_was_planned_for(
    llama: Decoder, plain: Transcript
) -> None:
    double = KnowingDrafter(plain.tokens)
    engine = make_engine(llama, drafters={DraftMethod.MODEL: double}, max_batched_tokens=20)
    found = Transcript()
    for each in speculating(eight(), 8):
        engine.admit(each)
    most = 0
    while not (found.tokens and engine.is_idle):
        output = engine.step()
        found.add(output)
        most = max(most, sum(event.drafted for event in output.drafts))
    same(found, plain)
    assert most <= 20


def test_no_draft_goes_beyond_the_answer_and_the_context(llama: Decoder) -> None:
    """Ask for 8 drafts in each step of an answer that ends where the context ends."""
    context = llama.shape.context_length
    for left in (1, 2, 3, 12):
        sampling = Sampling(max_tokens=left, ignore_eos=True)
        request = [admission("x", prompt_of(context - left), sampling)]
        plain = run_all(make_engine(llama), request)
        texts = {"x": [*plain.tokens["x"], *[5] * 20]}
        double = KnowingDrafter(texts, wrong(VOCABULARY))
        engine = make_engine(llama, drafters={DraftMethod.MODEL: double})
        for each in speculating(request, 8):
            engine.admit(each)
        found = Transcript()
        while not (found.tokens and engine.is_idle):
            done = len(found.tokens.get("x", ()))
            output = engine.step()
            found.add(output)
            for event in output.drafts:
                # The newest token's row gives one more than its drafts.
                assert done + event.drafted + 1 <= left
        same(found, plain)
        assert bool(found.drafts) is (left > 2), left


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("end", ["eos", "stop", "min", "length", "string"])
def test_ends_within_an_accepted_run_are_those_of_plain_decoding(
    llama: Decoder, end: str, temperature: float
) -> None:
    free = Sampling(max_tokens=NEW, ignore_eos=True, temperature=temperature, seed=3)
    text = run_all(make_engine(llama), [admission("x", prompt_of(21), free)]).tokens["x"]
    for place in (9, 11, 14, 17)[:: scaled(2, chaos=1)]:
        sampling = free
        eos: tuple[int, ...] = ()
        if end == "eos":
            sampling, eos = replace(free, ignore_eos=False), (text[place],)
        elif end == "stop":
            sampling = replace(free, stop_token_ids=(text[place],))
        elif end == "min":
            sampling = replace(free, stop_token_ids=(text[place],), min_tokens=place)
        elif end == "length":
            sampling = replace(free, max_tokens=place)
        else:
            sampling = replace(free, stop=(letter(text[place]) + letter(text[place + 1]),))
        request = [admission("x", prompt_of(21), sampling)]
        tokenizer = letters()
        engine = make_engine(llama, eos_token_ids=eos, tokenizer=tokenizer)
        plain = run_all(engine, request)
        double = KnowingDrafter({"x": text})
        engine = make_engine(
            llama,
            eos_token_ids=eos,
            tokenizer=tokenizer,
            drafters={DraftMethod.MODEL: double},
        )
        found = run_all(engine, speculating(request, 8))
        same(found, plain)
        assert 0 < sum(event.accepted for event in found.drafts) < len(found.tokens["x"])
        # Tokens behind the end are counted nowhere; the first one came with the prompt.
        assert found.decoded_tokens == plain.decoded_tokens == len(found.tokens["x"]) - 1


def letter(token: int) -> str:
    return chr(0x4E00 + token)


def letters() -> Tokenizer:
    """Return a tokenizer of which every token is one letter."""
    backend = tokenizers.Tokenizer(
        models.WordLevel({letter(i): i for i in range(VOCABULARY)}, letter(0))
    )
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend)


def test_penalties_and_logprobs_see_the_drafts_before_them(llama: Decoder) -> None:
    """Give every row its own history: a token counts from the row after it on."""
    changes = {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "logprobs": 2,
        "min_tokens": 30,
        "logit_bias": {7: 1.5},
    }

    def run(k: int, change: Change, texts: Transcript | None) -> tuple[Transcript, list[float]]:
        double = KnowingDrafter({} if texts is None else texts.tokens, change)
        engine = make_engine(llama, drafters={DraftMethod.MODEL: double})
        requests = eight(**changes)
        for each in speculating(requests, k) if k else requests:
            engine.admit(each)
        transcript = Transcript()
        scores: dict[tuple[str, int], float] = {}
        while not (transcript.tokens and engine.is_idle):
            output = engine.step()
            transcript.add(output)
            for event in output.tokens:
                assert len(event.choice.top_logprobs) == 2
                scores[event.key[0], event.index] = event.choice.logprob or 0.0
        return transcript, [scores[place] for place in sorted(scores)]

    plain, wanted = run(0, list, None)
    for change in (list, sometimes_wrong(VOCABULARY, 5)):
        found, scores = run(5, change, plain)
        same(found, plain)
        assert scores == pytest.approx(wanted, abs=1e-4)
        assert found.steps < plain.steps


def test_cancelling_in_the_middle_touches_no_other_request(
    llama: Decoder, plain: Transcript
) -> None:
    double = KnowingDrafter(plain.tokens, sometimes_wrong(VOCABULARY, 3))
    engine = make_engine(llama, drafters={DraftMethod.MODEL: double})
    for each in speculating(eight(), 3):
        engine.admit(each)
    found = Transcript()
    for _ in range(6):
        found.add(engine.step())
    engine.post(Cancel(("2", 0, 0)))
    while not engine.is_idle:
        found.add(engine.step())
    assert found.finishes["2"].reason == "cancelled"
    for name, tokens in plain.tokens.items():
        assert found.tokens[name] == (tokens if name != "2" else tokens[: len(found.tokens["2"])])
    assert engine.cache.pages.used_count == 0


def test_sequences_that_leave_the_device_come_back_with_the_same_text(
    llama: Decoder, plain: Transcript
) -> None:
    double = KnowingDrafter(plain.tokens, sometimes_wrong(VOCABULARY, 4))
    engine = make_engine(llama, cache_pages=24, drafters={DraftMethod.MODEL: double})
    found = Transcript()
    preemptions = 0
    for each in speculating(eight(), 4):
        engine.admit(each)
    while not (found.tokens and engine.is_idle):
        output = engine.step()
        preemptions += output.preemption_count
        found.add(output)
    same(found, plain)
    assert preemptions > 0


POISON = 5


@pytest.mark.parametrize("k", [1, 4, 8])
def test_a_draft_that_gives_nan_spoils_nothing(llama: Decoder, tmp_path: Path, k: int) -> None:
    """Draft a token whose embedding is NaN, anywhere among right ones."""
    model = Decoder.load(write_tiny("llama-3", tmp_path), CPU, torch.float32)
    requests = [
        replace(
            each,
            prompt=tuple(6 if token == POISON else token for token in each.prompt),
            sampling=replace(each.sampling, logit_bias={POISON: -100.0}),
        )
        for each in eight()
    ]
    plain = run_all(make_engine(model), requests)
    model._embedding[POISON] = float("nan")
    count = 0

    def poisoned(tokens: Sequence[int]) -> list[int]:
        nonlocal count
        count += 1
        place = count % max(1, len(tokens))
        return [*tokens[:place], POISON, *tokens[place + 1 :]] if count % 3 else list(tokens)

    double = KnowingDrafter(plain.tokens, poisoned)
    engine = make_engine(model, drafters={DraftMethod.MODEL: double})
    found = run_all(engine, speculating(requests, k))
    same(found, plain)
    # A step that a draft spoiled is repeated without drafts.
    assert plain.steps * 2 >= found.steps
    assert any(event.accepted for event in found.drafts)
    for plane in (*engine.cache.keys, *engine.cache.values):
        assert plane.isfinite().all()


def test_large_values_in_spare_rows_change_nothing(llama: Decoder, plain: Transcript) -> None:
    double = KnowingDrafter(plain.tokens, sometimes_wrong(VOCABULARY, 6))
    engine = make_engine(llama, drafters={DraftMethod.MODEL: double})
    for each in speculating(eight(), 4):
        engine.admit(each)
    found = Transcript()
    while not (found.tokens and engine.is_idle):
        found.add(engine.step())
        for sequence in engine.queues.running:
            index, row = divmod(sequence.computed, CHUNK)
            if index < len(sequence.pages):
                for plane in (*engine.cache.keys, *engine.cache.values):
                    plane[sequence.page(index), :, row:] = 1e4
    same(found, plain)


def test_drafts_need_memory_that_is_planned_for_them(llama: Decoder) -> None:
    plain = make_engine(llama)
    with pytest.raises(ValueError, match="draft_tokens"):
        Engine(
            llama,
            plain.cache,
            max_batch_size=4,
            max_batched_tokens=16,
            drafters={DraftMethod.MODEL: KnowingDrafter({})},
        )
