"""Calls to the schedulers, each with the key of the client that it is made for.

Facts of the served models are remembered for some seconds: they change with the workers only.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from gateway_service.openai.answers import Job
from gateway_service.openai.completions import CompletionJob
from gateway_service.openai.tools import CallingJob
from splitpoint.client.answers import drop_known
from splitpoint.client.caller_spans import Metadata
from splitpoint.client.requests import check_size
from splitpoint.client.scheduler_attempts import (
    DEFAULT_RETRY_SECONDS,
    HEALTH,
    INFERENCE,
    OnRetry,
    Round,
    Schedulers,
    Tries,
)
from splitpoint.errors import DeadlineExceeded, Internal, Retryable, SplitpointError, Unavailable
from splitpoint.transport.channels import open_channel
from splitpoint.transport.servers import STREAMS_PER_CONNECTION
from splitpoint.transport.statuses import error_of
from splitpoint.transport.tls import Identity
from splitpoint.v1 import scheduler_pb2 as pb

_SECONDS = 5.0


class Models:
    """Models by name. Only names that a scheduler knows are remembered."""

    def __init__(self, upstream: Upstream, clock: Callable[[], float] = time.monotonic) -> None:
        self._upstream = upstream
        self._clock = clock
        self._found: dict[str, tuple[float, pb.Model]] = {}

    async def get(self, name: str, metadata: Metadata) -> pb.Model:
        """Return a model. Raises NotFound, and what a call raises.

        The generation that follows is what checks the client's key: facts of a model are no
        secret of its clients.
        """
        now = self._clock()
        found = self._found.get(name)
        if found is None or now - found[0] > _SECONDS:
            request = pb.GetModelRequest(model=name)
            answer = await self._upstream.call(INFERENCE, "GetModel", request, metadata)
            found = self._found[name] = (now, answer.model)
        return found[1]


_log = logging.getLogger(__name__)

_SERVICE = "splitpoint.v1.InferenceService"
# Part of the streams that a server permits a connection: unary calls need some, too.
_MOST_GENERATIONS = STREAMS_PER_CONNECTION * 3 // 4

Take = Callable[[pb.GenerateResponse], Awaitable[None]]


class _Connection:
    """One connection to each scheduler, and its open generations."""

    def __init__(
        self,
        addresses: Sequence[str],
        identity: Identity,
        retry_seconds: float,
        on_retry: OnRetry,
    ) -> None:
        self.schedulers = Schedulers(
            addresses,
            functools.partial(open_channel, is_fresh=True),
            identity,
            retry_seconds=retry_seconds,
            on_retry=on_retry,
        )
        self.open_count = 0


class Upstream:
    """The schedulers. Create and use it inside one event loop.

    A connection carries a limited number of streams, and gRPC lets further ones wait silently:
    then another connection is made.

    Args:
        call_seconds: longest wait for an answer to anything but a generation.
        retry_seconds: how long a generation tries to go on after its scheduler was lost.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        identity: Identity,
        *,
        call_seconds: float,
        retry_seconds: float = DEFAULT_RETRY_SECONDS,
    ) -> None:
        self._addresses = addresses
        self._identity = identity
        self._call_seconds = call_seconds
        self._retry_seconds = retry_seconds
        self.retry_count = 0
        self._connections = [self._connected()]

    def _connected(self) -> _Connection:
        return _Connection(self._addresses, self._identity, self._retry_seconds, self._count_retry)

    def _count_retry(self, error: Retryable, address: str) -> None:
        self.retry_count += 1
        _log.warning("a generation goes on at %s: %s", address, error.message)

    @property
    def open_count(self) -> int:
        """Generations that are open."""
        return sum(each.open_count for each in self._connections)

    async def generate(self, request: pb.GenerateRequest, metadata: Metadata, take: Take) -> None:
        """Give every message of a generation to `take`, the final one included.

        It goes on at another scheduler if one is lost. Raises what the client of
        `splitpoint.client` raises. Leaving it, also by cancellation, cancels the request.
        """
        check_size(request)
        received = _Received()
        with self._opened() as schedulers:
            tries = Tries(schedulers, request, None, metadata=metadata, received=received)
            try:
                while True:
                    with tries.attempt():
                        async for message in tries.call:
                            tries.progressed()
                            received.add(message)
                            await take(message)
                    if tries.is_over:
                        return
                    await asyncio.sleep(tries.pause_seconds)
                    tries.restart()
            finally:
                tries.close()

    @contextmanager
    def _opened(self) -> Iterator[Schedulers]:
        """Count a generation at the connection that carries it."""
        for connection in self._connections:
            if connection.open_count < _MOST_GENERATIONS:
                break
        else:
            connection = self._connected()
            self._connections.append(connection)
        connection.open_count += 1
        try:
            yield connection.schedulers
        finally:
            connection.open_count -= 1

    async def call(
        self, service: Any, method: str, request: Message, metadata: Metadata = ()
    ) -> Any:
        """Return the answer of a unary call. Raises SplitpointError."""
        check_size(request)
        schedulers = self._connections[0].schedulers
        calls = Round(schedulers, service, method, request, self._call_seconds, metadata)
        while True:
            with calls.attempt():
                return await calls.send()

    async def stream(
        self, service: Any, method: str, request: Message, metadata: Metadata = ()
    ) -> AsyncIterator[Any]:
        """Yield the messages of a call that answers with several. Raises SplitpointError."""
        check_size(request)
        schedulers = self._connections[0].schedulers
        stub = schedulers.stub(schedulers.current, service, method)
        try:
            async for message in stub(
                request, timeout=self._call_seconds, metadata=metadata or None
            ):
                yield message
        except grpc.RpcError as error:
            raise error_of(error) from error

    async def is_serving(self) -> bool:
        """Return True if a scheduler can be reached and has ready workers."""
        request = health_pb2.HealthCheckRequest(service=_SERVICE)
        try:
            answer = await self.call(HEALTH, "Check", request)
        except SplitpointError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def warn_if_absent(self) -> None:
        """Write a warning if no scheduler answers now; one that only lacks workers does."""
        try:
            await self.call(HEALTH, "Check", health_pb2.HealthCheckRequest())
        except (Unavailable, DeadlineExceeded) as error:
            where = ",".join(self._addresses)
            _log.warning(
                "no scheduler answers at %s; requests fail until one does: %s", where, error
            )
        except SplitpointError:
            pass  # It refuses, so it is there.

    async def close(self) -> None:
        """Close all connections; open calls fail."""
        for connection in self._connections:
            for channel in connection.schedulers.closing():
                await channel.close()


async def prepare(job: Job, upstream: Upstream, models: Models, metadata: Metadata) -> None:
    """Give a job what it must know before its requests are sent. Raises what calls raise.

    The texts of prompts that it echoes and that came as token ids, or the facts of its model.
    """
    if isinstance(job, CompletionJob):
        for index, request in job.to_detokenize.items():
            answer = await upstream.call(INFERENCE, "Detokenize", request, metadata)
            job.detokenized(index, answer.text)
    elif isinstance(job, CallingJob) and job.needs_model:
        job.model_found(await models.get(job.model, metadata))


class _Received:
    """What has come of a generation, to go on with; see `splitpoint.client.scheduler_attempts`."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.is_complete = False
        self._prompt_count = 0

    def add(self, message: pb.GenerateResponse) -> None:
        """Take the next message, without what came before of the prompt's log-probabilities.

        Raises Internal for a gap in the token indices.
        """
        if message.HasField("chunk"):
            chunk = message.chunk
            self._prompt_count = drop_known(chunk, self._prompt_count)
            if chunk.index != len(self.token_ids):
                raise Internal(
                    f"the scheduler sent token {chunk.index} where {len(self.token_ids)} was due",
                    reason="TOKEN_GAP",
                )
            self.token_ids += chunk.token_ids
        else:
            self.is_complete = True
