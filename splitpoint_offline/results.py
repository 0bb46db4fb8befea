"""Results of offline requests: one for each prompt, with its answers or its error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from splitpoint.client.answers import Completion, FinishReason, Logprobs, Usage
from splitpoint.client.requests import Prompt
from splitpoint.errors import SplitpointError
from splitpoint.planning.plan import Plan

# Messages with `role` and `content`, as the model's chat template takes them.
Conversation = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Result:
    """The answers to one prompt, or why there are none.

    The properties are those of the first answer; they raise `error` if there is one.

    Attributes:
        prompt: as it was given: text, token ids, or a conversation.
        completions: `SamplingParams.n` answers in order; empty if `error` is set.
        error: None if every answer came.
    """

    prompt: Prompt | Conversation
    completions: tuple[Completion, ...]
    error: SplitpointError | None = None

    @property
    def completion(self) -> Completion:
        if self.error is not None:
            raise self.error
        return self.completions[0]

    @property
    def text(self) -> str:
        return self.completion.text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.completion.token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.completion.finish_reason

    @property
    def logprobs(self) -> tuple[Logprobs, ...]:
        return self.completion.logprobs

    @property
    def usage(self) -> Usage:
        return self.completion.usage

    @property
    def plan(self) -> Plan | None:
        return self.completion.plan
