"""The format of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

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
