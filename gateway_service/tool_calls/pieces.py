"""What parsers make of an answer's text: content, and tool calls, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
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
