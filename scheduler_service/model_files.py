"""The served model from its folder: shape, tokenizer and chat template."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from scheduler_service.options import ServedModel
from splitpoint.chat.renderer import ChatRenderer
from splitpoint.chat.source import (
    TEMPLATE_FILE,
    ChatTemplates,
    read_template_file,
    read_templates,
)
from splitpoint.checkpoint.config import with_context
from splitpoint.checkpoint.decoder import read_shape
from splitpoint.checkpoint.files import is_there
from splitpoint.checkpoint.resolve import TOKENIZER_FILES, eos_token_ids
from splitpoint.checkpoint.text import Tokenizer
from splitpoint.errors import InvalidArgument
from splitpoint.options.scheduler import read_served_names
from splitpoint.shapes import DataType

_log = logging.getLogger(__name__)

# What clients need to tokenize as the model does.
_TOKENIZER_FILES = (*TOKENIZER_FILES, TEMPLATE_FILE)


def load_served_model(
    folder: Path,
    data_type: DataType | None = None,
    *,
    chat_template: Path | None = None,
    served_names: str | None = None,
    max_model_len: int | None = None,
) -> ServedModel:
    """Return the model of a checkpoint folder. `data_type` None: as stored.

    `served_names`: its names for clients, with commas; None: the checkpoint's.
    `max_model_len`: bound of its context in tokens; None: the checkpoint's.

    A template of the folder that cannot be used is a warning, and the model then has none; one
    that is given with `chat_template` is an error.

    Raises InvalidArgument.
    """
    shape = with_context(read_shape(folder, data_type=data_type), max_model_len)
    names = read_served_names(served_names) or (shape.name,)
    tokenizer = Tokenizer.load(folder)
    there = [name for name in _TOKENIZER_FILES if is_there(folder / name)]
    files = {name: folder / name for name in there} if tokenizer is not None else {}
    templates, chats = None, None
    if chat_template is not None:
        if tokenizer is None:
            raise InvalidArgument(
                "a chat template needs a tokenizer, and the model has none", field="chat-template"
            )
        templates = read_template_file(chat_template, folder)
        chats = ChatRenderer(templates)
        files[TEMPLATE_FILE] = chat_template
    elif tokenizer is not None:
        templates, chats = _own_templates(folder)
    return ServedModel(
        replace(shape, name=names[0]),
        tokenizer,
        frozenset(eos_token_ids(folder)),
        chats=chats,
        tool_call_format=templates.tool_call_format if chats and templates else "",
        tokenizer_files=files,
        other_names=names[1:],
    )


def _own_templates(folder: Path) -> tuple[ChatTemplates | None, ChatRenderer | None]:
    """Return the folder's templates; None if there are none that can be used."""
    try:
        templates = read_templates(folder)
        return templates, None if templates is None else ChatRenderer(templates)
    except InvalidArgument as error:
        _log.warning("the model serves no chats: %s", error.message)
        return None, None
