"""/v1/completions: its fields, the requests of a body, and its answers, whole and as a stream."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, TypedDict

from gateway_service.openai.answers import (
    Answer,
    ChunkStream,
    FinishReason,
    Head,
    Job,
    PromptLogprobs,
    StopReason,
    Usage,
    finish_reason_of,
    finite_logprob,
    plan_report,
    prompt_logprobs_of,
    quoted,
    token_text,
    usage_of,
)
from gateway_service.openai.fields import (
    BOOLEAN,
    TOKEN_IDS,
    Field,
    Kind,
    Table,
    extra,
    integer,
    read_text,
    refused,
    wrong,
    wrong_type,
)
from gateway_service.openai.sampling import (
    MOST_CHOICES,
    MOST_LOGPROBS,
    TEXT_FIELDS,
    check_copies,
    choices_of,
    constraint_names,
    form_of,
    generate_request,
)
from splitpoint.config import counted
from splitpoint.v1 import scheduler_pb2 as pb
from splitpoint.v1 import types_pb2

_OBJECT: Literal["text_completion"] = "text_completion"
# OpenAI's, where a client says nothing.
_DEFAULT_MAX_TOKENS = 16
# What one body may ask for at most: prompts times n.
_MOST_REQUESTS = 256

Prompt = str | list[int]


def _read_prompt(name: str, value: Any) -> list[Prompt]:
    """Return the prompts of a text, a list of token ids, or a list of either."""
    if isinstance(value, str):
        return [_one_prompt(name, value)]
    if not isinstance(value, list):
        raise wrong_type(name, value, "a string, an array of token ids, or an array of these")
    if not value:
        raise wrong(name, "must not be empty")
    if isinstance(value[0], str | list):
        if len(value) > _MOST_REQUESTS:
            raise wrong(name, f"has {counted(len(value), 'prompt')}, at most {_MOST_REQUESTS}")
        return [_one_prompt(f"{name}[{index}]", item) for index, item in enumerate(value)]
    return [_one_prompt(name, value)]


def _one_prompt(name: str, value: Any) -> Prompt:
    if isinstance(value, str):
        if not value:
            raise wrong(name, "must not be empty")
        return read_text(name, value)
    if not isinstance(value, list):
        raise wrong_type(name, value, "a string or an array of token ids")
    found: list[int] = TOKEN_IDS.read(name, value)
    return found


_TEXT = {"type": "string", "minLength": 1}
PROMPT = Kind(
    _read_prompt,
    {
        "anyOf": [
            _TEXT,
            TOKEN_IDS.schema,
            {
                "type": "array",
                "items": {"anyOf": [_TEXT, TOKEN_IDS.schema]},
                "minItems": 1,
                "maxItems": _MOST_REQUESTS,
            },
        ]
    },
)

ADD_SPECIAL_TOKENS = extra(
    "add_special_tokens",
    BOOLEAN,
    "Put the model's special tokens around a text, as its tokenizer does.",
    True,
)
COMPLETION_FIELDS = Table(
    [
        Field(
            "prompt",
            PROMPT,
            "A text, an array of token ids, or an array of these.",
            is_required=True,
        ),
        *TEXT_FIELDS,
        Field(
            "max_tokens",
            integer(0),
            "Most tokens of an answer; 0 with echo: the prompt alone.",
            default=_DEFAULT_MAX_TOKENS,
        ),
        Field(
            "logprobs",
            integer(0, MOST_LOGPROBS),
            "Log-probabilities of this many of the likeliest tokens, and of the chosen one.",
        ),
        Field(
            "echo",
            BOOLEAN,
            "Begin the text with the prompt, and with logprobs give those of its tokens, too.",
            default=False,
        ),
        Field("best_of", integer(1, MOST_CHOICES), "As n, or absent: answers are not ranked."),
        refused("suffix", "no model here fills gaps", ""),
        ADD_SPECIAL_TOKENS,
    ]
)


class Logprobs(TypedDict):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class Choice(TypedDict):
    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: FinishReason
    prompt_logprobs: NotRequired[PromptLogprobs]
    stop_reason: StopReason


class Completion(Head):
    object: Literal["text_completion"]
    choices: list[Choice]
    usage: Usage


class ChunkChoice(TypedDict):
    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: FinishReason | None
    stop_reason: NotRequired[StopReason]


class CompletionChunk(Head):
    object: Literal["text_completion"]
    choices: list[ChunkChoice]
    usage: NotRequired[Usage | None]


@dataclass(slots=True, kw_only=True)
class CompletionJob(Job):
    """A body of /v1/completions. Choices of a prompt follow each other.

    Attributes:
        logprobs: likeliest tokens to report at each position of the text; None: nothing.
        drops_answer: the prompt alone was asked for; the one token that is computed is left out.
        echoes: the text of each prompt; empty without `echo`.
        to_detokenize: prompts of token ids that are echoed, by their index: `detokenized` takes
            their texts before the answers are rendered.
    """

    choices_per_prompt: int
    logprobs: int | None
    drops_answer: bool
    echoes: list[str] = field(default_factory=list)
    to_detokenize: dict[int, pb.DetokenizeRequest] = field(default_factory=dict)

    def detokenized(self, index: int, text: str) -> None:
        """Take the text of one entry of `to_detokenize`."""
        self.echoes[index] = text

    def echo_of(self, index: int) -> str:
        """Return what the text of a choice begins with."""
        return self.echoes[index // self.choices_per_prompt] if self.echoes else ""

    def result(self, answers: Sequence[Answer]) -> Completion:
        if self.drops_answer:
            answers = [_emptied(answer) for answer in answers]
        completes = [answer.finished for answer in answers]
        found: Completion = {
            "id": self.id,
            "object": _OBJECT,
            "created": self.created,
            "model": self.model,
            "choices": [
                self._choice(index, answer, complete)
                for index, (answer, complete) in enumerate(zip(answers, completes, strict=True))
            ],
            "usage": usage_of(completes, self.choices_per_prompt),
        }
        if self.form.has_plan:
            found["splitpoint"] = plan_report(completes[0])
        return found

    def writer(self) -> CompletionStream:
        return CompletionStream(self)

    def _choice(self, index: int, answer: Answer, complete: pb.GenerateComplete) -> Choice:
        logprobs = None
        if self.logprobs is not None:
            positions = answer.prompt_logprobs if self.echoes else []
            logprobs = TokenLogprobs(self.logprobs).add(answer.logprobs, positions)
        found: Choice = {
            "index": index,
            "text": self.echo_of(index) + answer.text,
            "logprobs": logprobs,
            "finish_reason": finish_reason_of(complete),
            "stop_reason": complete.matched_stop or None,
        }
        if (count := self.form.prompt_logprobs) is not None:
            found["prompt_logprobs"] = prompt_logprobs_of(answer.prompt_logprobs, count)
        return found


def read_completion(body: Any, *, request_id: str, created: int) -> CompletionJob:
    """Return what a body asks for. Raises InvalidArgument with the field as the client wrote it.

    Args:
        body: the JSON value.
        request_id: of the answer, at most 60 characters; further requests of it add an index.
        created: seconds since 1970.
    """
    values = COMPLETION_FIELDS.read(body)
    prompts, count = values["prompt"], values.get("n", 1)
    if len(prompts) * count > _MOST_REQUESTS:
        raise wrong("n", f"times the number of prompts is at most {_MOST_REQUESTS}")
    if values.get("best_of", count) != count:
        raise wrong("best_of", "must equal n: answers are not ranked")
    has_echo, logprobs = values.get("echo", False), values.get("logprobs")
    most_tokens = values.get("max_tokens", _DEFAULT_MAX_TOKENS)
    if not most_tokens and not has_echo:
        raise wrong("max_tokens", "must be at least 1 without echo")
    form = form_of(values)
    shared = generate_request(values)
    # A prompt is computed for the token behind it.
    shared.sampling.max_tokens = max(1, most_tokens)
    if logprobs is not None:
        shared.sampling.logprobs = logprobs
        if has_echo:
            shared.sampling.prompt_logprobs = max(logprobs, values.get("prompt_logprobs", 0))
    shared.omits_special_tokens = not values.get("add_special_tokens", True)
    # The constraints of the text may be much longer than the prompts.
    check_copies(shared.ByteSize(), len(prompts) * count)
    firsts = [request_of(prompt, shared) for prompt in prompts]
    check_copies(sum(request.ByteSize() for request in firsts), count)
    requests: list[pb.GenerateRequest] = []
    for request in firsts:
        requests += choices_of(request, request_id, len(requests), count)
    job = CompletionJob(
        id=request_id,
        created=created,
        model=values["model"],
        requests=requests,
        choices_per_prompt=count,
        form=form,
        logprobs=logprobs,
        drops_answer=not most_tokens,
        parameter_names=constraint_names(values),
    )
    if has_echo:
        _echo(job, prompts)
    return job


def request_of(prompt: Prompt, shared: pb.GenerateRequest) -> pb.GenerateRequest:
    """Return a copy of `shared` with this prompt."""
    request = pb.GenerateRequest()
    request.CopyFrom(shared)
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    return request


def _emptied(answer: Answer) -> Answer:
    """Return an answer without the token that followed the prompt."""
    complete = _without_token(answer.finished)
    return Answer(prompt_logprobs=answer.prompt_logprobs, complete=complete)


def _without_token(complete: pb.GenerateComplete) -> pb.GenerateComplete:
    found = pb.GenerateComplete()
    found.CopyFrom(complete)
    if finish_reason_of(complete):  # raises if the answer was cut off
        found.finish_reason = types_pb2.FINISH_REASON_LENGTH
    found.matched_stop = found.text = ""
    found.usage.completion_tokens = 0
    return found


def _echo(job: CompletionJob, prompts: Sequence[Prompt]) -> None:
    job.echoes = [prompt if isinstance(prompt, str) else "" for prompt in prompts]
    job.to_detokenize = {
        index: pb.DetokenizeRequest(model=job.model, token_ids=prompt, keeps_special_tokens=True)
        for index, prompt in enumerate(prompts)
        if not isinstance(prompt, str)
    }


# -- log-probabilities --------------------------------------------------------------------------


class TokenLogprobs:
    """The `logprobs` of one choice, which may come in parts. Counts the text's characters.

    `count`: likeliest tokens to list at each position.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._characters = 0

    def add(
        self,
        positions: Sequence[types_pb2.PositionLogprobs],
        prompt: Sequence[types_pb2.PositionLogprobs] = (),
    ) -> Logprobs:
        """Return the log-probabilities of these tokens; offsets go on from the part before.

        `prompt`: of tokens before them that are the prompt's; its first one follows nothing.
        """
        found: Logprobs = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for index, position in enumerate(itertools.chain(prompt, positions)):
            found["text_offset"].append(self._characters)
            token = token_text(position.chosen_token_bytes)
            found["tokens"].append(token)
            if index < len(prompt) and not position.chosen_rank:
                found["token_logprobs"].append(None)
                found["top_logprobs"].append(None)
            else:
                logprob = finite_logprob(position.chosen_logprob)
                found["token_logprobs"].append(logprob)
                found["top_logprobs"].append(self._top(position, token, logprob))
            # Every byte that does not continue a character begins one.
            self._characters += sum(byte & 0xC0 != 0x80 for byte in position.chosen_token_bytes)
        return found

    def _top(
        self, position: types_pb2.PositionLogprobs, token: str, logprob: float
    ) -> dict[str, float]:
        found = {
            token_text(each.token_bytes): finite_logprob(each.logprob)
            for each in position.top[: self._count]
        }
        # As OpenAI: with the chosen token if it is none of the likeliest.
        found.setdefault(token, logprob)
        return found


# -- streams ----------------------------------------------------------------------------------


class CompletionStream(ChunkStream):
    """Renders the stream of a job."""

    def __init__(self, job: CompletionJob) -> None:
        super().__init__(job, _OBJECT, "text", job.choices_per_prompt)
        self._job = job
        self._logprobs: list[TokenLogprobs] = []
        if job.logprobs is not None:
            self._logprobs = [TokenLogprobs(job.logprobs) for _ in job.requests]

    def begin(self, prompt_tokens: int) -> bytes:
        if not self._job.echoes:
            return b""
        frames = (
            f"{head}{quoted(self._job.echo_of(index))}{self._plain_tail}"
            for index, head in enumerate(self._heads)
        )
        return "".join(frames).encode()

    def chunk(self, index: int, chunk: pb.GenerateChunk) -> bytes:
        if self._job.drops_answer:
            del chunk.token_ids[:], chunk.logprobs[:]
            chunk.text = ""
        if self._usages is not None:
            self._usages.add(index, chunk)
        logprobs = None
        if self._logprobs:
            logprobs = self._logprobs[index].add(chunk.logprobs, chunk.prompt_logprobs)
        elif not chunk.text:  # a part of a character, whose text comes with its last token
            return b""
        return f"{self._heads[index]}{quoted(chunk.text)}{self._tail(index, logprobs)}".encode()

    def complete(self, index: int, complete: pb.GenerateComplete) -> bytes:
        if self._job.drops_answer:
            complete = _without_token(complete)
        reason = finish_reason_of(complete)
        return self._last(index, quoted(complete.text), reason, complete).encode()
