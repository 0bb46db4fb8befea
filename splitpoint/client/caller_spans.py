"""A span around each generation of a program that uses OpenTelemetry; else nothing.

The client never loads OpenTelemetry. It only checks whether the program has.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from typing import Any

import grpc

from splitpoint.observe.tracing import TRACEPARENT, traceparent_of

# Entries that a call adds to those of its channel.
Metadata = tuple[tuple[str, str], ...]


def generate(method: Any, request: Any, timeout: float | None, metadata: Metadata = ()) -> Any:
    """Call `method` within a span that ends with the call."""
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None:
        return method(request, timeout=timeout, metadata=metadata or None)
    span = api.get_tracer("splitpoint").start_span(
        "splitpoint generate",
        kind=api.SpanKind.CLIENT,
        attributes={"splitpoint.request_id": request.request_id},
    )
    context = span.get_span_context()
    if not context.is_valid:
        return method(request, timeout=timeout, metadata=metadata or None)
    traced = (*metadata, (TRACEPARENT, traceparent_of(context)))
    call = method(request, timeout=timeout, metadata=traced)
    call.add_done_callback(lambda done: _end(api, span, done))
    return call


def _end(api: Any, span: Any, call: Any) -> None:
    code = call.code()
    if not inspect.isawaitable(code):
        _end_as(api, span, code)
        return
    # The status of an asyncio call must be awaited.
    asking = asyncio.ensure_future(code)
    asking.add_done_callback(
        lambda told: _end_as(api, span, None if told.cancelled() else told.result())
    )


def _end_as(api: Any, span: Any, code: grpc.StatusCode | None) -> None:
    if code is not None and code is not grpc.StatusCode.OK:
        span.set_status(api.Status(api.StatusCode.ERROR, code.name))
    span.end()
