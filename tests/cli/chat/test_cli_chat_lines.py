"""What is typed into a chat: messages, blocks of several lines, commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from splitpoint.errors import InvalidArgument
from splitpoint_cli.chat.conversation import (
    HELP,
    Command,
    Conversation,
    Turn,
    check_known,
    entries,
    totals,
)


def reader(lines: Iterable[str]) -> Callable[[bool], str | None]:
    left = iter(lines)
    return lambda inside: next(left, None)


def read(*lines: str) -> list[str | Command]:
    return list(entries(reader(lines)))


def test_each_line_is_a_message_and_empty_ones_are_none() -> None:
    assert read("Hello.", "", "   ", "  And now?  ") == ["Hello.", "And now?"]


def test_a_block_keeps_its_lines_and_their_spaces() -> None:
    assert read('"""', "def f():", "    return 1", "", "# end", '"""', "next") == [
        "def f():\n    return 1\n\n# end",
        "next",
    ]


def test_a_block_may_begin_and_end_beside_its_text() -> None:
    assert read('"""one', 'two"""') == ["one\ntwo"]
    assert read('"""one line"""') == ["one line"]


def test_commands_inside_of_a_block_are_text() -> None:
    assert read('"""', "/quit", '"""') == ["/quit"]


def test_a_block_that_does_not_end_is_an_error() -> None:
    with pytest.raises(InvalidArgument, match="ended inside of a message"):
        read('"""', "left open")


def test_the_reader_knows_whether_a_block_is_open() -> None:
    asked: list[bool] = []
    lines = iter(['"""a', "b", 'c"""', "d"])

    def read_line(inside: bool) -> str | None:
        asked.append(inside)
        return next(lines, None)

    assert list(entries(read_line)) == ["a\nb\nc", "d"]
    assert asked == [False, True, True, False, False]


def test_commands_and_their_argument() -> None:
    assert read("/save my file.json", "/quit", "//not a command") == [
        Command("/save", "my file.json"),
        Command("/quit", ""),
        "/not a command",
    ]


def test_every_command_of_the_help_is_known_and_no_other() -> None:
    for name in ("/system", "/reset", "/save", "/stats", "/help", "/quit"):
        check_known(Command(name, ""))
        assert any(line.split()[0] == name for line, _ in HELP)
    for name in ("/", "/Quit", "/usr/bin", "//"):
        with pytest.raises(InvalidArgument, match="there is no command"):
            check_known(Command(name, ""))


def test_the_messages_of_a_conversation() -> None:
    conversation = Conversation("Be short.", [Turn("One?", "One.", None)])
    assert conversation.messages("Two?") == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "One."},
        {"role": "user", "content": "Two?"},
    ]
    assert len(conversation.messages()) == 3
    assert Conversation().messages("Hi") == [{"role": "user", "content": "Hi"}]


def test_stopped_answers_count_nothing() -> None:
    sums = totals([Turn("One?", "On", None)])
    assert (sums.prompt_tokens, sums.cached_tokens, sums.completion_tokens) == (0, 0, 0)
    assert sums.cached_share == 0
