"""What a scheduler is started with, and the served model: shape, tokenizer and chat template."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from scheduler_service.limits import Limits
from scheduler_service.policy.settings import PolicySettings
from splitpoint.chat.renderer import ChatRenderer
from splitpoint.chat.source import TEMPLATE_FILE, ChatTemplates, read_template_file, read_templates
from splitpoint.checkpoint.config import with_context
from splitpoint.checkpoint.decoder import read_shape
from splitpoint.checkpoint.files import is_there
from splitpoint.checkpoint.resolve import TOKENIZER_FILES, eos_token_ids
from splitpoint.checkpoint.text import Tokenizer
from splitpoint.discovery.redis_options import RedisOptions
from splitpoint.errors import InvalidArgument
from splitpoint.options.scheduler import AnswerCharge, read_served_names
from splitpoint.planning.plan import Objective, Residency
from splitpoint.shapes import DataType, ModelShape
from splitpoint.transport.access import Access
from splitpoint.transport.tls import PLAIN, Identity

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


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The one model that the scheduler serves, as its folder describes it."""

    shape: ModelShape
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int] = frozenset()
    # Renders chats. None: the model has no chat template. The scheduler closes it.
    chats: ChatRenderer | None = None
    # The form of tool calls that the chat template teaches; empty: none that is known.
    tool_call_format: str = ""
    # Files of the tokenizer, by the names that they have in a model folder.
    tokenizer_files: Mapping[str, Path] = field(default_factory=dict)
    # Further names by which requests may ask for it, besides the shape's.
    other_names: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All names by which requests may ask for it."""
        return (self.shape.name, *self.other_names)


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """All settings of one scheduler."""

    model: ServedModel
    # Workers with fixed addresses; further ones are found in Redis.
    worker_addresses: Sequence[str]
    # Secret from which the salts of chunk keys are derived.
    server_key: bytes
    limits: Limits = field(default_factory=Limits)
    # For requests that name no residency. None: resident if that fits, else streamed.
    default_residency: Residency | None = None
    # What plans minimize.
    objective: Objective = Objective.LATENCY
    # The answer for which requests are charged at their start.
    answer_charge: AnswerCharge = AnswerCharge.EXPECTED
    # The order in which waiting requests start.
    policy: PolicySettings = field(default_factory=PolicySettings)
    reflection: bool = False
    # Certificate and token that the scheduler shows to clients, workers and stores.
    identity: Identity = PLAIN
    # Tokens that may call. None: every caller may.
    access: Access | None = None
    # None: use only the workers above, and the stores that they name.
    redis: RedisOptions | None = None
