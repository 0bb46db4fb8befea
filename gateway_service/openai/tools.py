"""The fields `tools`, `tool_choice` and `parallel_tool_calls`, and what they ask of an answer."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway_service.openai.answers import Job
from gateway_service.openai.fields import (
    BOOLEAN,
    OBJECT,
    TEXT,
    Field,
    Kind,
    Table,
    array,
    nested,
    one_of,
    read_text,
    wrong,
    wrong_type,
)
from gateway_service.tool_calls.forced import (
    CallArrayParser,
    NamedCallParser,
    call_array_schema,
    parameters_schema,
)
from gateway_service.tool_calls.formats import HermesParser, Llama3JsonParser, MistralParser
from gateway_service.tool_calls.splitter import Piece, ToolCallParser
from splitpoint.v1 import scheduler_pb2 as pb
from splitpoint.v1 import types_pb2

MOST_TOOLS = 128
_MOST_NAME = 64
_NAME_CHARACTERS = frozenset(string.ascii_letters + string.digits + "_-")
_MOST_SCHEMA_BYTES = 64 * 1024


def _read_name(name: str, value: Any) -> str:
    text = read_text(name, value)
    if not 1 <= len(text) <= _MOST_NAME or not _NAME_CHARACTERS.issuperset(text):
        raise wrong(name, f"must be 1 to {_MOST_NAME} of a-z, A-Z, 0-9, _ and -")
    return text


FUNCTION_NAME = Kind(
    _read_name, {"type": "string", "pattern": f"^[a-zA-Z0-9_-]{{1,{_MOST_NAME}}}$"}
)
# The fields of a function, which chat nests in a tool and responses do not.
FUNCTION_FIELDS = (
    Field("name", FUNCTION_NAME, "Name of the function.", is_required=True),
    Field("description", TEXT, "What it does, for the model."),
    Field("parameters", OBJECT, "JSON schema of its arguments, an object. Absent: none."),
    Field("strict", BOOLEAN, "Forced calls follow the schema either way; others do not."),
)
TYPE_FUNCTION = Field("type", one_of("function"), "Functions only.", is_required=True)
_TOOL = Table(
    [
        TYPE_FUNCTION,
        Field("function", nested(Table(FUNCTION_FIELDS)), "The function.", is_required=True),
    ]
)
_NAMED = Table(
    [
        TYPE_FUNCTION,
        Field(
            "function",
            nested(Table([Field("name", FUNCTION_NAME, "Its name.", is_required=True)])),
            "The function to call.",
            is_required=True,
        ),
    ]
)
_MODES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class NamedFunction:
    """A tool_choice that names its function."""

    name: str


ToolChoice = str | NamedFunction


def tool_choice_kind(table: Table, name_of: Callable[[Mapping[str, Any]], str]) -> Kind:
    """A mode, or an object by `table` that names a function."""

    def read(name: str, value: Any) -> ToolChoice:
        if isinstance(value, dict):
            return NamedFunction(name_of(table.read(value, name=name)))
        if not isinstance(value, str):
            raise wrong_type(name, value, "a string or an object")
        if value not in _MODES:
            raise wrong(name, f"must be one of {', '.join(_MODES)}, or an object")
        return value

    return Kind(read, {"anyOf": [{"type": "string", "enum": [*_MODES]}, table.schema]})


TOOLS = Field(
    "tools",
    array(nested(_TOOL), most=MOST_TOOLS),
    "Functions that the model may call.",
)
TOOL_CHOICE = Field(
    "tool_choice",
    tool_choice_kind(_NAMED, lambda given: str(given["function"]["name"])),
    "none: the model does not see the tools; auto: it decides; required, or a named function: it "
    "must call, by structured output. Default: auto with tools, else none.",
)
PARALLEL_TOOL_CALLS = Field(
    "parallel_tool_calls", BOOLEAN, "False: at most one call; others are dropped.", default=True
)
# By Model.tool_call_format. Each takes the names of the request's functions.
_PARSERS: dict[str, Callable[[Sequence[str]], ToolCallParser]] = {
    "hermes": lambda names: HermesParser(),
    "llama3_json": Llama3JsonParser,
    "mistral": lambda names: MistralParser(),
}
# Formats whose marker is a special token, at least in some models.
_FORMATS_OF_SPECIAL_TOKENS = frozenset({"hermes", "mistral"})


class OneCall:
    """Drops all calls of a parser but the first."""

    def __init__(self, parser: ToolCallParser) -> None:
        self._parser = parser

    def push(self, text: str) -> list[Piece]:
        return self._first(self._parser.push(text))

    def finish(self) -> list[Piece]:
        return self._first(self._parser.finish())

    @staticmethod
    def _first(pieces: list[Piece]) -> list[Piece]:
        return [piece for piece in pieces if isinstance(piece, str) or piece.index == 0]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a body says about tools, checked.

    Attributes:
        tools: in the form of chat; empty if the model is not to know any.
        choice: none, auto, required, or the function that must be called.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    choice: ToolChoice = "none"
    is_parallel: bool = True

    @property
    def may_call(self) -> bool:
        return self.choice != "none"

    @property
    def is_forced(self) -> bool:
        """True if the answer is calls, by structured output."""
        return self.may_call and self.choice != "auto"

    def constrain(self, sampling: types_pb2.SamplingParams) -> None:
        """Set what a forced answer must look like.

        Raises InvalidArgument if the body constrains a text that may be calls.
        """
        if self.may_call and sampling.HasField("structured_output"):
            raise wrong(
                "tool_choice",
                "allows calls, which cannot have the form that another field demands: set it to "
                "none, or leave the other field out",
            )
        if not self.is_forced:
            return
        try:
            text = self._schema()
        except RecursionError:
            raise wrong("tools", "have a schema that is nested too deeply") from None
        if len(text) > _MOST_SCHEMA_BYTES:
            raise wrong(
                "tools",
                f"have schemas of {len(text):,} bytes, at most {_MOST_SCHEMA_BYTES:,} when a call "
                "is forced",
            )
        sampling.structured_output.json_schema = text

    def _schema(self) -> str:
        """Return the JSON schema of a forced answer."""
        functions = [each["function"] for each in self.tools]
        if isinstance(self.choice, NamedFunction):
            named = next(each for each in functions if each["name"] == self.choice.name)
            schema = parameters_schema(named.get("parameters"))
        else:
            pairs = [(each["name"], each.get("parameters")) for each in functions]
            schema = call_array_schema(pairs, one=not self.is_parallel)
        return json.dumps(schema)

    def parser(self, tool_call_format: str) -> ToolCallParser | None:
        """Return a parser for one answer; None if its text is content.

        `tool_call_format`: the model's, for the choice auto.
        """
        if isinstance(self.choice, NamedFunction):
            return NamedCallParser(self.choice.name)
        if self.choice == "required":
            return CallArrayParser()
        if self.choice == "none":
            return None
        names = [str(each["function"]["name"]) for each in self.tools]
        parser = _PARSERS[tool_call_format](names)
        return parser if self.is_parallel else OneCall(parser)


def _take_format(requests: Iterable[pb.GenerateRequest], model: pb.Model) -> str:
    """Return a model's form of tool calls, and let the answers' texts keep what marks them.

    Raises InvalidArgument if its answers cannot be searched for calls.
    """
    form = model.tool_call_format
    if form not in _PARSERS:
        known = ", ".join(_PARSERS)
        raise wrong(
            "tool_choice",
            f"auto needs a model whose chat template teaches a known form of tool calls ({known}); "
            "this one's does not. Use required, or name the function.",
            reason="UNSUPPORTED_TOOL_CHOICE",
        )
    if form in _FORMATS_OF_SPECIAL_TOKENS:
        for request in requests:
            request.sampling.keeps_special_tokens = True
    return form


@dataclass(slots=True, kw_only=True)
class CallingJob(Job):
    """What the jobs have in common whose answers may call tools.

    Attributes:
        tool_call_format: of the model; empty unless `needs_model`.
    """

    has_logprobs: bool
    tools: ToolUse
    tool_call_format: str = ""

    @property
    def needs_model(self) -> bool:
        """True if `model_found` is to be called before the requests are sent."""
        return self.tools.choice == "auto"

    def model_found(self, model: pb.Model) -> None:
        """Take the form of its tool calls. Raises InvalidArgument if it has none."""
        self.tool_call_format = _take_format(self.requests, model)


def tool_use(
    values: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None = None
) -> ToolUse:
    """Return the tools of a body. Raises InvalidArgument for fields that contradict each other.

    `tools`: those of the body in the form of chat, if the body has another one.
    """
    given = values.get("tools", ()) if tools is None else tools
    choice: ToolChoice = values.get("tool_choice", "auto" if given else "none")
    names = [each["function"]["name"] for each in given]
    if len(set(names)) < len(names):
        raise wrong("tools", "have two functions of the same name")
    if choice == "none" or (choice == "auto" and not given):
        return ToolUse()
    if not given:
        raise wrong("tool_choice", "needs tools")
    if isinstance(choice, NamedFunction) and choice.name not in names:
        raise wrong("tool_choice", "names a function that is not among the tools")
    return ToolUse(given, choice, values.get("parallel_tool_calls", True))


_MISTRAL_ID_CHARACTERS = string.ascii_letters + string.digits
_MISTRAL_ID_LENGTH = 9


def call_id(tool_call_format: str) -> str:
    """Return a new id of a call. Mistral's templates take only 9 letters and digits."""
    if tool_call_format == "mistral":
        return "".join(secrets.choice(_MISTRAL_ID_CHARACTERS) for _ in range(_MISTRAL_ID_LENGTH))
    return f"call_{secrets.token_hex(12)}"
