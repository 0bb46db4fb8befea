"""The scheduler's answers in vLLM's messages. Knows no channel."""

from __future__ import annotations

from collections.abc import Sequence

from smg_grpc_proto.generated import vllm_engine_pb2

from gateway_service.openai.answers import finite_logprob
from splitpoint.v1 import scheduler_pb2, types_pb2

_ABORTED = "abort"
_FINISH_REASONS = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_CANCELLED: _ABORTED,
}


class AnswerWriter:
    """Messages of one of the `n` answers.

    Args:
        index: which of the answers it is.
        prompt_tokens: tokens of the prompt; 0 if the scheduler tokenizes it.
        streams: whether tokens are sent as they come, or all at the end.
    """

    def __init__(self, index: int, prompt_tokens: int, *, streams: bool) -> None:
        self._index = index
        self._prompt_tokens = prompt_tokens
        self._streams = streams
        self._token_ids: list[int] = []
        self._logprobs: list[types_pb2.PositionLogprobs] = []

    def message_of(
        self, message: scheduler_pb2.GenerateResponse
    ) -> vllm_engine_pb2.GenerateResponse | None:
        """Return what the router gets for a message of the scheduler; None: nothing yet.

        Texts stay behind: the router makes them from the tokens.
        """
        if message.HasField("complete"):
            return self._completed(message.complete)
        chunk = message.chunk
        self._token_ids += chunk.token_ids
        if not self._streams:
            self._logprobs += chunk.logprobs
            return None
        if not chunk.token_ids:
            return None
        sent = vllm_engine_pb2.GenerateStreamChunk(
            token_ids=chunk.token_ids,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(self._token_ids),
            index=self._index,
        )
        if chunk.logprobs:
            _write_logprobs(sent.output_logprobs, chunk.token_ids, chunk.logprobs)
        return vllm_engine_pb2.GenerateResponse(chunk=sent)

    def aborted(self) -> vllm_engine_pb2.GenerateResponse:
        """Return the last message of an answer that Abort ended."""
        complete = vllm_engine_pb2.GenerateComplete(
            output_ids=self._token_ids,
            finish_reason=_ABORTED,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(self._token_ids),
            index=self._index,
        )
        return vllm_engine_pb2.GenerateResponse(complete=complete)

    def _completed(
        self, message: scheduler_pb2.GenerateComplete
    ) -> vllm_engine_pb2.GenerateResponse:
        usage = message.usage
        complete = vllm_engine_pb2.GenerateComplete(
            output_ids=self._token_ids,
            finish_reason=_FINISH_REASONS[message.finish_reason],
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            index=self._index,
            spec_accepted_tokens=usage.speculation.accepted_token_count,
            spec_draft_tokens=usage.speculation.draft_token_count,
        )
        if message.matched_stop:
            complete.matched_stop_str = message.matched_stop
        if self._logprobs:
            _write_logprobs(complete.output_logprobs, self._token_ids, self._logprobs)
        return vllm_engine_pb2.GenerateResponse(complete=complete)


def _write_logprobs(
    target: vllm_engine_pb2.OutputLogProbs,
    token_ids: Sequence[int],
    logprobs: Sequence[types_pb2.PositionLogprobs],
) -> None:
    target.token_ids.extend(token_ids)
    for position in logprobs:
        target.token_logprobs.append(finite_logprob(position.chosen_logprob))
        target.top_logprobs.add(
            token_ids=[each.token_id for each in position.top],
            values=[finite_logprob(each.logprob) for each in position.top],
        )
