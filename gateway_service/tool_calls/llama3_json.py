"""The format of Llama 3: the whole answer is `{"name": ..., "parameters": {...}}`, or several."""

from __future__ import annotations

from collections.abc import Collection

from gateway_service.tool_calls.splitter import Splitter

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
