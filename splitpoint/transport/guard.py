"""The guard around every handler of a server: access, decoding, errors as statuses, and counts.

By itself grpc.aio answers UNKNOWN with the text of any exception that escapes. Behind the
guard a `SplitpointError` becomes its status with google.rpc details, a malformed request
becomes INVALID_ARGUMENT, and any other exception INTERNAL with an incident id that only
the log explains. Cancellation passes through. If the service has a tokens file, the guard
checks the caller before it looks up the handler; gRPC has read only the headers by then.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any, NoReturn

import grpc
from google.protobuf import descriptor_pool
from grpc_health.v1 import health
from prometheus_client import Counter

from splitpoint.errors import Internal, InvalidArgument, SplitpointError
from splitpoint.observe.meters import Meters
from splitpoint.observe.metrics import RPC_CALLS
from splitpoint.transport.access import Access, set_caller
from splitpoint.transport.statuses import status_of, trailers_of

# The label of any other method: callers must not be able to add series.
UNKNOWN_METHOD = "unknown"


def count_calls(meters: Meters, service_names: Sequence[str]) -> OnCallEnded:
    """Return the `on_answer` of a server of these services (full names) and health.

    Every method starts with 0 calls that succeeded. Call once per process.
    """
    calls = meters.counter(RPC_CALLS)
    methods = _methods_of([*service_names, health.SERVICE_NAME])
    counted: dict[tuple[str, grpc.StatusCode], Counter] = {
        (method, grpc.StatusCode.OK): calls.labels(method, grpc.StatusCode.OK.name)
        for method in methods.values()
    }

    def count(path: str, code: grpc.StatusCode) -> None:
        method = methods.get(path, UNKNOWN_METHOD)
        counter = counted.get((method, code))
        if counter is None:
            counter = counted[method, code] = calls.labels(method, code.name)
        counter.inc()

    return count


def _methods_of(service_names: Sequence[str]) -> dict[str, str]:
    """Map the path of each method, "/package.Service/Method", to "Service/Method"."""
    pool = descriptor_pool.Default()
    return {
        f"/{service.full_name}/{method.name}": f"{service.name}/{method.name}"
        for service in map(pool.FindServiceByName, service_names)
        for method in service.methods
    }


_log = logging.getLogger(__name__)

# Called with the method and the status of each call that has ended.
OnCallEnded = Callable[[str, grpc.StatusCode], None]

# Messages that are larger are handled one in a turn of the event loop: decoding one of 4 MiB, and
# what a handler does with it before it first waits, holds the loop for milliseconds.
_LARGE_BYTES = 256 * 1024

_Context = grpc.aio.ServicerContext[Any, Any]
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class Guard(grpc.aio.ServerInterceptor):
    """Replace each handler by one that decodes, calls and encodes inside a try.

    Handlers are coroutines, or async generators for streamed answers. They must read a
    request stream through its iterator: `context.read()` would return undecoded bytes.
    """

    def __init__(self, access: Access | None, on_answer: OnCallEnded) -> None:
        self._access = access
        self._on_answer = on_answer
        self._guarded: dict[str, tuple[Any, Any]] = {}
        self._large = asyncio.Lock()

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        method: str = handler_call_details.method
        if self._access is not None:
            try:
                caller = self._access.admit(method, handler_call_details.invocation_metadata)
            except Exception as error:
                return _refusing_handler(method, error, self._on_answer)
            # gRPC runs the handler in the same task.
            set_caller(caller)
        handler = await continuation(handler_call_details)
        if handler is None:
            self._on_answer(method, grpc.StatusCode.UNIMPLEMENTED)
            return None  # gRPC answers UNIMPLEMENTED
        known = self._guarded.get(method)
        if known is None or known[0] is not handler:
            known = (handler, _guarded(handler, method, self._on_answer, self._large))
            self._guarded[method] = known
        return known[1]


def _guarded(handler: Any, method: str, on_answer: OnCallEnded, large: asyncio.Lock) -> Any:
    # Both serializers run inside the guarded call, so that the guard answers their
    # errors. gRPC's own serializer is for handlers that pass messages to context.write().
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
        with _report_call_end(method, context, on_answer):
            try:
                await _take_turn(raw, large)
                return _encode(handler, await behaviour(receive(handler, raw), context))
            except Exception as error:
                await _abort(context, method, error)

    async def answer_stream(raw: Any, context: _Context) -> None:
        with _report_call_end(method, context, on_answer):
            try:
                await _take_turn(raw, large)
                result = behaviour(receive(handler, raw), context)
                if isinstance(result, Awaitable):
                    await result
                    return
                # Closed at once, so that a handler learns of a cancelled call without
                # waiting for the garbage collector.
                async with aclosing(result) as responses:
                    async for response in responses:
                        await context.write(_encode(handler, response))
            except Exception as error:
                await _abort(context, method, error)

    answer: Callable[..., Any] = answer_stream if handler.response_streaming else answer_once
    return make(answer, request_deserializer=None, response_serializer=partial(_encode, handler))


async def _take_turn(raw: Any, large: asyncio.Lock) -> None:
    """Wait for a turn of the event loop in which no other large message is handled."""
    if isinstance(raw, bytes) and len(raw) > _LARGE_BYTES:
        async with large:
            await asyncio.sleep(0)


@contextmanager
def _report_call_end(method: str, context: _Context, on_answer: OnCallEnded) -> Iterator[None]:
    """Report how the call in this block ended."""
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
    code: Any = context.code()  # None if not set; a number, although the stubs say otherwise
    return code if isinstance(code, grpc.StatusCode) else _CODES[code or 0]


def ignore_call_end(method: str, code: grpc.StatusCode) -> None:
    """Do nothing, for servers that do not count their calls."""


def _refusing_handler(method: str, error: Exception, on_answer: OnCallEnded) -> Any:
    """Return a handler that answers a call with `error`.

    It is a stream on both sides for every kind of method, so that gRPC reads no request.
    """

    async def refuse(_: Any, context: _Context) -> None:
        with _report_call_end(method, context, on_answer):
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
    """Serialize an answer, unless its handler has, or this was called before."""
    if isinstance(message, bytes) or handler.response_serializer is None:
        encoded: bytes = message
    else:
        encoded = handler.response_serializer(message)
    return encoded


async def _abort(context: _Context, method: str, error: Exception) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error  # the handler has already answered
    if isinstance(error, grpc.aio.InternalError):
        # A message could not be sent: the peer has gone. gRPC calls that a cancellation.
        raise asyncio.CancelledError from error
    if not isinstance(error, SplitpointError):
        incident = secrets.token_hex(8)
        _log.error(
            "incident %s in %s", incident, method, exc_info=error, extra={"incident": incident}
        )
        error = Internal(f"internal error, incident {incident}", incident=incident)
    status = status_of(error)
    try:
        await context.abort(_CODES[status.code], status.message, trailers_of(error, status))
    except grpc.aio.InternalError as left:
        raise asyncio.CancelledError from left  # it has gone without reading its status
