"""Python values as fields of requests: each type is checked, and an error names the argument.

Protobuf would take a string as several strings, letter by letter, and True as 1. The types
come from the fields' descriptors. The server checks the ranges.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from numbers import Real
from types import MappingProxyType
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from splitpoint.errors import InvalidArgument

_Message = TypeVar("_Message", bound=Message)
_Enum = TypeVar("_Enum", bound=Enum)
# Bytes are integers and sets have no order, so they would pass for token ids.
_NO_IDS = (str, bytes, bytearray, memoryview, Mapping, set, frozenset)
_INTEGER_BITS = {FieldDescriptor.CPPTYPE_INT32: 31, FieldDescriptor.CPPTYPE_INT64: 63}


def filled(
    kind: type[_Message], values: Mapping[str, Any], names: Mapping[str, str] = MappingProxyType({})
) -> _Message:
    """Return a message with these values in the fields of their names; None is left out.

    Repeated fields take one value or an iterable of them, maps any mapping.

    Raises TypeError for a value of the wrong type, InvalidArgument for one that its field
    cannot hold. Both give the argument's name.

    Args:
        names: fields of arguments that have another name.
    """
    fields: Mapping[str, Any] = kind.DESCRIPTOR.fields_by_name
    converted = {}
    for name, value in values.items():
        if value is not None:
            field = fields[names.get(name, name)]
            converted[field.name] = field_value(name, value, field)
    return kind(**converted)


def field_value(name: str, value: Any, field: FieldDescriptor) -> Any:
    """Return the value as `field` holds it. `name`: the argument. Raises as `filled`."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return _mapping(name, value, field)
    convert = _conversion(field)
    # Only repeated fields have the default []. The oldest supported protobuf has no `is_repeated`.
    if field.default_value != []:
        return convert(name, value)
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | bytearray | Mapping):
        return [convert(f"{name}[{index}]", item) for index, item in enumerate(value)]
    try:
        return [convert(name, value)]
    except TypeError:
        is_text = field.cpp_type == FieldDescriptor.CPPTYPE_STRING
        wanted = "a string or a list of strings" if is_text else "an int or a list of ints"
        raise _wrong_type(name, value, wanted) from None


def token_ids(name: str, value: Any) -> list[int]:
    """Return token ids from any ordered iterable of integers. Raises as `filled`."""
    if isinstance(value, _NO_IDS) or not isinstance(value, Iterable):
        raise _wrong_type(name, value, "text or a sequence of token ids")
    return [_integer(f"{name}[{index}]", item, 31) for index, item in enumerate(value)]


def text(name: str, value: Any) -> str:
    """Return text that UTF-8 can encode. Raises as `filled`."""
    if not isinstance(value, str):
        raise _wrong_type(name, value, "a str")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"{name} is not valid UTF-8: character {error.start} is half of a surrogate pair",
            field=name,
        ) from error
    return value


def text_or_bytes(name: str, value: Any) -> bytes:
    """Return bytes as they are, and text in UTF-8. Raises as `filled`."""
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise _wrong_type(name, value, "bytes or a str")
    return text(name, value).encode()


def choice(name: str, value: Any, kind: type[_Enum]) -> _Enum:
    """Return the member from a member or its value. Raises as `filled`."""
    if not isinstance(value, str | kind):
        raise _wrong_type(name, value, f"a {kind.__name__} or its value")
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(member.value for member in kind)
        raise InvalidArgument(f"{name} {value!r} is not one of {names}", field=name) from None


def seconds(name: str, value: Any) -> float | None:
    """Return a time limit; None: no limit. Raises as `filled`."""
    if value is None:
        return None
    number = _number(name, value)
    if not 0 < number < float("inf"):
        raise InvalidArgument(f"{name} must be finite and above 0 seconds", field=name)
    return number


def _conversion(field: FieldDescriptor) -> Callable[[str, Any], Any]:
    if field.cpp_type in _INTEGER_BITS:
        bits = _INTEGER_BITS[field.cpp_type]
        return lambda name, value: _integer(name, value, bits)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return lambda name, value: _instance(name, value, bytes)
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return text
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return lambda name, value: _instance(name, value, bool)
    if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
        return _number
    # Messages and numbers of enumerations: the clients made them.
    return lambda name, value: value


def _mapping(name: str, value: Any, field: FieldDescriptor) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise _wrong_type(name, value, "a mapping")
    entry: Mapping[str, Any] = field.message_type.fields_by_name  # type: ignore[union-attr]
    key_of, value_of = _conversion(entry["key"]), _conversion(entry["value"])
    return {
        key_of(f"a key of {name}", key): value_of(f"{name}[{key!r}]", item)
        for key, item in value.items()
    }


def _integer(name: str, value: Any, bits: int) -> int:
    """Return an int from anything that can be an index, such as NumPy's; never from a bool."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise _wrong_type(name, value, "an int")
    if not -(1 << bits) <= number < 1 << bits:
        raise InvalidArgument(f"{name} does not fit into {bits + 1} bits", field=name)
    return number


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _wrong_type(name, value, "a number")
    try:
        return float(value)
    except OverflowError as error:
        raise InvalidArgument(f"{name} does not fit into 64 bits", field=name) from error


def _instance(name: str, value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise _wrong_type(name, value, f"a {kind.__name__}")
    return value


def _wrong_type(name: str, value: Any, wanted: str) -> TypeError:
    """Return an error that names the type only: a prompt is never shown."""
    article = "an" if type(value).__name__[0].lower() in "aeiou" else "a"
    return TypeError(f"{name} must be {wanted}, not {article} {type(value).__name__}")
