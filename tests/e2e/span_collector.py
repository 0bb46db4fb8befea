"""A collector of traces: a real OTLP/gRPC server that keeps what it gets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc


@dataclass(frozen=True)
class ReceivedSpan:
    """One span as it came over the wire; times in nanoseconds."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    attributes: dict[str, Any]
    is_error: bool


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    address: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)
    raw: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    async def Export(
        self, request: pb.ExportTraceServiceRequest, context: Any
    ) -> pb.ExportTraceServiceResponse:
        self.raw += request.SerializeToString()
        self.headers = {key: str(value) for key, value in context.invocation_metadata()}
        for resource in request.resource_spans:
            facts = {entry.key: entry.value for entry in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [_span(facts["service.name"].string_value, s) for s in scope.spans]
        return pb.ExportTraceServiceResponse()

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]

    def children(self, parent: ReceivedSpan) -> list[ReceivedSpan]:
        found = [span for span in self.spans if span.parent_id == parent.span_id]
        return sorted(found, key=lambda span: span.start)

    def tree(self, root: ReceivedSpan, depth: int = 0, since: int | None = None) -> list[str]:
        """For people: one line a span, milliseconds from the root's start."""
        since = root.start if since is None else since
        when = f"{(root.start - since) / 1e6:8.1f} {(root.end - root.start) / 1e6:8.1f}"
        lines = [f"{when}  {'  ' * depth}{root.name} ({root.service.removeprefix('splitpoint-')})"]
        for child in self.children(root):
            lines += self.tree(child, depth + 1, since)
        return lines


def _span(service: str, span: Any) -> ReceivedSpan:
    def value_of(value: Any) -> Any:
        return getattr(value, value.WhichOneof("value"))

    return ReceivedSpan(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        {entry.key: value_of(entry.value) for entry in span.attributes},
        span.status.code == 2,
    )


@asynccontextmanager
async def span_collector(address: str = "127.0.0.1:0") -> AsyncIterator[Collector]:
    collector = Collector()
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.address = f"127.0.0.1:{server.add_insecure_port(address)}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(0)
