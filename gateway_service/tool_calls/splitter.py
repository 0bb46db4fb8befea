"""What parsers make of an answer's text, content and tool calls, and what they have in common.

That is a buffer, states, and how content and calls are given out piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from gateway_service.tool_calls.json_pieces import SPACE, CallReader


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. Calls of an answer are numbered from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A further part of the arguments of a call that has begun: text of a JSON value."""

    index: int
    text: str


# A str is content.
Piece = str | CallStart | CallArguments


class ToolCallParser(Protocol):
    """Splits one answer. The joined pieces do not depend on how the text is cut into pushes."""

    def push(self, text: str) -> list[Piece]:
        """Return what is certain with this text."""
        ...

    def finish(self) -> list[Piece]:
        """Return the rest; no text follows."""
        ...


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A whole call. `arguments` is the text that the model wrote; it may be cut or no JSON."""

    name: str
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """The joined pieces of an answer."""

    content: str
    calls: tuple[ParsedCall, ...]


def joined(pieces: Iterable[Piece]) -> ParsedAnswer:
    """Join the pieces of one answer."""
    content: list[str] = []
    calls: list[tuple[str, list[str]]] = []
    for piece in pieces:
        if isinstance(piece, str):
            content.append(piece)
        elif isinstance(piece, CallStart):
            calls.append((piece.name, []))
        else:
            calls[piece.index][1].append(piece.text)
    return ParsedAnswer(
        "".join(content), tuple(ParsedCall(name, "".join(parts)) for name, parts in calls)
    )


def parse(parser: ToolCallParser, text: str) -> ParsedAnswer:
    """Split a whole answer with a fresh parser."""
    return joined([*parser.push(text), *parser.finish()])


_MOST_AT_ONCE = 4096


class Splitter:
    """A ToolCallParser as a machine of states.

    A state is a method that takes what it can from the front of the buffer and returns True if
    anything moved on. It decides only on what more text cannot change, so the cuts between
    pushes leave no trace. States of a subclass begin with `self._state = self._first_state`.

    Spaces are held back until something follows: those at the end of the content of an answer with
    calls, and between its calls, are dropped.
    """

    # Before this text nothing is a call.
    _marker = ""

    def __init__(self, names: Collection[str] | None = None) -> None:
        self._names = names
        self._buffer = ""
        self._ended = False
        self._pieces: list[Piece] = []
        self._spaces = ""
        self._call_count = 0
        # Text that was taken from the buffer and is content if no call begins in it.
        self._raw: list[str] = []
        self._reader: CallReader | None = None
        self._told_begin = False
        self._state: Callable[[], bool] = self._content

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        # States cut from the front of the buffer: with a long one that would take quadratic time.
        for at in range(0, len(text), _MOST_AT_ONCE):
            self._buffer += text[at : at + _MOST_AT_ONCE]
            pieces += self._run()
        return pieces

    def finish(self) -> list[Piece]:
        self._ended = True
        pieces = self._run()
        self._give_content("".join([*self._raw, self._buffer]))
        self._buffer = ""
        self._raw = []
        if not self._call_count:
            self._pieces.append(self._spaces)
        pieces += [piece for piece in self._pieces if piece != ""]
        self._pieces = []
        return pieces

    def _run(self) -> list[Piece]:
        while self._state():
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    # -- content

    def _content(self) -> bool:
        """Give out text up to the marker; the end of the buffer may be the marker's begin."""
        before, marker, after = self._buffer.partition(self._marker)
        if marker:
            self._give_content(before)
            self._buffer = after
            self._raw = [marker]
            self._state = self._after_marker
            return True
        held = 0 if self._ended else overlap(before, self._marker)
        certain = len(before) - held
        self._give_content(before[:certain])
        self._buffer = before[certain:]
        return False

    def _after_marker(self) -> bool:
        raise NotImplementedError

    def _give_content(self, text: str) -> None:
        text = self._spaces + text
        certain = text.rstrip(SPACE)
        self._spaces = text[len(certain) :]
        if certain:
            self._pieces.append(certain)

    def _not_a_call(self) -> None:
        """Give out as content what was read since the marker."""
        self._give_content("".join(self._raw))
        self._raw = []
        self._reader = None

    # -- small steps of the states

    def _take(self, count: int) -> str:
        """Take characters from the buffer; they stay known until a call begins."""
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        self._raw.append(text)
        return text

    def _skip_spaces(self) -> None:
        self._take(len(self._buffer) - len(self._buffer.lstrip(SPACE)))

    def _may_become(self, word: str) -> bool:
        """Return True if the buffer, with what may follow, could begin with `word`."""
        return not self._ended and len(self._buffer) < len(word) and word.startswith(self._buffer)

    # -- one call

    def _begin_call(self, *, needs_arguments: bool = False) -> None:
        self._reader = CallReader(self._names, needs_arguments=needs_arguments)
        self._told_begin = False
        self._state = self._call

    def _call(self) -> bool:
        reader = self._reader
        assert reader is not None
        self._take(reader.push(self._buffer))
        if reader.has_begun:
            if not self._told_begin:
                self._start_call(reader.name or "")
            self._give_arguments(reader.pop_arguments())
            self._raw = []
        if reader.is_done or reader.is_broken:
            self._reader = None
            if self._told_begin:
                self._state = self._after_call if reader.is_done else self._after_broken_call
            else:
                self._not_a_call()
                self._state = self._after_no_call
            return True
        return False

    def _start_call(self, name: str) -> None:
        self._told_begin = True
        self._raw = []
        self._spaces = ""
        self._pieces.append(CallStart(self._call_count, name))
        self._call_count += 1

    def _give_arguments(self, text: str) -> None:
        if text:
            self._pieces.append(CallArguments(self._call_count - 1, text))

    def _after_call(self) -> bool:
        raise NotImplementedError

    def _after_broken_call(self) -> bool:
        """Go on behind a call whose object does not end as it should."""
        return self._after_call()

    def _after_no_call(self) -> bool:
        """Go on behind an object that was no call, and has been given out as content."""
        self._state = self._content
        return True


def overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` that begins but does not complete `marker`."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0
