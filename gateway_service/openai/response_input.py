"""The input of /v1/responses as the messages of a chat, and its tools in the form of chat."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gateway_service.openai.fields import Field, Kind, Table, read_text, wrong, wrong_type
from gateway_service.openai.messages import MOST_MESSAGES, read_part
from gateway_service.openai.response_answers import NamedTool, Tool
from gateway_service.openai.tools import (
    FUNCTION_FIELDS,
    FUNCTION_NAME,
    TYPE_FUNCTION,
    NamedFunction,
    tool_choice_kind,
)

# Parts of a message's content by their type, and the field that has the text.
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_OUTPUT_PARTS = {"input_text": "text"}
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}

Message = dict[str, Any]


def _read_input(name: str, value: Any) -> list[Message]:
    """Return the messages of a text, or of a list of items."""
    if isinstance(value, str):
        if not value:
            raise wrong(name, "must not be empty")
        return [{"role": "user", "content": read_text(name, value)}]
    if not isinstance(value, list):
        raise wrong_type(name, value, "a string or an array of items")
    if not value:
        raise wrong(name, "must not be empty")
    if len(value) > MOST_MESSAGES:
        raise wrong(name, f"has {len(value):,} items, at most {MOST_MESSAGES:,}")
    messages: list[Message] = []
    for index, item in enumerate(value):
        _add_item(messages, f"{name}[{index}]", item)
    return messages


def _add_item(messages: list[Message], name: str, item: Any) -> None:
    if not isinstance(item, dict):
        raise wrong_type(name, item, "an object")
    kind = item.get("type")
    match "message" if kind is None else kind:
        case "message":
            messages.append(_message(name, item))
        case "function_call":
            _add_call(messages, name, item)
        case "function_call_output":
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": read_text(f"{name}.call_id", item.get("call_id")),
                    "content": _content(f"{name}.output", item.get("output"), _OUTPUT_PARTS),
                }
            )
        case "item_reference":
            raise wrong(f"{name}.type", "refers to what is not here: nothing is stored")
        case _:
            raise wrong(
                f"{name}.type",
                "must be message, function_call or function_call_output",
                reason="UNSUPPORTED_CONTENT",
            )


def _message(name: str, item: Mapping[str, Any]) -> Message:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong(f"{name}.role", f"must be one of {', '.join(_ROLES)}")
    content = _content(f"{name}.content", item.get("content"), _TEXT_PARTS)
    return {"role": _ROLES[role], "content": content}


def _content(name: str, value: Any, kinds: Mapping[str, str]) -> str | list[dict[str, str]]:
    if isinstance(value, str):
        return read_text(name, value)
    if not isinstance(value, list):
        raise wrong_type(name, value, "a string or an array of parts")
    return [read_part(f"{name}[{index}]", part, kinds) for index, part in enumerate(value)]


def _add_call(messages: list[Message], name: str, item: Mapping[str, Any]) -> None:
    """Add a call to the assistant's message before it, which may have text or other calls."""
    call = {
        "id": read_text(f"{name}.call_id", item.get("call_id")),
        "type": "function",
        "function": {
            "name": read_text(f"{name}.name", item.get("name")),
            "arguments": _arguments(f"{name}.arguments", item.get("arguments")),
        },
    }
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    messages[-1].setdefault("tool_calls", []).append(call)


def _arguments(name: str, value: Any) -> str:
    """Return the arguments of a call, which templates need as an object."""
    text = read_text(name, value)
    try:
        parsed = json.loads(text or "{}")
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise wrong(name, "must be a JSON object, as text")
    return text


def _parts_schema(kinds: Mapping[str, str]) -> dict[str, Any]:
    parts = [
        {
            "type": "object",
            "properties": {"type": {"const": kind}, field: {"type": "string"}},
            "required": ["type", field],
        }
        for kind, field in kinds.items()
    ]
    return {"anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": parts}}]}


def _item_schema(kind: str, required: Sequence[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "type": {"const": kind} if "type" in required else {"enum": [kind, None]},
            **properties,
        },
        "required": [*required],
    }


_STRING = {"type": "string"}
_ITEM_SCHEMA = {
    "anyOf": [
        _item_schema(
            "message",
            ("role", "content"),
            role={"type": "string", "enum": [*_ROLES]},
            content=_parts_schema(_TEXT_PARTS),
        ),
        _item_schema(
            "function_call",
            ("type", "call_id", "name", "arguments"),
            call_id=_STRING,
            name=_STRING,
            arguments=_STRING,
        ),
        _item_schema(
            "function_call_output",
            ("type", "call_id", "output"),
            call_id=_STRING,
            output=_parts_schema(_OUTPUT_PARTS),
        ),
    ]
}
INPUT = Kind(
    _read_input,
    {
        "anyOf": [
            {"type": "string", "minLength": 1},
            {"type": "array", "items": _ITEM_SCHEMA, "minItems": 1, "maxItems": MOST_MESSAGES},
        ]
    },
)

TOOL = Table([TYPE_FUNCTION, *FUNCTION_FIELDS])
TOOL_CHOICE = tool_choice_kind(
    Table([TYPE_FUNCTION, Field("name", FUNCTION_NAME, "Its name.", is_required=True)]),
    lambda given: str(given["name"]),
)


def chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function in the form of chat."""
    function = {key: value for key, value in tool.items() if key != "type"}
    return {"type": "function", "function": function}


def shown_tool(tool: Mapping[str, Any]) -> Tool:
    """Return a function as a response repeats it, with what was left out."""
    return {
        "description": tool.get("description"),
        "parameters": tool.get("parameters"),
        "strict": tool.get("strict"),
        "type": "function",
        "name": tool["name"],
    }


def shown_choice(choice: str | NamedFunction) -> str | NamedTool:
    """Return a tool_choice as a response repeats it."""
    if isinstance(choice, NamedFunction):
        return {"type": "function", "name": choice.name}
    return choice
