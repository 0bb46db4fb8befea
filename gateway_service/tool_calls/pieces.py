"""What parsers make of an answer's text: content, and tool calls, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol


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


@dataclass(slots=True)
class ParsedCall:
    """A whole call. `arguments` is the text that the model wrote; it may be cut or no JSON."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class ParsedAnswer:
    """The joined pieces of an answer."""

    content: str = ""
    calls: list[ParsedCall] = field(default_factory=list)

    def add(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, str):
                self.content += piece
            elif isinstance(piece, CallStart):
                self.calls.append(ParsedCall(piece.name))
            else:
                self.calls[piece.index].arguments += piece.text


def parse(parser: ToolCallParser, text: str) -> ParsedAnswer:
    """Split a whole answer with a fresh parser."""
    answer = ParsedAnswer()
    answer.add(parser.push(text))
    answer.add(parser.finish())
    return answer
