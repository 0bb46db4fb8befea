"""The formats of Mistral: `[TOOL_CALLS]` before a JSON array, or before `name[ARGS]{...}`."""

from __future__ import annotations

import re

from gateway_service.tool_calls.json_pieces import SPACE, ValueReader
from gateway_service.tool_calls.splitter import Splitter

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
