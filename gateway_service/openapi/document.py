"""The OpenAPI 3.1 document: paths, their bodies by the tables of fields, answers and errors."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from gateway_service.openai.chat.job import CHAT_FIELDS
from gateway_service.openai.completions import COMPLETION_FIELDS
from gateway_service.openai.embeddings import EMBEDDING_FIELDS
from gateway_service.openai.fields import Table
from gateway_service.openai.responses.job import RESPONSE_FIELDS
from gateway_service.openai.tokens import DETOKENIZE_FIELDS, TOKENIZE_FIELDS
from gateway_service.openapi import schemas
from gateway_service.openapi.schemas import Schema, reference

_BODIES: dict[str, Table] = {
    "CompletionRequest": COMPLETION_FIELDS,
    "ChatCompletionRequest": CHAT_FIELDS,
    "ResponseRequest": RESPONSE_FIELDS,
    "EmbeddingRequest": EMBEDDING_FIELDS,
    "TokenizeRequest": TOKENIZE_FIELDS,
    "DetokenizeRequest": DETOKENIZE_FIELDS,
}
_ANSWERS: dict[str, Schema] = {
    "ChatCompletion": schemas.CHAT_COMPLETION,
    "ChatCompletionChunk": schemas.CHAT_CHUNK,
    "Completion": schemas.COMPLETION,
    "CompletionChunk": schemas.COMPLETION_CHUNK,
    "Embeddings": schemas.EMBEDDINGS,
    "Error": schemas.ERROR,
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
    404: "There is no such model, or no previous response by this id.",
    408: "The body did not come in time.",
    409: "The request contradicts one that is running.",
    413: "The body is too large.",
    415: "The body is not application/json, or is compressed.",
    429: "Too many requests, or a full queue or quota.",
    500: "A bug; the log explains the incident.",
    503: "No scheduler or worker is ready.",
    504: "A scheduler did not answer in time.",
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
