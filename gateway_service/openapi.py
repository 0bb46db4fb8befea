"""The OpenAPI 3.1 document, and the tables of fields in the documentation.

Bodies are described by the tables by which they are read, answers by the types that their builders
return. `python -m gateway_service.openapi NAME` prints the fields of one kind of body.
"""

from __future__ import annotations

import functools
import json
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    TypedDict,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from gateway_service.openai.answers import Usage
from gateway_service.openai.batches import (
    BATCH_FIELDS,
    UPLOAD,
    Batch,
    Batches,
    DeletedFile,
    File,
    Files,
)
from gateway_service.openai.chat_completions import (
    CHAT_FIELDS,
    ChatCompletion,
    ChatCompletionChunk,
)
from gateway_service.openai.completions import COMPLETION_FIELDS, Completion, CompletionChunk
from gateway_service.openai.embeddings import EMBEDDING_FIELDS, Embeddings
from gateway_service.openai.errors import Error
from gateway_service.openai.fields import Field, Table, Use
from gateway_service.openai.response_answers import EVENTS, Response
from gateway_service.openai.responses import RESPONSE_FIELDS
from gateway_service.openai.tokens import (
    DETOKENIZE_FIELDS,
    TOKENIZE_FIELDS,
    Model,
    Models,
    Text,
    Tokens,
)

Schema = Mapping[str, Any]


class Health(TypedDict):
    status: Literal["ok"]


class Version(TypedDict):
    version: str


class Status(TypedDict):
    scheduler: dict[str, Any]
    queue: dict[str, Any]
    workers: list[dict[str, Any]]


_BODIES: dict[str, Table] = {
    "CompletionRequest": COMPLETION_FIELDS,
    "ChatCompletionRequest": CHAT_FIELDS,
    "ResponseRequest": RESPONSE_FIELDS,
    "EmbeddingRequest": EMBEDDING_FIELDS,
    "BatchRequest": BATCH_FIELDS,
    "TokenizeRequest": TOKENIZE_FIELDS,
    "DetokenizeRequest": DETOKENIZE_FIELDS,
}
# Types that have a name in the document; others are written where they are used.
_ANSWERS: dict[str, Any] = {
    "Batch": Batch,
    "Batches": Batches,
    "ChatCompletion": ChatCompletion,
    "ChatCompletionChunk": ChatCompletionChunk,
    "Completion": Completion,
    "CompletionChunk": CompletionChunk,
    "Embeddings": Embeddings,
    "DeletedFile": DeletedFile,
    "Error": Error,
    "File": File,
    "Files": Files,
    "Health": Health,
    "Model": Model,
    "Models": Models,
    "Response": Response,
    "Status": Status,
    "Text": Text,
    "Tokens": Tokens,
    "Usage": Usage,
    "Version": Version,
}
_NAMES = {kind: name for name, kind in _ANSWERS.items()}
_PLAIN: dict[Any, Schema] = {
    str: {"type": "string"},
    # All are counts or times.
    int: {"type": "integer", "minimum": 0},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    Any: {},
}


def _reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _schema_of(kind: Any) -> Schema:
    """Return the JSON schema of a type of answers."""
    if name := _NAMES.get(kind):
        return _reference(name)
    return _PLAIN[kind] if kind in _PLAIN else _written_out(kind)


def _written_out(kind: Any) -> Schema:
    """Return the JSON schema of a type that is not plain, with its fields or alternatives."""
    origin, arguments = get_origin(kind), get_args(kind)
    if is_typeddict(kind):
        return _object_of(get_type_hints(kind, include_extras=True))
    if origin is NotRequired:
        return _schema_of(arguments[0])
    if origin is Annotated:
        return {**_schema_of(arguments[0]), "description": arguments[1]}
    if origin is Literal:
        is_text = isinstance(arguments[0], str)
        return {"type": "string", "enum": [*arguments]} if is_text else {"const": arguments[0]}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema_of(each) for each in arguments]}
    if origin is list:
        return {"type": "array", "items": _schema_of(arguments[0])}
    assert origin is dict, kind
    values = _schema_of(arguments[1])
    return {"type": "object", "additionalProperties": values} if values else {"type": "object"}


def _object_of(fields: Mapping[str, Any]) -> Schema:
    """Return the JSON schema of an object with fields of these types."""
    return {
        "type": "object",
        "properties": {name: _schema_of(kind) for name, kind in fields.items()},
        "required": [name for name, kind in fields.items() if get_origin(kind) is not NotRequired],
    }


def _event_of_response() -> Schema:
    common = {"sequence_number": int}
    kinds = ((Literal[names], fields) for names, fields in EVENTS.items())
    return {"anyOf": [_object_of({"type": kind, **common, **fields}) for kind, fields in kinds]}


def _events(name: str, *, ends_with_mark: bool) -> Schema:
    """One server-sent event: an object of this name as JSON.

    `ends_with_mark`: the stream ends with [DONE], or with an error.
    """
    content = _reference(name)
    if ends_with_mark:
        content = {"anyOf": [content, _reference("Error")]}
    data: Schema = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": content,
    }
    if ends_with_mark:
        data = {"anyOf": [{"const": "[DONE]"}, data]}
    properties = {"event": _PLAIN[str], "data": data}
    return {"type": "object", "properties": properties, "required": ["data"]}


_ERRORS = {
    400: "The request is wrong: `param` names the field.",
    401: "The key is missing or unknown.",
    403: "The key does not permit this, or the host is not this one's.",
    404: "There is no such model, previous response, file or batch.",
    408: "The body did not come in time.",
    409: "The request contradicts one that is running.",
    413: "The body or the file is too large.",
    415: "The body has another type, or is compressed.",
    429: "Too many requests, or a full queue or quota.",
    500: "A bug; the log explains the incident.",
    503: "No scheduler or worker is ready.",
    504: "A scheduler did not answer in time.",
    507: "The disk space of files and batches is used up.",
}
_WITHOUT_BODY = (400, 401, 403, 429, 500, 503, 504)
_RETRY_AFTER = {
    "Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}
}
_WARNING = {
    "X-Splitpoint-Warning": {
        "description": "Fields of the body that changed nothing, after `ignored: `.",
        "schema": {"type": "string"},
    }
}


def _error(status: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "description": _ERRORS[status],
        "content": {"application/json": {"schema": _reference("Error")}},
    }
    if status in (429, 503):
        found["headers"] = _RETRY_AFTER
    return found


def _answer(kind: str, description: str, content_type: str = "application/json") -> dict[str, Any]:
    schema = _reference(kind) if content_type == "application/json" else _PLAIN[str]
    return {"description": description, "content": {content_type: {"schema": schema}}}


def _operation(
    name: str, summary: str, answer: dict[str, Any], errors: Sequence[int]
) -> dict[str, Any]:
    responses = {"200": answer, **{str(status): _error(status) for status in errors}}
    return {"operationId": name, "summary": summary, "responses": responses}


def _post(
    name: str, summary: str, body: str, answer: str, *, events: Schema | None = None
) -> dict[str, Any]:
    """A call with a body. `events`: schema of each event of its stream; None: it has none."""
    found = _answer(answer, "The answer." if events is None else "The answer, or its stream.")
    if events is not None:
        found["content"]["text/event-stream"] = {"schema": events}
        found["headers"] = _WARNING
    operation = _operation(name, summary, found, [*_ERRORS])
    operation["requestBody"] = {
        "required": True,
        "content": {"application/json": {"schema": _reference(body)}},
    }
    return {"post": operation}


def _get(
    name: str, summary: str, answer: dict[str, Any], errors: Sequence[int] = _WITHOUT_BODY
) -> dict[str, Any]:
    return {"get": _operation(name, summary, answer, errors)}


def _of_id(name: str, path: dict[str, Any]) -> dict[str, Any]:
    """The calls of a path with an id. All may find nothing."""
    for operation in path.values():
        operation["responses"].setdefault("404", _error(404))
    schema = {"type": "string", "minLength": 1}
    return {
        **path,
        "parameters": [{"name": name, "in": "path", "required": True, "schema": schema}],
    }


def _list(name: str, summary: str, answer: str, most: int) -> dict[str, Any]:
    found = _get(name, summary, _answer(answer, "A page."), (*_WITHOUT_BODY, 404))
    limit = {"type": "integer", "minimum": 1, "maximum": most}
    found["get"]["parameters"] = [
        {"name": "limit", "in": "query", "schema": limit},
        {"name": "after", "in": "query", "schema": _PLAIN[str]},
        {"name": "order", "in": "query", "schema": {"type": "string", "enum": ["asc", "desc"]}},
    ]
    return found


def _batch_paths() -> dict[str, Any]:
    upload = _operation("create_file", "Keep a file.", _answer("File", "The file."), [*_ERRORS])
    upload["requestBody"] = {
        "required": True,
        "content": {"multipart/form-data": {"schema": UPLOAD}},
    }
    content = _answer("", "The file.", "application/octet-stream")
    removed = _operation(
        "delete_file", "Remove a file.", _answer("DeletedFile", "Done."), (*_WITHOUT_BODY, 507)
    )
    file, batch = _answer("File", "The file."), _answer("Batch", "The batch.")
    cancelled = _operation("cancel_batch", "End a batch early.", batch, (*_WITHOUT_BODY, 507))
    return {
        "/v1/files": {"post": upload, **_list("list_files", "Files.", "Files", 10_000)},
        "/v1/files/{file_id}": _of_id(
            "file_id", {**_get("get_file", "A file.", file), "delete": removed}
        ),
        "/v1/files/{file_id}/content": _of_id(
            "file_id",
            _get("get_file_content", "A file's content.", content, (*_WITHOUT_BODY, 507)),
        ),
        "/v1/batches": {
            **_post("create_batch", "Answer a file of requests.", "BatchRequest", "Batch"),
            **_list("list_batches", "Batches.", "Batches", 100),
        },
        "/v1/batches/{batch_id}": _of_id("batch_id", _get("get_batch", "A batch.", batch)),
        "/v1/batches/{batch_id}/cancel": _of_id("batch_id", {"post": cancelled}),
    }


def _open_get(name: str, summary: str, answer: dict[str, Any], *errors: int) -> dict[str, Any]:
    """A call that asks for no key."""
    found = _get(name, summary, answer, (403, *errors))
    found["get"]["security"] = []
    return found


def _paths() -> dict[str, Any]:
    return {
        "/v1/chat/completions": _post(
            "create_chat_completion",
            "Answer a chat.",
            "ChatCompletionRequest",
            "ChatCompletion",
            events=_events("ChatCompletionChunk", ends_with_mark=True),
        ),
        "/v1/completions": _post(
            "create_completion",
            "Complete texts.",
            "CompletionRequest",
            "Completion",
            events=_events("CompletionChunk", ends_with_mark=True),
        ),
        "/v1/responses": _post(
            "create_response",
            "Answer an input, or go on with a conversation.",
            "ResponseRequest",
            "Response",
            events=_events("ResponseEvent", ends_with_mark=False),
        ),
        "/v1/embeddings": _post(
            "create_embeddings",
            "The final hidden states at the last tokens of texts.",
            "EmbeddingRequest",
            "Embeddings",
        ),
        **_batch_paths(),
        "/v1/models": _get("list_models", "The served models.", _answer("Models", "All of them.")),
        "/v1/models/{model}": _of_id(
            "model", _get("get_model", "One served model.", _answer("Model", "The model."))
        ),
        "/tokenize": _post(
            "tokenize", "The token ids of a text or a chat.", "TokenizeRequest", "Tokens"
        ),
        "/detokenize": _post("detokenize", "The text of token ids.", "DetokenizeRequest", "Text"),
        "/splitpoint/status": _get(
            "get_status",
            "Counters, queue and workers, for operators.",
            _answer("Status", "The state now."),
        ),
        "/metrics": _get(
            "get_metrics",
            "Metrics of this process, for Prometheus.",
            _answer("", "In the form that `Accept` asks for.", "text/plain"),
        ),
        "/health": _open_get(
            "get_health", "Whether requests can be served.", _answer("Health", "They can."), 503
        ),
        "/health/live": _open_get(
            "get_liveness", "Whether the process answers.", _answer("Health", "It does.")
        ),
        "/version": _open_get(
            "get_version", "The version of this server.", _answer("Version", "Its version.")
        ),
        "/openapi.json": _open_get(
            "get_openapi",
            "This document.",
            {
                "description": "OpenAPI 3.1.",
                "content": {"application/json": {"schema": {"type": "object"}}},
            },
        ),
    }


@functools.cache
def document(version: str, *, needs_key: bool) -> dict[str, Any]:
    """Return the document. `needs_key`: this gateway checks keys itself; else a scheduler may."""
    bearer: dict[str, list[str]] = {"bearer": []}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Splitpoint",
            "version": version,
            "description": "OpenAI-compatible access to a Splitpoint stack.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [bearer] if needs_key else [{}, bearer],
        "paths": _paths(),
        "components": {
            "schemas": {
                **{name: table.schema for name, table in _BODIES.items()},
                **{name: _written_out(kind) for name, kind in _ANSWERS.items()},
                "ResponseEvent": _event_of_response(),
            },
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


# -- the documentation ---------------------------------------------------------------------


def _rows(table: Table) -> Iterator[str]:
    """Yield the lines of the table: what is read, then what is ignored and what is refused."""
    yield "| field | default | meaning |"
    yield "|---|---|---|"
    for field in table.fields.values():
        if field.use is Use.READ:
            star = "*" if field.is_extension else ""
            yield f"| `{field.name}`{star} | {_default(field)} | {_cell(field.help)} |"
    others = [field for field in table.fields.values() if field.use is not Use.READ]
    if not others:
        return
    yield ""
    yield "| field | is | why |"
    yield "|---|---|---|"
    for field in others:
        star = "*" if field.is_extension else ""
        yield f"| `{field.name}`{star} | {_use(field)} | {_cell(field.help)} |"


def _default(field: Field) -> str:
    if field.is_required:
        return "required"
    return "" if field.default is None else f"`{json.dumps(field.default)}`"


def _use(field: Field) -> str:
    if field.use is Use.IGNORED:
        return "ignored"
    neutral = " or ".join(f"`{json.dumps(value)}`" for value in field.neutral)
    return f"refused, except {neutral}" if neutral else "refused"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(arguments: Sequence[str]) -> int:
    """Return exit code 2 for an unknown name."""
    if len(arguments) != 1 or arguments[0] not in _BODIES:
        print(f"name one of {', '.join(_BODIES)}", file=sys.stderr)
        return 2
    print("\n".join(_rows(_BODIES[arguments[0]])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
