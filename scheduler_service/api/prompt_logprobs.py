"""The log-probabilities of a request's prompt, packed as workers send them: prompts are long.

Append-only: readers keep cursors into it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from splitpoint.checkpoint.text import Tokenizer
from splitpoint.v1 import types_pb2, worker_pb2


class PromptLogprobs:
    """Log-probabilities of the leading tokens of one prompt; the first token has none."""

    def __init__(self, prompt: Sequence[int], tokenizer: Tokenizer | None) -> None:
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._logprobs = array("f", [0.0])
        self._ranks = array("i", [0])
        self._top_token_ids = array("i")
        self._top_logprobs = array("f")

    def __len__(self) -> int:
        """Return how many tokens' are known."""
        return len(self._logprobs)

    @property
    def is_whole(self) -> bool:
        return len(self) == len(self._prompt)

    def add(self, result: worker_pb2.PromptLogprobs) -> None:
        """Add what a worker sent; what came before, from another attempt, is left out.

        Raises ValueError if positions before it are missing, or the message is inconsistent.
        """
        count, known = len(result.logprobs), len(self) - result.first_index
        width = len(result.top_token_ids) // max(1, count)
        if known < 0:
            raise ValueError(f"prompt token {result.first_index} came where {len(self)} was due")
        if not count == len(result.ranks) == len(
            self._prompt[result.first_index :][:count]
        ) or not width * count == len(result.top_token_ids) == len(result.top_logprobs):
            raise ValueError("log-probabilities of a prompt do not fit together")
        self._logprobs.extend(result.logprobs[known:])
        self._ranks.extend(result.ranks[known:])
        self._top_token_ids.extend(result.top_token_ids[known * width :])
        self._top_logprobs.extend(result.top_logprobs[known * width :])

    def positions(self, start: int, count: int) -> list[types_pb2.PositionLogprobs]:
        """Return those of at most `count` tokens from `start` on, with the tokens' texts."""
        width = len(self._top_token_ids) // max(1, len(self) - 1)
        found = []
        for index in range(start, min(start + count, len(self))):
            tops = range((index - 1) * width, index * width) if index else ()
            token_id = self._prompt[index]
            found.append(
                types_pb2.PositionLogprobs(
                    chosen_logprob=self._logprobs[index],
                    chosen_token_id=token_id,
                    chosen_token_bytes=self._bytes_of(token_id),
                    chosen_rank=self._ranks[index],
                    top=[
                        types_pb2.TokenLogprob(
                            token_id=self._top_token_ids[place],
                            logprob=self._top_logprobs[place],
                            token_bytes=self._bytes_of(self._top_token_ids[place]),
                        )
                        for place in tops
                    ],
                )
            )
        return found

    def _bytes_of(self, token_id: int) -> bytes:
        return b"" if self._tokenizer is None else self._tokenizer.token_bytes(token_id)
