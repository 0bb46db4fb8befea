"""OpenTelemetry spans of requests, in services that were started with --otlp-endpoint.

Other processes do not load OpenTelemetry; every span is `NO_SPAN` there, whose methods do
nothing. A request's context travels as a W3C traceparent: in the metadata of calls, and in
the commands of a worker's stream. Attributes are counts and names, never prompts, token ids,
tenants, salts or tokens.

Times are seconds of `time.monotonic`, which on Linux is the clock of `time.perf_counter`.
All spans of a request in a process use one offset to calendar time, so that nested spans
stay nested.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from splitpoint.config import check_address
from splitpoint.errors import InvalidArgument, SplitpointError
from splitpoint.extras import MissingExtra

_log = logging.getLogger(__name__)

TRACEPARENT = "traceparent"
FROM_ENVIRONMENT = "env"
# Time to send the last spans at the end of a process; the rest is lost.
FLUSH_SECONDS = 2.0
# Limit of one export with its retries, unless OTEL_EXPORTER_OTLP_TIMEOUT is set.
_EXPORT_SECONDS = 2.0
# Clients choose what they send as a traceparent; version 00 has 55 characters.
_LONGEST_PARENT = 128
# Version ff, a trace of zeros and a span of zeros are invalid. A later version may have more parts.
_PARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-((?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2})(-.*)?"
)

Fact = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class _Sdk:
    """The loaded parts of OpenTelemetry."""

    tracer: Any
    propagator: Any
    api: Any


_sdk: _Sdk | None = None


def is_on() -> bool:
    """Return True if this process makes spans."""
    return _sdk is not None


class Span:
    """One span, or no span: then its methods do nothing."""

    __slots__ = ("_inner", "_offset_ns")

    def __init__(self, inner: Any = None, offset_ns: int = 0) -> None:
        self._inner = inner
        self._offset_ns = offset_ns

    @property
    def is_recorded(self) -> bool:
        """True if the span is sampled and will be exported."""
        return self._inner is not None and bool(self._inner.is_recording())

    @property
    def traceparent(self) -> str:
        """The context for another process; empty if the request is not traced."""
        if self._inner is None:
            return ""
        return traceparent_of(self._inner.get_span_context())

    def begin(self, name: str, at: float | None = None, **facts: Fact) -> Span:
        """Return a child span that begins now or at `at`; the caller ends it."""
        return self._begin(name, at, facts)

    def record(self, name: str, first: float, last: float, **facts: Fact) -> None:
        """Add a child span with both of its times."""
        self._begin(name, first, facts).end(last)

    @contextmanager
    def part(self, name: str, **facts: Fact) -> Iterator[Span]:
        """Add a child span around the block, and give its context to calls in the block."""
        part = self._begin(name, None, facts)
        with _ending(part), part.current():
            yield part

    @contextmanager
    def current(self) -> Iterator[None]:
        """Give this span's context to calls in the block (see `metadata`)."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def set(self, **facts: Fact) -> None:
        if self._inner is not None:
            self._inner.set_attributes(_attributes(facts))

    def end(self, at: float | None = None, *, error: str = "") -> None:
        """End the span now or at `at`, once. `error`: a name, never a message."""
        if not self.is_recorded or _sdk is None:
            return
        if error:
            self._inner.set_status(_sdk.api.Status(_sdk.api.StatusCode.ERROR, error))
        self._inner.end(self._ns(at))

    def _begin(self, name: str, at: float | None, facts: Mapping[str, Fact]) -> Span:
        if not self.is_recorded or _sdk is None:
            return self  # its children are not sampled, either
        inner = _sdk.tracer.start_span(
            name,
            _sdk.api.set_span_in_context(self._inner),
            attributes=_attributes(facts),
            start_time=self._ns(at),
        )
        return Span(inner, self._offset_ns)

    def _ns(self, at: float | None) -> int:
        """Return nanoseconds since 1970."""
        monotonic = time.monotonic_ns() if at is None else int(at * 1e9)
        return monotonic + self._offset_ns


NO_SPAN = Span()
_current: ContextVar[Span] = ContextVar("span", default=NO_SPAN)


def begin(name: str, parent: str = "", **facts: Fact) -> Span:
    """Return the first span of a request in this process.

    `parent` is a traceparent; if it is missing or malformed, the span begins a new trace.
    """
    if _sdk is None:
        return NO_SPAN
    context = _sdk.propagator.extract({TRACEPARENT: parent[:_LONGEST_PARENT]})
    offset_ns = time.time_ns() - time.monotonic_ns()
    inner = _sdk.tracer.start_span(
        name,
        context,
        kind=_sdk.api.SpanKind.SERVER,
        attributes=_attributes(facts),
        start_time=time.monotonic_ns() + offset_ns,
    )
    return Span(inner, offset_ns)


@contextmanager
def serving(name: str, call: Any, **facts: Fact) -> Iterator[Span]:
    """Add a span around the answer to a gRPC call, if the caller traces it."""
    parent = parent_of(call)
    span = begin(name, parent, **facts) if parent else NO_SPAN
    with _ending(span):
        yield span


@contextmanager
def _ending(span: Span) -> Iterator[None]:
    """End a span with the block, and with the error that leaves it."""
    try:
        yield
    except BaseException as error:
        span.end(error=name_of(error))
        raise
    span.end()


def parent_of(call: Any) -> str:
    """Return the traceparent of a gRPC call; empty if there is none or spans are off."""
    if _sdk is None:
        return ""
    received = call.invocation_metadata() or ()
    return next((str(value) for key, value in received if key == TRACEPARENT), "")


def received_parent(values: Sequence[str]) -> str:
    """Return the traceparent to send on for what a caller sent under that name, in version 00.

    Empty if there is none, or several, or one that is malformed: the standard says to ignore them.
    """
    found = _PARENT.fullmatch(values[0].strip(" \t")) if len(values) == 1 else None
    if found is None or (found[1] == "00" and found[3]):
        return ""
    return f"00-{found[2]}"


def current() -> Span:
    """Return the span whose context calls carry now."""
    return _current.get()


def metadata() -> tuple[tuple[str, str], ...] | None:
    """Return the metadata for a call made now; None if it is not traced."""
    parent = _current.get().traceparent
    return ((TRACEPARENT, parent),) if parent else None


def traceparent_of(context: Any) -> str:
    """Return an OpenTelemetry span context as a W3C traceparent."""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & 1:02x}"


def name_of(error: BaseException) -> str:
    """Return a failure's reason or class; its message may quote input."""
    return error.reason if isinstance(error, SplitpointError) else type(error).__name__


def _attributes(facts: Mapping[str, Fact]) -> dict[str, Fact]:
    return {f"splitpoint.{name}": fact for name, fact in facts.items() if fact is not None}


# -- exporting spans ---------------------------------------------------------------------


def collector_url(text: str) -> str | None:
    """Return the URL of `HOST:PORT` or of a URL; None for "env", where OTEL_* variables decide.

    Raises InvalidArgument for other texts, MissingExtra if OpenTelemetry is not installed.
    """
    if text == FROM_ENVIRONMENT:
        url = None
    elif "://" in text:
        scheme, _, place = text.partition("://")
        if scheme not in ("http", "https"):
            raise InvalidArgument(
                f"{text!r} begins neither with http:// nor with https://", field="otlp_endpoint"
            )
        check_address(place.rstrip("/"), field="otlp_endpoint")
        url = text
    else:
        if check_address(text, field="otlp_endpoint").startswith("unix:"):
            raise InvalidArgument("a collector has a HOST:PORT or a URL", field="otlp_endpoint")
        url = f"http://{text}"
    try:
        import opentelemetry.exporter.otlp.proto.grpc
        import opentelemetry.sdk.version  # noqa: F401
    except ImportError as error:
        raise MissingExtra("--otlp-endpoint", "tracing", "OpenTelemetry") from error
    return url


@contextmanager
def exported(service: str, endpoint: str | None) -> Iterator[None]:
    """Export the spans made in this block; with `endpoint` None there are none.

    `service` is called "splitpoint-NAME" unless OTEL_SERVICE_NAME is set. Leaving the block
    takes at most FLUSH_SECONDS, even if the collector does not answer. Raises what
    `collector_url` raises.
    """
    global _sdk
    if endpoint is None:
        yield
        return
    url = collector_url(endpoint)
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    has_timeout = any(f"OTEL_EXPORTER_OTLP_{kind}TIMEOUT" in os.environ for kind in ("", "TRACES_"))
    exporter = OTLPSpanExporter(url, timeout=None if has_timeout else _EXPORT_SECONDS)
    provider = TracerProvider(
        resource=Resource.create(_resource_of(service)), shutdown_on_exit=False
    )
    sending: Any = _Exporter(exporter, url or "the collector")
    provider.add_span_processor(BatchSpanProcessor(sending))
    # It logs every batch that fails; `_Exporter` logs the first.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    _sdk = _Sdk(provider.get_tracer("splitpoint"), TraceContextTextMapPropagator(), trace)
    _log.info("traces go to %s", url or "where OTEL_EXPORTER_OTLP_ENDPOINT says")
    try:
        yield
    finally:
        _sdk = None
        # A daemon thread: an export may hang for longer than FLUSH_SECONDS.
        flushing = threading.Thread(target=provider.shutdown, name="last spans", daemon=True)
        flushing.start()
        flushing.join(FLUSH_SECONDS)


def _resource_of(service: str) -> dict[str, str]:
    facts = {"service.instance.id": service, "service.namespace": "splitpoint"}
    is_named = "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    if not is_named and not os.environ.get("OTEL_SERVICE_NAME"):
        facts["service.name"] = f"splitpoint-{service}"
    return facts


class _Exporter:
    """An exporter that logs one warning until its collector takes spans again."""

    def __init__(self, inner: Any, name: str) -> None:
        self._inner = inner
        self._name = name
        self._has_warned = False

    def export(self, spans: Sequence[Any]) -> Any:
        result = self._inner.export(spans)
        failed = result.name != "SUCCESS"
        if failed and not self._has_warned:
            _log.warning("%s does not take traces: they are dropped until it does", self._name)
        elif self._has_warned and not failed:
            _log.info("%s takes traces again", self._name)
        self._has_warned = failed
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return bool(self._inner.force_flush(timeout_millis))
