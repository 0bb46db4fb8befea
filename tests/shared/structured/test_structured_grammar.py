"""Grammars of requests: their bounds, and the process that compiles them within limits. 12 s."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest
from random_schemas import random_schema

from splitpoint.errors import InvalidArgument, SplitpointError
from splitpoint.structured.checker import GrammarChecker
from splitpoint.structured.grammar import (
    MOST_BYTES,
    GrammarKind,
    GrammarText,
    grammar_from_proto,
)
from splitpoint.v1 import types_pb2

Output = types_pb2.StructuredOutput
SLOW = json.dumps(
    {"allOf": [{"type": "string", "pattern": f".*{chr(97 + index)}.*"} for index in range(26)]}
)


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    made = GrammarChecker()
    yield made
    made.close()


def schema(value: object) -> GrammarText:
    return GrammarText(GrammarKind.JSON_SCHEMA, json.dumps(value))


@pytest.mark.parametrize(
    ("message", "field", "said"),
    [
        (Output(), "", "no kind"),
        (Output(json_object=False), "json_object", "must be true"),
        (Output(json_schema=""), "json_schema", "empty"),
        (Output(json_schema="{"), "json_schema", "no JSON"),
        (Output(json_schema="[1]"), "json_schema", "JSON object"),
        (Output(json_schema="[" * 50_000), "json_schema", "no JSON"),
        (Output(json_schema=" " * (MOST_BYTES + 1)), "json_schema", "bytes, at most"),
        (Output(regex="a" * (MOST_BYTES + 1)), "regex", "bytes, at most"),
        (Output(grammar="ä" * (MOST_BYTES // 2 + 1)), "grammar", "bytes, at most"),
        (Output(choice=types_pb2.Choices()), "choice.texts", "0 texts"),
        (Output(choice=types_pb2.Choices(texts=["a"] * 1025)), "choice.texts", "1,025|1025"),
        (Output(choice=types_pb2.Choices(texts=["a", ""])), "choice.texts[1]", "empty"),
        (Output(choice=types_pb2.Choices(texts=["a" * 70_000])), "choice", "bytes, at most"),
    ],
)
def test_what_no_grammar_can_be_is_refused(message: Output, field: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said) as refused:
        grammar_from_proto(message)
    assert refused.value.field == f"sampling.structured_output.{field}".rstrip(".")


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (GrammarText(GrammarKind.REGEX, "a("), "unclosed group"),
        (GrammarText(GrammarKind.REGEX, "(?=a)b"), "look-ahead"),
        (GrammarText(GrammarKind.REGEX, r"(a)\1"), "backreferences"),
        (GrammarText(GrammarKind.REGEX, r"[^\s\S]"), "no text satisfies it"),
        (GrammarText(GrammarKind.REGEX, "()"), "only the empty text"),
        (GrammarText(GrammarKind.REGEX, "(" * 20_000 + "a" + ")" * 20_000), "invalid regex"),
        (GrammarText(GrammarKind.GRAMMAR, 'start: "a" foo'), "unknown name"),
        (GrammarText(GrammarKind.GRAMMAR, "start: start"), "no text satisfies it"),
        (schema({"type": "objct"}), "Invalid type"),
        (schema({"not": {}}), "Unimplemented keys"),
        (schema({"uniqueItems": True}), "Unimplemented keys"),
        (schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf"),
        (schema({"$ref": "http://example.com/x.json"}), "not fetch"),
        (schema({"$ref": "file:///etc/passwd"}), "not fetch"),
        (schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "no text"),
        # What llguidance would take in another way than JSON Schema means it.
        (schema({"type": "object", "minProperties": 2}), "#: minProperties 2 beside 0 required"),
        (
            schema({"required": ["a"], "patternProperties": {"^b": {}}, "minProperties": 3}),
            "minProperties 3 beside 1 required name: at most 2",
        ),
        (schema({"$ref": "#/$defs/a", "$defs": {"a": {"minProperties": 2}}}), "#/.defs/a: minP"),
        (schema({"$ref": "#/default/0", "default": [{"minProperties": 2}]}), "#/default/0: minP"),
        (schema({"allOf": [{}, {"minProperties": 2}]}), "#/allOf/1: minProperties"),
        (schema({"items": {"anyOf": [{"minProperties": 9}]}}), "#/items/anyOf/0: minProperties"),
        (schema({"properties": {"default": {"minProperties": 2}}}), "#/properties/default: minP"),
        (schema({"prefixItems": [{}], "additionalItems": False}), "additionalItems"),
        (schema({"type": "integer", "minimum": 2**53 + 1}), "minimum is beyond"),
        (schema({"const": 1 << 70}), "integer of more than 64 bits"),
        (schema({"maximum": float("inf")}), "no JSON: Infinity"),
        (GrammarText(GrammarKind.JSON_SCHEMA, '{"maximum": 1e999}'), "number beyond"),
        (schema({"type": "string", "pattern": "^[[:alpha:]]$"}), "a class with"),
        (schema({"type": "string", "pattern": "^[a-z--b]$"}), "a class with"),
        (schema({"patternProperties": {"[a&&b]": {}}}), "a class with"),
        (schema({"type": "string", "pattern": "[^]]"}), "begins with `]`"),
        (schema({"type": "string", "pattern": "^a\\x01b$"}), "a control character"),
        (schema({"type": "string", "pattern": "^a\x01b$"}), "a control character"),
        (schema({"type": "string", "pattern": "^[\\x00-\\x20]$"}), "a control character"),
        (schema({"type": "string", "pattern": "\\P{L}"}), "or a class that has them"),
        (schema({"type": "string", "pattern": "\\p{Cc}"}), "or a class that has them"),
        (schema({"enum": ["a\x01"]}), "a constant has a control"),
        (schema(False), "schema is false"),
        # What a schema says of itself does not make it lenient.
        (schema({"not": {}, "x-guidance": {"lenient": True}}), "Unimplemented keys"),
    ],
)
def test_what_cannot_be_compiled_says_why(
    checker: GrammarChecker, grammar: GrammarText, said: str
) -> None:
    for _ in range(2):  # the second time from memory
        with pytest.raises(InvalidArgument, match=said) as refused:
            checker.check(grammar)
        assert refused.value.reason == "BAD_GRAMMAR"
        assert refused.value.field == grammar.field
        assert len(refused.value.message) <= 500


@pytest.mark.parametrize(
    "value",
    [
        True,
        {"type": "object", "minProperties": 1},
        {"type": "object", "required": ["a"], "minProperties": 2},
        # Data, and the name of a member.
        {"const": {"minProperties": 2}},
        {"type": "object", "properties": {"minProperties": {"type": "null"}}},
        {"type": "string", "pattern": "^[\\]\\[a&]&&[^x\\]]--$"},
        {"type": "string", "pattern": "^\\p{Lu}\\.\\x41\\u0042[^\\x00-\\x1f]\\t\\x0a$"},
        {"const": "\\u0001 \t"},
        {"items": [{}], "additionalItems": False},
        {"type": "number", "exclusiveMinimum": 2**53},
    ],
)
def test_what_can_be_kept_is_not_refused(checker: GrammarChecker, value: object) -> None:
    checker.check(schema(value))


def test_random_schemas_compile(checker: GrammarChecker) -> None:
    for seed in range(500):
        checker.check(schema(random_schema(seed)))


def test_one_that_takes_minutes_is_stopped_and_stops_nothing_else() -> None:
    checker = GrammarChecker()
    failures: list[SplitpointError] = []

    def slow() -> None:
        try:
            checker.check(GrammarText(GrammarKind.JSON_SCHEMA, SLOW))
        except SplitpointError as error:
            failures.append(error)

    thread = threading.Thread(target=slow)
    thread.start()
    while thread.is_alive() and not checker._pool.idle_pids:
        checker.check(GrammarText(GrammarKind.REGEX, f"a{time.monotonic_ns()}"))
    thread.join()
    [failure] = failures
    assert isinstance(failure, InvalidArgument)
    assert "more than 2 s" in failure.message
    # It is not tried again.
    assert checker.knows(GrammarText(GrammarKind.JSON_SCHEMA, SLOW))
    with pytest.raises(InvalidArgument, match="more than 2 s"):
        checker.check(GrammarText(GrammarKind.JSON_SCHEMA, SLOW))
    checker.check(GrammarText(GrammarKind.REGEX, "after"))
    checker.close()


def test_a_process_that_was_killed_is_replaced(checker: GrammarChecker) -> None:
    checker.check(GrammarText(GrammarKind.REGEX, "before"))
    [pid, *_] = checker._pool.idle_pids
    os.kill(pid, signal.SIGKILL)
    checker.check(GrammarText(GrammarKind.REGEX, "after the kill"))


def test_nothing_is_left_after_close() -> None:
    checker = GrammarChecker()
    checker.check(GrammarText(GrammarKind.REGEX, "x"))
    [pid] = checker._pool.idle_pids
    checker.close()
    checker.close()
    assert not os.path.exists(f"/proc/{pid}")
    # One that is used all the same leaves nothing either.
    checker.check(GrammarText(GrammarKind.REGEX, "y"))
    assert checker._pool.idle_pids == []


def test_a_process_ends_with_its_service() -> None:
    code = (
        "import os, sys\n"
        "from splitpoint.structured.checker import GrammarChecker\n"
        "from splitpoint.structured.grammar import GrammarKind, GrammarText\n"
        "checker = GrammarChecker()\n"
        "checker.check(GrammarText(GrammarKind.REGEX, 'x'))\n"
        "print(checker._pool.idle_pids[0], flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    import sys

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    pid = int(done.stdout)
    deadline = time.monotonic() + 20
    while os.path.exists(f"/proc/{pid}") and state_of(pid) != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.02)


def state_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"
