"""Errors on the wire: a SplitpointError as a gRPC status with google.rpc details, and back.

A service that cannot start tells its supervisor why by one line on stdout:
FAILED {"code": 3, "reason": "...", "message": "..."}
"""

from __future__ import annotations

import json
import logging
import re
from typing import Any
from urllib.parse import unquote

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from splitpoint.errors import (
    CANNOT_CONNECT,
    Internal,
    InvalidArgument,
    Retryable,
    SplitpointError,
    Unavailable,
    from_code,
)

FAILED_PREFIX = "FAILED "


def failure_line(error: SplitpointError) -> str:
    facts = {"code": error.code, "reason": error.reason, "message": error.message}
    return FAILED_PREFIX + json.dumps(facts)


def read_failure(line: str) -> SplitpointError | None:
    """Return the error in a `failure_line`; None for any other line."""
    if not line.startswith(FAILED_PREFIX):
        return None
    try:
        facts = json.loads(line.removeprefix(FAILED_PREFIX))
        return from_code(int(facts["code"]), str(facts["message"]), str(facts["reason"]))
    except (ValueError, KeyError, TypeError):
        return None


_log = logging.getLogger(__name__)

ERROR_DOMAIN = "splitpoint"
# Details travel in the trailers, twice (grpc-message and the binary details). A client
# drops a status whose trailers are larger than its metadata limit.
_ERROR_TEXT_LIMIT = 1500
_ERROR_FACT_LIMIT = 200
_ERROR_FACT_COUNT = 8
_DETAILS_KEY = "grpc-status-details-bin"
_PUSHBACK_KEY = "grpc-retry-pushback-ms"
# A grpc.aio client says this of a stream that ended while it was sending a message. The
# status that the server sent is lost then.
_SEND_FAILED = "Internal error from Core"


def status_of(error: SplitpointError) -> status_pb2.Status:
    """Return the error as google.rpc.Status with ErrorInfo, BadRequest and RetryInfo."""
    facts = list(error.metadata.items())[:_ERROR_FACT_COUNT]
    details = [
        error_details_pb2.ErrorInfo(
            reason=error.reason,
            domain=ERROR_DOMAIN,
            metadata={key: value[:_ERROR_FACT_LIMIT] for key, value in facts},
        )
    ]
    message = error.message[:_ERROR_TEXT_LIMIT]
    if isinstance(error, InvalidArgument) and error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=message[:_ERROR_FACT_LIMIT]
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, Retryable) and error.retry_after_seconds is not None:
        delay = Duration()
        delay.FromNanoseconds(int(error.retry_after_seconds * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=error.code, message=message)
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def error_of(error: grpc.RpcError, called: str = "") -> SplitpointError:
    """Return the exception that the server raised: the inverse of `status_of`.

    A status without details (from gRPC itself or another server) becomes the class of its
    code.

    Args:
        called: the address that was called, for messages. gRPC names the one that it tried last
            of a host with several, which may be one where nothing should listen.
    """
    call: Any = error  # the stubs know no common base of what both APIs raise
    code = call.code() if hasattr(call, "code") else None
    if not isinstance(code, grpc.StatusCode):
        return Internal("the call failed without a status", reason="NO_STATUS")
    if code is grpc.StatusCode.INTERNAL and call.details() == _SEND_FAILED:
        return Unavailable("the call ended while a message was being sent", reason="CALL_ENDED")
    number: int = code.value[0]
    result = from_code(number, _explain_failure(str(call.details() or code.name), called))
    for key, value in call.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            _apply_details(result, value)
    return result


def _apply_details(error: SplitpointError, serialized: bytes) -> None:
    status = status_pb2.Status()
    try:
        status.ParseFromString(serialized)
    except Exception:
        _log.warning("unreadable error details in a %s status", type(error).__name__)
        return
    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    for detail in status.details:
        if detail.Unpack(info):
            error.reason = info.reason
            error.metadata = dict(info.metadata)
        elif detail.Unpack(bad_request) and bad_request.field_violations:
            if isinstance(error, InvalidArgument):
                error.field = bad_request.field_violations[0].field
        elif detail.Unpack(retry) and isinstance(error, Retryable):
            error.retry_after_seconds = retry.retry_delay.ToNanoseconds() / 1e9


def trailers_of(error: SplitpointError, status: status_pb2.Status) -> tuple[tuple[str, Any], ...]:
    """Return the trailing metadata: the details, and for Unavailable when to retry."""
    trailers: list[tuple[str, Any]] = [(_DETAILS_KEY, status.SerializeToString())]
    if isinstance(error, Unavailable):
        retry_after = error.retry_after_seconds
        pushback = -1 if retry_after is None else int(retry_after * 1000)
        trailers.append((_PUSHBACK_KEY, str(pushback)))
    return tuple(trailers)


# gRPC gives no cause with these words.
_UNEXPLAINED = "handshake failed"
# A server of TLS ends a connection without TLS at once. Which of gRPC's words come of it is chance.
_ENDED_AT_ONCE = (
    "the server closed the connection at once; most likely it speaks TLS (give --ca, or "
    "SPLITPOINT_CA, the authority of its certificate), or it wants a client certificate of its own "
    "authority that has not expired"
)
# Words of gRPC about a connection that failed, and what they mean.
_FAILURES = (
    ("certificate has expired", "the server's certificate has expired"),
    ("certificate is not yet valid", "the server's certificate is not valid yet: check the clocks"),
    ("CERTIFICATE_VERIFY_FAILED", "the server's certificate is not of the authority given here"),
    ("WRONG_VERSION_NUMBER", "this client speaks TLS, the server does not"),
    ("Hostname Verification", "the server's certificate is not for the host that was called"),
    ("not in peer certificate", "the server's certificate is not for the host that was called"),
    (_UNEXPLAINED, "the TLS handshake failed"),
    ("Socket closed", _ENDED_AT_ONCE),
    ("Connection reset by peer", _ENDED_AT_ONCE),
    ("Broken pipe", _ENDED_AT_ONCE),
)


# gRPC closed a connection whose peer left a ping unanswered.
NO_ANSWER = "it stopped answering: the process hangs or is stopped, or the network to it is cut"
# gRPC's text differs with its resolver.
_UNRESOLVED = re.compile(r"(?:errors resolving|DNS resolution failed for) (\S+): ")
# gRPC's text: a status that is not the call's, the address once or twice, then the reason.
_NOT_CONNECTED = re.compile(
    r"failed to connect to all addresses; last error: \w+: (?:ipv[46]:)?(?P<address>(unix:)?.*?): "
    r"(?:.*: )?(?P<reason>[^:]+)$"
)

_OTHER_PROTOCOL = re.compile(r"(?:ipv[46]:)?(\S+): Failed parsing HTTP/2")


def _explain_failure(text: str, called: str) -> str:
    """Return the likely cause of a connection that failed, else gRPC's own text."""
    if match := _UNRESOLVED.match(text):
        return f"cannot resolve the host name of {match[1]}"
    if text.startswith("failed to connect"):
        for words, cause in _FAILURES:
            if words in text:
                details = f" ({text})" if words == _UNEXPLAINED else ""
                return f"no TLS connection: {cause}{details}"
    if "(ping timeout)" in text:  # more follows if something was being written
        return NO_ANSWER
    if match := _OTHER_PROTOCOL.search(text):
        return (
            f"{unquote(match[1])} does not speak gRPC: most likely it is the port of a gateway, "
            "and the scheduler's is needed here"
        )
    if match := _NOT_CONNECTED.match(text):
        tried, reason = unquote(match["address"]), match["reason"]
        if called not in ("", tried):
            return f"{CANNOT_CONNECT} {called}: {reason} at {tried}"
        return f"{CANNOT_CONNECT} {tried}: {reason}"
    return text
