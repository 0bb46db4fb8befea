"""Masks against texts: what masks allow is what the grammar allows, for tokenizers of all kinds.

No model: tokens are drawn from the masks at random. About 8 s.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from long_runs import scaled
from random_schemas import random_schema
from tiny_tokenizers import byte_level, sentencepiece

from splitpoint.checkpoint.text import TextStream, Tokenizer
from splitpoint.errors import FailedPrecondition, InvalidArgument
from splitpoint.structured.grammar import GrammarKind, GrammarText, grammar_from_proto
from splitpoint.v1 import types_pb2
from worker_service.structured import masks
from worker_service.structured.compiler import GrammarCompiler
from worker_service.structured.masks import MaskFiller, allowed_ids
from worker_service.structured.matcher import GrammarMatcher

ROOT = Path(__file__).parents[3]
TOKENIZERS = {
    "byte-level": Tokenizer(byte_level()),
    "llama-2": Tokenizer(sentencepiece(metaspace=False)),
    "metaspace": Tokenizer(sentencepiece(metaspace=True)),
    "bundled": Tokenizer(
        tokenizers.Tokenizer.from_file(str(ROOT / "models/stdlib-llama/tokenizer.json"))
    ),
}
# Rows of the model beyond the tokenizer's vocabulary, as padded checkpoints have them.
PADDING = 7
NAMES = sorted(TOKENIZERS)
END = {name: 2 if name in ("llama-2", "metaspace") else 1 for name in NAMES}


def size_of(name: str) -> int:
    return TOKENIZERS[name].vocabulary_size + PADDING


@pytest.fixture(scope="module", autouse=True)
def _no_bound_on_seconds() -> Iterator[None]:
    """A loaded machine may take longer for a mask than a request is given."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "MOST_SECONDS", 60.0)
        yield


@pytest.fixture(scope="module")
def compilers() -> Iterator[dict[str, GrammarCompiler]]:
    made = {name: GrammarCompiler(TOKENIZERS[name], size_of(name)) for name in NAMES}
    yield made
    for each in made.values():
        each.close()


def matcher_of(
    compiler: GrammarCompiler,
    kind: GrammarKind,
    text: str,
    ends: Sequence[int] = (),
    least: int = 0,
) -> GrammarMatcher:
    return compiler.matcher(
        GrammarText(kind, text), salt=b"", ends=frozenset(ends), min_tokens=least
    )


def allowed(filler: MaskFiller, matcher: GrammarMatcher, size: int) -> list[int]:
    [masks] = filler.fill([(matcher, ())])
    return [int(index) for index in allowed_ids(masks[0], size)]


def walk(
    name: str, matcher: GrammarMatcher, source: random.Random, most: int = 400
) -> tuple[str, list[int], bool]:
    """Return the text and the tokens of a random answer, and whether it is whole."""
    filler, tokens = MaskFiller(size_of(name)), list[int]()
    while len(tokens) < most and not matcher.is_complete:
        ids = allowed(filler, matcher, size_of(name))
        # Ends are rare among the ids, and so are the short ways to them.
        choice = END[name] if END[name] in ids and source.random() < 0.3 else source.choice(ids)
        if choice == END[name]:
            return TOKENIZERS[name].decode(tokens), tokens, True
        matcher.accept(choice)
        tokens.append(choice)
        assert matcher.error is None
    stream = TextStream(TOKENIZERS[name], ())
    return stream.push(tokens) + stream.finish(), tokens, matcher.is_complete


@pytest.mark.scaled
@pytest.mark.parametrize("name", NAMES)
def test_whole_answers_satisfy_their_schema(
    compilers: dict[str, GrammarCompiler], name: str
) -> None:
    whole, seeds = 0, scaled(24, chaos=120)
    for seed in range(seeds):
        schema = random_schema(seed)
        matcher = matcher_of(
            compilers[name], GrammarKind.JSON_SCHEMA, json.dumps(schema), [END[name]]
        )
        text, tokens, is_whole = walk(name, matcher, random.Random(seed))
        whole += is_whole
        if is_whole:
            jsonschema.validate(json.loads(text), schema)
        # A next attempt that is given some of the tokens goes on in the same way.
        again = compilers[name].matcher(
            GrammarText(GrammarKind.JSON_SCHEMA, json.dumps(schema)),
            salt=b"",
            delivered=tokens[: len(tokens) // 2],
            ends=frozenset([END[name]]),
        )
        again.replay(tokens[len(tokens) // 2 :])
        assert again.is_complete == matcher.is_complete
    assert whole >= seeds * 5 / 6


@pytest.mark.scaled
@pytest.mark.parametrize(
    "schema",
    [
        # Exclusive bounds less than 1 apart, which llguidance alone would take as inclusive.
        {"type": "number", "exclusiveMinimum": 0, "maximum": 0.24},
        {"type": "number", "exclusiveMaximum": -5, "minimum": -5.2},
        {"type": "number", "exclusiveMinimum": 999, "maximum": 999.5},
        {"type": "number", "exclusiveMaximum": -100, "minimum": -100.5},
        {"allOf": [{"type": "number", "exclusiveMinimum": 5}, {"maximum": 5.5}]},
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "type": "number",
            "minimum": 0,
            "exclusiveMinimum": True,
            "maximum": 0.3,
        },
        # Classes with and without quotes.
        {"type": "string", "pattern": '^[^"]{2,9}$'},
        {"type": "string", "pattern": "^[^\\\\]{2,9}$"},
        # One more than the required names: it is not one of them.
        {
            "type": "object",
            "properties": {"a": {"type": "null"}},
            "required": ["a"],
            "patternProperties": {"^[ab]$": {}},
            "additionalProperties": False,
            "minProperties": 2,
            "maxProperties": 2,
        },
        {
            "type": "object",
            "required": ["", "b"],
            "additionalProperties": {"type": "boolean"},
            "minProperties": 3,
            "maxProperties": 4,
        },
    ],
)
def test_what_llguidance_takes_in_another_way(
    compilers: dict[str, GrammarCompiler], schema: dict[str, Any]
) -> None:
    whole, seeds = 0, scaled(16, chaos=40)
    for seed in range(seeds):
        matcher = matcher_of(
            compilers["bundled"], GrammarKind.JSON_SCHEMA, json.dumps(schema), [END["bundled"]]
        )
        text, _, is_whole = walk("bundled", matcher, random.Random(seed))
        whole += is_whole
        if is_whole:
            jsonschema.validators.validator_for(schema)(schema).validate(json.loads(text))
    assert whole >= seeds / 4


def test_a_name_has_one_spelling(compilers: dict[str, GrammarCompiler]) -> None:
    """With another one a member would escape the schema of its name."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tokenizer = TOKENIZERS["bundled"]
    for text, kept in (
        ('{"a":1}', '{"a":1}'),
        ('{"a":"', '{"a":'),
        ('{"b":"', '{"b":"'),
        ('{"\\u0061"', '{"\\'),
        ('{"a":1,"\\u0061":"', '{"a":1,"\\'),
        ('{"\\n":"\\u00e9', '{"\\n":"\\'),
    ):
        tokens = [tokenizer.encode(each, adds_special_tokens=False)[0] for each in text]
        matcher = matcher_of(compilers["bundled"], GrammarKind.JSON_SCHEMA, json.dumps(schema))
        count = 0
        while count < len(tokens) and tokens[count] in allowed(
            MaskFiller(size_of("bundled")), matcher, size_of("bundled")
        ):
            matcher.accept(tokens[count])
            count += 1
        assert text[:count] == kept


@pytest.mark.parametrize("name", NAMES)
def test_masks_are_those_of_an_exhaustive_search(
    compilers: dict[str, GrammarCompiler], name: str
) -> None:
    """Every token is tried on every begin of a text, by the text that it leads to."""
    texts = ["yes", "yes, 2", " no", "nö", "日本", "a\nb"]
    wanted = types_pb2.StructuredOutput(choice=types_pb2.Choices(texts=texts))
    grammar, tokenizer = grammar_from_proto(wanted), TOKENIZERS[name]
    filler, size = MaskFiller(size_of(name)), size_of(name)
    drops = name in ("llama-2", "metaspace")

    def leads(tokens: list[int]) -> bool:
        """True if a text can follow: by bytes, for characters may be cut."""
        spelled = b"".join(tokenizer.token_bytes(each) for each in tokens)
        if drops:
            # Texts that begin with a space make the space before the text necessary.
            return any((b" " + text.encode()).startswith(spelled) for text in texts)
        return any(text.encode().startswith(spelled) for text in texts)

    def after_space(index: int) -> str:
        return tokenizer.token_bytes(index).removeprefix(b" ").decode(errors="replace")

    seen, open_ones = 0, [list[int]()]
    while open_ones:
        tokens = open_ones.pop()
        matcher = compilers[name].matcher(
            grammar, salt=b"", delivered=tokens, ends=frozenset([END[name]])
        )
        if matcher.is_complete:
            assert tokenizer.decode(tokens) in texts
            continue
        found = allowed(filler, matcher, size)
        assert (END[name] in found) == (tokenizer.decode(tokens) in texts)
        found = [each for each in found if each != END[name]]
        possible = [
            each
            for each in range(size)
            if not tokenizer.is_silent(each)
            and leads([*tokens, each])
            # Not every token with spaces loses the first one, and no other, at the begin.
            and (not drops or tokens or tokenizer.decode([each]) == after_space(each))
        ]
        # Of a text that is the only one left, the mask may have the tokenizer's own tokens only.
        assert set(found) <= set(possible)
        assert bool(found) == bool(possible)
        if len({tokenizer.token_bytes(each)[:1] for each in possible}) > 1:
            assert found == possible
        seen += 1
        open_ones += [[*tokens, each] for each in found]
    assert seen > 10


@pytest.mark.scaled
@settings(max_examples=scaled(24, chaos=60))
@given(
    texts=st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=4),
    seed=st.integers(0, 10**6),
    name=st.sampled_from(NAMES),
)
def test_answers_are_one_of_the_choices(
    compilers: dict[str, GrammarCompiler], texts: list[str], seed: int, name: str
) -> None:
    wanted = types_pb2.StructuredOutput(choice=types_pb2.Choices(texts=texts))
    matcher = compilers[name].matcher(
        grammar_from_proto(wanted), salt=b"", ends=frozenset([END[name]])
    )
    text, _, is_whole = walk(name, matcher, random.Random(seed))
    assert is_whole
    assert text in texts


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "pattern", ["[a-z]{2,5}", " ?[0-9]+(\\.[0-9]{2})?", "\\s{1,3}x", "(é|ü|日){1,4}", "[^a]b?"]
)
def test_answers_match_the_whole_expression(
    compilers: dict[str, GrammarCompiler], name: str, pattern: str
) -> None:
    for seed in range(20):
        matcher = matcher_of(compilers[name], GrammarKind.REGEX, pattern, [END[name]])
        text, _, is_whole = walk(name, matcher, random.Random(seed))
        assert not is_whole or re.fullmatch(pattern, text), text


def test_a_grammar_of_ones_own(compilers: dict[str, GrammarCompiler]) -> None:
    lark = 'start: "(" start ")" | NUMBER\nNUMBER: /[0-9]{1,3}/'
    for seed in range(20):
        matcher = matcher_of(compilers["bundled"], GrammarKind.GRAMMAR, lark, [1])
        text, _, is_whole = walk("bundled", matcher, random.Random(seed))
        inner = text.strip("()")
        if is_whole:
            assert inner.isdigit()
            assert text == "(" * text.count("(") + inner + ")" * text.count("(")


def test_an_answer_ends_where_it_may_and_not_before(compilers: dict[str, GrammarCompiler]) -> None:
    filler, tokenizer = MaskFiller(size_of("bundled")), TOKENIZERS["bundled"]
    [a], stop = tokenizer.encode("a", adds_special_tokens=False), 5
    for least, ends in ((0, [1, stop]), (2, [1, stop]), (0, [])):
        matcher = matcher_of(compilers["bundled"], GrammarKind.REGEX, "a{2,}", ends, least)
        for count in range(5):
            found = allowed(filler, matcher, size_of("bundled"))
            may_end = count >= max(2, least)
            assert [each for each in (1, stop) if each in found] == (ends if may_end else [])
            matcher.accept(a)
    # One that can only end does, whatever min_tokens says.
    matcher = matcher_of(compilers["bundled"], GrammarKind.REGEX, "a{1}", [1], 9)
    matcher.accept(a)
    assert matcher.is_complete


def test_a_stop_token_is_no_part_of_an_answer(compilers: dict[str, GrammarCompiler]) -> None:
    """Where the grammar needs it as text, nothing is left."""
    tokenizer = TOKENIZERS["bundled"]
    spelled = [
        index
        for index in range(tokenizer.vocabulary_size)
        if not tokenizer.is_silent(index) and b"a".startswith(tokenizer.token_bytes(index)[:1])
    ]
    matcher = matcher_of(compilers["bundled"], GrammarKind.REGEX, "a+", spelled)
    filler = MaskFiller(size_of("bundled"))
    assert filler.fill([(matcher, ())]) == [[]]
    assert isinstance(matcher.error, InvalidArgument)
    assert matcher.error.reason == "GRAMMAR_DEAD_END"


def test_drafts_are_kept_as_far_as_they_leave_the_answer_open(
    compilers: dict[str, GrammarCompiler],
) -> None:
    tokenizer, size = TOKENIZERS["bundled"], size_of("bundled")
    a, b, c = (tokenizer.encode(text, adds_special_tokens=False)[0] for text in "abc")
    filler = MaskFiller(size)
    for drafts, count in (([a, a, b, c], 3), ([a, a, b, c, c], 3), ([a, c], 1), ([c], 0), ([], 0)):
        matcher = matcher_of(compilers["bundled"], GrammarKind.REGEX, "a+bc", [1])
        before = allowed(filler, matcher, size)
        assert matcher.allowed_drafts(drafts) == count
        assert matcher.allowed_drafts([1]) == 0
        assert allowed(filler, matcher, size) == before
        # Masks behind drafts are those that plain decoding meets.
        [masks] = filler.fill([(matcher, drafts[:count])])
        assert len(masks) == count + 1
        for place, mask in enumerate(masks):
            assert [int(each) for each in allowed_ids(mask, size)] == allowed(filler, matcher, size)
            if place < count:
                matcher.accept(drafts[place])


def test_tokens_that_do_not_fit_are_refused(compilers: dict[str, GrammarCompiler]) -> None:
    compiler, grammar = compilers["bundled"], GrammarText(GrammarKind.REGEX, "ab")
    [c] = TOKENIZERS["bundled"].encode("c", adds_special_tokens=False)
    with pytest.raises(InvalidArgument) as refused:
        compiler.matcher(grammar, salt=b"", delivered=[c])
    assert refused.value.field == "resume.token_ids"
    # The grammar that is kept is as new.
    assert compiler.matcher(grammar, salt=b"").error is None


def test_a_grammar_that_gets_too_complex_ends_its_answer_alone(
    compilers: dict[str, GrammarCompiler],
) -> None:
    size, filler = size_of("bundled"), MaskFiller(size_of("bundled"))
    heavy = "start: A\nA: /(.*a){9}.*/ & /(.*b){9}.*/ & /(.*c){9}.*/ & ~/(.*d){9}.*/"
    bad = matcher_of(compilers["bundled"], GrammarKind.GRAMMAR, heavy, [1])
    good = matcher_of(compilers["bundled"], GrammarKind.REGEX, "[a-z]+", [1])
    wanted = allowed(filler, good, size)
    failed, [mask] = filler.fill([(bad, ()), (good, ())])
    assert failed == []
    assert bad.error is not None
    assert bad.error.reason == "GRAMMAR_TOO_COMPLEX"
    assert [int(each) for each in allowed_ids(mask, size)] == wanted


def test_a_tokenizer_that_changes_texts_is_refused() -> None:
    backend = byte_level()
    backend.normalizer = tokenizers.normalizers.Lowercase()
    assert GrammarCompiler.if_possible(Tokenizer(backend), 500) is None
    assert GrammarCompiler.if_possible(None, 500) is None
    compiler = GrammarCompiler(Tokenizer(backend), 500)
    with pytest.raises(FailedPrecondition) as refused:
        matcher_of(compiler, GrammarKind.REGEX, "a")
    assert refused.value.reason == "STRUCTURED_OUTPUT_UNAVAILABLE"
    compiler.close()
