"""What an answer must look like, as requests say it and as llguidance reads it.

llguidance is an extra. Only `GrammarText.source` and `parser_limits` import it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from splitpoint.config import counted
from splitpoint.errors import FailedPrecondition, InvalidArgument
from splitpoint.structured.schema import read_schema
from splitpoint.v1 import types_pb2

if TYPE_CHECKING:
    import llguidance

FIELD = "sampling.structured_output"
MOST_BYTES = 64 * 1024
MOST_CHOICES = 1024
# States of one answer; each takes 1 to 2 KiB.
MOST_LEXER_STATES = 50_000
# Work on a lexer before its first mask; 1024 choices of 60 characters take less than half of it.
MOST_LEXER_FUEL = 100_000

# Between the tokens of a JSON text: nothing, one space, or a new line with its indentation. With
# any white space at all, a model could go on with it for ever.
WHITE_SPACE = r"[ ]|\n[ ]{0,32}"
_META_CHARACTERS = re.compile(r"[\\.+*?()|\[\]{}^$#&\-~/]")


class GrammarKind(StrEnum):
    """The fields of StructuredOutput."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class GrammarText:
    """What an answer must look like.

    Attributes:
        text: as the request has it; of choices a regular expression.
    """

    kind: GrammarKind
    text: str

    @property
    def field(self) -> str:
        return f"{FIELD}.{self.kind.value}"

    def source(self, before: str = "") -> str:
        """Return llguidance's form, with a Lark expression `before` the answer.

        Raises InvalidArgument for a schema that cannot be read.
        """
        from llguidance import LLMatcher

        match self.kind:
            case GrammarKind.JSON_OBJECT:
                source = _of_schema({"type": "object"})
            case GrammarKind.JSON_SCHEMA:
                source = _of_schema(_schema(self.text))
            case GrammarKind.GRAMMAR:
                source = LLMatcher.grammar_from_lark(self.text)
            case GrammarKind.REGEX | GrammarKind.CHOICE:
                source = LLMatcher.grammar_from_regex(self.text)
        if not before:
            return source
        [answer] = json.loads(source)["grammars"]
        start = {"lark_grammar": f"start: {before} @answer"}
        return json.dumps({"grammars": [start, {**answer, "name": "answer"}]})


def has_llguidance() -> bool:
    """Return True if the extra `structured` is installed."""
    return find_spec("llguidance") is not None


def unavailable(what: str) -> FailedPrecondition:
    return FailedPrecondition(what, reason="STRUCTURED_OUTPUT_UNAVAILABLE")


def grammar_from_proto(message: types_pb2.StructuredOutput) -> GrammarText:
    """Return the grammar of a message. Raises InvalidArgument, which names the field."""
    which = message.WhichOneof("kind")
    if which is None:
        raise InvalidArgument("no kind is set", field=FIELD)
    kind = GrammarKind(which)
    if kind is GrammarKind.JSON_OBJECT:
        if not message.json_object:
            raise InvalidArgument("must be true", field=f"{FIELD}.{kind.value}")
        return GrammarText(kind, "")
    if kind is GrammarKind.CHOICE:
        return GrammarText(kind, _of_choices(message.choice.texts))
    text: str = getattr(message, kind.value)
    if not text:
        raise InvalidArgument("it is empty", field=f"{FIELD}.{kind.value}")
    _check_size(len(text.encode()), kind)
    if kind is GrammarKind.JSON_SCHEMA:
        _schema(text)
    return GrammarText(kind, text)


def parser_limits() -> llguidance.LLParserLimits:
    """Return the limits of every grammar. Error messages hold no text of an answer."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=MOST_LEXER_FUEL,
        max_lexer_states=MOST_LEXER_STATES,
        verbose_errors=False,
    )


def _check_size(size: int, kind: GrammarKind) -> None:
    if size > MOST_BYTES:
        raise InvalidArgument(
            f"{size:,} bytes, at most {MOST_BYTES:,}", field=f"{FIELD}.{kind.value}"
        )


def _of_choices(texts: Sequence[str]) -> str:
    """Return the regular expression of some texts. Raises InvalidArgument."""
    field = f"{FIELD}.{GrammarKind.CHOICE.value}.texts"
    if not 1 <= len(texts) <= MOST_CHOICES:
        raise InvalidArgument(
            f"{counted(len(texts), 'text')}; there must be 1 to {MOST_CHOICES:,}", field=field
        )
    for index, text in enumerate(texts):
        if not text:
            raise InvalidArgument("it is empty", field=f"{field}[{index}]")
    _check_size(sum(len(text.encode()) for text in texts), GrammarKind.CHOICE)
    return "|".join(_META_CHARACTERS.sub(r"\\\g<0>", text) for text in dict.fromkeys(texts))


def _of_schema(schema: dict[str, Any]) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(
        schema,
        overrides={
            "whitespace_flexible": True,
            "whitespace_pattern": WHITE_SPACE,
            "item_separator": ",",
            "key_separator": ":",
            "lenient": False,
            "coerce_one_of": False,
            # One spelling of each name: "\u0061" would pass as another one than "a".
            "json_allowed_escapes": 'nrbtf\\"',
        },
    )


def _schema(text: str) -> dict[str, Any]:
    try:
        return read_schema(text)
    except ValueError as error:
        field = f"{FIELD}.{GrammarKind.JSON_SCHEMA.value}"
        raise InvalidArgument(str(error), field=field, reason="BAD_GRAMMAR") from None
