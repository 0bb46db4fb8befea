"""Calls that a request demands: the answer follows a JSON schema, whatever the model's format.

A single named function: the answer is its arguments. Any function: an array of
`{"name": ..., "parameters": {...}}`. Models need not know how to call tools for this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway_service.tool_calls.splitter import CallArguments, CallStart, Piece, Splitter

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
# Keywords whose values are data, not schemas.
_DATA_KEYWORDS = frozenset({"const", "enum", "default", "examples"})
# Keywords whose values are objects of schemas by names of the author's choice.
_SCHEMAS_BY_NAME = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)


class NamedCallParser:
    """The whole answer is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_begun = False

    def push(self, text: str) -> list[Piece]:
        if not text:
            return []
        begin: list[Piece] = [] if self._has_begun else [CallStart(0, self._name)]
        self._has_begun = True
        return [*begin, CallArguments(0, text)]

    def finish(self) -> list[Piece]:
        """Tell of the call also if the answer was cut before its first character."""
        if self._has_begun:
            return []
        self._has_begun = True
        return [CallStart(0, self._name)]


class CallArrayParser(Splitter):
    """The whole answer is an array of calls. What does not look like it is content."""

    def __init__(self) -> None:
        super().__init__()
        self._state = self._item
        self._is_open = False

    def _item(self) -> bool:
        self._skip_spaces()
        if not self._buffer:
            return False
        if not self._is_open and self._buffer.startswith("["):
            self._is_open = True
            self._take(1)
        elif self._is_open and self._buffer.startswith(","):
            self._take(1)
        elif self._is_open and self._buffer.startswith("{"):
            self._begin_call()
        else:
            if self._is_open and self._call_count and self._buffer.startswith("]"):
                self._buffer = self._buffer[1:]
                self._raw = []
            self._not_a_call()
            self._state = self._rest
        return True

    def _after_call(self) -> bool:
        self._state = self._item
        return True

    def _after_broken_call(self) -> bool:
        return self._after_no_call()

    def _after_no_call(self) -> bool:
        self._state = self._rest
        return True

    def _rest(self) -> bool:
        self._give_content(self._buffer)
        self._buffer = ""
        return False


def call_array_schema(
    functions: Sequence[tuple[str, Mapping[str, Any] | None]], *, one: bool
) -> dict[str, Any]:
    """Return the schema of an array of calls of these functions: (name, schema of parameters).

    `one`: of exactly one call. The schemas stand under `$defs`, and their references that begin at
    their root point there.
    """
    definitions: dict[str, Any] = {}
    choices = []
    for number, (name, parameters) in enumerate(functions):
        key = f"parameters{number}"
        definitions[key] = _moved(parameters_schema(parameters), f"#/$defs/{key}")
        choices.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": name},
                    "parameters": {"$ref": f"#/$defs/{key}"},
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": choices}}
    if one:
        schema["maxItems"] = 1
    return {**schema, "$defs": definitions}


def parameters_schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the schema of a function's arguments: always of an object."""
    if not parameters:
        return dict(_NO_PARAMETERS)
    return {"type": "object", **parameters}


def _moved(schema: Any, base: str) -> Any:
    """Return a schema whose references to its own root point to `base` instead."""
    if isinstance(schema, list):
        return [_moved(each, base) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for key, value in schema.items():
        if key in _DATA_KEYWORDS:
            moved[key] = value
        elif key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            moved[key] = {name: _moved(each, base) for name, each in value.items()}
        elif key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = base + value[1:]
        elif key not in ("$schema", "$id"):
            moved[key] = _moved(value, base)
    return moved
