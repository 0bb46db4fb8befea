"""Wrong bodies of chats and responses: an error names the field that the client wrote.

Also if the scheduler found it, whatever it calls the field. Those of completions:
test_gateway_completions.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gateway_service.openai.answers import Job
from gateway_service.openai.chat_completions import read_chat
from gateway_service.openai.completions import read_completion
from gateway_service.openai.errors import error_answer
from gateway_service.openai.responses import read_response
from splitpoint.errors import InvalidArgument

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
COMPLETION: dict[str, Any] = {"model": "m", "prompt": "a"}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
RESPONSE: dict[str, Any] = {"model": "m", "input": "Hi"}
Read = Callable[..., Job]


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"properties": {"a": value}}
    return value


WRONG_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "a", "name": "\ud800"}]}, "messages[0].name"),
    ({"messages": [{"role": "user", "content": "a", "x": "\ud800"}]}, "messages"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0].function",
    ),
    ({"functions": []}, "functions"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"chat_template": "x"}, "chat_template"),
    ({"nonsense": 1}, "nonsense"),
    ({"chat_template_kwargs": nested(2000)}, "chat_template_kwargs"),
    (
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": nested(2000)}}],
            "tool_choice": "required",
        },
        "tools",
    ),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 2}, "logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"tools": [ADD, ADD]}, "tools"),
    ({"tools": [{"type": "custom"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [ADD], "tool_choice": "some"}, "tool_choice"),
    (
        {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "no"}}},
        "tool_choice",
    ),
    ({"tools": [ADD], "response_format": {"type": "json_object"}}, "tool_choice"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
    ),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"echo": True}, "echo"),
]
WRONG_RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": [7]}, "input[0]"),
    ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
    ({"input": [{"type": "reasoning", "id": "r"}]}, "input[0].type"),
    ({"input": [{"type": ["message"], "role": "user", "content": "a"}]}, "input[0].type"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0].type",
    ),
    ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
    (
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "[1"}]},
        "input[0].arguments",
    ),
    ({"previous_response_id": ""}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"include": ["file_search_call.results"]}, "include[0]"),
    ({"top_logprobs": 1}, "top_logprobs"),
    ({"top_logprobs": 1, "include": ["reasoning.encrypted_content"]}, "top_logprobs"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
    ({"stream_options": {}}, "stream_options"),
    ({"messages": []}, "messages"),
]


@pytest.mark.parametrize(
    ("read", "body", "parameter"),
    [
        *((read_chat, {**CHAT, **fields}, parameter) for fields, parameter in WRONG_CHATS),
        *((read_response, {**RESPONSE, **fields}, name) for fields, name in WRONG_RESPONSES),
    ],
)
def test_wrong_bodies_name_their_field(read: Read, body: dict[str, Any], parameter: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        read(body, request_id="r", created=0)
    assert raised.value.field == parameter


# -- what the scheduler finds --------------------------------------------------------------------

OUTPUT = "sampling.structured_output"
# Bodies, the field of the scheduler, and the one that the client is told.
EITHER: list[tuple[dict[str, Any], str, str]] = [
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
OF_CHATS: list[tuple[dict[str, Any], str, str]] = [
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
    ({"tools": [ADD], "tool_choice": "required"}, f"{OUTPUT}.json_schema", "tools"),
]


@pytest.mark.parametrize(
    ("read", "body", "field", "parameter"),
    [
        *((read_completion, {**COMPLETION, **fields}, *names) for fields, *names in EITHER),
        *((read_chat, {**CHAT, **fields}, *names) for fields, *names in (*EITHER, *OF_CHATS)),
    ],
)
def test_fields_of_the_scheduler_have_the_clients_name(
    read: Read, body: dict[str, Any], field: str, parameter: str
) -> None:
    job = read(body, request_id="r", created=0)
    answer = error_answer(InvalidArgument("x", field=field), job.parameter_names)
    assert answer.error["param"] == parameter
