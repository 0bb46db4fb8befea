"""/v1/responses: its fields, the request of a body, and the conversation that it leaves.

The input becomes the messages of a chat, and its tools have the form of chat.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway_service.openai.answers import Answer
from gateway_service.openai.fields import (
    BOOLEAN,
    TEXT,
    Field,
    Kind,
    Schema,
    Table,
    array,
    ignored,
    integer,
    nested,
    object_schema,
    one_of,
    read_array,
    read_text,
    refused,
    text_of,
    wrong,
    wrong_type,
)
from gateway_service.openai.messages import (
    CHAT_PROMPT_FIELDS,
    MOST_MESSAGES,
    as_json,
    chat_prompt,
    content_schema,
    read_content,
)
from gateway_service.openai.response_answers import (
    NamedTool,
    OutputItem,
    Repeated,
    Response,
    ResponseBuilder,
    ResponseStream,
    Tool,
)
from gateway_service.openai.sampling import (
    COMMON_FIELDS,
    JSON_SCHEMA,
    MOST_LOGPROBS,
    form_of,
    generate_request,
)
from gateway_service.openai.tools import (
    FUNCTION_FIELDS,
    FUNCTION_NAME,
    MOST_TOOLS,
    PARALLEL_TOOL_CALLS,
    TYPE_FUNCTION,
    CallingJob,
    NamedFunction,
    ToolUse,
    tool_choice_kind,
    tool_use,
)
from splitpoint.errors import InvalidArgument
from splitpoint.v1 import types_pb2

# Parts of a message's content by their type, and the field that has the text.
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_OUTPUT_PARTS = {"input_text": "text"}
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}

Message = dict[str, Any]


def _read_input(name: str, value: Any) -> list[Message]:
    """Return the messages of a text, or of a list of items."""
    if isinstance(value, str):
        if not value:
            raise wrong(name, "must not be empty")
        return [{"role": "user", "content": read_text(name, value)}]
    messages: list[Message] = []
    items = read_array(name, value, "a string or an array of items", "item", MOST_MESSAGES)
    for index, item in enumerate(items):
        _add_item(messages, f"{name}[{index}]", item)
    return messages


def _add_item(messages: list[Message], name: str, item: Any) -> None:
    if not isinstance(item, dict):
        raise wrong_type(name, item, "an object")
    kind = item.get("type")
    match "message" if kind is None else kind:
        case "message":
            messages.append(_message(name, item))
        case "function_call":
            _add_call(messages, name, item)
        case "function_call_output":
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": read_text(f"{name}.call_id", item.get("call_id")),
                    "content": read_content(f"{name}.output", item.get("output"), _OUTPUT_PARTS),
                }
            )
        case "item_reference":
            raise wrong(f"{name}.type", "refers to what is not here: nothing is stored")
        case _:
            raise wrong(
                f"{name}.type",
                "must be message, function_call or function_call_output",
                reason="UNSUPPORTED_CONTENT",
            )


def _message(name: str, item: Mapping[str, Any]) -> Message:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong(f"{name}.role", f"must be one of {', '.join(_ROLES)}")
    content = read_content(f"{name}.content", item.get("content"), _TEXT_PARTS)
    return {"role": _ROLES[role], "content": content}


def _add_call(messages: list[Message], name: str, item: Mapping[str, Any]) -> None:
    """Add a call to the assistant's message before it, which may have text or other calls."""
    call = {
        "id": read_text(f"{name}.call_id", item.get("call_id")),
        "type": "function",
        "function": {
            "name": read_text(f"{name}.name", item.get("name")),
            "arguments": _arguments(f"{name}.arguments", item.get("arguments")),
        },
    }
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    messages[-1].setdefault("tool_calls", []).append(call)


def _arguments(name: str, value: Any) -> str:
    """Return the arguments of a call, which templates need as an object."""
    text = read_text(name, value)
    try:
        parsed = json.loads(text or "{}")
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise wrong(name, "must be a JSON object, as text")
    return text


def _item_schema(kind: str, required: Sequence[str], **properties: Schema) -> Schema:
    type_ = {"const": kind} if "type" in required else {"enum": [kind, None]}
    return object_schema(required, type=type_, **properties)


_ITEM_SCHEMA = {
    "anyOf": [
        _item_schema(
            "message",
            ("role", "content"),
            role={"type": "string", "enum": [*_ROLES]},
            content={"anyOf": content_schema(_TEXT_PARTS)},
        ),
        _item_schema(
            "function_call",
            ("type", "call_id", "name", "arguments"),
            **dict.fromkeys(("call_id", "name", "arguments"), TEXT.schema),
        ),
        _item_schema(
            "function_call_output",
            ("type", "call_id", "output"),
            call_id=TEXT.schema,
            output={"anyOf": content_schema(_OUTPUT_PARTS)},
        ),
    ]
}
INPUT = Kind(
    _read_input,
    {
        "anyOf": [
            {"type": "string", "minLength": 1},
            {"type": "array", "items": _ITEM_SCHEMA, "minItems": 1, "maxItems": MOST_MESSAGES},
        ]
    },
)

TOOL = Table([TYPE_FUNCTION, *FUNCTION_FIELDS])
TOOL_CHOICE = tool_choice_kind(
    Table([TYPE_FUNCTION, Field("name", FUNCTION_NAME, "Its name.", is_required=True)]),
    lambda given: str(given["name"]),
)


def chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function in the form of chat."""
    function = {key: value for key, value in tool.items() if key != "type"}
    return {"type": "function", "function": function}


def shown_tool(tool: Mapping[str, Any]) -> Tool:
    """Return a function as a response repeats it, with what was left out."""
    return {
        "description": tool.get("description"),
        "parameters": tool.get("parameters"),
        "strict": tool.get("strict"),
        "type": "function",
        "name": tool["name"],
    }


def shown_choice(choice: str | NamedFunction) -> str | NamedTool:
    """Return a tool_choice as a response repeats it."""
    if isinstance(choice, NamedFunction):
        return {"type": "function", "name": choice.name}
    return choice


_LOGPROBS = "message.output_text.logprobs"
_MOST_METADATA = 16


def _read_metadata(name: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise wrong_type(name, value, "an object")
    if len(value) > _MOST_METADATA:
        raise wrong(name, f"has {len(value)} entries, at most {_MOST_METADATA}")
    return {
        _KEY.read(name, key): _VALUE.read(f"{name}.{read_text(name, key)}", each)
        for key, each in value.items()
    }


_KEY, _VALUE = text_of(most=64), text_of(most=512)
METADATA = Kind(
    _read_metadata,
    {
        "type": "object",
        "maxProperties": _MOST_METADATA,
        "propertyNames": {"maxLength": 64},
        "additionalProperties": {"type": "string", "maxLength": 512},
    },
)
_FORMAT = Table(
    [
        Field(
            "type",
            one_of("text", "json_object", "json_schema"),
            "Any text, a JSON object, or what a JSON schema allows.",
            is_required=True,
        ),
        Field("name", text_of(least=1, most=64), "Name of the schema."),
        Field("description", TEXT, "What the answer is for."),
        Field("schema", JSON_SCHEMA, "For the type json_schema."),
        Field("strict", BOOLEAN, "The answer follows the schema either way."),
    ]
)
_TEXT = Table(
    [
        Field("format", nested(_FORMAT), "What the text must be."),
        refused("verbosity", "say it in a message", "medium"),
    ]
)
_STREAM_OPTIONS = Table([ignored("include_obfuscation", "No padding is sent.")])


RESPONSE_FIELDS = Table(
    [
        Field("input", INPUT, "A text, or messages, calls and their outputs.", is_required=True),
        Field("instructions", TEXT, "A system message before the input."),
        *COMMON_FIELDS,
        Field(
            "max_output_tokens",
            integer(1),
            "Most tokens of the answer. Absent: until the context is full.",
        ),
        Field("text", nested(_TEXT), "What the text must be."),
        Field("tools", array(nested(TOOL), most=MOST_TOOLS), "Functions that the model may call."),
        Field("tool_choice", TOOL_CHOICE, "As for chat."),
        PARALLEL_TOOL_CALLS,
        Field(
            "include",
            array(one_of(_LOGPROBS, "reasoning.encrypted_content")),
            "Log-probabilities of the text's tokens. There is no reasoning to include.",
        ),
        Field(
            "top_logprobs",
            integer(0, MOST_LOGPROBS),
            "Likeliest tokens to return at each position; needs include.",
        ),
        Field(
            "previous_response_id",
            text_of(least=1, most=64),
            "Go on with the conversation of this answer; its instructions do not count.",
        ),
        Field(
            "store",
            BOOLEAN,
            "Keep the conversation in memory for an hour, for previous_response_id.",
            default=True,
        ),
        Field("metadata", METADATA, "Is returned with the answer."),
        Field("stream_options", nested(_STREAM_OPTIONS), "Has nothing to set."),
        CHAT_PROMPT_FIELDS[0],
        ignored("max_tool_calls", "There are no built-in tools."),
        ignored("reasoning", "See chat_template_kwargs, as the model's template says.", {}),
        refused("background", "answers are not stored: stay connected", False),
        refused("conversation", "use previous_response_id, or send the whole input"),
        refused("prompt", "there are no stored prompts"),
        refused("truncation", "inputs are not truncated", "disabled"),
        refused("prompt_logprobs", "answers have no place for them", is_extension=True),
    ]
)


@dataclass(slots=True, kw_only=True)
class ResponseJob(CallingJob):
    """A body of /v1/responses.

    Attributes:
        repeated: what the answer repeats of the body.
        previous_id: the answer whose conversation it goes on with; empty: none.
        is_stored: its client may want to go on with it.
        instructions: the message before the conversation, or none.
        messages: the conversation so far, without instructions.
        keep: takes the conversation with its answer, as JSON; None: it is not kept.
    """

    repeated: Repeated
    previous_id: str
    is_stored: bool
    instructions: list[Message]
    messages: list[Message]
    keep: Callable[[bytes], None] | None = None

    def go_on(self, conversation: bytes) -> None:
        """Put what was kept before the messages. Raises InvalidArgument if they are too many."""
        self.messages = [*json.loads(conversation), *self.messages]
        if len(self.messages) > MOST_MESSAGES:
            raise wrong("input", f"and what is before it have more than {MOST_MESSAGES:,} messages")
        messages = as_json("input", [*self.instructions, *self.messages])
        self.requests[0].chat.messages = messages

    def finished(self, output: Sequence[OutputItem]) -> None:
        """Keep the conversation with its answer, if it is to be kept.

        One that ends in half a call is not: no model could go on with it.
        """
        if self.keep is None:
            return
        try:
            answered = INPUT.read("output", [*output])
        except InvalidArgument:
            self.repeated["store"] = False
            return
        self.keep(json.dumps([*self.messages, *answered]).encode())

    def result(self, answers: Sequence[Answer]) -> Response:
        answer, *_ = answers
        builder = ResponseBuilder(self)
        builder.add(answer.text, answer.logprobs)
        builder.finish(answer.finished)
        return builder.response()

    def writer(self) -> ResponseStream:
        return ResponseStream(self)


def read_response(body: Any, *, request_id: str, created: int) -> ResponseJob:
    """Return what a body asks for. Raises InvalidArgument with the field as the client wrote it.

    Args:
        body: the JSON value.
        request_id: of the answer, at most 60 characters.
        created: seconds since 1970.
    """
    values = RESPONSE_FIELDS.read(body)
    tools = tool_use(values, [chat_tool(each) for each in values.get("tools", ())])
    text_format = values.get("text", {}).get("format", {"type": "text"})
    constraint = _constraint(text_format)
    request = generate_request(
        values if constraint is None else {**values, "response_format": constraint}
    )
    request.request_id = request_id
    instructions: list[Message] = []
    if "instructions" in values:
        instructions = [{"role": "system", "content": values["instructions"]}]
    messages = [*instructions, *values["input"]]
    request.chat.CopyFrom(chat_prompt(values, messages, tools.tools))
    tools.constrain(request.sampling)
    if "max_output_tokens" in values:
        request.sampling.max_tokens = values["max_output_tokens"]
    else:
        request.sampling.fills_context = True
    has_logprobs = _LOGPROBS in values.get("include", ())
    if has_logprobs:
        request.sampling.logprobs = values.get("top_logprobs", 0)
    elif values.get("top_logprobs"):
        raise wrong("top_logprobs", f"needs include to have {_LOGPROBS}")
    form = form_of(values)
    return ResponseJob(
        id=request_id,
        created=created,
        model=values["model"],
        requests=[request],
        form=form,
        has_logprobs=has_logprobs,
        tools=tools,
        repeated=_repeated(values, tools, body),
        previous_id=values.get("previous_response_id", ""),
        is_stored=values.get("store", True),
        instructions=instructions,
        messages=values["input"],
        parameter_names=_parameter_names(tools, constraint),
    )


def _constraint(text_format: Mapping[str, Any]) -> types_pb2.StructuredOutput | None:
    kind, schema = text_format["type"], text_format.get("schema")
    if kind == "json_schema":
        for name in ("name", "schema"):
            if name not in text_format:
                raise wrong(
                    f"text.format.{name}", "is missing", reason="MISSING_REQUIRED_PARAMETER"
                )
        return types_pb2.StructuredOutput(json_schema=schema)
    if schema is not None:
        raise wrong("text.format.schema", "needs the type json_schema")
    return types_pb2.StructuredOutput(json_object=True) if kind == "json_object" else None


def _repeated(values: Mapping[str, Any], tools: ToolUse, body: Mapping[str, Any]) -> Repeated:
    given = values.get("tools", ())
    shown_format = (body.get("text") or {}).get("format") or {"type": "text"}
    return {
        "background": False,
        "instructions": values.get("instructions"),
        "max_output_tokens": values.get("max_output_tokens"),
        "max_tool_calls": None,
        "metadata": values.get("metadata", {}),
        "model": values["model"],
        "parallel_tool_calls": values.get("parallel_tool_calls", True),
        "previous_response_id": values.get("previous_response_id"),
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "store": values.get("store", True),
        "temperature": values.get("temperature", 1.0),
        "text": {"format": shown_format},
        "tool_choice": shown_choice(values.get("tool_choice", "auto")),
        "tools": [shown_tool(each) for each in given],
        "top_logprobs": values.get("top_logprobs", 0),
        "top_p": values.get("top_p", 1.0),
        "truncation": "disabled",
    }


def _parameter_names(
    tools: ToolUse, constraint: types_pb2.StructuredOutput | None
) -> dict[str, str]:
    """Return the client's names of fields that the scheduler may find wrong."""
    names = {
        "sampling.max_tokens": "max_output_tokens",
        "sampling.logprobs": "top_logprobs",
        "chat": "input",
        "chat.messages": "input",
    }
    if tools.is_forced or constraint is not None:
        source = "tools" if tools.is_forced else "text.format"
        kinds = ("", ".json_schema", ".json_object")
        names |= {f"sampling.structured_output{kind}": source for kind in kinds}
    return names
