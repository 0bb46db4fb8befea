"""/v1/files and /v1/batches: the fields of a body and of an upload, and lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict
from urllib.parse import parse_qsl

from gateway_service.openai.answers import Seconds
from gateway_service.openai.fields import Field, Table, one_of, refused, text_of, wrong
from gateway_service.openai.responses import METADATA
from splitpoint.errors import InvalidArgument

_LEAST_SECONDS, MOST_SECONDS = 3600, 30 * 24 * 3600
_MOST_NAME = 512

BATCH_FIELDS = Table(
    [
        Field("input_file_id", text_of(least=1), "A file of requests.", is_required=True),
        Field(
            "endpoint",
            one_of("/v1/chat/completions", "/v1/completions", "/v1/responses"),
            "The `url` of all its requests.",
            is_required=True,
        ),
        Field(
            "completion_window",
            one_of("24h"),
            "What is not answered by then is given up.",
            is_required=True,
        ),
        Field("metadata", METADATA, "Is returned with the batch."),
        refused("output_expires_after", "files are kept for 30 days"),
    ]
)


UPLOAD = {
    "type": "object",
    "properties": {
        "purpose": {"type": "string", "enum": ["batch"]},
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {
            "type": "integer",
            "minimum": _LEAST_SECONDS,
            "maximum": MOST_SECONDS,
        },
    },
    "required": ["purpose", "file"],
    "additionalProperties": False,
}


Purpose = Literal["batch", "batch_output"]


class File(TypedDict):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: Seconds
    expires_at: Seconds
    filename: str
    purpose: Purpose
    status: Literal["processed"]


class DeletedFile(TypedDict):
    id: str
    object: Literal["file"]
    deleted: bool


class BatchError(TypedDict):
    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(TypedDict):
    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(TypedDict):
    total: int
    completed: int
    failed: int


class Batch(TypedDict):
    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating",
        "in_progress",
        "cancelling",
        "completed",
        "failed",
        "expired",
        "cancelled",
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: Seconds
    expires_at: Seconds
    in_progress_at: NotRequired[Seconds]
    cancelling_at: NotRequired[Seconds]
    finalizing_at: NotRequired[Seconds]
    completed_at: NotRequired[Seconds]
    failed_at: NotRequired[Seconds]
    expired_at: NotRequired[Seconds]
    cancelled_at: NotRequired[Seconds]
    request_counts: RequestCounts
    metadata: dict[str, Any] | None


class _Page(TypedDict):
    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Files(_Page):
    data: list[File]


class Batches(_Page):
    data: list[Batch]


def read_upload(values: Mapping[str, str]) -> tuple[str, int | None]:
    """Return the name of an uploaded file, and the seconds that it is kept; None: as others.

    `values`: those of the form. Raises InvalidArgument.
    """
    fields = {"file", "purpose", "expires_after[anchor]", "expires_after[seconds]"}
    for name in values:
        if name not in fields:
            shown = name[:64]
            raise InvalidArgument(
                f"Unknown parameter: '{shown}'", field=shown, reason="UNKNOWN_PARAMETER"
            )
    for name in ("file", "purpose"):
        if name not in values:
            raise wrong(name, "is missing", reason="MISSING_REQUIRED_PARAMETER")
    if values["purpose"] != "batch":
        raise wrong("purpose", "must be batch")
    if len(values["file"]) > _MOST_NAME:
        raise wrong("file", f"has a name of more than {_MOST_NAME} characters")
    seconds = values.get("expires_after[seconds]")
    if values.get("expires_after[anchor]", "created_at") != "created_at":
        raise wrong("expires_after[anchor]", "must be created_at")
    if seconds is None:
        return values["file"], None
    return values["file"], _number("expires_after[seconds]", seconds, _LEAST_SECONDS, MOST_SECONDS)


def _number(name: str, text: str, least: int, most: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) <= most):
        raise wrong(name, f"must be from {least} to {most}")
    return int(text)


def listed(query: bytes, values: Sequence[dict[str, Any]], most: int, default: int) -> Any:
    """Return a page of objects, given the oldest first, as the query of its URL says.

    Raises InvalidArgument for a wrong `limit`, `order`, or `after`.
    """
    asked = dict(parse_qsl(query.decode("latin-1"), errors="replace"))
    limit = _number("limit", asked.get("limit", str(default)), 1, most)
    order = asked.get("order", "desc")
    if order not in ("asc", "desc"):
        raise wrong("order", "must be asc or desc")
    purpose = asked.get("purpose")
    found = [each for each in values if purpose in (None, each.get("purpose"))]
    if order == "desc":
        found.reverse()
    if after := asked.get("after"):
        ids = [each["id"] for each in found]
        if after not in ids:
            raise wrong("after", "is no object of this list")
        found = found[ids.index(after) + 1 :]
    page = found[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(found) > limit,
    }
