"""An error names the field that the client wrote, whatever the scheduler calls it."""

from __future__ import annotations

from typing import Any

import pytest

from gateway_service.openai.chat_completions import read_chat
from gateway_service.openai.completions import read_completion
from gateway_service.openai.errors import error_answer
from splitpoint.errors import InvalidArgument

FUNCTION = {"type": "function", "function": {"name": "f"}}
OUTPUT = "sampling.structured_output"
EITHER = [
    ({"guided_regex": "((("}, f"{OUTPUT}.regex", "guided_regex"),
    ({"guided_regex": "((("}, OUTPUT, "guided_regex"),
    ({"guided_json": {"type": "x"}}, f"{OUTPUT}.json_schema", "guided_json"),
    ({"guided_grammar": "x"}, f"{OUTPUT}.grammar", "guided_grammar"),
    ({"guided_choice": ["a"]}, f"{OUTPUT}.choice", "guided_choice"),
    ({"guided_choice": ["a", "b"]}, f"{OUTPUT}.choice[1]", "guided_choice[1]"),
    (
        {"structured_outputs": {"regex": "((("}},
        f"{OUTPUT}.regex",
        "structured_outputs.regex",
    ),
    ({"response_format": {"type": "json_object"}}, f"{OUTPUT}.json_object", "response_format"),
    ({}, "sampling.stop[1]", "stop[1]"),
    ({}, "cache_salt", "cache_salt"),
]


def named(job: Any, field: str) -> object:
    return error_answer(InvalidArgument("x", field=field), job.parameter_names).error["param"]


@pytest.mark.parametrize(("body", "field", "parameter"), EITHER)
def test_of_a_completion(body: dict[str, Any], field: str, parameter: str) -> None:
    body = {"model": "m", "prompt": "a", **body}
    job = read_completion(body, request_id="r", created=0)
    assert named(job, field) == parameter


@pytest.mark.parametrize(
    ("body", "field", "parameter"),
    [
        *EITHER,
        ({}, "chat.messages", "messages"),
        (
            {},
            "chat.messages[3].tool_calls[0].function.arguments",
            "messages[3].tool_calls[0].function.arguments",
        ),
        ({}, "chat.tools[1]", "tools[1]"),
        ({}, "chat.template_arguments", "chat_template_kwargs"),
        ({}, "chat.template_arguments.messages", "chat_template_kwargs.messages"),
        ({"max_completion_tokens": 5}, "sampling.max_tokens", "max_completion_tokens"),
        (
            {"tools": [FUNCTION], "tool_choice": "required"},
            f"{OUTPUT}.json_schema",
            "tools",
        ),
    ],
)
def test_of_a_chat(body: dict[str, Any], field: str, parameter: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], **body}
    job = read_chat(body, request_id="r", created=0)
    assert named(job, field) == parameter
