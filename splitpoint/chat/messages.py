"""The JSON of a chat, checked and brought into the form that templates expect.

Errors name the field and never repeat what the messages say.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MOST_MESSAGES = 4096
# Variables that the caller may not set: the chat itself, and what has a field of its own.
RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})
# Names for a message's reasoning. Templates read the first; some of them `thinking`.
_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat as JSON texts; see ChatPrompt in scheduler.proto. Empty `tools`: none."""

    messages: str
    tools: str = ""
    template_arguments: str = ""
    adds_generation_prompt: bool = True
    continues_final_message: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        """The texts that tell it to the process that renders it."""
        flags = f"{self.adds_generation_prompt:d}{self.continues_final_message:d}"
        return self.messages, self.tools, self.template_arguments, flags

    @classmethod
    def of_parts(cls, parts: Sequence[str]) -> Chat:
        messages, tools, arguments, flags = parts
        return cls(messages, tools, arguments, flags[0] == "1", flags[1] == "1")


@dataclass(frozen=True, slots=True)
class ParsedChat:
    """The same as values. `tools` is None if there are none."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    template_arguments: dict[str, Any]


class ChatError(Exception):
    """A chat that cannot be rendered. `field`: its path below the ChatPrompt."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


def parse_chat(chat: Chat) -> ParsedChat:
    """Return the values of a chat. Raises ChatError."""
    messages = _parsed(chat.messages, "messages", list)
    if not 1 <= len(messages) <= MOST_MESSAGES:
        raise ChatError(
            f"a chat has 1 to {MOST_MESSAGES:,} messages, not {len(messages):,}", "messages"
        )
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]")
        _name_reasoning(message)
    if chat.continues_final_message:
        _check_final(messages[-1], f"messages[{len(messages) - 1}]")
    tools = _parsed(chat.tools, "tools", list) if chat.tools else []
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise ChatError("a tool is a JSON object", f"tools[{index}]")
    arguments = (
        _parsed(chat.template_arguments, "template_arguments", dict)
        if chat.template_arguments
        else {}
    )
    for name in RESERVED & arguments.keys():
        raise ChatError("this variable is the chat's own", f"template_arguments.{name}")
    return ParsedChat(messages, tools or None, arguments)


def in_the_form_of(
    messages: list[dict[str, Any]], *, takes_parts: bool, takes_text: bool, knows_calls: bool
) -> None:
    """Change the contents of messages to what a template can print.

    Args:
        takes_parts: the template goes through lists of parts. Else they are joined by newlines.
        takes_text: it prints texts. Else each becomes a list of one part.
        knows_calls: it prints tool calls, so it knows messages with null contents.
    """
    for message in messages:
        content = message.get("content")
        if content is None and "content" in message and not (knows_calls and _has_calls(message)):
            message["content"] = content = ""
        if isinstance(content, list) and not takes_parts:
            message["content"] = "\n".join(part["text"] for part in content)
        elif isinstance(content, str) and not takes_text:
            message["content"] = [{"type": "text", "text": content}]


def _has_calls(message: dict[str, Any]) -> bool:
    return bool(message.get("tool_calls"))


def _parsed(text: str, field: str, kind: type) -> Any:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ChatError("nested too deeply", field) from None
    except json.JSONDecodeError as error:
        raise ChatError(f"no JSON: {error.msg} at character {error.pos:,}", field) from None
    except ValueError as error:
        raise ChatError(f"no JSON: {error}", field) from None
    if not isinstance(value, kind):
        raise ChatError(f"not a JSON {'array' if kind is list else 'object'}", field)
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"it holds {name}")


def _check_message(message: Any, field: str) -> None:
    if not isinstance(message, dict):
        raise ChatError("a message is a JSON object", field)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ChatError("a message has a role, which is text", f"{field}.role")
    content = message.get("content")
    if isinstance(content, list):
        for index, part in enumerate(content):
            _check_part(part, f"{field}.content[{index}]")
    elif content is not None and not isinstance(content, str):
        raise ChatError("a content is text, null or a list of parts", f"{field}.content")
    if message.get("tool_calls") is not None:
        _read_calls(message["tool_calls"], f"{field}.tool_calls")


def _check_part(part: Any, field: str) -> None:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise ChatError("a part is a JSON object with a type", field)
    if part["type"] != "text":
        raise ChatError("the model reads text: only parts of the type text", f"{field}.type")
    if not isinstance(part.get("text"), str):
        raise ChatError("a part of the type text has a text", f"{field}.text")


def _read_calls(calls: Any, field: str) -> None:
    """Check the calls of a message, and parse their arguments: templates print objects."""
    if not isinstance(calls, list):
        raise ChatError("tool_calls is a list", field)
    for index, call in enumerate(calls):
        where = f"{field}[{index}].function"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ChatError("a call has a function with a name", where)
        arguments = function.get("arguments", "")
        if isinstance(arguments, str):
            text = arguments.strip() or "{}"
            function["arguments"] = _parsed(text, f"{where}.arguments", dict)
        elif not isinstance(arguments, dict):
            raise ChatError("arguments are a JSON object, or its text", f"{where}.arguments")


def _name_reasoning(message: dict[str, Any]) -> None:
    """Give a message's reasoning the names that templates read."""
    given = [message[name] for name in _REASONING if message.get(name) is not None]
    if given:
        message.setdefault("thinking", given[0])
        message["reasoning_content"] = given[0]


def _check_final(message: dict[str, Any], field: str) -> None:
    if message["role"] != "assistant":
        raise ChatError("only a message of the assistant can go on", f"{field}.role")
    if not message.get("content"):
        raise ChatError("the last message has no text that could go on", f"{field}.content")
