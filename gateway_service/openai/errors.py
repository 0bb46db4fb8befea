"""Errors in OpenAI's form: a status of HTTP, and the body that its clients read."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, TypedDict

from splitpoint.errors import (
    Aborted,
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    OutOfRange,
    PermissionDenied,
    ResourceExhausted,
    Retryable,
    SplitpointError,
    Unauthenticated,
    Unavailable,
)


class HttpError(SplitpointError):
    """An error that gRPC has no code for, with its status of HTTP. `field`: the client's."""

    def __init__(self, status: int, message: str, *, reason: str, field: str = "") -> None:
        super().__init__(message, reason=reason)
        self.status = status
        self.field = field


class ErrorObject(TypedDict):
    message: str
    type: str
    param: Annotated[str | None, "The field that is wrong."]
    code: Annotated[str | None, "A stable name of the cause."]


class Error(TypedDict):
    error: ErrorObject


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """What a client gets: the status, further headers, and the body's `error` object."""

    status: int
    error: ErrorObject
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> Error:
        return {"error": self.error}


# By kind of error: the status, and OpenAI's type.
_STATUSES: tuple[tuple[type[SplitpointError], int, str], ...] = (
    (InvalidArgument, 400, "invalid_request_error"),
    (OutOfRange, 400, "invalid_request_error"),
    (FailedPrecondition, 400, "invalid_request_error"),
    (Unauthenticated, 401, "authentication_error"),
    (PermissionDenied, 403, "permission_error"),
    (NotFound, 404, "not_found_error"),
    (AlreadyExists, 409, "conflict_error"),
    (Aborted, 409, "conflict_error"),
    (ResourceExhausted, 429, "rate_limit_error"),
    (Unavailable, 503, "service_unavailable_error"),
    (Cancelled, 503, "service_unavailable_error"),
    (DeadlineExceeded, 504, "timeout_error"),
)
# What does not fit, and never will.
_TOO_LARGE = {"MESSAGE_TOO_LARGE"}
# Reasons whose name clients of OpenAI know otherwise.
_CODES = {
    "CONTEXT_EXCEEDED": "context_length_exceeded",
    "TOKEN_MISSING": "invalid_api_key",
    "TOKEN_UNKNOWN": "invalid_api_key",
    "TOKEN_MALFORMED": "invalid_api_key",
}
_LEAST_RETRY_SECONDS = 1


def error_answer(error: SplitpointError, names: Mapping[str, str] | None = None) -> ErrorAnswer:
    """Return what a client gets for an error.

    `names`: the endpoint's own fields, by the scheduler's (`parameter_of`); None: the error's field
    is the client's.
    """
    status, kind = _status_of(error)
    parameter = error.field if isinstance(error, InvalidArgument | HttpError) else ""
    if names is not None:
        parameter = parameter_of(parameter, names)
    headers = {}
    if isinstance(error, Retryable) and status in (429, 503):
        seconds = error.retry_after_seconds or _LEAST_RETRY_SECONDS
        headers["retry-after"] = str(max(_LEAST_RETRY_SECONDS, math.ceil(seconds)))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return ErrorAnswer(
        status,
        {
            "message": error.message,
            "type": kind,
            "param": parameter or None,
            "code": _CODES.get(error.reason, error.reason.lower()),
        },
        headers,
    )


def _status_of(error: SplitpointError) -> tuple[int, str]:
    if isinstance(error, HttpError):
        return error.status, "server_error" if error.status >= 500 else "invalid_request_error"
    if isinstance(error, ResourceExhausted) and error.retry_after_seconds is None:
        return 413 if error.reason in _TOO_LARGE else 400, "invalid_request_error"
    for kind, status, name in _STATUSES:
        if isinstance(error, kind):
            return status, name
    return 500, "server_error"


# Fields of the scheduler's messages that have another name at every endpoint.
_NAMES = {
    "text": "prompt",
    "token_ids.ids": "prompt",
    "token_ids": "prompt",
    "chat": "messages",
    "chat.messages": "messages",
    "chat.tools": "tools",
    "chat.template_arguments": "chat_template_kwargs",
    "sampling.structured_output": "structured_outputs",
    "sampling.structured_output.json_schema": "structured_outputs.json",
    "sampling.structured_output.regex": "structured_outputs.regex",
    "sampling.structured_output.grammar": "structured_outputs.grammar",
    "sampling.structured_output.choice": "structured_outputs.choice",
    "sampling.structured_output.json_object": "structured_outputs.json_object",
}
_ENDING = re.compile(r"(\[[^\]]*\].*)?$")


def parameter_of(path: str, names: Mapping[str, str]) -> str:
    """Return the field that the client wrote for one of the scheduler's ("sampling.stop[1]").

    `names`: from the scheduler's field, without an index, to the client's.
    """
    ending = _ENDING.search(path)
    index = ending[0] if ending else ""
    field = path.removesuffix(index)
    # A variable of the template is a part of a field: "chat.template_arguments.NAME".
    parent, dot, child = field.rpartition(".")
    found = names.get(field) or _NAMES.get(field)
    if found is None and (of_parent := names.get(parent) or _NAMES.get(parent)):
        found = f"{of_parent}{dot}{child}"
    return f"{found or field.removeprefix('sampling.')}{index}"
