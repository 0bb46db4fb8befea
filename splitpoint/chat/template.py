"""Renders chats with Jinja, as transformers' `apply_chat_template` does.

Templates come with models, so they are not trusted: they run in Jinja's immutable sandbox, and
services run this module only in a process with limits of its own (`splitpoint.chat.process`).
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from splitpoint.chat.messages import Chat, ChatError, ParsedChat, in_the_form_of, parse_chat

# More than any context that is served; a template cannot fill memory with its output.
MOST_TEXT_BYTES = 4 << 20
_PROBE = "probe4of8contents"
_ERROR_CHARACTERS = 512


class TemplateRefused(jinja2.TemplateError):
    """The template called `raise_exception`."""


class ChatTemplate:
    """One compiled template, and which contents it can print.

    Raises ChatError if the text is no template.
    """

    def __init__(self, text: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(text)
        except jinja2.TemplateError as error:
            line = (
                f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            )
            raise ChatError(f"{error.message}{line}", "template") from error
        except (RecursionError, MemoryError, OverflowError) as error:
            raise ChatError(f"it cannot be compiled: {type(error).__name__}", "template") from error
        self._special_tokens = dict(special_tokens)
        self._knows_calls = "tool_calls" in text
        self._takes_parts = self._prints([{"type": "text", "text": _PROBE}])
        # What prints neither is tried with texts.
        self._takes_text = not self._takes_parts or self._prints(_PROBE)

    def render(self, chat: Chat, parsed: ParsedChat) -> str:
        """Return the prompt. Raises ChatError."""
        messages = parsed.messages
        in_the_form_of(
            messages,
            takes_parts=self._takes_parts,
            takes_text=self._takes_text,
            knows_calls=self._knows_calls,
        )
        mark = _mark_end(messages[-1]) if chat.continues_final_message else ""
        text = self._rendered(
            messages,
            parsed.tools,
            parsed.template_arguments,
            adds_generation_prompt=chat.adds_generation_prompt and not mark,
        )
        return _up_to(mark, text) if mark else text

    def _rendered(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        arguments: Mapping[str, Any],
        *,
        adds_generation_prompt: bool,
    ) -> str:
        variables = {
            "documents": None,
            **self._special_tokens,
            **arguments,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": adds_generation_prompt,
        }
        pieces, size = [], 0
        try:
            for piece in self._template.generate(variables):
                size += len(piece)
                if size > MOST_TEXT_BYTES:
                    break
                pieces.append(piece)
            text = "".join(pieces)
            size = max(size, len(text.encode()))
        except TemplateRefused as error:
            said = (error.message or "")[:_ERROR_CHARACTERS]
            raise ChatError(
                f"the chat template refuses these messages: {said}", "messages"
            ) from None
        except UnicodeEncodeError:
            raise ChatError("they hold half of a surrogate pair", "messages") from None
        except MemoryError:
            raise ChatError("the chat template needs too much memory", "messages") from None
        except RecursionError:
            raise ChatError("the chat template calls itself too often", "messages") from None
        except Exception as error:  # templates can raise whatever the operators of Python raise
            said = str(error)[:_ERROR_CHARACTERS]
            raise ChatError(
                f"the chat template cannot print these messages: {type(error).__name__}: {said}",
                "messages",
            ) from None
        if size > MOST_TEXT_BYTES:
            raise ChatError(
                f"the chat template writes more than {MOST_TEXT_BYTES:,} bytes", "messages"
            )
        return text

    def _prints(self, content: Any) -> bool:
        """Return True if the text of a content comes out, and not the notation of its parts."""
        message = {"role": "user", "content": content}
        try:
            text = self._rendered([message], None, {}, adds_generation_prompt=False)
        except ChatError:
            return False
        return _PROBE in text and "'type'" not in text and '"type"' not in text


class ModelTemplates:
    """The templates of one model.

    Raises ChatError if one of the texts is no template.
    """

    def __init__(
        self, default: str, tool_use: str | None, special_tokens: Mapping[str, str]
    ) -> None:
        self._default = ChatTemplate(default, special_tokens)
        self._tool_use = None if tool_use is None else ChatTemplate(tool_use, special_tokens)

    def render(self, chat: Chat) -> str:
        """Return the prompt of a chat. Raises ChatError."""
        parsed = parse_chat(chat)
        has_own = parsed.tools is not None and self._tool_use is not None
        template = self._tool_use if has_own and self._tool_use is not None else self._default
        return template.render(chat, parsed)


class _Generation(Extension):
    """`{% generation %}` … `{% endgeneration %}`, which mark answers for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _environment() -> ImmutableSandboxedEnvironment:
    """Return Jinja's settings for chat templates, which the models' authors rely on."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    # Jinja's own filter escapes for HTML.
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: object) -> None:
    raise TemplateRefused(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _mark_end(message: dict[str, Any]) -> str:
    """Put a mark behind the text of the last message, and return it.

    It ends in a space, which shows whether the template cuts white space off.
    """
    mark = f"{secrets.token_hex(8)} "
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + mark
    else:
        content[-1]["text"] += mark
    return mark


def _up_to(mark: str, text: str) -> str:
    """Return the text before the mark, without white space if the template cuts that off."""
    begin = text.rfind(mark.strip())
    if begin < 0:
        raise ChatError("the chat template does not print the last message", "messages")
    keeps_spaces = text.startswith(mark, begin)
    return text[:begin] if keeps_spaces else text[:begin].rstrip()
