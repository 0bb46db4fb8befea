"""The chat templates of a model folder, as text. Nothing here runs them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from splitpoint.checkpoint.files import is_there, read_bytes, read_object
from splitpoint.errors import InvalidArgument

MOST_TEMPLATE_BYTES = 1 << 20
TEMPLATE_FILE = "chat_template.jinja"
# Further templates of a folder, each in NAME.jinja.
NAMED_FOLDER = "additional_chat_templates"
_DEFAULT = "default"
_TOOL_USE = "tool_use"
# Tokens that templates may write, as `tokenizer_config.json` names them.
_NAMED_TOKENS = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token"),
    "mask_token",
)
# Texts by which a template teaches its model to call tools. The first that occurs counts.
_TOOL_CALL_FORMATS = {
    "[TOOL_CALLS]": "mistral",
    "<tool_call>": "hermes",
    "<|python_tag|>": "llama3_json",
    '{"name": function name, "parameters"': "llama3_json",
}


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """A model's templates in Jinja's language.

    Attributes:
        default: for every chat.
        tool_use: for chats with tools instead; None: the default, too.
        special_tokens: text of each named token of the tokenizer, such as `bos_token`.
    """

    default: str
    tool_use: str | None = None
    special_tokens: dict[str, str] = field(default_factory=dict)

    @property
    def tool_call_format(self) -> str:
        """The form of tool calls that they teach: hermes, llama3_json, mistral, or empty."""
        text = self.default if self.tool_use is None else self.tool_use
        return next((name for mark, name in _TOOL_CALL_FORMATS.items() if mark in text), "")


def read_templates(folder: Path) -> ChatTemplates | None:
    """Return the templates of a model folder; None if it has no default one.

    `chat_template.jinja` and files of `additional_chat_templates` come before what
    `tokenizer_config.json` holds: a text, or a list of named ones. Raises InvalidArgument for
    files that cannot be read, and for templates of more than 1 MiB.
    """
    config = folder / "tokenizer_config.json"
    settings = read_object(config) if is_there(config) else {}
    named = _in_files(folder) or _in_settings(settings.get("chat_template"), config)
    if _DEFAULT not in named:
        return None
    return ChatTemplates(named[_DEFAULT], named.get(_TOOL_USE), _special_tokens(folder, settings))


def read_template_file(path: Path, folder: Path) -> ChatTemplates:
    """Return the template in a file, with the special tokens of a model folder.

    Raises InvalidArgument if one of them cannot be read, or has more than 1 MiB.
    """
    if not is_there(path):
        raise InvalidArgument(f"{path}: no such file", field="chat-template")
    config = folder / "tokenizer_config.json"
    settings = read_object(config) if is_there(config) else {}
    return ChatTemplates(_text(path), None, _special_tokens(folder, settings))


def special_tokens_json(templates: ChatTemplates) -> str:
    """Return everything that the rendering process needs to know, as JSON."""
    return json.dumps(
        {
            "default": templates.default,
            "tool_use": templates.tool_use,
            "special_tokens": templates.special_tokens,
        }
    )


def _in_files(folder: Path) -> dict[str, str]:
    """Return the templates in files of their own, by name. Empty without a default one."""
    if not is_there(folder / TEMPLATE_FILE):
        return {}
    found = {_DEFAULT: _text(folder / TEMPLATE_FILE)}
    tool_use = folder / NAMED_FOLDER / f"{_TOOL_USE}.jinja"
    if is_there(tool_use):
        found[_TOOL_USE] = _text(tool_use)
    return found


def _in_settings(value: Any, path: Path) -> dict[str, str]:
    """Return the templates of `tokenizer_config.json`, by name. Raises InvalidArgument."""
    entries = value if isinstance(value, list) else []
    if isinstance(value, str):
        entries = [{"name": _DEFAULT, "template": value}]
    elif value is not None and not isinstance(value, list):
        raise InvalidArgument(f"{path}: chat_template is neither text nor a list", field="model")
    found = {}
    for entry in entries:
        name = entry.get("name") if isinstance(entry, dict) else None
        text = entry.get("template") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not isinstance(text, str):
            raise InvalidArgument(
                f"{path}: each chat_template needs a name and a template", field="model"
            )
        if len(text.encode(errors="replace")) > MOST_TEMPLATE_BYTES:
            raise InvalidArgument(
                f"{path}: a chat_template has more than {MOST_TEMPLATE_BYTES:,} bytes",
                field="model",
            )
        found[name] = text
    return found


def _text(path: Path) -> str:
    try:
        return read_bytes(path, MOST_TEMPLATE_BYTES).decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path} is not UTF-8", field="model") from error


def _special_tokens(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Return the named tokens that have a text; those of `special_tokens_map.json` first."""
    path = folder / "special_tokens_map.json"
    known = {**settings, **(read_object(path) if is_there(path) else {})}
    found = {}
    for name in _NAMED_TOKENS:
        token = known.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            found[name] = token
    return found
