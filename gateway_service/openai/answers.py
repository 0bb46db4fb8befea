"""A generation's messages as one answer, and the parts of OpenAI's answers that endpoints share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway_service.plan_report import plan_report
from splitpoint.errors import Internal, Unavailable
from splitpoint.v1 import scheduler_pb2 as pb
from splitpoint.v1 import types_pb2

FINISH_REASONS = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
}
DONE = b"data: [DONE]\n\n"
_LEAST_LOGPROB = -9999.0


@dataclass(slots=True)
class Answer:
    """All of one generation that has come. `complete` is None until its final message."""

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[types_pb2.PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[types_pb2.PositionLogprobs] = field(default_factory=list)
    complete: pb.GenerateComplete | None = None

    def add(self, message: pb.GenerateResponse) -> None:
        """Take the next message."""
        if message.HasField("chunk"):
            chunk = message.chunk
            self.token_ids += chunk.token_ids
            self.texts.append(chunk.text)
            self.logprobs += chunk.logprobs
            self.prompt_logprobs += chunk.prompt_logprobs
        elif message.HasField("complete"):
            self.texts.append(message.complete.text)
            self.complete = message.complete

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def finished(self) -> pb.GenerateComplete:
        """The final message. Raises Internal if it is missing."""
        if self.complete is None:
            raise Internal("the stream ended without its final message")
        return self.complete


class StreamWriter(Protocol):
    """Renders one stream: bytes of server-sent events for each of the scheduler's messages.

    Not of one choice, but of all: `index` is the position of a message's request in
    `Job.requests`.
    """

    def begin(self, prompt_tokens: int) -> bytes:
        """Return what comes before the first token. `prompt_tokens`: of the first prompt."""
        ...

    def chunk(self, index: int, chunk: pb.GenerateChunk) -> bytes:
        """Return the frames of some tokens; empty if there is nothing to send yet."""
        ...

    def complete(self, index: int, complete: pb.GenerateComplete) -> bytes:
        """Return the last frames of one choice."""
        ...

    def end(self) -> bytes:
        """Return the last frames, once every choice is complete: the usage, and the end mark."""
        ...

    def failed(self, error: Mapping[str, Any]) -> bytes:
        """Return the last frame of a stream that cannot go on. `error`: OpenAI's object."""
        ...


class Asking(Protocol):
    """What a body asks of the scheduler.

    Attributes:
        requests: sent all at once; the answers keep their order.
    """

    requests: Sequence[pb.GenerateRequest]


class Job(Asking, Protocol):
    """One body, read: what to ask of the scheduler, and how its answers are rendered.

    Attributes:
        id: of the answer; the first request's id.
        is_stream: the client wants server-sent events.
        parameter_names: the client's fields by the scheduler's, for errors; see
            `errors.parameter_of`.
    """

    id: str
    is_stream: bool
    parameter_names: dict[str, str]

    def result(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return the JSON object for whole answers, in the order of `requests`."""
        ...

    def writer(self) -> StreamWriter:
        """Return a new renderer of the stream."""
        ...


class ModelJob(Job, Protocol):
    """A job that may depend on facts of its model."""

    model: str

    @property
    def needs_model(self) -> bool:
        """True if `model_found` must be called before the requests are sent."""
        ...

    def model_found(self, model: pb.Model) -> None:
        """Take the facts. Raises InvalidArgument if the model cannot do what the body asks for."""
        ...


# -- parts that endpoints share --------------------------------------------------------------


class _Named(Protocol):
    id: str
    created: int
    model: str


def head_of(job: _Named, object_name: str) -> dict[str, Any]:
    """Return the fields that every object of an answer begins with."""
    return {"id": job.id, "object": object_name, "created": job.created, "model": job.model}


def finish_reason_of(complete: pb.GenerateComplete) -> str:
    """Return OpenAI's word. Raises Unavailable for an answer that was cut off."""
    reason = FINISH_REASONS.get(complete.finish_reason)
    if reason is None:
        raise Unavailable("the generation was cancelled before its end", reason="CANCELLED")
    return reason


def usage_of(completes: Sequence[pb.GenerateComplete], choices_per_prompt: int) -> dict[str, Any]:
    """Return the usage of answers, `choices_per_prompt` of which follow each other for a prompt.

    Each prompt counts once, with the cached tokens of its first answer.
    """
    firsts = [complete.usage for complete in completes[::choices_per_prompt]]
    prompt = sum(usage.prompt_tokens for usage in firsts)
    completion = sum(complete.usage.completion_tokens for complete in completes)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in firsts)},
    }


class RunningUsage:
    """The usage of each choice so far, for streams that tell it in each chunk."""

    def __init__(self, count: int) -> None:
        self._counts = [(0, 0)] * count

    def begin(self, prompt_tokens: int) -> None:
        """Take the prompt's tokens, of a prompt that all choices have in common."""
        self._counts = [(prompt_tokens, 0) for _ in self._counts]

    def add(self, index: int, chunk: pb.GenerateChunk) -> None:
        """Take a message of one choice."""
        prompt, completion = self._counts[index]
        count = completion + len(chunk.token_ids)
        self._counts[index] = (chunk.prompt_tokens or prompt, count)

    def ending(self, index: int) -> str:
        """Return the field of a choice's next chunk, as JSON with a comma in front."""
        prompt, completion = self._counts[index]
        return (
            f',"usage":{{"prompt_tokens":{prompt},"completion_tokens":{completion},'
            f'"total_tokens":{prompt + completion}}}'
        )


def plan_of(completes: Iterable[pb.GenerateComplete]) -> dict[str, Any] | None:
    """Return what `include_plan` asks for: of the first choice."""
    return next((plan_report(complete) for complete in completes), None)


def frame(value: Any) -> bytes:
    """Return one server-sent event with a JSON value."""
    return b"data: " + dumped(value) + b"\n\n"


def last_frames(
    head: Mapping[str, Any], usage: Mapping[str, Any] | None, plan: Mapping[str, Any] | None
) -> bytes:
    """Return the end of a stream of chunks: the usage and the plan if there are any, and the mark.

    `head`: the fields that each chunk begins with.
    """
    final = {**head, "choices": []}
    if usage is not None:
        final["usage"] = usage
    if plan is not None:
        final["splitpoint"] = plan
    return DONE if usage is None and plan is None else frame(final) + DONE


def error_frame(error: Mapping[str, Any]) -> bytes:
    """Return the last frame of a stream of chunks that cannot go on."""
    return frame({"error": error})


def dumped(value: Any) -> bytes:
    """Return compact JSON in ASCII."""
    return json.dumps(value, separators=(",", ":")).encode()


# Quotes a string as JSON in ASCII; the C function behind json.dumps, without what is around it.
quoted: Callable[[str], str] = json.encoder.encode_basestring_ascii


def token_text(token: bytes) -> str:
    """Return a token's text as OpenAI shows it: bytes that are not UTF-8 as escapes."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def prompt_logprobs_of(
    positions: Iterable[types_pb2.PositionLogprobs], count: int
) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: of each token of the prompt an object by token ids.

    It has the token and the `count` likeliest ones; null stands for the first token, which follows
    nothing.
    """
    return [_position(each, count) if each.chosen_rank else None for each in positions]


def _position(position: types_pb2.PositionLogprobs, count: int) -> dict[str, Any]:
    found = {
        str(each.token_id): _ranked(each.logprob, rank, each.token_bytes)
        for rank, each in enumerate(position.top[:count], 1)
    }
    chosen = _ranked(position.chosen_logprob, position.chosen_rank, position.chosen_token_bytes)
    found.setdefault(str(position.chosen_token_id), chosen)
    return found


def _ranked(logprob: float, rank: int, token: bytes) -> dict[str, Any]:
    return {"logprob": finite_logprob(logprob), "rank": rank, "decoded_token": token_text(token)}


def finite_logprob(value: float) -> float:
    """Return a log-probability that JSON can hold: of an impossible token OpenAI says -9999."""
    return max(value, _LEAST_LOGPROB)
