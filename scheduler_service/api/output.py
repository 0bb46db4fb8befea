"""The tokens that a request has generated, the text that they make, and what is told of its prompt.

Append-only: readers keep cursors into it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from splitpoint.checkpoint.text import TextStream, Tokenizer
from splitpoint.errors import InvalidArgument
from splitpoint.v1 import scheduler_pb2, types_pb2, worker_pb2

# Most tokens in one message, of the prompt too; a reader that fell behind catches up in groups.
GROUP_TOKENS = 256


class PromptLogprobs:
    """Log-probabilities of the leading tokens of one prompt; the first token has none.

    Packed as workers send them: prompts are long.
    """

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


class Output:
    """Tokens, their log-probabilities, and for each token the text that became certain with it."""

    def __init__(
        self,
        sampling: types_pb2.SamplingParams,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        *,
        prompt: Sequence[int] = (),
    ) -> None:
        """`prompt`: of the request, for its first messages."""
        self._prompt_tokens = len(prompt)
        # None: the request does not ask for them.
        self.prompt_logprobs: PromptLogprobs | None = None
        if sampling.HasField("prompt_logprobs"):
            self.prompt_logprobs = PromptLogprobs(prompt, tokenizer)
        self.token_ids: list[int] = []
        # Leading tokens that the client brought along. Their log-probabilities are unknown.
        self.resumed_count = 0
        self._logprobs: list[types_pb2.PositionLogprobs] = []
        self._texts: list[str] = []
        self._min_tokens = sampling.min_tokens
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self._stop_token_ids |= eos_token_ids
        # Trailing stop tokens. They are no text if the request ends with them, unless it asks so.
        self._keeps_stop = sampling.include_stop_str_in_output
        self._withheld: list[int] = []
        self._tokenizer = tokenizer
        self._stream: TextStream | None = None
        if tokenizer is not None:
            self._stream = TextStream(
                tokenizer,
                tuple(sampling.stop),
                min_tokens=sampling.min_tokens,
                keeps_special=sampling.keeps_special_tokens,
                keeps_stop=sampling.include_stop_str_in_output,
            )

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def matched_stop(self) -> str:
        """The stop string that ended the text; empty if none did."""
        return (self._stream.matched_stop or "") if self._stream is not None else ""

    @property
    def ends_in_stop(self) -> bool:
        """True if a worker would end the request after these tokens."""
        if self.matched_stop:
            return True
        if len(self.token_ids) < max(self._min_tokens, 1):
            return False
        return self.token_ids[-1] in self._stop_token_ids

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """True if a worker must report the prompt's log-probabilities.

        They come before the first token, so a client that brought tokens has them.
        """
        prompt = self.prompt_logprobs
        return prompt is not None and not self.token_ids and not prompt.is_whole

    def prompt_chunk(self, start: int) -> scheduler_pb2.GenerateChunk | None:
        """Return the message with prompt tokens from `start` on; None if none is known."""
        prompt = self.prompt_logprobs
        if prompt is None or start >= len(prompt):
            return None
        return scheduler_pb2.GenerateChunk(
            prompt_tokens=self._prompt_tokens,
            prompt_index=start,
            prompt_logprobs=prompt.positions(start, GROUP_TOKENS),
        )

    def resume(self, token_ids: Sequence[int]) -> None:
        """Begin with the tokens that a client was sent by another scheduler.

        The text that follows continues the one that came with them, since what became certain
        with a token depends on no later one. Raises InvalidArgument if the answer ended before
        the last of them.
        """
        for index, token_id in enumerate(token_ids):
            if index and self.ends_in_stop:
                raise InvalidArgument(
                    f"token {index - 1} ended the answer", field=f"resume.token_ids[{index}]"
                )
            self.append([token_id], [])
        self.resumed_count = len(token_ids)

    def count_new(self, first_index: int, count: int) -> int:
        """Return how many of `count` tokens from `first_index` on are new: each counts once.

        Raises ValueError if tokens before them are missing, or log-probabilities of the prompt.
        """
        if self.lacks_prompt_logprobs:
            raise ValueError("tokens came before the prompt's log-probabilities")
        if first_index > len(self):
            raise ValueError(f"index {first_index} came where {len(self)} was due")
        return max(0, first_index + count - len(self))

    def append(
        self, token_ids: Sequence[int], logprobs: Sequence[types_pb2.PositionLogprobs]
    ) -> None:
        """Add the next tokens. `logprobs` is empty or has one entry per token."""
        for token_id in token_ids:
            self._texts.append(self._text_after(token_id))
        self.token_ids.extend(token_ids)
        if logprobs:
            self._spell(token_ids, logprobs)
            self._logprobs.extend(logprobs)

    def finish(self, *, stopped: bool) -> str:
        """Return the text held back until now. `stopped`: the request did not end by length."""
        if self._stream is None:
            return ""
        withheld, self._withheld = self._withheld, []
        text = "" if stopped and not self._keeps_stop else self._stream.push(withheld)
        return text + self._stream.finish()

    def chunk(self, start: int) -> scheduler_pb2.GenerateChunk:
        """Return the message from token `start` on, with 1 to GROUP_TOKENS tokens."""
        end = min(len(self.token_ids), start + GROUP_TOKENS)
        known = self.resumed_count
        return scheduler_pb2.GenerateChunk(
            index=start,
            token_ids=self.token_ids[start:end],
            text="".join(self._texts[start:end]),
            logprobs=self._logprobs[max(0, start - known) : max(0, end - known)],
            prompt_tokens=0 if start else self._prompt_tokens,
        )

    def _spell(
        self, token_ids: Sequence[int], logprobs: Sequence[types_pb2.PositionLogprobs]
    ) -> None:
        """Fill in the bytes of the tokens, which workers leave out."""
        if self._tokenizer is None:
            return
        bytes_of = self._tokenizer.token_bytes
        for token_id, position in zip(token_ids, logprobs, strict=True):
            position.chosen_token_bytes = bytes_of(token_id)
            for alternative in position.top:
                alternative.token_bytes = bytes_of(alternative.token_id)

    def _text_after(self, token_id: int) -> str:
        if self._stream is None:
            return ""
        if token_id in self._stop_token_ids:
            self._withheld.append(token_id)
            return ""
        # A withheld stop token was text after all: min_tokens were not reached yet.
        withheld, self._withheld = self._withheld, []
        return self._stream.push([*withheld, token_id])
