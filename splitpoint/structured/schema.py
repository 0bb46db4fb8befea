"""JSON schemas as requests give them: read, and refused where answers would not satisfy them.

llguidance refuses what it does not know. This refuses or rewrites the rest: what it reads in
another way than JSON Schema means it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from splitpoint.config import counted

# Values of these are data, whatever they look like; those of the others may be schemas.
_DATA = frozenset(("const", "default", "enum", "example", "examples"))
_MAPS = frozenset(("$defs", "definitions", "dependentSchemas", "patternProperties", "properties"))
# Parts of a pattern: escapes, begins and ends of classes, what Rust alone reads as operators in
# one, and control characters.
_PATTERN_PARTS = re.compile(
    r"\\[pPxuU]\{[^}]*\}|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\[pP].|\\."
    r"|\[\^?\]?|\]|&&|--|~~|[\x00-\x1f\x7f]",
    re.DOTALL,
)
_CODE = re.compile(r"\\[xuU]\{?([0-9a-fA-F]{1,8})\}?")
# In a text of JSON: an odd number of backslashes before the `u`, or DEL itself.
_CONTROL = re.compile(r"(?<!\\)(?:\\\\)*\\u00[01]|\x7f")
_MOST_INTEGER = 1 << 63
# Bounds are doubles to llguidance, with the inclusive one and the inside of each.
_MOST_EXACT = 1 << 53
_BOUNDS = {
    "minimum": ("minimum", math.inf),
    "maximum": ("maximum", -math.inf),
    "exclusiveMinimum": ("minimum", math.inf),
    "exclusiveMaximum": ("maximum", -math.inf),
}
_TINY, _TINIEST_PART = 1e-12, 1e-14


def read_schema(text: str) -> dict[str, Any]:
    """Return a schema for llguidance; of `true` and `false` the object that means the same.

    Raises ValueError with what is wrong.
    """
    try:
        found = json.loads(
            text, parse_int=_integer, parse_float=_number, parse_constant=_no_constant
        )
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"it is no JSON: {error}") from None
    if isinstance(found, bool):
        return {"anyOf": [found]}
    if not isinstance(found, dict):
        raise ValueError("a schema is a JSON object, true or false")
    for place, schema in _schemas(found):
        _check(place, schema)
        _nudge_bounds(place, schema)
        _rewrite_patterns(place, schema)
    return found


def _integer(digits: str) -> int:
    # The length first: what Python takes for one of many digits grows with their square.
    if len(digits) > 20 or not -_MOST_INTEGER <= int(digits) < _MOST_INTEGER:
        raise ValueError("it has an integer of more than 64 bits")
    return int(digits)


def _number(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError("it has a number beyond those of 64 bits")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"it is no JSON: {name}")


def _schemas(root: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each schema within one, and those that its references name, with their places."""
    seen = set[int]()
    left: list[tuple[str, Any]] = [("#", root)]
    while left:
        place, found = left.pop()
        if isinstance(found, list):
            left += [(f"{place}/{index}", each) for index, each in enumerate(found)]
        if not isinstance(found, dict) or id(found) in seen:
            continue
        seen.add(id(found))
        yield place, found
        for key, value in found.items():
            if key in _MAPS and isinstance(value, dict):
                left += [(f"{place}/{key}/{name}", each) for name, each in value.items()]
            elif key == "$ref" and isinstance(value, str):
                left.append((value, _target(root, value)))
            elif key not in _DATA:
                left.append((f"{place}/{key}", value))


def _target(root: Any, reference: str) -> Any:
    """Return what a reference by JSON pointer names; else None: it has been seen, or is refused."""
    _, _, pointer = reference.partition("#")
    found = root
    for part in unquote(pointer).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        elif isinstance(found, dict) and key in found:
            found = found[key]
        else:
            return None
    return found


def _check(place: str, schema: dict[str, Any]) -> None:
    """Raise ValueError for keywords that would not hold."""
    least, required = schema.get("minProperties"), schema.get("required")
    if isinstance(least, int | float):
        listed = required if isinstance(required, list) else ()
        names = {each for each in listed if isinstance(each, str)}
        # Members with required names come once each; all others may be one name, repeated.
        if least > len(names) + 1:
            raise ValueError(
                f"{place}: minProperties {least} beside {counted(len(names), 'required name')}: "
                f"at most {len(names) + 1} can be kept, for other names may repeat in an answer; "
                "name the members in `required`"
            )
    constants = json.dumps([schema.get("const"), schema.get("enum")], ensure_ascii=False)
    if _CONTROL.search(constants):
        raise ValueError(
            f"{place}: a constant has a control character, which answers cannot have: of those "
            "only \\b, \\t, \\n, \\f and \\r are supported"
        )
    if "additionalItems" in schema and not isinstance(schema.get("items"), list):
        raise ValueError(
            f"{place}: additionalItems has no meaning unless `items` is a list; "
            "beside prefixItems, it is `items` that further items satisfy"
        )


def _nudge_bounds(place: str, schema: dict[str, Any]) -> None:
    """Move exclusive bounds that are whole numbers inwards by next to nothing.

    llguidance takes such a bound as allowed where the other one is less than 1 away. Raises
    ValueError for bounds that a double does not hold.
    """
    for key in (*_BOUNDS, "multipleOf"):
        value = schema.get(key)
        if isinstance(value, int) and abs(value) > _MOST_EXACT:
            raise ValueError(f"{place}: {key} is beyond 2**53, which is not exact")
    if schema.get("type") == "integer":
        return
    for key, (inclusive, towards) in _BOUNDS.items():
        if key == inclusive:
            continue
        # In draft 4, `exclusiveMinimum` says whether `minimum` is allowed.
        name = inclusive if schema.get(key) is True else key
        value = schema.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or value % 1:
            continue
        # Many times what a double can tell apart: llguidance reads the last digits inexactly.
        schema[name] = value + math.copysign(max(_TINY, abs(value) * _TINIEST_PART), towards)


def _rewrite_patterns(place: str, schema: dict[str, Any]) -> None:
    """Give the patterns of a schema the form that `_pattern` returns. Raises ValueError."""
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = _pattern(place, schema["pattern"])
    by_pattern = schema.get("patternProperties")
    if isinstance(by_pattern, dict):
        schema["patternProperties"] = {
            _pattern(place, name): value for name, value in by_pattern.items()
        }


def _pattern(place: str, pattern: str) -> str:
    """Return a pattern whose negated classes leave NUL out, which no answer has anyway.

    llguidance takes a class that has all control characters as one that has the quote and the
    backslash too. Raises ValueError for what Rust reads in another way than JSON Schema, and for
    control characters.
    """
    made, end, opened = "", 0, ""
    for found in _PATTERN_PARTS.finditer(pattern):
        part, made = found[0], made + pattern[end : found.start()]
        end = found.end()
        if opened and (part in ("&&", "--", "~~") or part.startswith("[")):
            raise _wrong_pattern(place, pattern, "a class with `[`, `&&`, `--` or `~~` in it")
        if part.startswith("["):
            if part.endswith("]"):
                raise _wrong_pattern(place, pattern, "a class that begins with `]`")
            opened = part
        elif part == "]":
            opened = ""
        elif opened != "[^" and _is_control(part):
            raise _wrong_pattern(place, pattern, "a control character, or a class that has them")
        made += "[^\\x00" if part == "[^" else part
    return made + pattern[end:]


def _is_control(part: str) -> bool:
    """Return True for a control character that answers cannot have, and classes of them."""
    code = _CODE.fullmatch(part)
    if code is not None:
        value = int(code[1], 16)
        return value == 0x7F or (value < 0x20 and chr(value) not in "\b\t\n\f\r")
    if part.startswith("\\"):
        return (
            part[1:2] in "avP"
            or part.startswith(("\\pC", "\\p{^"))
            or "=" in part
            or bool(re.match(r"\\p\{\s*(C|Other\b)", part, re.IGNORECASE))
        )
    return part == "\x7f" or (part < " " and part not in "\b\t\n\f\r")


def _wrong_pattern(place: str, pattern: str, what: str) -> ValueError:
    return ValueError(f"{place}: the pattern {pattern!r} has {what}, which is not supported")
