"""gRPC as this project speaks it: servers with a guard, channels, errors with details, health.

Knows nothing of any service: only the error tree and the limits of the wire contract.

The guard stands around every handler and every deserializer. By itself grpc.aio
answers UNKNOWN with the text of whatever exception escaped; behind the guard a
`SplitpointError` becomes its status with google.rpc details, a malformed request
INVALID_ARGUMENT, and anything else INTERNAL with an incident id that only the
log explains. Cancellation passes through untouched. Where a service has a tokens
file, the guard asks it before a handler is even looked for: nothing of the call but its
headers is read then.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from splitpoint.config import is_local_address
from splitpoint.errors import (
    Internal,
    InvalidArgument,
    Retryable,
    SplitpointError,
    Unavailable,
    from_code,
)
from splitpoint.host.descriptors import connection_limit
from splitpoint.transport.access import METADATA_KEY, Access, set_caller
from splitpoint.transport.bearer import AsyncTokenChannel, TokenChannel
from splitpoint.transport.tls import PLAIN, Identity, explain_failure

MESSAGE_LIMIT_BYTES = 4 * 1024 * 1024
METADATA_LIMIT_BYTES = 8 * 1024
STREAMS_PER_CONNECTION = 256
ERROR_DOMAIN = "splitpoint"

# Details travel in the trailers, twice (grpc-message and the binary details):
# what is longer would make the client drop the status for its size.
_ERROR_TEXT_LIMIT = 1500
_ERROR_FACT_LIMIT = 200
_ERROR_FACT_COUNT = 8
_DETAILS_KEY = "grpc-status-details-bin"
_PUSHBACK_KEY = "grpc-retry-pushback-ms"
# What a grpc.aio client says of a stream whose end overtook a message it was sending.
# It puts this over the status that it had from the server, which is lost.
_SEND_FAILED = "Internal error from Core"

# Told the method and the status of a call that has ended.
OnAnswer = Callable[[str, grpc.StatusCode], None]

_log = logging.getLogger(__name__)

_Options = list[tuple[str, Any]]

_SHARED_OPTIONS: _Options = [
    ("grpc.max_send_message_length", MESSAGE_LIMIT_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
    # Soft and hard limit are equal: between the two gRPC rejects by chance.
    ("grpc.max_metadata_size", METADATA_LIMIT_BYTES),
    ("grpc.absolute_max_metadata_size", METADATA_LIMIT_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_timeout_ms", 10_000),
]
# Beyond so many a connection is closed as soon as it is accepted.
_CONNECTIONS = "grpc.max_allowed_incoming_connections"
_SERVER_OPTIONS: _Options = [
    *_SHARED_OPTIONS,
    ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION),
    ("grpc.keepalive_time_ms", 30_000),
    # Below the clients' keepalive time, else a server punishes them for it.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # Peers that connect and say nothing, or nothing more than hello, give their descriptor back.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),
    # A second server on the same port must fail, not share its connections.
    ("grpc.so_reuseport", 0),
]
# UNAVAILABLE is the only code retried automatically. gRPC stops retrying once
# response headers arrived, so never after the first token; and a server that
# says "-1" as push-back (see `_trailers`) is not asked again.
_RETRYING_SERVICES = ("splitpoint.v1.InferenceService", "splitpoint.v1.AdminService")
_SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [{"service": service} for service in _RETRYING_SERVICES],
            "retryPolicy": {
                "maxAttempts": 3,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
_CHANNEL_OPTIONS: _Options = [
    *_SHARED_OPTIONS,
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name the time that one attempt to connect may take: a busy peer,
    # or a TLS handshake over some distance, needs more than the first back-off.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
]


# -- servers ---------------------------------------------------------------------


def create_server(
    *,
    max_concurrent_rpcs: int | None = None,
    options: Sequence[tuple[str, Any]] = (),
    access: Access | None = None,
    on_answer: OnAnswer | None = None,
) -> grpc.aio.Server:
    """A server whose every handler is guarded, with the limits of the wire contract.

    `max_concurrent_rpcs` bounds the calls in flight; more are answered
    RESOURCE_EXHAUSTED. `options` override the standard ones. With `access`
    every method but health is for callers it knows; handlers ask
    `access.current_caller()` who calls.

    `on_answer` hears of every call as it ends: its method ("/package.Service/Method",
    whatever the caller made of it) and its status. A call that its caller gave up, or
    whose deadline passed, is CANCELLED. Calls that gRPC turns away by itself, before any
    handler is looked for, are not heard of: those beyond `max_concurrent_rpcs`.
    """
    # gRPC takes the first of two equal names.
    merged = {**dict(_SERVER_OPTIONS), _CONNECTIONS: connection_limit(), **dict(options)}
    return grpc.aio.server(
        interceptors=[_Guard(access, on_answer or _nobody)],
        options=list(merged.items()),
        maximum_concurrent_rpcs=max_concurrent_rpcs,
    )


def listen(server: grpc.aio.Server, address: str, identity: Identity = PLAIN) -> str:
    """Binds `host:port` or `unix:/path`; returns the address with the real port.

    An identity with a certificate serves TLS on a port, one with authorities as
    well demands a certificate of every client. Raises Unavailable when the
    address cannot be bound.
    """
    try:
        if identity.serves_tls and not address.startswith("unix:"):
            port = server.add_secure_port(address, _server_credentials(identity))
        else:
            port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise Unavailable(f"cannot listen on {address}: it is in use or not ours") from error
    if address.startswith("unix:"):
        return address
    host, _, _ = address.rpartition(":")
    return f"{host}:{port}"


def _server_credentials(identity: Identity) -> grpc.ServerCredentials:
    return grpc.ssl_server_credentials(
        [(identity.key, identity.certificate)],
        root_certificates=identity.authorities or None,
        require_client_auth=bool(identity.authorities),
    )


# -- channels --------------------------------------------------------------------


def open_channel(
    address: str, identity: Identity = PLAIN, *, is_fresh: bool = False
) -> grpc.aio.Channel:
    """An asyncio channel to `host:port` or `unix:/path`; connects on first use.

    `is_fresh`: with a connection of its own. Channels of one process to one address share
    theirs otherwise, and the pause after an attempt to connect that failed.

    An identity with authorities speaks TLS (not over sockets), one with a token
    presents it with every call. Raises InvalidArgument for a token that would
    leave this host unencrypted.
    """
    options = [*_options_for(address, identity)]
    if is_fresh:
        options.append(("grpc.use_local_subchannel_pool", 1))
    channel = (
        grpc.aio.secure_channel(address, _channel_credentials(identity), options=options)
        if _is_encrypted(address, identity)
        else grpc.aio.insecure_channel(address, options=options)
    )
    return AsyncTokenChannel(channel, _entry(identity)) if identity.token else channel


def open_sync_channel(address: str, identity: Identity = PLAIN) -> grpc.Channel:
    """A blocking channel with the same options."""
    options = _options_for(address, identity)
    channel = (
        grpc.secure_channel(address, _channel_credentials(identity), options=options)
        if _is_encrypted(address, identity)
        else grpc.insecure_channel(address, options=options)
    )
    return TokenChannel(channel, _entry(identity)) if identity.token else channel


def _is_encrypted(address: str, identity: Identity) -> bool:
    return identity.expects_tls and not address.startswith("unix:")


def _options_for(address: str, identity: Identity) -> _Options:
    is_encrypted = _is_encrypted(address, identity)
    if identity.token and not is_encrypted and not is_local_address(address):
        raise InvalidArgument(
            f"a token is never sent to {address} in the clear: name the certificate authority "
            "of that server (--tls-ca for services, SPLITPOINT_CA or --ca for clients)",
            field="ca",
            reason="TOKEN_WITHOUT_TLS",
        )
    if is_encrypted and identity.server_name:
        return [*_CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", identity.server_name)]
    return _CHANNEL_OPTIONS


def _channel_credentials(identity: Identity) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        root_certificates=identity.authorities,
        private_key=identity.key or None,
        certificate_chain=identity.certificate or None,
    )


def _entry(identity: Identity) -> tuple[str, str]:
    return METADATA_KEY, f"Bearer {identity.token}"


# -- errors on the wire ------------------------------------------------------------


def status_of(error: SplitpointError) -> status_pb2.Status:
    """The error as google.rpc.Status: ErrorInfo always, BadRequest and RetryInfo if they apply."""
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
    retry_after = _retry_after(error)
    if retry_after is not None:
        delay = Duration()
        delay.FromNanoseconds(int(retry_after * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=error.code, message=message)
    for detail in details:
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def error_of(error: grpc.RpcError) -> SplitpointError:
    """The exception that the server raised: the inverse of `status_of`.

    Statuses without details (made by gRPC itself or by a foreign server)
    become the class of their code.
    """
    call: Any = error  # the stubs know no common base of what both APIs raise
    code = call.code() if hasattr(call, "code") else None
    if not isinstance(code, grpc.StatusCode):
        return Internal("the call failed without a status", reason="NO_STATUS")
    if code is grpc.StatusCode.INTERNAL and call.details() == _SEND_FAILED:
        return Unavailable("the call ended while a message was being sent", reason="CALL_ENDED")
    number: int = code.value[0]
    result = from_code(number, explain_failure(str(call.details() or code.name)))
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


def _retry_after(error: SplitpointError) -> float | None:
    if isinstance(error, Retryable):
        return error.retry_after_seconds
    return None


def _trailers(error: SplitpointError, status: status_pb2.Status) -> tuple[tuple[str, Any], ...]:
    trailers: list[tuple[str, Any]] = [(_DETAILS_KEY, status.SerializeToString())]
    if isinstance(error, Unavailable):
        retry_after = error.retry_after_seconds
        pushback = -1 if retry_after is None else int(retry_after * 1000)
        trailers.append((_PUSHBACK_KEY, str(pushback)))
    return tuple(trailers)


# -- the guard ---------------------------------------------------------------------

_Context = grpc.aio.ServicerContext[Any, Any]
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class _Guard(grpc.aio.ServerInterceptor):
    """Replaces each handler by one that decodes, calls and encodes inside a try.

    Handlers keep their two forms: coroutines, and for streamed answers also
    async generators. Requests of a stream come through the iterator only
    (`context.read()` would see undecoded bytes).
    """

    def __init__(self, access: Access | None, on_answer: OnAnswer) -> None:
        self._access = access
        self._on_answer = on_answer
        self._guarded: dict[str, tuple[Any, Any]] = {}

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        method: str = handler_call_details.method
        if self._access is not None:
            try:
                caller = self._access.admit(method, handler_call_details.invocation_metadata)
            except Exception as error:
                return _refusing(method, error, self._on_answer)
            # gRPC runs the handler in this very task.
            set_caller(caller)
        handler = await continuation(handler_call_details)
        if handler is None:
            self._on_answer(method, grpc.StatusCode.UNIMPLEMENTED)
            return None  # gRPC answers so
        known = self._guarded.get(method)
        if known is None or known[0] is not handler:
            known = (handler, _guarded(handler, method, self._on_answer))
            self._guarded[method] = known
        return known[1]


def _guarded(handler: Any, method: str, on_answer: OnAnswer) -> Any:
    # Both serializers work inside the guarded call, where their errors are
    # ours to answer. The one left to gRPC serves handlers that use
    # context.write() with messages; what is encoded already passes.
    def serialize(message: Any) -> bytes:
        return message if isinstance(message, bytes) else _encode(handler, message)

    if handler.request_streaming and handler.response_streaming:
        make, behaviour = grpc.stream_stream_rpc_method_handler, handler.stream_stream
    elif handler.request_streaming:
        make, behaviour = grpc.stream_unary_rpc_method_handler, handler.stream_unary
    elif handler.response_streaming:
        make, behaviour = grpc.unary_stream_rpc_method_handler, handler.unary_stream
    else:
        make, behaviour = grpc.unary_unary_rpc_method_handler, handler.unary_unary
    receive = _decode_stream if handler.request_streaming else _decode

    async def answer_once(raw: Any, context: _Context) -> bytes:
        with _heard(method, context, on_answer):
            try:
                return _encode(handler, await behaviour(receive(handler, raw), context))
            except Exception as error:
                await _abort(context, method, error)

    async def answer_stream(raw: Any, context: _Context) -> None:
        with _heard(method, context, on_answer):
            try:
                result = behaviour(receive(handler, raw), context)
                if isinstance(result, Awaitable):
                    await result
                    return
                # Closed here, not when the collector finds it: a handler learns of
                # a cancelled call at once.
                async with aclosing(result) as responses:
                    async for response in responses:
                        await context.write(_encode(handler, response))
            except Exception as error:
                await _abort(context, method, error)

    answer: Callable[..., Any] = answer_stream if handler.response_streaming else answer_once
    return make(answer, request_deserializer=None, response_serializer=serialize)


@contextmanager
def _heard(method: str, context: _Context, on_answer: OnAnswer) -> Iterator[None]:
    """Tells how the call within ended."""
    try:
        yield
    except asyncio.CancelledError:
        on_answer(method, grpc.StatusCode.CANCELLED)
        raise
    except BaseException:  # answered by `_abort`, or by the handler itself
        on_answer(method, _code_of(context))
        raise
    on_answer(method, _code_of(context))


def _code_of(context: _Context) -> grpc.StatusCode:
    code: Any = context.code()  # None while nobody set one; a number, whatever the stubs say
    return code if isinstance(code, grpc.StatusCode) else _CODES[code or 0]


def _nobody(method: str, code: grpc.StatusCode) -> None:
    """Hears nothing: for servers whose calls nobody counts."""


def _refusing(method: str, error: Exception, on_answer: OnAnswer) -> Any:
    """A handler for a call that is not let in.

    A stream on both sides whatever the method is: so gRPC reads no request first.
    """

    async def refuse(_: Any, context: _Context) -> None:
        with _heard(method, context, on_answer):
            await _abort(context, method, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _decode(handler: Any, raw: bytes) -> Any:
    if handler.request_deserializer is None:
        return raw
    try:
        return handler.request_deserializer(raw)
    except Exception as error:
        raise InvalidArgument(
            "the request is not a valid message of this method", reason="MALFORMED_MESSAGE"
        ) from error


async def _decode_stream(handler: Any, raw: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    async for message in raw:
        yield _decode(handler, message)


def _encode(handler: Any, message: Any) -> bytes:
    serialized: bytes = (
        message if handler.response_serializer is None else handler.response_serializer(message)
    )
    return serialized


async def _abort(context: _Context, method: str, error: Exception) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error  # the handler has answered by itself
    if isinstance(error, grpc.aio.InternalError):
        # A message could not be sent: the peer has gone, and with it whoever
        # could be answered. For gRPC, too, that is a cancellation.
        raise asyncio.CancelledError from error
    if not isinstance(error, SplitpointError):
        incident = secrets.token_hex(8)
        _log.error(
            "incident %s in %s", incident, method, exc_info=error, extra={"incident": incident}
        )
        error = Internal(f"internal error, incident {incident}", incident=incident)
    status = status_of(error)
    await context.abort(_CODES[status.code], status.message, _trailers(error, status))


# -- health and reflection -----------------------------------------------------------


class HealthReporter:
    """The official health service: "" is liveness, a full service name its readiness."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set(self, service_name: str, serving: bool) -> None:
        """Tells watchers, too. Ignored once `shut_down` was called."""
        status = health_pb2.HealthCheckResponse
        await self._servicer.set(service_name, status.SERVING if serving else status.NOT_SERVING)

    async def shut_down(self) -> None:
        """NOT_SERVING for every service, for good: the server is draining."""
        await self._servicer.enter_graceful_shutdown()


def enable_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    """Lets tools list `service_names`, health and reflection itself."""
    from grpc_reflection.v1alpha import reflection  # only servers have it installed

    names = [*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME]
    reflection.enable_server_reflection(names, server)
