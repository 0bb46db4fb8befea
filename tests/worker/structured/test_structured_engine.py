"""Structured output in an engine: drafts, other requests, moves and errors change no answer.

A tiny random model with the bundled tokenizer: without masks it writes nothing of sense.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jsonschema
import pytest
import torch
from drafter_doubles import Change, KnowingDrafter, sometimes_wrong, wrong
from engine_runner import CPU, Transcript, admission, make_engine
from long_runs import scaled
from random_schemas import random_schema
from tiny_models import write_tiny

from splitpoint.checkpoint.text import Tokenizer
from splitpoint.speculation import DraftMethod, Speculation
from splitpoint.structured.grammar import GrammarKind, GrammarText
from worker_service.engine import model_runner
from worker_service.engine.engine import Engine
from worker_service.engine.messages import StepOutput
from worker_service.engine.sampling import Choice, Sampling
from worker_service.engine.sequence import Admission
from worker_service.model.decoder import Decoder
from worker_service.structured.compiler import GrammarCompiler
from worker_service.structured.masks import MOST_SECONDS
from worker_service.structured.matcher import GrammarMatcher

if TYPE_CHECKING:
    from llguidance import LLMatcher

BUNDLED = Path(__file__).parents[3] / "models" / "stdlib-llama"
EOS = 1
LOADED = Tokenizer.load(BUNDLED)
assert LOADED is not None
TOKENIZER: Tokenizer = LOADED
VOCABULARY = 4096
GREETING = GrammarText(GrammarKind.REGEX, "(hello|good morning), [a-z]{3,12}( [a-z]{1,9}){0,3}!")
NUMBERS = GrammarText(GrammarKind.REGEX, "[0-9]+")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoder]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = write_tiny("llama", tmp_path_factory.mktemp("m"), vocab_size=VOCABULARY)
    yield Decoder.load(folder, CPU, torch.float32)
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler.if_possible(TOKENIZER, VOCABULARY)
    assert made is not None
    yield made
    made.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps wait for masks: on a busy machine one that is late costs a step its drafts."""
    monkeypatch.setattr(model_runner, "PATIENCE_SECONDS", 60.0)


@dataclass
class Answers(Transcript):
    """Also keeps the choices."""

    def __post_init__(self) -> None:
        self.choices: dict[str, list[Choice]] = {}
        self.preemption_count = 0

    def add(self, output: StepOutput) -> None:
        super().add(output)
        self.preemption_count += output.preemption_count
        for event in output.tokens:
            self.choices.setdefault(event.key[0], []).append(event.choice)

    def text(self, name: str) -> str:
        return TOKENIZER.decode(self.tokens.get(name, []))

    def reason(self, name: str) -> str:
        finish = self.finishes[name]
        assert finish.error is None, finish.error
        return finish.reason


def asked(
    name: str,
    grammar: GrammarText | None,
    prompt: Sequence[int] = (5, 6, 7),
    *,
    speculation: Speculation | None = None,
    delivered: Sequence[int] = (),
    **sampling: object,
) -> Admission:
    options = {"max_tokens": 64, **sampling}
    made = admission(name, prompt, Sampling(**options), delivered=delivered)  # type: ignore[arg-type]
    made = replace(made, grammar=grammar)
    return made if speculation is None else replace(made, speculation=speculation)


def run(
    engine: Engine,
    compiler: GrammarCompiler,
    admissions: Sequence[Admission],
) -> Answers:
    """Admit everything at once and step until idle, as the runtime does."""
    for each in admissions:
        matcher = None
        if each.grammar is not None:
            ends = set(each.sampling.stop_token_ids)
            if not each.sampling.ignore_eos:
                ends.update(engine.eos_token_ids)
            matcher = compiler.matcher(
                each.grammar,
                salt=each.salt,
                delivered=each.delivered,
                ends=frozenset(ends),
                min_tokens=each.sampling.min_tokens,
            )
        engine.admit(each, matcher=matcher)
    answers = Answers()
    for _ in range(5000):
        answers.add(output := engine.step())
        if engine.is_idle:
            return answers
        if not engine.can_go_on(output):
            engine.wait(30)  # for a late mask
    raise AssertionError("not idle")


def engine_of(model: Decoder, **options: object) -> Engine:
    return make_engine(model, eos_token_ids=(EOS,), tokenizer=TOKENIZER, **options)  # type: ignore[arg-type]


def mixed(count: int, speculation: Speculation | None = None) -> list[Admission]:
    """Greedy and sampled requests with schemas, with expressions, and without either."""
    made = []
    for index in range(count):
        grammar = (
            GrammarText(GrammarKind.JSON_SCHEMA, json.dumps(random_schema(index))),
            GREETING,
            None,
            GrammarText(GrammarKind.JSON_OBJECT, ""),
        )[index % 4]
        made.append(
            asked(
                f"r{index}",
                grammar,
                [3 + index, 9, 4, 200 + index],
                speculation=speculation,
                # Where thousands of tokens are about as likely as each other, the order of
                # additions would decide between them.
                temperature=(0.0, 0.3)[index // 4 % 2],
                top_p=(1.0, 0.95)[index // 8 % 2],
                seed=index,
                max_tokens=48,
            )
        )
    return made


def test_answers_belong_to_their_grammars(model: Decoder, compiler: GrammarCompiler) -> None:
    requests = mixed(48)
    answers = run(engine_of(model), compiler, requests)
    whole = 0
    for index, request in enumerate(requests):
        name = request.request_id
        if answers.reason(name) != "stop" or request.grammar is None:
            continue
        whole += 1
        if request.grammar.kind is GrammarKind.JSON_SCHEMA:
            jsonschema.validate(json.loads(answers.text(name)), random_schema(index))
        elif request.grammar.kind is GrammarKind.JSON_OBJECT:
            assert isinstance(json.loads(answers.text(name)), dict)
        else:
            assert answers.text(name)[-1] == "!"
    assert whole >= 20


@pytest.fixture(scope="module")
def plain(model: Decoder, compiler: GrammarCompiler) -> Answers:
    """What 16 requests answer together, without drafts."""
    return run(engine_of(model), compiler, mixed(16))


@pytest.mark.scaled
def test_an_answer_is_independent_of_the_requests_beside_it(
    model: Decoder, compiler: GrammarCompiler, plain: Answers
) -> None:
    together = plain
    # A third of them are of all kinds, too.
    for request in mixed(16)[:: scaled(3, chaos=1)]:
        alone = run(engine_of(model), compiler, [request])
        name = request.request_id
        assert alone.tokens[name] == together.tokens[name]
        assert alone.finishes[name].reason == together.finishes[name].reason


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("change", [list, wrong(VOCABULARY), sometimes_wrong(VOCABULARY, 5)])
@pytest.mark.parametrize("count", [1, 5])
def test_drafts_change_no_answer(
    model: Decoder, compiler: GrammarCompiler, plain: Answers, change: Change, count: int
) -> None:
    drafter = KnowingDrafter(plain.tokens, change)
    speculation = Speculation(DraftMethod.MODEL, count)
    engine = engine_of(model, drafters={DraftMethod.MODEL: drafter})
    drafted = run(engine, compiler, mixed(16, speculation))
    assert drafted.tokens == plain.tokens
    assert {k: f.reason for k, f in drafted.finishes.items()} == {
        k: f.reason for k, f in plain.finishes.items()
    }
    accepted = sum(event.accepted for event in drafted.drafts)
    if change is list:
        assert drafted.steps < plain.steps
        assert accepted > 0.5 * sum(event.drafted for event in drafted.drafts)


@pytest.mark.usefixtures("patient")
def test_drafts_that_break_the_grammar_are_not_computed(
    model: Decoder, compiler: GrammarCompiler
) -> None:
    plain = run(engine_of(model), compiler, [asked("r", NUMBERS, temperature=1.0, seed=3)])
    letters = TOKENIZER.encode("hello", adds_special_tokens=False)
    drafter = KnowingDrafter(plain.tokens, lambda tokens: [*tokens[:1], *letters])
    engine = engine_of(model, drafters={DraftMethod.MODEL: drafter})
    request = asked(
        "r", NUMBERS, temperature=1.0, seed=3, speculation=Speculation(DraftMethod.MODEL, 4)
    )
    drafted = run(engine, compiler, [request])
    assert drafted.tokens == plain.tokens
    assert drafted.drafts
    assert all(event.drafted == event.accepted == 1 for event in drafted.drafts)


@pytest.mark.scaled
def test_an_answer_goes_on_elsewhere_after_any_token(
    model: Decoder, compiler: GrammarCompiler
) -> None:
    schema = GrammarText(GrammarKind.JSON_SCHEMA, json.dumps(random_schema(3)))
    cases: tuple[tuple[GrammarText, dict[str, Any]], ...] = (
        (GREETING, {"temperature": 0.3, "seed": 4}),
        (schema, {}),
    )
    for grammar, options in cases:
        whole = run(engine_of(model), compiler, [asked("r", grammar, **options)]).tokens["r"]
        for count in range(1, min(len(whole), scaled(6, chaos=12))):
            rest = run(
                engine_of(model),
                compiler,
                [asked("r", grammar, delivered=whole[:count], **options)],
            )
            assert rest.tokens["r"] == whole[count:]


def test_a_sequence_that_leaves_the_device_keeps_its_place_in_the_grammar(
    model: Decoder, compiler: GrammarCompiler
) -> None:
    requests = mixed(12)
    wanted = run(engine_of(model), compiler, requests)
    # Four sequences of up to four pages in six.
    got = run(engine_of(model, cache_pages=6), compiler, requests)
    assert got.preemption_count > 0
    assert got.tokens == wanted.tokens


def test_logprobs_are_of_the_tokens_that_may_follow(
    model: Decoder, compiler: GrammarCompiler
) -> None:
    pair = GrammarText(GrammarKind.REGEX, "(a|b)(1|2|3)")
    answers = run(engine_of(model), compiler, [asked("r", pair, logprobs=20)])
    first, second = answers.choices["r"][:2]
    for choice, most in ((first, 20), (second, 4)):
        assert choice.logprob is not None
        found = dict(choice.top_logprobs)
        assert len(found) <= most
        assert found[choice.token_id] == choice.logprob == max(found.values())
        assert math.fsum(map(math.exp, found.values())) == pytest.approx(1)


def test_an_answer_that_cannot_go_on_ends_whatever_was_asked_for(
    model: Decoder, compiler: GrammarCompiler
) -> None:
    three = GrammarText(GrammarKind.REGEX, "[ax]{3}")
    answers = run(
        engine_of(model),
        compiler,
        [
            asked("plain", three),
            asked("least", three, min_tokens=40),
            asked("no end", three, ignore_eos=True),
            asked("long", GrammarText(GrammarKind.REGEX, "[0-9]{90}"), max_tokens=9),
        ],
    )
    assert [answers.reason(name) for name in ("plain", "least", "no end")] == ["stop"] * 3
    assert all(len(answers.text(name)) == 3 for name in ("plain", "least", "no end"))
    assert answers.reason("long") == "length"


def test_an_end_of_sequence_ends_a_whole_answer_only(
    model: Decoder, compiler: GrammarCompiler
) -> None:
    """With all weight on the end, it comes as soon as the grammar lets it."""
    bias = {EOS: 100.0}
    many = GrammarText(GrammarKind.REGEX, "[0-9]{3,}")
    answers = run(
        engine_of(model),
        compiler,
        [
            asked("soon", many, logit_bias=bias),
            asked("later", many, logit_bias=bias, min_tokens=20),
            asked("never", many, logit_bias=bias, ignore_eos=True, max_tokens=30),
        ],
    )
    assert answers.tokens["soon"][-1] == EOS
    assert 3 <= len(answers.text("soon")) <= 9
    assert answers.tokens["later"][-1] == EOS
    assert len(answers.tokens["later"]) == 21
    assert EOS not in answers.tokens["never"]
    assert [answers.reason(name) for name in ("soon", "later", "never")] == [
        "stop",
        "stop",
        "length",
    ]


def test_a_stop_string_ends_an_answer(model: Decoder, compiler: GrammarCompiler) -> None:
    answers = run(engine_of(model), compiler, [asked("r", GREETING, stop=(",",))])
    assert answers.reason("r") == "stop"
    assert answers.text("r").count(",") == 1
    assert answers.text("r")[-1] == ","


def test_a_grammar_that_fails_ends_its_own_request(
    model: Decoder, compiler: GrammarCompiler
) -> None:
    heavy = GrammarText(
        GrammarKind.GRAMMAR,
        "start: A\nA: /(.*a){9}.*/ & /(.*b){9}.*/ & /(.*c){9}.*/ & ~/(.*d){9}.*/",
    )
    wanted = run(engine_of(model), compiler, mixed(8))
    answers = run(engine_of(model), compiler, [*mixed(8), asked("heavy", heavy)])
    error = answers.finishes["heavy"].error
    assert error is not None
    assert error.reason == "GRAMMAR_TOO_COMPLEX"
    assert "heavy" not in answers.tokens
    assert answers.tokens == wanted.tokens


def test_drafts_keep_to_allowed_tokens_and_off_bad_words(
    model: Decoder, compiler: GrammarCompiler
) -> None:
    few: dict[str, Any] = {"allowed_token_ids": (11, 12, 13), "seed": 2, "temperature": 1.0}
    few |= {"bad_words": ((11, 12), (13, 13, 13)), "max_tokens": 40}
    plain = run(engine_of(model), compiler, [asked("r", None, [5, 11], **few)])
    tokens = plain.tokens["r"]
    assert set(tokens) == {11, 12, 13}
    assert not {(11, 12)} & set(pairwise(tokens))
    assert (13, 13, 13) not in zip(tokens, tokens[1:], tokens[2:], strict=False)
    drafter = KnowingDrafter(plain.tokens, sometimes_wrong(VOCABULARY, 5))
    engine = engine_of(model, drafters={DraftMethod.MODEL: drafter})
    speculation = Speculation(DraftMethod.MODEL, 4)
    drafted = run(engine, compiler, [asked("r", None, [5, 11], speculation=speculation, **few)])
    assert drafted.tokens == plain.tokens
    assert sum(event.accepted for event in drafted.drafts) > 5
    # An answer that an earlier attempt began goes on as it would have.
    rest = run(engine_of(model), compiler, [asked("r", None, [5, 11], delivered=tokens[:9], **few)])
    assert rest.tokens["r"] == tokens[9:]


class HeldMatcher:
    """llguidance's matcher, whose masks wait until they are let go, except for the first ones."""

    def __init__(self, inner: LLMatcher, free: int) -> None:
        self._inner = inner
        self._free = free
        self.let_go = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
        self._free -= 1
        assert self._free >= 0 or self.let_go.wait(60), "a step waits for this mask"
        self._inner.unsafe_compute_mask_ptr(pointer, size)


@pytest.mark.parametrize("free", [0, 1])
def test_a_mask_that_takes_long_keeps_only_its_own_sequence_out_of_the_steps(
    model: Decoder, compiler: GrammarCompiler, free: int
) -> None:
    """Its first one, behind the prompt, or the next one, behind a token."""
    slow = asked("slow", GREETING, [5, 6, 7, 8], temperature=0.3)
    others = [asked("free", None, max_tokens=30), asked("ruled", GREETING, seed=4)]
    wanted = run(engine_of(model), compiler, [slow, *others])
    engine, ends = engine_of(model), frozenset([EOS])
    held = HeldMatcher(compiler.matcher(GREETING, salt=b"", ends=ends).inner, free)
    engine.admit(slow, matcher=GrammarMatcher(cast("LLMatcher", held), ends=ends))
    engine.admit(others[0])
    engine.admit(others[1], matcher=compiler.matcher(GREETING, salt=b"", ends=ends))
    answers = Answers()
    while not {"free", "ruled"} <= answers.finishes.keys():
        answers.add(engine.step())
    while engine.can_go_on(output := engine.step()):
        answers.add(output)
    # No step runs for it alone.
    assert not output.ran
    assert len(answers.tokens.get("slow", ())) == free
    held.let_go.set()
    while not engine.is_idle:
        answers.add(output := engine.step())
        if not engine.can_go_on(output):
            engine.wait(60)
    assert answers.tokens == wanted.tokens
    assert {name: end.reason for name, end in answers.finishes.items()} == {
        name: end.reason for name, end in wanted.finishes.items()
    }


def test_an_answer_ends_whose_mask_takes_too_much_of_the_processor(
    model: Decoder, compiler: GrammarCompiler
) -> None:
    class Busy(HeldMatcher):
        def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
            began = time.thread_time()
            while time.thread_time() - began <= MOST_SECONDS:
                pass
            super().unsafe_compute_mask_ptr(pointer, size)

    inner = Busy(compiler.matcher(GREETING, salt=b"", ends=frozenset([EOS])).inner, 9)
    engine = engine_of(model)
    engine.admit(
        asked("slow", GREETING),
        matcher=GrammarMatcher(cast("LLMatcher", inner), ends=frozenset([EOS])),
    )
    answers = run(engine, compiler, [asked("free", None, max_tokens=9)])
    assert answers.reason("free") == "length"
    error = answers.finishes["slow"].error
    assert error is not None
    assert error.reason == "GRAMMAR_TOO_COMPLEX"


def test_a_request_without_a_grammar_costs_nothing(
    model: Decoder, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model)
    filler = engine._runner._mask_filler

    def refused(*_: object) -> None:
        raise AssertionError("masks were computed")

    monkeypatch.setattr(type(filler), "fill", refused)
    answers = run(engine, compiler, [asked("r", None, max_tokens=8, ignore_eos=True)])
    assert len(answers.tokens["r"]) == 8
