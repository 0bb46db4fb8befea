"""The scheduler's answers in vLLM's messages. Knows no channel."""

from __future__ import annotations

from collections.abc import Sequence

from smg_grpc_proto.generated import vllm_engine_pb2

from splitpoint.client.answers import Completion, FinishReason, Logprobs, Tokens

_FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
}


class AnswerWriter:
    """Messages of one of the `n` answers; numbers its tokens.

    Args:
        index: which of the answers it is.
        prompt_tokens: tokens of the prompt; 0 if the scheduler tokenizes it.
        streams: whether tokens are sent as they come.
    """

    def __init__(self, index: int, prompt_tokens: int, *, streams: bool) -> None:
        self._index = index
        self._prompt_tokens = prompt_tokens
        self._streams = streams
        self._token_ids: list[int] = []
        self._logprobs: list[Logprobs] = []

    def tokens(self, tokens: Tokens) -> vllm_engine_pb2.GenerateResponse | None:
        """Return the message for these tokens; None if there is nothing to send yet."""
        self._token_ids += tokens.token_ids
        if not self._streams:
            self._logprobs += tokens.logprobs
            return None
        if not tokens.token_ids:
            return None  # only text, which the router makes itself
        chunk = vllm_engine_pb2.GenerateStreamChunk(
            token_ids=tokens.token_ids,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(self._token_ids),
            index=self._index,
        )
        if tokens.logprobs:
            _write_logprobs(chunk.output_logprobs, tokens.token_ids, tokens.logprobs)
        return vllm_engine_pb2.GenerateResponse(chunk=chunk)

    def completed(self, completion: Completion) -> vllm_engine_pb2.GenerateResponse:
        usage = completion.usage
        complete = vllm_engine_pb2.GenerateComplete(
            output_ids=self._token_ids,
            finish_reason=_FINISH_REASONS[completion.finish_reason],
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            index=self._index,
            spec_accepted_tokens=usage.speculation.accepted_token_count,
            spec_draft_tokens=usage.speculation.draft_token_count,
        )
        if completion.matched_stop is not None:
            complete.matched_stop_str = completion.matched_stop
        if self._logprobs:
            _write_logprobs(complete.output_logprobs, self._token_ids, self._logprobs)
        return vllm_engine_pb2.GenerateResponse(complete=complete)

    def aborted(self) -> vllm_engine_pb2.GenerateResponse:
        """Return the last message of a request that Abort ended."""
        complete = vllm_engine_pb2.GenerateComplete(
            output_ids=self._token_ids,
            finish_reason=_FINISH_REASONS[FinishReason.CANCELLED],
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(self._token_ids),
            index=self._index,
        )
        return vllm_engine_pb2.GenerateResponse(complete=complete)


def _write_logprobs(
    target: vllm_engine_pb2.OutputLogProbs,
    token_ids: Sequence[int],
    logprobs: Sequence[Logprobs],
) -> None:
    target.token_ids.extend(token_ids)
    for position in logprobs:
        target.token_logprobs.append(position.chosen)
        target.top_logprobs.add(
            token_ids=[token_id for token_id, _ in position.top],
            values=[logprob for _, logprob in position.top],
        )
