"""Parsers of tool calls: whole texts, and the same texts cut in every way."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import jsonschema
import llguidance
import pytest
from long_runs import scaled

from gateway_service.tool_calls.forced import (
    CallArrayParser,
    NamedCallParser,
    call_array_schema,
    parameters_schema,
)
from gateway_service.tool_calls.formats import HermesParser, Llama3JsonParser, MistralParser
from gateway_service.tool_calls.splitter import (
    CallArguments,
    CallStart,
    ParsedAnswer,
    ToolCallParser,
    joined,
    parse,
)

NAMES = ("get_weather", "add", "look_up")
PARSERS: dict[str, Callable[[], ToolCallParser]] = {
    "hermes": HermesParser,
    "llama3_json": lambda: Llama3JsonParser(NAMES),
    "mistral": MistralParser,
    "array": CallArrayParser,
    "named": lambda: NamedCallParser("add"),
}
WEATHER = '{"city": "Paris \\"}]{ </tool_call>", "days": [1, {"a": 2}]}'
ONE = f'{{"name": "get_weather", "arguments": {WEATHER}}}'

# (parser, text, content, calls as (name, arguments))
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", "Just text.\n", "Just text.\n", []),
    ("hermes", "", "", []),
    ("hermes", f"<tool_call>\n{ONE}\n</tool_call>", "", [("get_weather", WEATHER)]),
    (
        "hermes",
        f"Let me see. \n\n<tool_call>\n{ONE}\n</tool_call>\n<tool_call>"
        '{"name": "add", "arguments": {}}</tool_call>\n',
        "Let me see.",
        [("get_weather", WEATHER), ("add", "{}")],
    ),
    # Arguments first, as text, as null, or missing.
    (
        "hermes",
        '<tool_call>{"arguments": {"a":1}, "name": "add"}</tool_call>',
        "",
        [("add", '{"a":1}')],
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("add", '{"a": 1}')],
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": null}</tool_call>',
        "",
        [("add", "{}")],
    ),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
    # No calls: the text is content as it is.
    ("hermes", "a <tool_call> b", "a <tool_call> b", []),
    ("hermes", "<tool_call>{'name': 1}</tool_call>", "<tool_call>{'name': 1}</tool_call>", []),
    ("hermes", "if a <tool_", "if a <tool_", []),
    ("hermes", '<tool_call>{"name": 7}', '<tool_call>{"name": 7}', []),
    (
        "hermes",
        f"<tool_call><tool_call>{ONE}</tool_call>",
        "<tool_call>",
        [("get_weather", WEATHER)],
    ),
    # The end of the answer cuts a call.
    ("hermes", '<tool_call>{"name": "add", "argu', '<tool_call>{"name": "add", "argu', []),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": [', "", [("add", '{"a": [')]),
    ("hermes", '<tool_call>{"name": "add", "arguments": {}}\n</tool', "", [("add", "{}")]),
    # The closing tag is missing, or something stands before it.
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {}}\n<tool_call>{"name": "add", "arguments": {}}',
        "",
        [("add", "{}"), ("add", "{}")],
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {}} Done.',
        "Done.",
        [("add", "{}")],
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {}, nonsense}</tool_call> Then.',
        " Then.",
        [("add", "{}")],
    ),
    ("llama3_json", "Hello {there}", "Hello {there}", []),
    (
        "llama3_json",
        '{"name": "add", "parameters": {"a": 1}}',
        "",
        [("add", '{"a": 1}')],
    ),
    (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1}}',
        "",
        [("add", '{"a": 1}')],
    ),
    (
        "llama3_json",
        ' {"name": "add", "parameters": {"a": 1}}; {"name": "look_up", "parameters": {}}\n',
        "",
        [("add", '{"a": 1}'), ("look_up", "{}")],
    ),
    # Objects that are no calls of these tools.
    ("llama3_json", '{"name": "Ada", "parameters": {}}', '{"name": "Ada", "parameters": {}}', []),
    ("llama3_json", '{"name": "add"} ', '{"name": "add"} ', []),
    ("llama3_json", '{"answer": [1, 2]}', '{"answer": [1, 2]}', []),
    ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    (
        "llama3_json",
        '{"name": "add", "parameters": {}}; {"x": 1} y',
        '; {"x": 1} y',
        [("add", "{}")],
    ),
    ("mistral", "Plain [TOOL] text", "Plain [TOOL] text", []),
    (
        "mistral",
        f'[TOOL_CALLS] [{ONE}, {{"name": "add", "arguments": {{}}}}]',
        "",
        [("get_weather", WEATHER), ("add", "{}")],
    ),
    (
        "mistral",
        'I look.[TOOL_CALLS]look_up[ARGS]{"q": "[TOOL_CALLS]"}[TOOL_CALLS]add{"a": 1}',
        "I look.",
        [("look_up", '{"q": "[TOOL_CALLS]"}'), ("add", '{"a": 1}')],
    ),
    (
        "mistral",
        '[TOOL_CALLS]add[CALL_ID]Ab3dE6gh9[ARGS]{"a": 1}',
        "",
        [("add", '{"a": 1}')],
    ),
    ("mistral", '[TOOL_CALLS]{"name": "add", "arguments": {}}', "", [("add", "{}")]),
    ("mistral", "[TOOL_CALLS] [] none", "[TOOL_CALLS] [] none", []),
    ("mistral", "[TOOL_CALLS]no call, sorry", "[TOOL_CALLS]no call, sorry", []),
    ("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", []),
    (
        "array",
        f'[{ONE}, {{"name": "add", "parameters": {{"a": 2}}}}]',
        "",
        [("get_weather", WEATHER), ("add", '{"a": 2}')],
    ),
    ("array", "no", "no", []),
    ("named", '{"a": 1}', "", [("add", '{"a": 1}')]),
    ("named", "", "", [("add", "")]),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_a_whole_answer(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    answer = parse(PARSERS[name](), text)
    assert answer.content == content
    assert [(call.name, call.arguments) for call in answer.calls] == calls


def parsed_in_pieces(parser: ToolCallParser, pieces: list[str]) -> ParsedAnswer:
    found = [each for piece in pieces for each in parser.push(piece)]
    return joined([*found, *parser.finish()])


@pytest.mark.parametrize(("name", "text"), [case[:2] for case in CASES])
def test_cuts_leave_no_trace(name: str, text: str) -> None:
    """Every cut in two, each character alone, and random cuts."""
    whole = parse(PARSERS[name](), text)
    assert parsed_in_pieces(PARSERS[name](), list(text)) == whole
    for at in range(len(text) + 1):
        assert parsed_in_pieces(PARSERS[name](), [text[:at], text[at:]]) == whole, at
    rng = random.Random(text)
    for _ in range(20):
        cuts = sorted(rng.choices(range(len(text) + 1), k=5))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parsed_in_pieces(PARSERS[name](), pieces) == whole


# What random answers are made of: parts of all formats, whole and broken.
ATOMS = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"),
    *("{", "}", "[", "]", ",", ":", ";", '"', "\\", " ", "\n", "x", "7", "é", "null"),
    *('"name"', '"add"', '"arguments"', '"parameters"', '{"a": 1}', '"{}"', '"name": "add"'),
    *(ONE, '{"name": "add", "parameters": {}}', '"arguments": {"b": "\\u00e9"}', "add", "<tool"),
)


# Random answers begin with one of these, so that many of them have calls.
BEGINS = {
    "hermes": ["", f"<tool_call>{ONE}", "<tool_call>"],
    "llama3_json": ["", '{"name": "add", "parameters": '],
    "mistral": ["", f"[TOOL_CALLS] [{ONE}", "[TOOL_CALLS]", "[TOOL_CALLS]add"],
    "array": ["", f"[{ONE}", "["],
    "named": [""],
}


@pytest.mark.scaled
@pytest.mark.parametrize("name", PARSERS)
def test_random_answers_are_independent_of_their_cuts(name: str) -> None:
    rng = random.Random(f"cuts of {name}")
    count, call_count = scaled(400, chaos=6000), 0
    for _ in range(count):
        atoms = rng.choices(ATOMS, k=rng.randrange(14))
        text = "".join([rng.choice(BEGINS[name]), *atoms])
        whole = parse(PARSERS[name](), text)
        call_count += len(whole.calls)
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(1, 8)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parsed_in_pieces(PARSERS[name](), pieces) == whole, pieces
        assert parsed_in_pieces(PARSERS[name](), list(text)) == whole, text
        if not whole.calls and name != "named":
            assert whole.content == text  # nothing is lost of an answer without calls
    assert call_count > count // 6


@pytest.mark.parametrize("name", PARSERS)
def test_long_answers_take_linear_time(name: str) -> None:
    """A megabyte of markers: in quadratic time this would take minutes."""
    for text in ("<tool_call>", "[TOOL_CALLS]", '{"name": ', "[", ONE, f"<tool_call>{ONE}"):
        answer = parse(PARSERS[name](), text * ((1 << 20) // len(text)))
        assert answer.content or answer.calls


def test_calls_are_told_early() -> None:
    """The name goes out with the first character of the arguments, which follow as they come."""
    parser = HermesParser()
    assert parser.push('Hm.\n<tool_call>{"name": "add", "argu') == ["Hm."]
    assert parser.push('ments": {') == [CallStart(0, "add"), CallArguments(0, "{")]
    assert parser.push('"a": 1') == [CallArguments(0, '"a": 1')]
    assert parser.push("}}") == [CallArguments(0, "}")]
    assert parser.push("</tool_call>") == []
    assert parser.finish() == []


# -- schemas of forced calls ------------------------------------------------------------------

POINT = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "properties": {
        "at": {"$ref": "#/$defs/point"},
        "$ref": {"type": "string"},
        "kind": {"enum": ["#", {"$ref": "#/$defs/point"}]},
    },
    "required": ["at"],
    "additionalProperties": False,
    "$defs": {"point": {"type": "array", "items": {"type": "integer"}, "maxItems": 2}},
}


def accepts(schema: object, text: str) -> bool:
    """Ask the grammar that the worker would follow."""
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar)
    assert not matcher.is_error(), matcher.get_error()
    count = matcher.try_consume_tokens(list(text.encode()))
    return bool(count == len(text.encode()) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("calls", "is_valid"),
    [
        ([{"name": "move", "parameters": {"at": [1, 2]}}], True),
        ([{"name": "stop", "parameters": {}}], True),
        (
            [{"name": "stop", "parameters": {}}, {"name": "move", "parameters": {"at": []}}],
            True,
        ),
        ([], False),
        ([{"name": "fly", "parameters": {}}], False),
        ([{"name": "move", "parameters": {}}], False),
        ([{"name": "move", "parameters": {"at": [1, 2, 3]}}], False),
        ([{"name": "stop", "parameters": {"at": [1, 2]}}], False),
    ],
)
def test_an_array_of_calls_follows_the_functions_schemas(
    calls: list[object], is_valid: bool
) -> None:
    schema = call_array_schema([("move", POINT), ("stop", None)], one=False)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert jsonschema.Draft202012Validator(schema).is_valid(calls) is is_valid
    assert accepts(schema, json.dumps(calls)) is is_valid


def test_one_call_only() -> None:
    schema = call_array_schema([("stop", {})], one=True)
    one = [{"name": "stop", "parameters": {}}]
    assert accepts(schema, json.dumps(one))
    assert not accepts(schema, json.dumps(one * 2))


def test_arguments_are_objects() -> None:
    assert parameters_schema(None)["additionalProperties"] is False
    assert parameters_schema({"properties": {}})["type"] == "object"
