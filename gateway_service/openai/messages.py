"""The messages of a chat: light checks, and the form in which the scheduler renders them.

What a model's template makes of them, and the checks of their contents, are the scheduler's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gateway_service.openai.fields import (
    BOOLEAN,
    OBJECT,
    TEXT,
    Kind,
    Schema,
    extra,
    object_schema,
    read_array,
    read_text,
    wrong,
    wrong_type,
)
from splitpoint.v1 import scheduler_pb2 as pb

MOST_MESSAGES = 4096
# Parts of a content by their type, and the field that has the text.
_TEXT_PARTS = {"text": "text", "refusal": "refusal"}
# Fields of older or other messages that hold nothing for a template if they are null.
_DROPPED = frozenset({"annotations", "audio", "refusal"})
_ROLES = {"developer": "system"}


def _read_messages(name: str, value: Any) -> list[dict[str, Any]]:
    found = read_array(name, value, "an array", "message", MOST_MESSAGES)
    return [_read_message(f"{name}[{index}]", message) for index, message in enumerate(found)]


def _read_message(name: str, value: Any) -> dict[str, Any]:
    """Return a message without what is null, and with contents as text or parts of text."""
    if not isinstance(value, dict):
        raise wrong_type(name, value, "an object")
    message = {key: item for key, item in value.items() if item is not None and key not in _DROPPED}
    role = read_text(f"{name}.role", message.get("role"))
    if not role:
        raise wrong(f"{name}.role", "must not be empty")
    message["role"] = _ROLES.get(role, role)
    if "function_call" in message:
        raise wrong(f"{name}.function_call", "is not supported: use tool_calls")
    for key in ("name", "tool_call_id"):
        if key in message:
            read_text(f"{name}.{key}", message[key])
    if "tool_calls" in message:
        _check_calls(f"{name}.tool_calls", message["tool_calls"])
    if message.setdefault("content", None) is not None:
        message["content"] = read_content(f"{name}.content", message["content"], _TEXT_PARTS)
    elif role == "assistant" and value.get("refusal"):
        message["content"] = read_text(f"{name}.refusal", value["refusal"])
    elif not message.get("tool_calls"):
        raise wrong(f"{name}.content", "must not be null", reason="MISSING_REQUIRED_PARAMETER")
    return message


def _check_calls(name: str, calls: Any) -> None:
    """Check the form of calls; whether their arguments are JSON is the scheduler's to find out."""
    if not isinstance(calls, list):
        raise wrong_type(name, calls, "an array")
    for index, call in enumerate(calls):
        where = f"{name}[{index}]"
        if not isinstance(call, dict):
            raise wrong_type(where, call, "an object")
        if call.get("id") is not None:
            read_text(f"{where}.id", call["id"])
        if call.get("type", "function") != "function":
            raise wrong(f"{where}.type", "must be function", reason="UNSUPPORTED_CONTENT")
        function = call.get("function")
        if not isinstance(function, dict):
            raise wrong_type(f"{where}.function", function, "an object")
        read_text(f"{where}.function.name", function.get("name"))
        if not isinstance(function.get("arguments"), dict):
            read_text(f"{where}.function.arguments", function.get("arguments"))


def read_content(name: str, value: Any, kinds: Mapping[str, str]) -> str | list[dict[str, str]]:
    """Return a content as text or parts of text. `kinds`: fields of the text by type of part."""
    if isinstance(value, str):
        return read_text(name, value)
    if not isinstance(value, list):
        raise wrong_type(name, value, "a string or an array of parts")
    return [_read_part(f"{name}[{index}]", part, kinds) for index, part in enumerate(value)]


def _read_part(name: str, value: Any, kinds: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(value, dict):
        raise wrong_type(name, value, "an object")
    kind = read_text(f"{name}.type", value.get("type"))
    if kind not in kinds:
        raise wrong(
            f"{name}.type",
            f"must be {' or '.join(kinds)}: only text is served",
            reason="UNSUPPORTED_CONTENT",
        )
    field = kinds[kind]
    return {"type": "text", "text": read_text(f"{name}.{field}", value.get(field))}


def content_schema(kinds: Mapping[str, str]) -> list[Schema]:
    """Return the alternatives of a content: a text, or parts. `kinds`: as of `read_content`."""
    parts = [
        object_schema(("type", field), type={"const": kind}, **{field: TEXT.schema})
        for kind, field in kinds.items()
    ]
    return [TEXT.schema, {"type": "array", "items": {"anyOf": parts}}]


_TEXT_OR_NULL = {"type": ["string", "null"]}
_CALL_SCHEMA = object_schema(
    ["function"],
    id=_TEXT_OR_NULL,
    type={"const": "function"},
    function=object_schema(
        ["name", "arguments"],
        name=TEXT.schema,
        arguments={
            "type": ["string", "object"],
            "description": "A JSON object, usually as text.",
        },
    ),
)
_MESSAGE_SCHEMA = object_schema(
    ["role"],
    role={
        "type": "string",
        "minLength": 1,
        "description": "system, developer, user, assistant, tool, or what the template knows.",
    },
    content={"anyOf": [*content_schema(_TEXT_PARTS), {"type": "null"}]},
    tool_calls={"anyOf": [{"type": "array", "items": _CALL_SCHEMA}, {"type": "null"}]},
    tool_call_id=_TEXT_OR_NULL,
    name=_TEXT_OR_NULL,
)
MESSAGES = Kind(
    _read_messages,
    {"type": "array", "items": _MESSAGE_SCHEMA, "minItems": 1, "maxItems": MOST_MESSAGES},
)

# How a chat becomes a prompt. The names are vLLM's.
CHAT_PROMPT_FIELDS = (
    extra(
        "chat_template_kwargs",
        OBJECT,
        "Further variables of the chat template, such as enable_thinking.",
    ),
    extra("add_generation_prompt", BOOLEAN, "Begin an answer behind the last message.", True),
    extra(
        "continue_final_message",
        BOOLEAN,
        "Go on in the last message, which is the assistant's.",
        False,
    ),
)


def chat_prompt(values: Mapping[str, Any], messages: Any, tools: Any) -> pb.ChatPrompt:
    """Return the prompt of a chat, with the fields of `CHAT_PROMPT_FIELDS` in `values`.

    Raises InvalidArgument.
    """
    prompt = pb.ChatPrompt(messages=as_json("messages", messages))
    if tools:
        prompt.tools = as_json("tools", tools)
    if "chat_template_kwargs" in values:
        arguments = values["chat_template_kwargs"]
        prompt.template_arguments = as_json("chat_template_kwargs", arguments)
    if values.get("continue_final_message", False):
        if values.get("add_generation_prompt", False):
            raise wrong("continue_final_message", "cannot come with add_generation_prompt")
        prompt.continues_final_message = True
    prompt.omits_generation_prompt = not values.get("add_generation_prompt", True)
    return prompt


def as_json(name: str, value: Any) -> str:
    """Return a value as JSON text for the scheduler. Raises InvalidArgument with `name`."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise wrong(name, "is nested too deeply") from None
    read_text(name, text)
    return text
