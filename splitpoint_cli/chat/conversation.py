"""A conversation: what was said, and what each answer cost. Knows no terminal and no channel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from splitpoint.client.answers import Completion
from splitpoint_cli.request.generate_output import completion_json

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
