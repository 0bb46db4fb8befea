"""The fields that a body may have: how each is checked, and its JSON schema.

Errors name the field as the client wrote it and the type of the value, never the value: it may be
a prompt. Null counts as absent. A field that a table lacks is refused, as OpenAI does; so is one
that is not supported, unless its value is neutral. docs/openai-api.md and the OpenAPI document are
made of the same tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from splitpoint.config import counted
from splitpoint.errors import InvalidArgument

# Takes the field's name and its value. Returns the value as the program uses it; raises
# InvalidArgument.
Read = Callable[[str, Any], Any]
Schema = Mapping[str, Any]

LARGEST_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of value: its check, and the JSON schema of what passes."""

    read: Read
    schema: Schema


def wrong(name: str, message: str, *, reason: str = "INVALID_VALUE") -> InvalidArgument:
    """Return the error of a field."""
    return InvalidArgument(f"{name} {message}", field=name, reason=reason)


def wrong_type(name: str, value: Any, wanted: str) -> InvalidArgument:
    return wrong(name, f"must be {wanted}, not {_shown(value)}", reason="INVALID_TYPE")


def _shown(value: Any) -> str:
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "a string"}
    names |= {list: "an array", dict: "an object"}
    return names.get(type(value), "null")


# -- scalars ----------------------------------------------------------------------------


def integer(least: int, most: int = LARGEST_INT32) -> Kind:
    """An integer, which JSON may also write as 3.0."""

    def read(name: str, value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong_type(name, value, "an integer")
        if not least <= value <= most:
            raise wrong(name, f"must be from {least} to {most}")
        return value

    return Kind(read, {"type": "integer", "minimum": least, "maximum": most})


def number(least: float, most: float = math.inf, *, above: bool = False) -> Kind:
    """A finite number, from any `least` on. `above`: greater than `least`, not equal to it."""
    bounds, words = {}, []
    if least > -math.inf:
        bounds["exclusiveMinimum" if above else "minimum"] = least
        words.append(f" {'above' if above else 'at least'} {least:g}")
    if most < math.inf:
        bounds["maximum"] = most
        words.append(f" at most {most:g}")

    def read(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(name, value, "a number")
        try:
            found = float(value)
        except OverflowError:
            found = math.inf
        if not math.isfinite(found) or found > most or (found <= least if above else found < least):
            raise wrong(name, f"must be a finite number{' and'.join(words)}")
        return found

    return Kind(read, {"type": "number", **bounds})


def _read_boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong_type(name, value, "a boolean")
    return value


BOOLEAN = Kind(_read_boolean, {"type": "boolean"})


def read_text(name: str, value: Any) -> str:
    """Return a string that UTF-8 can encode: JSON can name half of a surrogate pair."""
    if not isinstance(value, str):
        raise wrong_type(name, value, "a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise wrong(
            name, f"has half of a surrogate pair at character {error.start}", reason="INVALID_TEXT"
        ) from None
    return value


TEXT = Kind(read_text, {"type": "string"})


def text_of(*, least: int = 0, most: int | None = None) -> Kind:
    """A string of this many bytes in UTF-8; its schema bounds the characters."""
    schema: dict[str, Any] = {"type": "string"}
    if least:
        schema["minLength"] = least
    if most is not None:
        schema["maxLength"] = most

    def read(name: str, value: Any) -> str:
        found = read_text(name, value)
        size = len(found.encode())
        if size < least:
            raise wrong(name, "must not be empty")
        if most is not None and size > most:
            raise wrong(name, f"has {counted(size, 'byte')} of UTF-8, at most {most:,}")
        return found

    return Kind(read, schema)


def one_of(*choices: str) -> Kind:
    """One of these strings."""

    def read(name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise wrong_type(name, value, "a string")
        if value not in choices:
            raise wrong(name, f"must be one of {', '.join(choices)}")
        return value

    return Kind(read, {"type": "string", "enum": [*choices]})


# -- arrays and objects --------------------------------------------------------------------


def read_array(name: str, value: Any, wanted: str, noun: str, most: int) -> list[Any]:
    """Return an array of 1 to `most` entries. `wanted`, `noun`: what it and an entry is called."""
    if not isinstance(value, list):
        raise wrong_type(name, value, wanted)
    if not value:
        raise wrong(name, "must not be empty")
    if len(value) > most:
        raise wrong(name, f"has {counted(len(value), noun)}, at most {most:,}")
    return value


def array(kind: Kind, *, least: int = 0, most: int | None = None) -> Kind:
    """An array of values of one kind."""
    schema: dict[str, Any] = {"type": "array", "items": kind.schema}
    if least:
        schema["minItems"] = least
    if most is not None:
        schema["maxItems"] = most

    def read(name: str, value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise wrong_type(name, value, "an array")
        if len(value) < least:
            raise wrong(name, "must not be empty")
        if most is not None and len(value) > most:
            raise wrong(name, f"has {counted(len(value), 'entry', 'entries')}, at most {most:,}")
        return [kind.read(f"{name}[{index}]", item) for index, item in enumerate(value)]

    return Kind(read, schema)


MOST_TOKENS = 1 << 19


def _read_token_ids(name: str, value: Any) -> list[int]:
    ids: list[int] = read_array(name, value, "an array of token ids", "token id", MOST_TOKENS)
    # No step of Python for each id. A boolean is an int, but has another type.
    if {*map(type, ids)} != {int}:
        index = next(i for i, kind in enumerate(map(type, ids)) if kind is not int)
        raise wrong_type(f"{name}[{index}]", ids[index], "a token id")
    if min(ids) < 0 or max(ids) > LARGEST_INT32:
        index = next(i for i, each in enumerate(ids) if not 0 <= each <= LARGEST_INT32)
        raise wrong(f"{name}[{index}]", f"must be from 0 to {LARGEST_INT32}")
    return ids


TOKEN_IDS = Kind(
    _read_token_ids,
    {
        "type": "array",
        "items": {"type": "integer", "minimum": 0, "maximum": LARGEST_INT32},
        "minItems": 1,
        "maxItems": MOST_TOKENS,
    },
)


def text_or_texts(kind: Kind, *, most: int) -> Kind:
    """A string, or an array of strings; read as a list."""
    several = array(kind, most=most)

    def read(name: str, value: Any) -> list[str]:
        if isinstance(value, str):
            return [kind.read(name, value)]
        if not isinstance(value, list):
            raise wrong_type(name, value, "a string or an array of strings")
        found: list[str] = several.read(name, value)
        return found

    return Kind(read, {"anyOf": [kind.schema, several.schema]})


def object_schema(required: Iterable[str], **properties: Schema) -> Schema:
    """Return the JSON schema of an object that may have further properties."""
    return {"type": "object", "properties": properties, "required": [*required]}


def _read_object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(name, value, "an object")
    return value


def check_little(name: str, value: Any, most: int) -> None:
    """Raise InvalidArgument if a JSON value has more than `most` values within it.

    Before it is written as JSON again, which takes long for many of them.
    """
    count, left = 1, [value]
    while left:
        each = left.pop()
        inner = [*each.values()] if isinstance(each, dict) else each
        if not isinstance(inner, list):
            continue
        count += len(inner)
        if count > most:
            raise wrong(name, f"has more than {most:,} values", reason="TOO_MANY_VALUES")
        left += inner


_MOST_VALUES = 1 << 16


def _read_any_object(name: str, value: Any) -> dict[str, Any]:
    found = _read_object(name, value)
    check_little(name, found, _MOST_VALUES)
    return found


OBJECT = Kind(_read_any_object, {"type": "object"})


def by_token_id(kind: Kind, *, most: int) -> Kind:
    """An object with token ids as keys, which are text since JSON has no others."""

    def read(name: str, value: Any) -> dict[int, Any]:
        given = _read_object(name, value)
        if len(given) > most:
            raise wrong(name, f"has {counted(len(given), 'entry', 'entries')}, at most {most}")
        found = {}
        for key, each in given.items():
            if not key.isascii() or not key.isdigit() or len(key) > 10 or int(key) > LARGEST_INT32:
                raise wrong(name, "must have token ids as keys")
            found[int(key)] = kind.read(f"{name}.{key}", each)
        return found

    schema = {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": kind.schema,
        "maxProperties": most,
    }
    return Kind(read, schema)


# -- fields of a body ----------------------------------------------------------------------


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


def extra(name: str, kind: Kind, help: str, default: Any = None) -> Field:
    """Return a field that OpenAI does not have."""
    return Field(name, kind, help, default=default, is_extension=True)


def ignored(name: str, help: str, *neutral: Any, is_extension: bool = False) -> Field:
    return Field(name, None, help, Use.IGNORED, neutral=neutral, is_extension=is_extension)


def refused(name: str, help: str, *neutral: Any, is_extension: bool = False) -> Field:
    """Return a field that is refused. `help`: why, for errors, too."""
    return Field(name, None, help, Use.REFUSED, neutral=neutral, is_extension=is_extension)


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
