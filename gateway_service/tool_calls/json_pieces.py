"""JSON that arrives in pieces: one value, and the object that models write for a tool call.

Values are found by their brackets and quotes only. What a model writes as arguments is returned as
it is, valid or not: the protocol leaves that to the client.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from enum import Enum, auto

SPACE = " \t\r\n"
_STRUCTURE = re.compile(r'[\[\]{}"]')
_STRING_END = re.compile(r'["\\]')
_SCALAR_END = re.compile(r"[\s,\]}]")
_ARGUMENT_KEYS = ("arguments", "parameters")


class ValueReader:
    """Finds the end of one JSON value. `kind` is its first character; empty before it.

    A number or word ends before the next space, comma or closing bracket, which is not consumed.
    """

    def __init__(self) -> None:
        self.kind = ""
        self.is_done = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def push(self, text: str, start: int) -> int:
        """Read on from `text[start]`; return the index behind what belongs to the value.

        The first push begins with the value itself, without spaces.
        """
        if not self.kind and start < len(text):
            self.kind = text[start]
        if self.kind in ('"', "{", "["):
            return self._push_bracketed(text, start)
        found = _SCALAR_END.search(text, start)
        self.is_done = found is not None
        return len(text) if found is None else found.start()

    def _push_bracketed(self, text: str, start: int) -> int:
        at = start
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_STRING_END if self._in_string else _STRUCTURE).search(text, at)
            if found is None:
                return len(text)
            at = found.end()
            char = found.group()
            if char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if char in "[{" else -1
            if self._depth == 0 and not self._in_string and char != "\\":
                self.is_done = True
                return at
        return at


class _Expects(Enum):
    OPEN = auto()
    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_KEY = auto()
    IN_VALUE = auto()
    COMMA_OR_END = auto()


class CallReader:
    """Reads `{"name": "f", "arguments": {...}}`, also with `parameters`, in any order of keys.

    A call has begun once its name and the start of its arguments are known. Until then the object
    may turn out to be something else: `is_broken`.

    Args:
        names: functions that can be called; an object with another name is none. None: any.
        needs_arguments: an object without arguments is no call, else one with none.
    """

    def __init__(self, names: Collection[str] | None = None, *, needs_arguments: bool) -> None:
        self.is_done = False
        self.is_broken = False
        self.has_begun = False
        self.name: str | None = None
        # Those that the owner has not fetched yet.
        self._arguments: list[str] = []
        self._names = names
        self._needs_arguments = needs_arguments
        self._expects = _Expects.OPEN
        self._value = ValueReader()
        self._key = ""
        self._raw: list[str] = []
        self._found_arguments = False

    def push(self, text: str) -> int:
        """Read on; return the number of characters that belong to the object.

        Stops at the end of the object, or before the character that breaks it.
        """
        at = 0
        while at < len(text) and not self.is_done and not self.is_broken:
            if self._expects in (_Expects.IN_KEY, _Expects.IN_VALUE):
                at = self._push_value(text, at)
            elif text[at] in SPACE or self._takes(text[at]):
                at += 1
            elif self._expects not in (_Expects.IN_KEY, _Expects.IN_VALUE):
                self.is_broken = True
        return at

    def pop_arguments(self) -> str:
        """Return the text of the arguments that came since the last time."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def _takes(self, char: str) -> bool:
        """Move on with a character outside of keys and values; False if it stays unread."""
        expects = self._expects
        if expects is _Expects.OPEN and char == "{":
            self._expects = _Expects.KEY_OR_END
        elif expects in (_Expects.KEY_OR_END, _Expects.COMMA_OR_END) and char == "}":
            self._end()
        elif expects is _Expects.COMMA_OR_END and char == ",":
            self._expects = _Expects.KEY
        elif expects is _Expects.COLON and char == ":":
            self._expects = _Expects.VALUE
        else:
            if expects in (_Expects.KEY, _Expects.KEY_OR_END) and char == '"':
                self._begin(_Expects.IN_KEY)
            elif expects is _Expects.VALUE and char not in ",:]}":
                self._begin(_Expects.IN_VALUE)
            return False
        return True

    def _begin(self, state: _Expects) -> None:
        self._expects = state
        self._value = ValueReader()
        self._raw = []

    @property
    def _streams(self) -> bool:
        """True while the value is one whose text goes out as it comes."""
        return (
            self._expects is _Expects.IN_VALUE
            and self._key in _ARGUMENT_KEYS
            and self._value.kind in ("{", "[")
        )

    def _push_value(self, text: str, at: int) -> int:
        end = self._value.push(text, at)
        if self._streams:
            self._found_arguments = True
            self._arguments.append(text[at:end])
            self._check_begun()
        else:
            self._raw.append(text[at:end])
        if self._value.is_done:
            self._value_ended()
        return end

    def _value_ended(self) -> None:
        if self._expects is _Expects.IN_KEY:
            self._key = self._string("".join(self._raw))
            repeats = self._found_arguments if self._key in _ARGUMENT_KEYS else False
            self.is_broken |= repeats or (self._key == "name" and self.name is not None)
            self._expects = _Expects.COLON
            return
        if not self._streams:
            self._read_value("".join(self._raw))
        self._expects = _Expects.COMMA_OR_END

    def _read_value(self, raw: str) -> None:
        if self._key == "name":
            name = self._string(raw) if raw.startswith('"') else ""
            if not name or (self._names is not None and name not in self._names):
                self.is_broken = True
                return
            self.name = name
            self._check_begun()
        elif self._key in _ARGUMENT_KEYS:
            # Some models write the arguments as a string that holds JSON.
            text = self._string(raw) if raw.startswith('"') else raw
            self._arguments.append("{}" if text in ("null", "") else text)
            self._found_arguments = True
            self._check_begun()

    def _string(self, raw: str) -> str:
        try:
            text = json.loads(raw, strict=False)
        except ValueError:
            self.is_broken = True
            return ""
        # A lone surrogate, written as an escape, could not be sent.
        return str(text).encode(errors="replace").decode()

    def _check_begun(self) -> None:
        self.has_begun = self.name is not None and self._found_arguments

    def _end(self) -> None:
        if self.name is not None and not self._found_arguments and not self._needs_arguments:
            self._arguments.append("{}")
            self._found_arguments = True
            self._check_begun()
        if self.has_begun:
            self.is_done = True
        else:
            self.is_broken = True
