"""The store's calls that work for one request, with a span each when their callers trace it."""

from __future__ import annotations

from typing import Any

from kvstore_service.server import KvStoreServicer
from splitpoint.observe import tracing
from splitpoint.v1 import kvstore_pb2 as pb

_Context = Any  # grpc.aio.ServicerContext; the generated base class is untyped


class TracedKvStoreServicer(KvStoreServicer):
    """The same store: what it answers, and when, is decided in the class below."""

    async def Match(self, request: pb.MatchRequest, context: _Context) -> pb.MatchResponse:
        is_peek = not request.session_id
        with tracing.serving(
            "match", context, tokens=len(request.token_ids), is_peek=is_peek
        ) as span:
            answer = await super().Match(request, context)
            span.set(cached_tokens=answer.cached_tokens, chunks=len(answer.chunks))
            return answer

    async def Reserve(self, request: pb.ReserveRequest, context: _Context) -> pb.ReserveResponse:
        with tracing.serving("reserve", context, slots=request.slot_count) as span:
            answer = await super().Reserve(request, context)
            span.set(runs=len(answer.runs))
            return answer

    async def Seal(self, request: pb.SealRequest, context: _Context) -> pb.SealResponse:
        with tracing.serving("seal", context, chunks=len(request.chunks)) as span:
            answer = await super().Seal(request, context)
            span.set(duplicates=sum(chunk.duplicate for chunk in answer.chunks))
            return answer
