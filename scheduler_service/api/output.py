"""The tokens of one request as they come in, and the text they make.

Append-only: readers keep cursors into it. Knows no worker and no client.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_service.api.validation import GenerateInput
from splitpoint.checkpoint.text import TextStream, Tokenizer
from splitpoint.v1 import scheduler_pb2, types_pb2

# Most tokens in one message; a reader that fell behind catches up in groups.
GROUP_TOKENS = 256


class Transcript:
    """Tokens, their log-probabilities, and per token the text that it made certain."""

    def __init__(
        self, request: GenerateInput, tokenizer: Tokenizer | None, eos_token_ids: frozenset[int]
    ) -> None:
        self.token_ids: list[int] = []
        self._logprobs: list[types_pb2.PositionLogprobs] = []
        self._texts: list[str] = []
        self._min_tokens = request.min_tokens
        self._ending = request.stop_token_ids | (
            frozenset() if request.ignore_eos else eos_token_ids
        )
        # Tokens that are no text if they turn out to be the last.
        self._withheld: list[int] = []
        self._stream = (
            None
            if tokenizer is None
            else TextStream(tokenizer, request.stop, min_tokens=request.min_tokens)
        )

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def matched_stop(self) -> str:
        """The stop string that ended the text; empty: none."""
        return (self._stream.matched_stop or "") if self._stream is not None else ""

    @property
    def ends_in_stop(self) -> bool:
        """Whether a worker would end the request after the last of these tokens."""
        if self.matched_stop:
            return True
        return (
            len(self.token_ids) >= max(self._min_tokens, 1) and self.token_ids[-1] in self._ending
        )

    def append(
        self, token_ids: Sequence[int], logprobs: Sequence[types_pb2.PositionLogprobs]
    ) -> None:
        """The next tokens; `logprobs` is empty or has one entry per token."""
        for token_id in token_ids:
            self._texts.append(self._text_after(token_id))
        self.token_ids.extend(token_ids)
        self._logprobs.extend(logprobs)

    def finish(self, *, stopped: bool) -> str:
        """The text held back until now. `stopped`: a stop ended it, not its length."""
        if self._stream is None:
            return ""
        withheld, self._withheld = self._withheld, []
        text = "" if stopped else self._stream.push(withheld)
        return text + self._stream.finish()

    def chunk(self, start: int) -> scheduler_pb2.GenerateChunk:
        """The message from token `start` on: at most GROUP_TOKENS, at least one token."""
        end = min(len(self.token_ids), start + GROUP_TOKENS)
        return scheduler_pb2.GenerateChunk(
            index=start,
            token_ids=self.token_ids[start:end],
            text="".join(self._texts[start:end]),
            logprobs=self._logprobs[start:end],
        )

    def _text_after(self, token_id: int) -> str:
        if self._stream is None:
            return ""
        if token_id in self._ending:
            self._withheld.append(token_id)
            return ""
        if self._withheld:
            # It went on after all: min_tokens were not reached yet.
            withheld, self._withheld = self._withheld, []
            return self._stream.push([*withheld, token_id])
        return self._stream.push((token_id,))
