"""The formats in which models write tool calls.

Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
Llama 3: the whole answer is `{"name": ..., "parameters": {...}}`, or several.
Mistral: `[TOOL_CALLS]` before a JSON array, or before `name[ARGS]{...}`.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from gateway_service.tool_calls.json_pieces import SPACE, ValueReader
from gateway_service.tool_calls.splitter import Splitter

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"


class HermesParser(Splitter):
    """Content may stand before, between and behind the calls.

    An object that is no call, or that the end of the answer cuts before its arguments, is content
    with its marker.
    """

    _marker = _OPEN

    def _after_marker(self) -> bool:
        self._begin_call()
        return True

    def _after_call(self) -> bool:
        """Take the closing tag, which models leave out at times."""
        self._skip_spaces()
        if self._buffer.startswith(_CLOSE):
            self._take(len(_CLOSE))
        elif self._may_become(_CLOSE):
            return False
        elif _CLOSE.startswith(self._buffer):
            self._buffer = ""  # the end of the answer cuts the tag
            return False
        self._raw = []
        self._state = self._content
        return True

    def _after_broken_call(self) -> bool:
        """Drop what follows a call that has begun, up to its closing tag or the next call."""
        places = [at for tag in (_CLOSE, _OPEN) if (at := self._buffer.find(tag)) >= 0]
        if places:
            self._buffer = self._buffer[min(places) :]
            self._state = self._after_call
            return True
        # A tag may be cut by the end of the buffer.
        self._buffer = "" if self._ended else self._buffer[-len(_CLOSE) + 1 :]
        return False


_TAG = "<|python_tag|>"
_SEPARATOR = ";"


class Llama3JsonParser(Splitter):
    """Nothing marks these calls, so an object counts only if it names one of the request's tools.

    An answer that begins with anything else is content to its end. Several calls are separated by
    semicolons or spaces; what follows them is content.
    """

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._state = self._start

    def _start(self) -> bool:
        self._skip_spaces()
        if self._buffer.startswith(_TAG):
            self._take(len(_TAG))
            self._skip_spaces()
        if self._buffer.startswith("{"):
            self._begin_call(needs_arguments=True)
            return True
        if not self._ended and (not self._buffer or self._may_become(_TAG)):
            return False
        return self._after_no_call()

    def _after_call(self) -> bool:
        self._skip_spaces()
        if self._buffer.startswith(_SEPARATOR) and not self._is_separated:
            self._take(1)
            self._skip_spaces()
        if self._buffer.startswith("{"):
            self._begin_call(needs_arguments=True)
            return True
        if not self._buffer:
            if self._ended:
                self._raw = []
            return False
        return self._after_no_call()

    @property
    def _is_separated(self) -> bool:
        """True if a semicolon was taken since the last call."""
        return any(_SEPARATOR in part for part in self._raw)

    def _after_broken_call(self) -> bool:
        return self._after_no_call()

    def _after_no_call(self) -> bool:
        self._not_a_call()
        self._state = self._rest
        return True

    def _rest(self) -> bool:
        self._give_content(self._buffer)
        self._buffer = ""
        return False


_MARKER = "[TOOL_CALLS]"
_ARGUMENTS = "[ARGS]"
_CALL_ID = "[CALL_ID]"
_NAME = re.compile(r"[\w.\-]{1,64}")
_ID = re.compile(r"[\w\-]{1,64}")


class MistralParser(Splitter):
    """Reads both forms. Newer models repeat the marker before each call, and may add an id."""

    _marker = _MARKER

    def _after_marker(self) -> bool:
        self._skip_spaces()
        if not self._buffer:
            return False
        if self._buffer.startswith("["):
            self._take(1)
            self._state = self._item
        elif self._buffer.startswith("{"):
            self._begin_call()
        else:
            self._state = self._name
        return True

    # -- [{"name": ..., "arguments": {...}}, ...]

    def _item(self) -> bool:
        """Read what stands before the next object of the array, or the array's end."""
        self._skip_spaces()
        if not self._buffer:
            return False
        if self._buffer.startswith(","):
            self._take(1)
        elif self._buffer.startswith("{"):
            self._begin_call()
        elif self._buffer.startswith("]") and self._call_count:
            self._buffer = self._buffer[1:]
            self._raw = []
            self._state = self._content
        else:
            self._not_a_call()
            self._state = self._content
        return True

    def _after_call(self) -> bool:
        self._state = self._item
        return True

    def _after_broken_call(self) -> bool:
        self._raw = []
        self._state = self._content
        return True

    # -- name[CALL_ID]id[ARGS]{...}

    def _name(self) -> bool:
        """Read a name, and what stands between it and its arguments, once all of it is there."""
        found = _NAME.match(self._buffer)
        if found is None:
            return self._no_name()
        at = found.end()
        for tag, pattern in ((_CALL_ID, _ID), (_ARGUMENTS, None)):
            rest = self._buffer[at:]
            if not self._ended and len(rest) < len(tag) and tag.startswith(rest):
                return False
            if rest.startswith(tag):
                at += len(tag)
                if pattern is not None:
                    value = pattern.match(self._buffer, at)
                    at = at if value is None else value.end()
        spaces = len(self._buffer[at:]) - len(self._buffer[at:].lstrip(SPACE))
        if at + spaces == len(self._buffer) and not self._ended:
            return False
        if not self._buffer.startswith("{", at + spaces):
            return self._no_name()
        self._buffer = self._buffer[at + spaces :]
        self._start_call(found.group())
        self._value = ValueReader()
        self._state = self._arguments
        return True

    def _no_name(self) -> bool:
        self._not_a_call()
        self._state = self._content
        return True

    def _arguments(self) -> bool:
        end = self._value.push(self._buffer, 0)
        self._give_arguments(self._buffer[:end])
        self._buffer = self._buffer[end:]
        if self._value.is_done:
            self._state = self._content
        return self._value.is_done
