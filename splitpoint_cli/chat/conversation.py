"""A conversation: what is typed, what was said, and what each answer cost.

What is typed are messages of one or several lines, and commands that begin with a slash. Knows no
terminal and no channel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from splitpoint.client.answers import Completion
from splitpoint.errors import InvalidArgument
from splitpoint_cli.request.generate import completion_json

FENCE = '"""'
HELP = (
    ("/system TEXT", "set the system prompt; without TEXT: show it; /system - removes it"),
    ("/reset", "forget what was said; the system prompt stays"),
    ("/save FILE", "write the conversation and its figures as JSON"),
    ("/stats", "show cached tokens, split and times of each turn"),
    ("/help", "show this"),
    ("/quit", "leave; so does the end of the input (Ctrl-D)"),
    (FENCE, "begin a message of several lines, which ends with the same"),
    ("//text", "send a message that begins with a slash"),
    ("Ctrl-C", "stop an answer; what came of it stays in the conversation"),
)
_NAMES = frozenset(line.split()[0] for line, _ in HELP if line[1:2].isalpha())

# Returns the next line without its line break; None at the end. The flag: inside of a message.
ReadLine = Callable[[bool], str | None]


@dataclass(frozen=True, slots=True)
class Command:
    """A line such as `/save FILE`; `name` has its slash, `argument` may be empty."""

    name: str
    argument: str


def entries(read_line: ReadLine) -> Iterator[str | Command]:
    """Yield messages and commands until the input ends. Raises InvalidArgument for an open fence.

    Empty lines between messages are skipped.
    """
    while (line := read_line(False)) is not None:
        text = line.strip()
        if text.startswith(FENCE):
            yield _fenced(text.removeprefix(FENCE), read_line)
        elif text.startswith("//"):
            yield text[1:]
        elif text.startswith("/"):
            name, _, argument = text.partition(" ")
            yield Command(name, argument.strip())
        elif text:
            yield text


def check_known(command: Command) -> None:
    """Raise InvalidArgument for a command that there is not."""
    if command.name not in _NAMES:
        raise InvalidArgument(
            f"there is no command {command.name}; /help lists them, //text sends a message that "
            "begins with a slash",
            field="command",
        )


def _fenced(first: str, read_line: ReadLine) -> str:
    """Return a message of several lines; its own spaces and line breaks stay."""
    lines: list[str] = []
    line: str | None = first
    while line is not None:
        if line.rstrip().endswith(FENCE):
            lines.append(line.rstrip().removesuffix(FENCE))
            return "\n".join(lines).strip("\n")
        lines.append(line)
        line = read_line(True)
    raise InvalidArgument(f"the input ended inside of a message that began with {FENCE}")


Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Turn:
    """A message and its answer. `completion` is None if the answer was stopped."""

    question: str
    answer: str
    completion: Completion | None


@dataclass(slots=True)
class Conversation:
    """The turns so far, and the system prompt; empty: none."""

    system: str = ""
    turns: list[Turn] = field(default_factory=list)

    def messages(self, question: str | None = None) -> list[Message]:
        """Return the messages of the chat, with a further question at their end if there is one."""
        said: list[Message] = []
        if self.system:
            said.append({"role": "system", "content": self.system})
        for turn in self.turns:
            said.append({"role": "user", "content": turn.question})
            said.append({"role": "assistant", "content": turn.answer})
        if question is not None:
            said.append({"role": "user", "content": question})
        return said

    def report(self) -> dict[str, object]:
        """Return the object of `--json`, `--output` and `/save`."""
        return {
            "messages": self.messages(),
            "turns": [
                None if turn.completion is None else completion_json(turn.completion)
                for turn in self.turns
            ],
        }


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the answers that were not stopped. `cached_tokens` are of the prompts."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    @property
    def cached_share(self) -> float:
        """Share of the prompts' tokens that was cached, from 0 to 1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def totals(turns: Sequence[Turn]) -> Totals:
    usages = [turn.completion.usage for turn in turns if turn.completion is not None]
    return Totals(
        sum(usage.prompt_tokens for usage in usages),
        sum(usage.cached_tokens for usage in usages),
        sum(usage.completion_tokens for usage in usages),
    )
