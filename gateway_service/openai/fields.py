"""Tables of the fields that a body may have, and the reading of a body by one.

A field that a table lacks is refused, as OpenAI does; so is one that is not supported, unless its
value is neutral. docs/gateway.md and the OpenAPI document are made of the same tables.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from gateway_service.openai.values import MOST_TOKENS, Kind, wrong
from splitpoint.errors import InvalidArgument


class Use(Enum):
    """What is done with a field."""

    READ = "read"
    # Accepted in any form, since it changes no text; the answer has a warning (`Table.ignored`).
    IGNORED = "ignored"
    # Only with a neutral value, since it would change the text or the form of the answer.
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a body.

    Attributes:
        kind: of the value. None: it is not read.
        help: what it does, or why it is refused: a phrase for the documentation and for errors.
        default: shown in the documentation; None: absent.
        neutral: values of a refused or ignored field that ask for nothing. Null always does.
        is_extension: OpenAI has no such field; the name is vLLM's unless the help says otherwise.
    """

    name: str
    kind: Kind | None
    help: str
    use: Use = Use.READ
    default: Any = None
    neutral: tuple[Any, ...] = ()
    is_required: bool = False
    is_extension: bool = False

    def is_neutral(self, value: Any) -> bool:
        """Return True for a value that asks for nothing."""
        # True is 1 in Python, but not in JSON.
        return value is None or any(
            type(value) is type(other) and value == other for other in self.neutral
        )

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of what is accepted, null included unless the field is required."""
        if self.use is Use.IGNORED:
            return {"description": self.help}
        if self.use is Use.REFUSED:
            return {"enum": [None, *self.neutral], "description": self.help}
        assert self.kind is not None
        found: dict[str, Any] = dict(self.kind.schema)
        if not self.is_required:
            found = {"anyOf": [found, {"type": "null"}]}
        if self.default is not None:
            found["default"] = self.default
        return {**found, "description": self.help}


class Table:
    """The fields of one kind of body, by name."""

    def __init__(self, fields: Iterable[Field]) -> None:
        self.fields: dict[str, Field] = {}
        for field in fields:
            if field.name in self.fields:
                raise ValueError(f"{field.name} is in a table twice")
            self.fields[field.name] = field
        self._required = [field.name for field in self.fields.values() if field.is_required]

    def read(self, body: Any, *, name: str = "") -> dict[str, Any]:
        """Return the values that were given; without null, and without ignored fields.

        `name`: of the object, if it is a field of another one. Raises InvalidArgument with the
        field.
        """
        if not isinstance(body, Mapping):
            raise InvalidArgument(f"{name or 'the body'} must be a JSON object", field=name)
        prefix = f"{name}." if name else ""
        values: dict[str, Any] = {}
        for key, value in body.items():
            field = self.fields.get(key)
            if field is None:
                raise _unknown(f"{prefix}{key}")
            if value is None or field.use is Use.IGNORED:
                continue
            if field.use is Use.REFUSED:
                if not field.is_neutral(value):
                    raise wrong(
                        f"{prefix}{key}",
                        f"is not supported: {field.help}",
                        reason="UNSUPPORTED_PARAMETER",
                    )
                continue
            assert field.kind is not None
            values[key] = field.kind.read(f"{prefix}{key}", value)
        for key in self._required:
            if key not in values:
                raise wrong(f"{prefix}{key}", "is missing", reason="MISSING_REQUIRED_PARAMETER")
        return values

    def ignored(self, body: Mapping[str, Any]) -> list[str]:
        """Return the ignored fields of a body that was read, but for those that ask for nothing."""
        ignored = [field for field in self.fields.values() if field.use is Use.IGNORED]
        return [each.name for each in ignored if not each.is_neutral(body.get(each.name))]

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of the body."""
        return {
            "type": "object",
            "properties": {name: field.schema for name, field in self.fields.items()},
            "required": list(self._required),
            "additionalProperties": False,
        }


_LONGEST_NAME = 64


def _unknown(name: str) -> InvalidArgument:
    shown = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}..."
    # Half of a surrogate pair could not be sent back.
    shown = shown.encode(errors="replace").decode()
    return InvalidArgument(f"Unknown parameter: '{shown}'", field=shown, reason="UNKNOWN_PARAMETER")


def nested(table: Table) -> Kind:
    """An object with the fields of another table; read as the values that were given."""
    return Kind(lambda name, value: table.read(value, name=name), table.schema)


# -- JSON ------------------------------------------------------------------------------------


# What a body may have at most: values, as many as the token ids of a prompt and some more; and
# strings, keys, arrays and objects, which take many times as long to read as numbers. While a body
# is read, no stream of the process goes on.
_MOST_VALUES = MOST_TOKENS + 4096
_MOST_PARTS = 1 << 17
# A string to its end, or to that of the text. It matches at every quote: nothing is tried twice.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)


def parsed(text: bytes) -> Any:
    """Return the JSON value of a body in UTF-8, as RFC 8259 has it. Raises InvalidArgument.

    Not only for bodies of wrong JSON, but also for those with too many values. NaN, Infinity, a
    byte order mark, UTF-16 and UTF-32, which Python would accept, are refused.
    """
    _check_counts(text)
    try:
        return json.loads(text.decode(), parse_constant=_refuse_constant)
    except RecursionError:
        raise _not_json("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise _not_json("it is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _not_json(f"{error.msg} at character {error.pos}") from None
    except ValueError:  # a constant, or an integer of more digits than Python reads
        raise _not_json("it has a number that JSON cannot have, or one that is too long") from None


def _check_counts(text: bytes) -> None:
    """Raise InvalidArgument if a body has too many values. Counts bytes, since that is cheap."""
    if len(text) < 2 * _MOST_PARTS:
        return
    if _is_little(text, text.count(b'"') // 2):
        return
    # The texts in it may be full of commas and brackets. Before they are taken out: each string
    # has a quote that no backslash precedes.
    if text.count(b'"') - text.count(b'\\"') <= 2 * _MOST_PARTS:
        rest, strings = _STRING.subn(b"", text)
        if _is_little(rest, strings):
            return
    raise InvalidArgument(
        f"the body has too many values: at most {_MOST_VALUES:,}, and at most {_MOST_PARTS:,} "
        "strings, keys, arrays and objects",
        reason="TOO_MANY_VALUES",
    )


def _is_little(text: bytes, strings: int) -> bool:
    parts = strings + text.count(b"[") + text.count(b"{")
    return text.count(b",") < _MOST_VALUES and parts <= _MOST_PARTS


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _not_json(why: str) -> InvalidArgument:
    return InvalidArgument(f"the body is not JSON: {why}", reason="INVALID_JSON")
