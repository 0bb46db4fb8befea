"""JSON schemas of what the gateway answers. They say which fields are always there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]

STRING: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
BOOLEAN: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def one_of(*values: str) -> Schema:
    return {"type": "string", "enum": [*values]}


def described(schema: Schema, description: str) -> Schema:
    return {**schema, "description": description}


def obj(optional: Sequence[str] = (), **properties: Schema) -> Schema:
    """An object whose properties are always there, but for those in `optional`."""
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
    }


def reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_SECONDS = described(COUNT, "Seconds since 1970.")
_PLAN = described(
    OBJECT, "Only with include_plan: the plan, its reason, and times. See docs/gateway.md."
)
_FINISH = one_of("stop", "length")
_STOP_REASON = described(nullable(STRING), "The stop string that ended the text.")

ERROR = obj(
    error=obj(
        message=STRING,
        type=STRING,
        param=described(nullable(STRING), "The field that is wrong."),
        code=described(nullable(STRING), "A stable name of the cause."),
    )
)
USAGE = obj(
    ("prompt_tokens_details",),
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
    prompt_tokens_details=obj(
        cached_tokens=described(
            COUNT, "Of the prompt; they were not computed again. Absent before a stream's end."
        )
    ),
)

_TOKEN = obj(token=STRING, logprob=NUMBER, bytes=array(COUNT))
_LOGPROB = obj(token=STRING, logprob=NUMBER, bytes=array(COUNT), top_logprobs=array(_TOKEN))


_PROMPT_LOGPROBS = described(
    array(
        nullable(
            {
                "type": "object",
                "additionalProperties": obj(logprob=NUMBER, rank=COUNT, decoded_token=STRING),
            }
        )
    ),
    "Only if asked for: of each token of the prompt, by token id. Null for the first one.",
)


def _answer(name: str, extra: Mapping[str, Schema] = {}, **choice: Schema) -> Schema:
    """A whole answer; `choice` is what a choice has besides its index and the stop string.

    `extra`: further fields, which may be missing.
    """
    return obj(
        ("splitpoint", *extra),
        id=STRING,
        object=one_of(name),
        created=_SECONDS,
        model=STRING,
        choices=array(obj(("prompt_logprobs",), index=COUNT, **choice, stop_reason=_STOP_REASON)),
        usage=reference("Usage"),
        splitpoint=_PLAN,
        **extra,
    )


def _chunk(name: str, **choice: Schema) -> Schema:
    """An event of a stream; `choice` as of `_answer`."""
    return obj(
        ("usage", "splitpoint"),
        id=STRING,
        object=one_of(name),
        created=_SECONDS,
        model=STRING,
        choices=array(obj(("stop_reason",), index=COUNT, **choice, stop_reason=_STOP_REASON)),
        usage=nullable(reference("Usage")),
        splitpoint=_PLAN,
    )


# -- /v1/completions ----------------------------------------------------------------------------

_TOKEN_LOGPROBS = nullable(
    obj(
        text_offset=array(COUNT),
        token_logprobs=array(nullable(NUMBER)),
        tokens=array(STRING),
        top_logprobs=array(nullable({"type": "object", "additionalProperties": NUMBER})),
    )
)
COMPLETION = _answer(
    "text_completion",
    text=STRING,
    logprobs=_TOKEN_LOGPROBS,
    finish_reason=_FINISH,
    prompt_logprobs=_PROMPT_LOGPROBS,
)
COMPLETION_CHUNK = _chunk(
    "text_completion",
    text=STRING,
    logprobs=_TOKEN_LOGPROBS,
    finish_reason=nullable(_FINISH),
)

# -- /v1/chat/completions -------------------------------------------------------------------------

_CHAT_LOGPROBS = nullable(obj(content=array(_LOGPROB), refusal={"type": "null"}))
_CHAT_FINISH = one_of("stop", "length", "tool_calls")
_ARGUMENTS = described(STRING, "As the model wrote them.")
CHAT_COMPLETION = _answer(
    "chat.completion",
    {"prompt_logprobs": _PROMPT_LOGPROBS},
    message=obj(
        ("tool_calls",),
        role=one_of("assistant"),
        content=described(nullable(STRING), "Null if there are only calls."),
        refusal={"type": "null"},
        tool_calls=array(
            obj(
                id=STRING,
                type=one_of("function"),
                function=obj(name=STRING, arguments=_ARGUMENTS),
            )
        ),
    ),
    logprobs=_CHAT_LOGPROBS,
    finish_reason=_CHAT_FINISH,
)
CHAT_CHUNK = _chunk(
    "chat.completion.chunk",
    delta=obj(
        ("role", "content", "tool_calls"),
        role=one_of("assistant"),
        content=nullable(STRING),
        tool_calls=array(
            obj(
                ("id", "type"),
                index=COUNT,
                id=described(STRING, "Only where the call begins."),
                type=one_of("function"),
                function=obj(("name",), name=STRING, arguments=_ARGUMENTS),
            )
        ),
    ),
    logprobs=_CHAT_LOGPROBS,
    finish_reason=nullable(_CHAT_FINISH),
)

# -- /v1/responses --------------------------------------------------------------------------------

_ITEM_STATUS = described(
    one_of("completed", "incomplete", "in_progress"), "in_progress only in events."
)
_TEXT_PART = obj(
    type=one_of("output_text"), text=STRING, annotations=array({}), logprobs=array(_LOGPROB)
)
_OUTPUT_ITEM: Schema = {
    "anyOf": [
        obj(
            id=STRING,
            type=one_of("message"),
            status=_ITEM_STATUS,
            role=one_of("assistant"),
            content=array(_TEXT_PART),
        ),
        obj(
            id=STRING,
            type=one_of("function_call"),
            status=_ITEM_STATUS,
            call_id=STRING,
            name=STRING,
            arguments=STRING,
        ),
    ]
}
_NULL: Schema = {"type": "null"}
RESPONSE = obj(
    ("splitpoint",),
    id=STRING,
    object=one_of("response"),
    created_at=_SECONDS,
    status=_ITEM_STATUS,
    error=_NULL,
    incomplete_details=nullable(obj(reason=one_of("max_output_tokens"))),
    background={"const": False},
    instructions=nullable(STRING),
    max_output_tokens=nullable(COUNT),
    max_tool_calls=_NULL,
    metadata={"type": "object", "additionalProperties": STRING},
    model=STRING,
    parallel_tool_calls=BOOLEAN,
    previous_response_id=nullable(STRING),
    reasoning=obj(effort=_NULL, summary=_NULL),
    service_tier=one_of("default"),
    store=BOOLEAN,
    temperature=NUMBER,
    text=obj(format=OBJECT),
    tool_choice={"anyOf": [STRING, obj(type=one_of("function"), name=STRING)]},
    tools=array(
        obj(
            type=one_of("function"),
            name=STRING,
            description=nullable(STRING),
            parameters=nullable(OBJECT),
            strict=nullable(BOOLEAN),
        )
    ),
    top_logprobs=COUNT,
    top_p=NUMBER,
    truncation=one_of("disabled"),
    output=array(_OUTPUT_ITEM),
    usage=nullable(
        obj(
            input_tokens=COUNT,
            input_tokens_details=obj(
                cached_tokens=COUNT,
                cache_write_tokens=described(COUNT, "Always 0: writes are not counted."),
            ),
            output_tokens=COUNT,
            output_tokens_details=obj(reasoning_tokens=COUNT),
            total_tokens=COUNT,
        )
    ),
    splitpoint=_PLAN,
)


def _event(*kinds: str, **fields: Schema) -> Schema:
    return obj((), type=one_of(*kinds), sequence_number=COUNT, **fields)


def _item_event(*kinds: str, **fields: Schema) -> Schema:
    return _event(*kinds, item_id=STRING, output_index=COUNT, **fields)


_LOGPROBS = array(_LOGPROB)
RESPONSE_EVENT: Schema = {
    "anyOf": [
        _event(
            *("response.created", "response.in_progress"),
            *("response.completed", "response.incomplete"),
            response=reference("Response"),
        ),
        _event(
            *("response.output_item.added", "response.output_item.done"),
            output_index=COUNT,
            item=_OUTPUT_ITEM,
        ),
        _item_event(
            *("response.content_part.added", "response.content_part.done"),
            content_index=COUNT,
            part=_TEXT_PART,
        ),
        _item_event(
            "response.output_text.delta", content_index=COUNT, delta=STRING, logprobs=_LOGPROBS
        ),
        _item_event(
            "response.output_text.done", content_index=COUNT, text=STRING, logprobs=_LOGPROBS
        ),
        _event("error", code=nullable(STRING), message=STRING, param=nullable(STRING)),
        _item_event("response.function_call_arguments.delta", delta=STRING),
        _item_event("response.function_call_arguments.done", name=STRING, arguments=STRING),
    ]
}

EMBEDDINGS = obj(
    (),
    object=one_of("list"),
    model=STRING,
    pooling=described(one_of("last"), "The state of the last token is the embedding."),
    data=array(
        obj(
            (),
            object=one_of("embedding"),
            index=COUNT,
            embedding={"anyOf": [array(NUMBER), STRING]},
        )
    ),
    usage=obj(
        (),
        prompt_tokens=COUNT,
        total_tokens=COUNT,
        prompt_tokens_details=obj((), cached_tokens=COUNT),
    ),
)

# -- the others --------------------------------------------------------------------------------

MODEL = obj(
    id=STRING,
    object=one_of("model"),
    created=_SECONDS,
    owned_by=STRING,
    max_model_len=described(COUNT, "Tokens of prompt and answer together."),
    vocabulary_size=COUNT,
    has_chat_template=BOOLEAN,
    has_structured_output=BOOLEAN,
    tool_call_format=described(nullable(STRING), "hermes, llama3_json or mistral."),
    ready_worker_count=COUNT,
)
MODELS = obj(object=one_of("list"), data=array(reference("Model")))
TOKENS = obj(
    count=COUNT,
    max_model_len=COUNT,
    tokens=array(COUNT),
    token_strs=nullable(array(STRING)),
)
TEXT = obj(prompt=STRING)
UPLOAD: Schema = {
    "type": "object",
    "properties": {
        "purpose": one_of("batch"),
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "expires_after[anchor]": one_of("created_at"),
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 30 * 24 * 3600},
    },
    "required": ["purpose", "file"],
    "additionalProperties": False,
}
FILE = obj(
    id=STRING,
    object=one_of("file"),
    bytes=COUNT,
    created_at=_SECONDS,
    expires_at=_SECONDS,
    filename=STRING,
    purpose=one_of("batch", "batch_output"),
    status=one_of("processed"),
)
DELETED_FILE = obj(id=STRING, object=one_of("file"), deleted=BOOLEAN)
_ENDS = ("completed", "failed", "expired", "cancelled")
_TIMES = ("in_progress_at", "cancelling_at", "finalizing_at", *(f"{end}_at" for end in _ENDS))
_BATCH_ERROR = obj(code=STRING, message=STRING, param=nullable(STRING), line=nullable(COUNT))
BATCH = obj(
    _TIMES,
    id=STRING,
    object=one_of("batch"),
    endpoint=STRING,
    errors=nullable(obj(object=one_of("list"), data=array(_BATCH_ERROR))),
    input_file_id=STRING,
    completion_window=STRING,
    status=one_of("validating", "in_progress", "cancelling", *_ENDS),
    output_file_id=nullable(STRING),
    error_file_id=nullable(STRING),
    created_at=_SECONDS,
    expires_at=_SECONDS,
    request_counts=obj(total=COUNT, completed=COUNT, failed=COUNT),
    metadata=nullable(OBJECT),
    **dict.fromkeys(_TIMES, _SECONDS),
)


def page_of(name: str) -> Schema:
    """A list of objects of this name."""
    return obj(
        object=one_of("list"),
        data=array(reference(name)),
        first_id=nullable(STRING),
        last_id=nullable(STRING),
        has_more=BOOLEAN,
    )


HEALTH = obj(status=one_of("ok"))
VERSION = obj(version=STRING)
STATUS = obj(scheduler=OBJECT, queue=OBJECT, workers=array(OBJECT))


def events(name: str, *, ends_with_mark: bool) -> Schema:
    """One server-sent event: an object of this name as JSON.

    `ends_with_mark`: the stream ends with [DONE], or with an error.
    """
    content = reference(name)
    if ends_with_mark:
        content = {"anyOf": [content, reference("Error")]}
    data: Schema = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": content,
    }
    if ends_with_mark:
        data = {"anyOf": [{"const": "[DONE]"}, data]}
    return obj(("event",), event=STRING, data=data)
