"""The exception tree, and its one table to gRPC status codes.

SplitpointError
├── InvalidArgument        the caller's input is wrong; names the field
├── NotFound               no such model, request, session
├── AlreadyExists          same request_id, other body
├── OutOfRange             resume index beyond what was produced
├── FailedPrecondition     stale epoch or generation, layout mismatch, unsealed
│   └── ChunkLost          a slot no longer holds what its handle names
├── Aborted                superseded attempt
├── DataLoss               bytes differ from their checksum
├── Retryable              may succeed later
│   ├── ResourceExhausted  does not fit, now or ever; retry_after_seconds says which
│   └── Unavailable        not ready, draining, peer lost
├── DeadlineExceeded
├── Cancelled
├── Unauthenticated
├── PermissionDenied
└── Internal               a bug; clients see an incident id only

Nothing here imports grpc: `splitpoint.transport.statuses` turns these into statuses with
rich details and back again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

# What the message of an Unavailable begins with whose server cannot be reached; `ADDRESS: REASON`
# follows.
CANNOT_CONNECT = "cannot connect to"


class SplitpointError(Exception):
    """Base of every error that this project raises on purpose.

    Attributes:
        message: what went wrong, in words for a client.
        reason: stable UPPER_SNAKE_CASE name for google.rpc.ErrorInfo.
        metadata: machine-readable facts (numbers as text).
    """

    code: ClassVar[int] = 2  # google.rpc.Code; UNKNOWN is never used on purpose
    exit_code: ClassVar[int] = 1  # of a command or service that ends with it

    def __init__(self, message: str, *, reason: str = "", **metadata: object) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or _reason_of(type(self).__name__)
        self.metadata = {key: str(value) for key, value in metadata.items()}


class InvalidArgument(SplitpointError):
    """The input is wrong in every state. `field` is its path in the message."""

    code = 3
    exit_code = 2

    def __init__(
        self, message: str, *, field: str = "", reason: str = "", **metadata: object
    ) -> None:
        super().__init__(message, reason=reason, **metadata)
        self.field = field


class Retryable(SplitpointError):
    """Base of errors that may not occur again; google.rpc.RetryInfo says when to retry."""

    def __init__(
        self,
        message: str,
        *,
        retry_after_seconds: float | None = None,
        reason: str = "",
        **metadata: object,
    ) -> None:
        super().__init__(message, reason=reason, **metadata)
        self.retry_after_seconds = retry_after_seconds


class DeadlineExceeded(SplitpointError):
    code = 4
    exit_code = 4


class NotFound(SplitpointError):
    code = 5
    exit_code = 2


class AlreadyExists(SplitpointError):
    code = 6


class PermissionDenied(SplitpointError):
    code = 7


class ResourceExhausted(Retryable):
    """Does not fit. `retry_after_seconds` is None when it never will."""

    code = 8
    exit_code = 5


class FailedPrecondition(SplitpointError):
    code = 9


class ChunkLost(FailedPrecondition):
    """A slot no longer holds what its handle names: look up again or recompute."""


class Aborted(SplitpointError):
    code = 10


class OutOfRange(SplitpointError):
    code = 11
    exit_code = 2


class Internal(SplitpointError):
    code = 13


class Unavailable(Retryable):
    """Try again. `retry_after_seconds` is a hint."""

    code = 14
    exit_code = 3


class DataLoss(SplitpointError):
    code = 15


class Unauthenticated(SplitpointError):
    code = 16


class Cancelled(SplitpointError):
    code = 1
    exit_code = 130


def _kinds(kind: type[SplitpointError]) -> Iterator[type[SplitpointError]]:
    for child in kind.__subclasses__():
        yield child
        yield from _kinds(child)


# Each code belongs to the class that names it, not to those derived from that one.
BY_CODE: dict[int, type[SplitpointError]] = {
    kind.code: kind for kind in _kinds(SplitpointError) if "code" in vars(kind)
}


def from_code(code: int, message: str, reason: str = "") -> SplitpointError:
    """Return the error for a google.rpc.Code that came over the wire."""
    return BY_CODE.get(code, Internal)(message, reason=reason)


def _reason_of(name: str) -> str:
    return "".join(f"_{char}" if char.isupper() else char for char in name).lstrip("_").upper()
