"""/v1/chat/completions: its fields, the requests of a body, and its answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from gateway_service.openai.answers import (
    Answer,
    ChunkStream,
    Head,
    PromptLogprobs,
    StopReason,
    Usage,
    dumped,
    finish_reason_of,
    finite_logprob,
    plan_report,
    prompt_logprobs_of,
    quoted,
    token_text,
    usage_of,
)
from gateway_service.openai.fields import BOOLEAN, Field, Table, ignored, integer, refused, wrong
from gateway_service.openai.messages import CHAT_PROMPT_FIELDS, MESSAGES, chat_prompt
from gateway_service.openai.sampling import (
    MOST_LOGPROBS,
    TEXT_FIELDS,
    choices_of,
    constraint_names,
    form_of,
    generate_request,
)
from gateway_service.openai.tools import (
    PARALLEL_TOOL_CALLS,
    TOOL_CHOICE,
    TOOLS,
    CallingJob,
    NamedFunction,
    ToolUse,
    call_id,
    tool_use,
)
from gateway_service.tool_calls.splitter import CallStart, Piece, ToolCallParser, parse
from splitpoint.v1 import scheduler_pb2 as pb
from splitpoint.v1 import types_pb2

CHAT_FIELDS = Table(
    [
        Field("messages", MESSAGES, "The conversation so far.", is_required=True),
        *TEXT_FIELDS,
        Field(
            "max_completion_tokens",
            integer(1),
            "Most tokens of an answer. Absent: until the context is full.",
        ),
        Field("max_tokens", integer(1), "Former name of max_completion_tokens."),
        Field("logprobs", BOOLEAN, "Return log-probabilities of the tokens.", default=False),
        Field(
            "top_logprobs",
            integer(0, MOST_LOGPROBS),
            "Likeliest tokens to return at each position; needs logprobs.",
        ),
        TOOLS,
        TOOL_CHOICE,
        PARALLEL_TOOL_CALLS,
        *CHAT_PROMPT_FIELDS,
        ignored("prediction", "It could only change the speed."),
        refused("audio", "answers are text"),
        refused("function_call", "use tool_choice"),
        refused("functions", "use tools"),
        refused("modalities", "answers are text", ["text"]),
        refused("verbosity", "say it in a message", "medium"),
        refused("web_search_options", "there is no search"),
        refused(
            "add_special_tokens",
            "a chat's special tokens come from its template",
            False,
            is_extension=True,
        ),
        refused("chat_template", "it is the model's", is_extension=True),
        refused("documents", "put them in a message", is_extension=True),
        refused("echo", "only the continuation is returned", False, is_extension=True),
    ]
)


Arguments = Annotated[str, "As the model wrote them."]
FinishReason = Literal["stop", "length", "tool_calls"]


class Token(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobs(Token):
    top_logprobs: list[Token]


class Logprobs(TypedDict):
    content: list[TokenLogprobs]
    refusal: None


class Function(TypedDict):
    name: str
    arguments: Arguments


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: Function


class Message(TypedDict):
    role: Literal["assistant"]
    content: Annotated[str | None, "Null if there are only calls."]
    refusal: None
    tool_calls: NotRequired[list[ToolCall]]


class Choice(TypedDict):
    index: int
    message: Message
    logprobs: Logprobs | None
    finish_reason: FinishReason
    stop_reason: StopReason


class ChatCompletion(Head):
    object: Literal["chat.completion"]
    choices: list[Choice]
    usage: Usage
    prompt_logprobs: NotRequired[PromptLogprobs]


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: Arguments


class ToolCallDelta(TypedDict):
    index: int
    id: NotRequired[Annotated[str, "Only where the call begins."]]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class Delta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChunkChoice(TypedDict):
    index: int
    delta: Delta
    logprobs: Logprobs | None
    finish_reason: FinishReason | None
    stop_reason: NotRequired[StopReason]


class ChatCompletionChunk(Head):
    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: NotRequired[Usage | None]


@dataclass(slots=True, kw_only=True)
class ChatJob(CallingJob):
    """A body of /v1/chat/completions."""

    def result(self, answers: Sequence[Answer]) -> ChatCompletion:
        completes = [answer.finished for answer in answers]
        found: ChatCompletion = {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": [choice_of(self, index, answer) for index, answer in enumerate(answers)],
            "usage": usage_of(completes, len(completes)),
        }
        if (count := self.form.prompt_logprobs) is not None:
            # As vLLM: once, since all choices have the same prompt.
            found["prompt_logprobs"] = prompt_logprobs_of(answers[0].prompt_logprobs, count)
        if self.form.has_plan:
            found["splitpoint"] = plan_report(completes[0])
        return found

    def writer(self) -> ChatStream:
        return ChatStream(self)


def read_chat(body: Any, *, request_id: str, created: int) -> ChatJob:
    """Return what a body asks for. Raises InvalidArgument with the field as the client wrote it.

    Args:
        body: the JSON value.
        request_id: of the answer, at most 60 characters; further requests of it add an index.
        created: seconds since 1970.
    """
    values = CHAT_FIELDS.read(body)
    tools = tool_use(values)
    request = generate_request(values)
    request.chat.CopyFrom(chat_prompt(values, values["messages"], tools.tools))
    tools.constrain(request.sampling)
    most_tokens = values.get("max_completion_tokens", values.get("max_tokens"))
    if most_tokens is None:
        request.sampling.fills_context = True
    else:
        request.sampling.max_tokens = most_tokens
    has_logprobs = values.get("logprobs", False)
    if has_logprobs:
        request.sampling.logprobs = values.get("top_logprobs", 0)
    elif values.get("top_logprobs"):
        raise wrong("top_logprobs", "needs logprobs to be true")
    form = form_of(values)
    return ChatJob(
        id=request_id,
        created=created,
        model=values["model"],
        requests=choices_of(request, request_id, 0, values.get("n", 1)),
        form=form,
        has_logprobs=has_logprobs,
        tools=tools,
        parameter_names=_parameter_names(values, tools),
    )


def _parameter_names(values: Mapping[str, Any], tools: ToolUse) -> dict[str, str]:
    """Return the client's names of fields that the scheduler may find wrong."""
    limit = "max_completion_tokens" if "max_completion_tokens" in values else "max_tokens"
    names = {"sampling.max_tokens": limit, "sampling.logprobs": "top_logprobs"}
    if tools.is_forced:
        kinds = ("", ".json_schema", ".json_object")
        return names | {f"sampling.structured_output{kind}": "tools" for kind in kinds}
    return names | constraint_names(values)


def choice_of(job: ChatJob, index: int, answer: Answer) -> Choice:
    """Return one whole choice."""
    complete = answer.finished
    message: Message = {"role": "assistant", "content": answer.text, "refusal": None}
    has_calls = False
    parser = job.tools.parser(job.tool_call_format)
    if parser is not None:
        parsed = parse(parser, answer.text)
        message["content"] = parsed.content
        has_calls = bool(parsed.calls)
        if has_calls:
            message["content"] = parsed.content or None
            message["tool_calls"] = [
                {
                    "id": call_id(job.tool_call_format),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in parsed.calls
            ]
    return {
        "index": index,
        "message": message,
        "logprobs": _logprobs(answer.logprobs) if job.has_logprobs else None,
        "finish_reason": finish_reason(job.tools, complete, has_calls=has_calls),
        "stop_reason": complete.matched_stop or None,
    }


def finish_reason(
    tools: ToolUse, complete: pb.GenerateComplete, *, has_calls: bool
) -> FinishReason:
    """Return OpenAI's word: a call that the client named itself ends with stop."""
    reason = finish_reason_of(complete)
    is_own = has_calls and not isinstance(tools.choice, NamedFunction)
    return "tool_calls" if is_own and reason == "stop" else reason


def _logprobs(positions: Iterable[types_pb2.PositionLogprobs]) -> Logprobs:
    return {"content": token_logprobs(positions), "refusal": None}


def token_logprobs(positions: Iterable[types_pb2.PositionLogprobs]) -> list[TokenLogprobs]:
    """Return OpenAI's objects of tokens with their alternatives."""
    return [
        {
            **_token(position.chosen_token_bytes, position.chosen_logprob),
            "top_logprobs": [_token(each.token_bytes, each.logprob) for each in position.top],
        }
        for position in positions
    ]


def _token(token: bytes, logprob: float) -> Token:
    return {
        "token": token_text(token),
        "logprob": finite_logprob(logprob),
        "bytes": [*token],
    }


class ChatStream(ChunkStream):
    """Renders the stream of a job."""

    def __init__(self, job: ChatJob) -> None:
        super().__init__(job, "chat.completion.chunk", "delta", len(job.requests))
        self._job = job
        self._parsers = [job.tools.parser(job.tool_call_format) for _ in job.requests]
        self._has_calls = [False] * len(job.requests)

    def begin(self, prompt_tokens: int) -> bytes:
        if self._usages is not None:
            self._usages.begin(prompt_tokens)
        # Clients join the contents: an answer of calls alone has none.
        content = "null" if self._job.tools.may_call else '""'
        delta = f'{{"role":"assistant","content":{content}}}'
        return "".join(
            f"{head}{delta}{self._tail(index)}" for index, head in enumerate(self._heads)
        ).encode()

    def chunk(self, index: int, chunk: pb.GenerateChunk) -> bytes:
        if self._usages is not None:
            self._usages.add(index, chunk)
        parser = self._parsers[index]
        if parser is None and not self._job.has_logprobs:
            if not chunk.text:
                return b""
            content = f'{{"content":{quoted(chunk.text)}}}'
            return f"{self._heads[index]}{content}{self._tail(index)}".encode()
        deltas = self._deltas(index, parser, chunk.text)
        return self._frames(index, deltas, chunk.logprobs)

    def complete(self, index: int, complete: pb.GenerateComplete) -> bytes:
        deltas = self._deltas(index, self._parsers[index], complete.text, is_last=True)
        has_calls = self._has_calls[index]
        reason = finish_reason(self._job.tools, complete, has_calls=has_calls)
        last = self._last(index, "{}", reason, complete)
        return self._frames(index, deltas, ()) + last.encode()

    def _deltas(
        self, index: int, parser: ToolCallParser | None, text: str, *, is_last: bool = False
    ) -> list[str]:
        """Return the JSON of the deltas that are certain with a text."""
        if parser is None:
            return [f'{{"content":{quoted(text)}}}'] if text else []
        pieces = parser.push(text)
        if is_last:
            pieces += parser.finish()
        return [self._delta(index, piece) for piece in pieces]

    def _delta(self, index: int, piece: Piece) -> str:
        if isinstance(piece, str):
            return f'{{"content":{quoted(piece)}}}'
        if not isinstance(piece, CallStart):
            arguments = f'{{"arguments":{quoted(piece.text)}}}'
            return f'{{"tool_calls":[{{"index":{piece.index},"function":{arguments}}}]}}'
        self._has_calls[index] = True
        call: ToolCallDelta = {
            "index": piece.index,
            "id": call_id(self._job.tool_call_format),
            "type": "function",
            "function": {"name": piece.name, "arguments": ""},
        }
        return dumped({"tool_calls": [call]}).decode()

    def _frames(
        self, index: int, deltas: list[str], positions: Sequence[types_pb2.PositionLogprobs]
    ) -> bytes:
        """Return a frame for each delta; the first has the log-probabilities."""
        if positions and not deltas:
            deltas = ['{"content":""}']
        frames = []
        tail = self._tail(index, _logprobs(positions) if positions else None)
        for delta in deltas:
            frames.append(f"{self._heads[index]}{delta}{tail}")
            tail = self._tail(index)
        return "".join(frames).encode()
