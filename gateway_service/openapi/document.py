"""The OpenAPI 3.1 document: paths, their bodies by the tables of fields, answers and errors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from gateway_service.openai.batches import BATCH_FIELDS
from gateway_service.openai.chat_completions import CHAT_FIELDS
from gateway_service.openai.completions import COMPLETION_FIELDS
from gateway_service.openai.embeddings import EMBEDDING_FIELDS
from gateway_service.openai.fields import Table
from gateway_service.openai.responses import RESPONSE_FIELDS
from gateway_service.openai.tokens import DETOKENIZE_FIELDS, TOKENIZE_FIELDS
from gateway_service.openapi import schemas
from gateway_service.openapi.schemas import Schema, reference

_BODIES: dict[str, Table] = {
    "CompletionRequest": COMPLETION_FIELDS,
    "ChatCompletionRequest": CHAT_FIELDS,
    "ResponseRequest": RESPONSE_FIELDS,
    "EmbeddingRequest": EMBEDDING_FIELDS,
    "BatchRequest": BATCH_FIELDS,
    "TokenizeRequest": TOKENIZE_FIELDS,
    "DetokenizeRequest": DETOKENIZE_FIELDS,
}
_ANSWERS: dict[str, Schema] = {
    "Batch": schemas.BATCH,
    "Batches": schemas.page_of("Batch"),
    "ChatCompletion": schemas.CHAT_COMPLETION,
    "ChatCompletionChunk": schemas.CHAT_CHUNK,
    "Completion": schemas.COMPLETION,
    "CompletionChunk": schemas.COMPLETION_CHUNK,
    "Embeddings": schemas.EMBEDDINGS,
    "DeletedFile": schemas.DELETED_FILE,
    "Error": schemas.ERROR,
    "File": schemas.FILE,
    "Files": schemas.page_of("File"),
    "Health": schemas.HEALTH,
    "Model": schemas.MODEL,
    "Models": schemas.MODELS,
    "Response": schemas.RESPONSE,
    "ResponseEvent": schemas.RESPONSE_EVENT,
    "Status": schemas.STATUS,
    "Text": schemas.TEXT,
    "Tokens": schemas.TOKENS,
    "Usage": schemas.USAGE,
    "Version": schemas.VERSION,
}
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
        "content": {"application/json": {"schema": reference("Error")}},
    }
    if status in (429, 503):
        found["headers"] = _RETRY_AFTER
    return found


def _answer(kind: str, description: str, content_type: str = "application/json") -> dict[str, Any]:
    schema = reference(kind) if content_type == "application/json" else schemas.STRING
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
        "content": {"application/json": {"schema": reference(body)}},
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
        {"name": "after", "in": "query", "schema": schemas.STRING},
        {"name": "order", "in": "query", "schema": schemas.one_of("asc", "desc")},
    ]
    return found


def _batch_paths() -> dict[str, Any]:
    upload = _operation("create_file", "Keep a file.", _answer("File", "The file."), [*_ERRORS])
    upload["requestBody"] = {
        "required": True,
        "content": {"multipart/form-data": {"schema": schemas.UPLOAD}},
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
    model = _get(
        "get_model", "One served model.", _answer("Model", "The model."), (*_WITHOUT_BODY, 404)
    )
    model["parameters"] = [
        {
            "name": "model",
            "in": "path",
            "required": True,
            "schema": {"type": "string", "minLength": 1},
        }
    ]
    return {
        "/v1/chat/completions": _post(
            "create_chat_completion",
            "Answer a chat.",
            "ChatCompletionRequest",
            "ChatCompletion",
            events=schemas.events("ChatCompletionChunk", ends_with_mark=True),
        ),
        "/v1/completions": _post(
            "create_completion",
            "Complete texts.",
            "CompletionRequest",
            "Completion",
            events=schemas.events("CompletionChunk", ends_with_mark=True),
        ),
        "/v1/responses": _post(
            "create_response",
            "Answer an input, or go on with a conversation.",
            "ResponseRequest",
            "Response",
            events=schemas.events("ResponseEvent", ends_with_mark=False),
        ),
        "/v1/embeddings": _post(
            "create_embeddings",
            "The final hidden states at the last tokens of texts.",
            "EmbeddingRequest",
            "Embeddings",
        ),
        **_batch_paths(),
        "/v1/models": _get("list_models", "The served models.", _answer("Models", "All of them.")),
        "/v1/models/{model}": model,
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
                "content": {"application/json": {"schema": schemas.OBJECT}},
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
            "schemas": {**{name: table.schema for name, table in _BODIES.items()}, **_ANSWERS},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }
