"""Answers of /v1/responses, whole and as a stream of typed events."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired, Protocol, TypedDict

from gateway_service.openai.answers import (
    Form,
    PlanReport,
    Seconds,
    dumped,
    finish_reason_of,
    plan_report,
    quoted,
)
from gateway_service.openai.chat_completions import TokenLogprobs, token_logprobs
from gateway_service.openai.tools import ToolUse, call_id
from gateway_service.tool_calls.splitter import CallStart, Piece
from splitpoint.v1 import scheduler_pb2 as pb
from splitpoint.v1 import types_pb2

_TEXT_DELTA = "response.output_text.delta"
Status = Annotated[Literal["completed", "incomplete", "in_progress"], "in_progress only in events."]


class TextPart(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprobs]


class OutputMessage(TypedDict):
    id: str
    type: Literal["message"]
    status: Status
    role: Literal["assistant"]
    content: list[TextPart]


class FunctionCall(TypedDict):
    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | FunctionCall


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class Reasoning(TypedDict):
    effort: None
    summary: None


class Text(TypedDict):
    format: dict[str, Any]


class NamedTool(TypedDict):
    type: Literal["function"]
    name: str


class Tool(NamedTool):
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class InputTokensDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: Annotated[int, "Always 0: writes are not counted."]


class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


class Usage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Repeated(TypedDict):
    """The part of a response that is the same from its first event on."""

    background: Literal[False]
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    model: str
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: Reasoning
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: Text
    tool_choice: str | NamedTool
    tools: list[Tool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    # Never there, but `Response` has it, which is made of this.
    splitpoint: NotRequired[PlanReport]


class Response(Repeated):
    id: str
    object: Literal["response"]
    created_at: Seconds
    status: Status
    error: None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem]
    usage: Usage | None


_PLACE = {"item_id": str, "output_index": int}
_PART = {**_PLACE, "content_index": int}
_TEXT = {**_PART, "logprobs": list[TokenLogprobs]}
# What events have beside their type and number, by the types.
EVENTS: dict[tuple[str, ...], dict[str, Any]] = {
    (
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
    ): {"response": Response},
    ("response.output_item.added", "response.output_item.done"): {
        "output_index": int,
        "item": OutputItem,
    },
    ("response.content_part.added", "response.content_part.done"): {**_PART, "part": TextPart},
    (_TEXT_DELTA,): {**_TEXT, "delta": str},
    ("response.output_text.done",): {**_TEXT, "text": str},
    ("error",): {"code": str | None, "message": str, "param": str | None},
    ("response.function_call_arguments.delta",): {**_PLACE, "delta": str},
    ("response.function_call_arguments.done",): {**_PLACE, "name": str, "arguments": str},
}


class AnsweredResponse(Protocol):
    """What the rendering needs of a response's job."""

    id: str
    created: int
    form: Form
    has_logprobs: bool
    tools: ToolUse
    tool_call_format: str
    repeated: Repeated

    def finished(self, output: Sequence[OutputItem]) -> None:
        """Take the whole output, before its client is told of the end."""
        ...


Event = tuple[str, dict[str, Any]]


class ResponseBuilder:
    """Makes the output of a response from its text: messages and calls, in order.

    Each step returns the events that tell of it, as (type, further fields).
    """

    def __init__(self, job: AnsweredResponse) -> None:
        self._job = job
        self._parser = job.tools.parser(job.tool_call_format)
        self._output: list[OutputItem] = []
        # The last item is being written.
        self._is_open = False
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._new_logprobs: list[TokenLogprobs] = []
        self._complete: pb.GenerateComplete | None = None

    @property
    def is_plain(self) -> bool:
        """True if text goes out as it comes."""
        return self._parser is None and not self._job.has_logprobs

    @property
    def open_message(self) -> str:
        """Id of the message that is being written; empty: none is."""
        if not self._is_open or self._output[-1]["type"] != "message":
            return ""
        return self._output[-1]["id"]

    def add(self, text: str, logprobs: Iterable[types_pb2.PositionLogprobs] = ()) -> list[Event]:
        """Take further text."""
        if self._job.has_logprobs:
            self._new_logprobs += token_logprobs(logprobs)
        if self._parser is None:
            return self._add_content(text) if text else []
        return self._add_pieces(self._parser.push(text))

    def add_plain(self, text: str) -> None:
        """Take text of the open message, about which the caller tells."""
        self._texts.append(text)

    def finish(self, complete: pb.GenerateComplete) -> list[Event]:
        """Take the end of the answer, whose last text has been added."""
        is_cut = finish_reason_of(complete) == "length"
        events = self._add_pieces(self._parser.finish()) if self._parser is not None else []
        if not self._output:
            events += self._open_message()
        events += self._close("incomplete" if is_cut else "completed")
        self._complete = complete
        self._job.finished(self._output)
        events.append(
            (f"response.{'incomplete' if is_cut else 'completed'}", {"response": self.response()})
        )
        return events

    def response(self) -> Response:
        """Return the response as it is now."""
        complete, job = self._complete, self._job
        status: Status = "in_progress"
        if complete is not None:
            is_cut = finish_reason_of(complete) == "length"
            status = "incomplete" if is_cut else "completed"
        is_incomplete = status == "incomplete"
        found: Response = {
            "id": job.id,
            "object": "response",
            "created_at": job.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_incomplete else None,
            **job.repeated,
            "output": [*self._output],
            "usage": None if complete is None else _usage(complete.usage),
        }
        if job.form.has_plan and complete is not None:
            found["splitpoint"] = plan_report(complete)
        return found

    def _add_pieces(self, pieces: list[Piece]) -> list[Event]:
        events: list[Event] = []
        for piece in pieces:
            if isinstance(piece, str):
                events += self._add_content(piece)
            elif isinstance(piece, CallStart):
                events += self._close("completed")
                events += self._open_call(piece.name)
            else:
                self._texts.append(piece.text)
                events.append(
                    ("response.function_call_arguments.delta", self._at(delta=piece.text))
                )
        return events

    # -- messages

    def _add_content(self, text: str) -> list[Event]:
        events: list[Event] = []
        if not self.open_message:
            events += self._close("completed")
            events += self._open_message()
        self._texts.append(text)
        logprobs, self._new_logprobs = self._new_logprobs, []
        self._logprobs += logprobs
        place = self._at(content_index=0, delta=text, logprobs=logprobs)
        events.append((_TEXT_DELTA, place))
        return events

    def _open_message(self) -> list[Event]:
        item: OutputMessage = {
            "id": _new_id("msg"),
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        events = self._open(item)
        part = _text_part("", [])
        events.append(("response.content_part.added", self._at(content_index=0, part=part)))
        return events

    def _close_message(self, item: OutputMessage, text: str) -> list[Event]:
        self._logprobs += self._new_logprobs
        part = _text_part(text, self._logprobs)
        item["content"] = [part]
        done = self._at(content_index=0, text=text, logprobs=self._logprobs)
        return [
            ("response.output_text.done", done),
            ("response.content_part.done", self._at(content_index=0, part=part)),
        ]

    # -- calls

    def _open_call(self, name: str) -> list[Event]:
        self._new_logprobs = []
        item: FunctionCall = {
            "id": _new_id("fc"),
            "type": "function_call",
            "status": "in_progress",
            "call_id": call_id(self._job.tool_call_format),
            "name": name,
            "arguments": "",
        }
        return self._open(item)

    def _close_call(self, item: FunctionCall, text: str) -> list[Event]:
        item["arguments"] = text
        self._new_logprobs = []  # only texts have them
        done = self._at(name=item["name"], arguments=text)
        return [("response.function_call_arguments.done", done)]

    # -- items

    def _open(self, item: OutputItem) -> list[Event]:
        self._output.append(item)
        self._is_open = True
        self._texts, self._logprobs = [], []
        place = {"output_index": len(self._output) - 1, "item": item.copy()}
        return [("response.output_item.added", place)]

    def _close(self, status: Status) -> list[Event]:
        """End the open item, if there is one."""
        if not self._is_open:
            return []
        self._is_open = False
        item, text = self._output[-1], "".join(self._texts)
        if item["type"] == "message":
            events = self._close_message(item, text)
        else:
            events = self._close_call(item, text)
        item["status"] = status
        place = {"output_index": len(self._output) - 1, "item": item.copy()}
        return [*events, ("response.output_item.done", place)]

    def _at(self, **fields: Any) -> dict[str, Any]:
        """Return fields of an event about the open item."""
        return {
            "item_id": self._output[-1]["id"],
            "output_index": len(self._output) - 1,
            **fields,
        }


def _text_part(text: str, logprobs: list[TokenLogprobs]) -> TextPart:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def _usage(usage: pb.Usage) -> Usage:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class ResponseStream:
    """Renders the stream of a job (`answers.StreamWriter`). Its events are numbered from 0.

    Text of an answer that has no calls and no log-probabilities costs no object per token.
    """

    def __init__(self, job: AnsweredResponse) -> None:
        self._builder = ResponseBuilder(job)
        self._number = 0
        # Of the open message's deltas, without the number. Empty: none is open.
        self._delta_head = ""

    def begin(self, prompt_tokens: int) -> bytes:
        response = self._builder.response()
        return self._frames(
            [
                ("response.created", {"response": response}),
                ("response.in_progress", {"response": response}),
            ]
        )

    def chunk(self, index: int, chunk: pb.GenerateChunk) -> bytes:
        builder = self._builder
        if not (builder.is_plain and self._delta_head):
            frames = self._frames(builder.add(chunk.text, chunk.logprobs))
            if builder.is_plain and builder.open_message:
                self._delta_head = _delta_head(builder.open_message)
            return frames
        if not chunk.text:
            return b""
        builder.add_plain(chunk.text)
        number, self._number = self._number, self._number + 1
        text = quoted(chunk.text)
        return f'{self._delta_head}{number},"delta":{text},"logprobs":[]}}\n\n'.encode()

    def complete(self, index: int, complete: pb.GenerateComplete) -> bytes:
        events = self._builder.add(complete.text)
        return self._frames([*events, *self._builder.finish(complete)])

    def end(self) -> bytes:
        return b""

    def failed(self, error: Mapping[str, Any]) -> bytes:
        fields = {name: error[name] for name in ("code", "message", "param")}
        return self._frame("error", fields)

    def _frames(self, events: Sequence[Event]) -> bytes:
        return b"".join(self._frame(kind, fields) for kind, fields in events)

    def _frame(self, kind: str, fields: dict[str, Any]) -> bytes:
        number, self._number = self._number, self._number + 1
        value = dumped({"type": kind, "sequence_number": number, **fields})
        return b"event: " + kind.encode() + b"\ndata: " + value + b"\n\n"


def _delta_head(message_id: str) -> str:
    """Return a text delta up to its number: a response of plain text has one item."""
    return (
        f'event: {_TEXT_DELTA}\ndata: {{"type":"{_TEXT_DELTA}","item_id":"{message_id}",'
        f'"output_index":0,"content_index":0,"sequence_number":'
    )
