"""A generation's messages as one answer, and the parts of OpenAI's answers that endpoints share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NotRequired, Protocol, TypedDict

from splitpoint.errors import Internal, Unavailable
from splitpoint.transport import convert
from splitpoint.v1 import scheduler_pb2 as pb
from splitpoint.v1 import types_pb2

# Fields that several answers have. A text beside a type is its description in the OpenAPI document.
FinishReason = Literal["stop", "length"]
Seconds = Annotated[int, "Seconds since 1970."]
StopReason = Annotated[str | None, "The stop string that ended the text."]
PlanReport = Annotated[
    dict[str, Any],
    "Only with include_plan: the plan, its reason, and times. See docs/gateway.md.",
]
FINISH_REASONS: dict[types_pb2.FinishReason, FinishReason] = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
}
DONE = b"data: [DONE]\n\n"
# Between the text of a chunk and its usage.
_NO_END = ',"logprobs":null,"finish_reason":null}]'
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

    It renders all choices: `index` is the position of a message's request in `Job.requests`.
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


@dataclass(frozen=True, slots=True)
class Form:
    """The form in which a client wants its answer.

    Attributes:
        has_running_usage: each chunk of a stream has a usage, as vLLM's; only with the last one.
        prompt_logprobs: likeliest tokens to report at each position of the prompt; None: nothing.
    """

    is_stream: bool
    has_usage: bool
    has_running_usage: bool
    has_plan: bool
    prompt_logprobs: int | None


@dataclass(slots=True, kw_only=True)
class Job(ABC):
    """One body, read: what to ask of the scheduler, and how its answers are rendered.

    Attributes:
        id: of the answer; the first request's id.
        created: seconds since 1970.
        requests: sent all at once; the answers keep their order.
        parameter_names: the client's fields by the scheduler's, for errors; see
            `errors.parameter_of`.
    """

    id: str
    created: int
    model: str
    requests: Sequence[pb.GenerateRequest]
    form: Form
    parameter_names: dict[str, str]

    @abstractmethod
    def result(self, answers: Sequence[Answer]) -> Mapping[str, Any]:
        """Return the JSON object for whole answers, in the order of `requests`.

        Raises Internal, Unavailable if an answer is not whole.
        """

    @abstractmethod
    def writer(self) -> StreamWriter:
        """Return a new renderer of the stream."""


# -- parts that endpoints share --------------------------------------------------------------


class PromptTokensDetails(TypedDict):
    cached_tokens: Annotated[
        int, "Of the prompt; they were not computed again. Absent before a stream's end."
    ]


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptTokensDetails]


class RankedToken(TypedDict):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = Annotated[
    list[dict[str, RankedToken] | None],
    "Only if asked for: of each token of the prompt, by token id. Null for the first one.",
]


class Head(TypedDict):
    """Fields of every answer and chunk of chats and completions."""

    id: str
    created: Seconds
    model: str
    splitpoint: NotRequired[PlanReport]


def head_of(job: Job, object_name: str) -> dict[str, Any]:
    """Return the fields that every object of an answer begins with."""
    return {"id": job.id, "object": object_name, "created": job.created, "model": job.model}


def finish_reason_of(complete: pb.GenerateComplete) -> FinishReason:
    """Return OpenAI's word. Raises Unavailable for an answer that was cut off."""
    reason = FINISH_REASONS.get(complete.finish_reason)
    if reason is None:
        raise Unavailable("the generation was cancelled before its end", reason="CANCELLED")
    return reason


def usage_of(completes: Sequence[pb.GenerateComplete], choices_per_prompt: int) -> Usage:
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


def plan_report(complete: pb.GenerateComplete) -> PlanReport:
    """Return the value of the field `splitpoint`; seconds are those of the scheduler's clock.

    `plan` is None if the answer had ended before this scheduler ran anything of it.
    """
    speculation = complete.usage.speculation
    return {
        "request_id": complete.request_id,
        "worker": complete.worker_id,
        # As text: numbers of JavaScript have 53 bits.
        "seed": str(complete.seed),
        "prompt_tokens": complete.usage.prompt_tokens,
        "cached_tokens": complete.usage.cached_tokens,
        "completion_tokens": complete.usage.completion_tokens,
        "queue_seconds": complete.queue_seconds,
        "restore_seconds": complete.restore_seconds,
        "ttft_seconds": complete.ttft_seconds,
        "total_seconds": complete.total_seconds,
        "step_seconds": complete.step_seconds if complete.HasField("step_seconds") else None,
        "drafted_tokens": speculation.draft_token_count,
        "accepted_tokens": speculation.accepted_token_count,
        "plan": _plan(complete.plan) if complete.HasField("plan") else None,
    }


def _plan(message: types_pb2.Plan) -> dict[str, Any]:
    plan = convert.plan_from_proto(message)
    return {
        "residency": plan.residency.value,
        "method": plan.method.value,
        "schedule": plan.schedule.value,
        "reason": plan.reason,
        "reason_details": list(plan.reason_details),
        "cached_tokens": plan.cached_tokens,
        "new_tokens": plan.new_tokens,
        "split_tokens": plan.split_tokens,
        "device_tokens": plan.device_tokens,
        "fetched_tokens": plan.fetched_tokens,
        "fetch_source": plan.fetch_source,
        "fetch_transfer": plan.fetch_transfer,
        "recomputed_tokens": plan.recomputed_tokens,
        "resident_tokens": plan.resident_tokens,
        "footprint_bytes": plan.footprint_bytes,
        "predicted_restore_seconds": plan.predicted_restore_seconds,
        "predicted_load_seconds": plan.predicted_load_seconds,
        "predicted_recompute_seconds": plan.predicted_recompute_seconds,
        "predicted_ttft_seconds": plan.predicted_ttft_seconds,
        "predicted_step_seconds": plan.predicted_step_seconds,
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


def frame(value: Any) -> bytes:
    """Return one server-sent event with a JSON value."""
    return b"data: " + dumped(value) + b"\n\n"


class ChunkStream:
    """What streams of chunks have in common (`StreamWriter`).

    A frame of text is a constant head, the text as JSON, and a constant tail: no object per token.

    Args:
        object_name: of each chunk.
        part: field of a choice that has its text.
        choices_per_prompt: requests that follow each other for one prompt.
    """

    def __init__(self, job: Job, object_name: str, part: str, choices_per_prompt: int) -> None:
        self._form = job.form
        self._head = head_of(job, object_name)
        self._choices_per_prompt = choices_per_prompt
        start = f'data: {dumped(self._head).decode()[:-1]},"choices":[{{"index":'
        self._heads = [f'{start}{index},"{part}":' for index in range(len(job.requests))]
        self._plain_end = ',"usage":null}\n\n' if job.form.has_usage else "}\n\n"
        self._plain_tail = f"{_NO_END}{self._plain_end}"
        self._usages = RunningUsage(len(job.requests)) if job.form.has_running_usage else None
        self._completes: list[pb.GenerateComplete | None] = [None] * len(job.requests)

    def end(self) -> bytes:
        completes = [complete for complete in self._completes if complete is not None]
        final = {**self._head, "choices": []}
        if self._form.has_usage:
            final["usage"] = usage_of(completes, self._choices_per_prompt)
        if self._form.has_plan:
            final["splitpoint"] = plan_report(completes[0])
        return DONE if len(final) == len(self._head) + 1 else frame(final) + DONE

    def failed(self, error: Mapping[str, Any]) -> bytes:
        return error_frame(error)

    def _end(self, index: int) -> str:
        """Return the end of the next frame of a choice, with its usage so far if it is wanted."""
        usages = self._usages
        return self._plain_end if usages is None else f"{usages.ending(index)}}}\n\n"

    def _tail(self, index: int, logprobs: Mapping[str, Any] | None = None) -> str:
        """Return what follows the text of a frame that does not end its choice."""
        if logprobs is not None:
            text = dumped(logprobs).decode()
            return f',"logprobs":{text},"finish_reason":null}}]{self._end(index)}'
        return self._plain_tail if self._usages is None else f"{_NO_END}{self._end(index)}"

    def _last(self, index: int, text: str, reason: str, complete: pb.GenerateComplete) -> str:
        """Return the frame that ends a choice. `text`: as JSON."""
        self._completes[index] = complete
        stop_reason = complete.matched_stop or None
        ending = {"logprobs": None, "finish_reason": reason, "stop_reason": stop_reason}
        return f"{self._heads[index]}{text},{dumped(ending).decode()[1:]}]{self._end(index)}"


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
) -> PromptLogprobs:
    """Return vLLM's `prompt_logprobs`: of each token of the prompt an object by token ids.

    It has the token and the `count` likeliest ones; null stands for the first token, which follows
    nothing.
    """
    return [_position(each, count) if each.chosen_rank else None for each in positions]


def _position(position: types_pb2.PositionLogprobs, count: int) -> dict[str, RankedToken]:
    found = {
        str(each.token_id): _ranked(each.logprob, rank, each.token_bytes)
        for rank, each in enumerate(position.top[:count], 1)
    }
    chosen = _ranked(position.chosen_logprob, position.chosen_rank, position.chosen_token_bytes)
    found.setdefault(str(position.chosen_token_id), chosen)
    return found


def _ranked(logprob: float, rank: int, token: bytes) -> RankedToken:
    return {"logprob": finite_logprob(logprob), "rank": rank, "decoded_token": token_text(token)}


def finite_logprob(value: float) -> float:
    """Return a log-probability that JSON can hold: of an impossible token OpenAI says -9999."""
    return max(value, _LEAST_LOGPROB)
