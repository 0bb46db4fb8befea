"""The service vllm.grpc.engine.VllmEngine, answered by a scheduler."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2

from gateway_service.engine_protocol.answers import AnswerWriter
from gateway_service.engine_protocol.load import LoadReport
from gateway_service.engine_protocol.model import data_type_name, model_info, tokenizer_chunks
from gateway_service.engine_protocol.requests import generate_requests
from gateway_service.upstream.schedulers import Upstream
from splitpoint.client.caller_spans import Metadata
from splitpoint.client.tries import ADMIN, INFERENCE
from splitpoint.errors import FailedPrecondition, SplitpointError
from splitpoint.observe.tracing import TRACEPARENT, received_parent
from splitpoint.transport.access import METADATA_KEY
from splitpoint.v1 import scheduler_pb2

SERVICE_NAME = "vllm.grpc.engine.VllmEngine"
# By this a router tells kinds of vLLM's servers apart.
SERVER_TYPE = "vllm-grpc"
# Messages that wait for the router at most; then the scheduler's stream is not read.
_MOST_WAITING = 64

_Context = grpc.aio.ServicerContext[Any, Any]


class NotSupported(SplitpointError):
    """A method of the protocol that Splitpoint has nothing for."""

    code = 12


class _Running:
    """The tasks of requests that run, by the ids that the router gave them."""

    def __init__(self) -> None:
        self._tasks: dict[str, set[asyncio.Task[None]]] = defaultdict(set)
        self._aborted: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    @contextmanager
    def of(self, request_id: str, tasks: Sequence[asyncio.Task[None]]) -> Iterator[None]:
        """Know these tasks in this block."""
        self._tasks[request_id].update(tasks)
        try:
            yield
        finally:
            self._aborted.difference_update(tasks)
            self._tasks[request_id].difference_update(tasks)
            if not self._tasks[request_id]:
                del self._tasks[request_id]

    def abort(self, request_id: str) -> None:
        """Cancel the tasks of a request. An unknown one has ended already."""
        for task in self._tasks.get(request_id, ()):
            self._aborted.add(task)
            task.cancel()

    def is_aborted(self) -> bool:
        """Return True if the running task was aborted."""
        return asyncio.current_task() in self._aborted


class EngineServicer:
    """One engine with one rank, however many workers the stack has.

    Args:
        token: of calls that come without one; empty: they go on without one.
    """

    def __init__(self, upstream: Upstream, token: str = "") -> None:
        self._upstream = upstream
        self._own: Metadata = ((METADATA_KEY, f"Bearer {token}"),) if token else ()
        self._running = _Running()
        self._load = LoadReport()
        self._began = time.monotonic()
        self._last_request_at = 0.0

    # -- generating ----------------------------------------------------------------

    async def Generate(
        self, request: vllm_engine_pb2.GenerateRequest, context: _Context
    ) -> AsyncIterator[vllm_engine_pb2.GenerateResponse]:
        self._last_request_at = time.time()
        wanted = generate_requests(request)
        metadata = self._metadata(context)
        prompt_tokens = len(request.tokenized.input_ids)
        # None: all answers have ended.
        waiting: asyncio.Queue[vllm_engine_pb2.GenerateResponse | None]
        waiting = asyncio.Queue(_MOST_WAITING)
        tasks = [
            asyncio.create_task(
                self._answer(
                    one, metadata, AnswerWriter(i, prompt_tokens, streams=request.stream), waiting
                )
            )
            for i, one in enumerate(wanted)
        ]
        ended = asyncio.create_task(_end(tasks, waiting))
        try:
            with self._running.of(request.request_id, tasks):
                while (message := await waiting.get()) is not None:
                    yield message
                await ended  # raises the first error
        finally:
            for task in (ended, *tasks):
                task.cancel()
            await asyncio.gather(ended, *tasks, return_exceptions=True)

    async def _answer(
        self,
        request: scheduler_pb2.GenerateRequest,
        metadata: Metadata,
        writer: AnswerWriter,
        waiting: asyncio.Queue[vllm_engine_pb2.GenerateResponse | None],
    ) -> None:
        """Read one of the answers to its end, or to its abortion."""

        async def take(message: scheduler_pb2.GenerateResponse) -> None:
            if (sent := writer.message_of(message)) is not None:
                await waiting.put(sent)

        try:
            await self._upstream.generate(request, metadata, take)
        except asyncio.CancelledError:
            if not self._running.is_aborted():
                raise
            await waiting.put(writer.aborted())

    async def Abort(
        self, request: vllm_engine_pb2.AbortRequest, context: _Context
    ) -> vllm_engine_pb2.AbortResponse:
        for request_id in request.request_ids:
            self._running.abort(request_id)
        return vllm_engine_pb2.AbortResponse()

    # -- asking --------------------------------------------------------------------

    async def HealthCheck(
        self, request: vllm_engine_pb2.HealthCheckRequest, context: _Context
    ) -> vllm_engine_pb2.HealthCheckResponse:
        is_serving = await self._upstream.is_serving()
        message = "" if is_serving else "no scheduler with a ready worker can be reached"
        return vllm_engine_pb2.HealthCheckResponse(healthy=is_serving, message=message)

    async def GetModelInfo(
        self, request: vllm_engine_pb2.GetModelInfoRequest, context: _Context
    ) -> vllm_engine_pb2.GetModelInfoResponse:
        metadata = self._metadata(context)
        model = await self._model(metadata)
        files = await self._tokenizer_files(metadata) if model.has_tokenizer else {}
        return model_info(model, files)

    async def GetServerInfo(
        self, request: vllm_engine_pb2.GetServerInfoRequest, context: _Context
    ) -> vllm_engine_pb2.GetServerInfoResponse:
        model = await self._model(self._metadata(context))
        return vllm_engine_pb2.GetServerInfoResponse(
            active_requests=len(self._running),
            last_receive_timestamp=self._last_request_at,
            uptime_seconds=time.monotonic() - self._began,
            server_type=SERVER_TYPE,
            data_parallel_size=1,
            kv_cache_dtype="auto",
            block_size=model.chunk_tokens,
            model_dtype=data_type_name(model.shape),
            constrained_decoding_start="first_token",
        )

    async def GetLoads(
        self, request: vllm_engine_pb2.GetLoadsRequest, context: _Context
    ) -> vllm_engine_pb2.GetLoadsResponse:
        metadata = self._metadata(context)
        status, workers, model = await asyncio.gather(
            self._upstream.call(
                ADMIN, "GetSchedulerStatus", scheduler_pb2.GetSchedulerStatusRequest(), metadata
            ),
            self._upstream.call(ADMIN, "ListWorkers", scheduler_pb2.ListWorkersRequest(), metadata),
            self._model(metadata),
        )
        return self._load.of(status, workers, model)

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: _Context
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        files = await self._tokenizer_files(self._metadata(context))
        if not files:
            raise FailedPrecondition("the model has no tokenizer", reason="NO_TOKENIZER")
        for chunk in tokenizer_chunks(files):
            yield chunk

    # -- what Splitpoint has nothing for ---------------------------------------------

    async def SubscribeKvEvents(self, request: Any, context: _Context) -> NoReturn:
        # A scheduler knows chunks by keyed hashes, and not by the tokens that a router
        # would compare.
        raise NotSupported("no events of the cache are published", reason="NO_KV_EVENTS")

    async def Embed(self, request: Any, context: _Context) -> NoReturn:
        raise NotSupported("no embeddings are computed", reason="NO_EMBEDDINGS")

    async def FlushCache(self, request: Any, context: _Context) -> NoReturn:
        raise NotSupported("a cache is not flushed by a router", reason="NO_FLUSH")

    async def StartProfile(self, request: Any, context: _Context) -> NoReturn:
        raise NotSupported("a router starts no profiler", reason="NO_PROFILER")

    async def StopProfile(self, request: Any, context: _Context) -> NoReturn:
        raise NotSupported("a router starts no profiler", reason="NO_PROFILER")

    # -- the scheduler -----------------------------------------------------------------

    def _metadata(self, context: _Context) -> Metadata:
        """Return what goes on to the scheduler: the token and the traceparent, if there are any."""
        received = [(str(key), str(value)) for key, value in context.invocation_metadata() or ()]
        token = tuple(entry for entry in received if entry[0] == METADATA_KEY)[:1] or self._own
        parent = received_parent([value for key, value in received if key == TRACEPARENT])
        return (*token, (TRACEPARENT, parent)) if parent else token

    async def _model(self, metadata: Metadata) -> scheduler_pb2.Model:
        request = scheduler_pb2.GetModelRequest()
        answer = await self._upstream.call(INFERENCE, "GetModel", request, metadata)
        model: scheduler_pb2.Model = answer.model
        return model

    async def _tokenizer_files(self, metadata: Metadata) -> dict[str, bytes]:
        files: dict[str, bytes] = defaultdict(bytes)
        request = scheduler_pb2.GetTokenizerRequest()
        async for piece in self._upstream.stream(INFERENCE, "GetTokenizer", request, metadata):
            files[piece.file_name] += piece.data
        return files


async def _end(tasks: Sequence[asyncio.Task[None]], waiting: asyncio.Queue[Any]) -> None:
    """Tell the reader of `waiting` when the tasks have ended. Raises their first error."""
    try:
        await asyncio.gather(*tasks)
    finally:
        await waiting.put(None)
