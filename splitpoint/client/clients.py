"""The Python clients: `Client` blocks, `AsyncClient` awaits, both with the same names.

    with Client() as client:
        for event in client.generate("def main():", max_tokens=32):
            ...                                     # Tokens, ..., then one Completion
        answer = client.generate("def main():").complete()

Requests are built and answers read in one place for both; only the calls
themselves are written twice. Errors are those of `splitpoint.errors`. Knows
nothing of workers or stores: it speaks to a scheduler.

Who the client is comes from its arguments, else from the environment
(SPLITPOINT_TOKEN or SPLITPOINT_TOKEN_FILE, SPLITPOINT_CA, SPLITPOINT_CERT,
SPLITPOINT_KEY); see docs/security.md.

Retries: gRPC repeats a call that failed with UNAVAILABLE before its first
answer, at most twice, with back-off (the service config of `splitpoint.transport.channels`).
Nothing else is ever repeated, and nothing after the first token.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Generic, NamedTuple, Self, TypeVar, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitpoint.client import answers, caller_spans, request_values
from splitpoint.client.answers import (
    Completion,
    CompletionBuilder,
    Model,
    Queue,
    Tokenization,
    Tokens,
    Worker,
    WorkerPlan,
)
from splitpoint.client.requests import (
    ExplainOptions,
    GenerateOptions,
    Prompt,
    check_size,
    explain_request,
    generate_request,
    model_request,
    tokenize_request,
)
from splitpoint.client.telemetry import SchedulerStatus, scheduler_status
from splitpoint.config import check_address, default_address
from splitpoint.errors import (
    DeadlineExceeded,
    Internal,
    SplitpointError,
    Unavailable,
)
from splitpoint.transport import channels, statuses
from splitpoint.transport.tls import Identity, client_identity
from splitpoint.v1 import scheduler_pb2 as pb
from splitpoint.v1 import scheduler_pb2_grpc

DEFAULT_TIMEOUT_SECONDS = 10.0
INFERENCE_SERVICE = "splitpoint.v1.InferenceService"
_POLL_SECONDS = 0.1

Event = Tokens | Completion
_Result = TypeVar("_Result")


class _Method(NamedTuple, Generic[_Result]):
    """One unary call: where it is on the wire and how its answer is read."""

    service: str
    name: str
    read: Callable[[Any], _Result]


_TOKENIZE = _Method("inference", "Tokenize", answers.tokenization)
_GET_MODEL = _Method("inference", "GetModel", answers.model)
_LIST_MODELS = _Method("inference", "ListModels", answers.models)
_EXPLAIN_PLAN = _Method("inference", "ExplainPlan", answers.worker_plans)
_LIST_WORKERS = _Method("admin", "ListWorkers", answers.workers)
_GET_QUEUE = _Method("admin", "GetQueue", answers.queue)
_SCHEDULER_STATUS = _Method("admin", "GetSchedulerStatus", scheduler_status)
_HEALTH = _Method("health", "Check", answers.is_serving)


def _stubs(channel: Any) -> dict[str, Any]:
    return {
        "inference": scheduler_pb2_grpc.InferenceServiceStub(channel),
        "admin": scheduler_pb2_grpc.AdminServiceStub(channel),
        "health": health_pb2_grpc.HealthStub(channel),
    }


_NOT_SERVING = "it answers, but has no ready worker"


def _not_ready(address: str, seconds: float, obstacle: str) -> DeadlineExceeded:
    return DeadlineExceeded(f"{address} was not ready within {seconds:g} s: {obstacle}")


# In all that gRPC says of a deadline that has passed.
_DEADLINE_WORDS = "deadline exceeded"


def _error_of(error: grpc.RpcError, too_late: str) -> SplitpointError:
    """`statuses.error_of`; `too_late` says what did not happen before the deadline."""
    result = statuses.error_of(error)
    if isinstance(result, DeadlineExceeded) and _DEADLINE_WORDS in result.message.lower():
        return DeadlineExceeded(too_late)
    return result


def _no_answer(address: str, seconds: float) -> str:
    return f"{address} did not answer within {seconds:g} s"


def _not_ended(seconds: float | None) -> str:
    return f"the generation did not end within {seconds or 0:g} s"


_ENDED_EARLY = "the stream ended without its final message"


# Functions, not methods: a generator that held its Generation would make a
# cycle, and a loop left with `break` would cancel only when the collector runs.
# The Completion is yielded when the call is over, so its status has been seen.
def _receive(call: Any, timeout: float | None) -> Iterator[Event]:
    builder = CompletionBuilder()
    completion = None
    try:
        for message in call:
            for event in builder.events(message):
                if isinstance(event, Completion):
                    completion = event
                else:
                    yield event
    except grpc.RpcError as error:
        raise _error_of(error, _not_ended(timeout)) from error
    finally:
        _cancel(call)
    if completion is None:
        raise Internal(_ENDED_EARLY)
    yield completion


async def _receive_async(call: Any, timeout: float | None) -> AsyncIterator[Event]:
    builder = CompletionBuilder()
    completion = None
    try:
        async for message in call:
            for event in builder.events(message):
                if isinstance(event, Completion):
                    completion = event
                else:
                    yield event
    except grpc.RpcError as error:
        raise _error_of(error, _not_ended(timeout)) from error
    finally:
        _cancel(call)
    if completion is None:
        raise Internal(_ENDED_EARLY)
    yield completion


def _cancel(call: Any) -> None:
    """Without effect on a call that is over."""
    # At interpreter exit gRPC's threads may have died holding its locks; the
    # connection ends with the process anyway.
    if not sys.is_finalizing():
        call.cancel()


class Generation:
    """One running generation: iterate it for events, or `complete()` it.

    Leaving it early (`close`, the end of a `with` block, garbage collection)
    cancels the request; the worker stops within a step.
    """

    def __init__(self, call: Any, timeout: float | None = None) -> None:
        self._call = call
        self._events = _receive(call, timeout)

    def __iter__(self) -> Iterator[Event]:
        return self._events

    def __next__(self) -> Event:
        return next(self._events)

    def complete(self) -> Completion:
        """Wait for the whole answer (what was not yet iterated included)."""
        for event in self._events:
            if isinstance(event, Completion):
                return event
        raise Internal("this generation was closed or read to its end before")

    def close(self) -> None:
        """Cancel the request, if it still runs. Any thread or signal handler may call this."""
        _cancel(self._call)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Client:
    """Blocking client of a scheduler. Threads may share one; close it, or use `with`.

    Args:
        address: host:port or unix:/path.
        timeout: seconds for every call but generate, which takes its own.
        token: bearer token. Never sent unencrypted beyond this host.
        ca: file (PEM) with the authority of the server's certificate; turns TLS on.
        certificate, key: files (PEM) for a server that demands them.
        identity: all four in one, read before; the environment then counts for nothing.

    Raises InvalidArgument and PermissionDenied for files that are not what they
    should be.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
        token: str | None = None,
        ca: str | Path | None = None,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
        identity: Identity | None = None,
    ) -> None:
        self.address = check_address(address or default_address())
        self._timeout = timeout
        self.identity = (
            client_identity(token=token, ca=ca, certificate=certificate, key=key)
            if identity is None
            else identity
        )
        self._channel = channels.open_sync_channel(self.address, self.identity)
        self._services = _stubs(self._channel)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        """Start generating; returns at once. See GenerateOptions."""
        request = generate_request(prompt, options)
        timeout = request_values.seconds("timeout", options.get("timeout"))
        check_size(request)
        method = self._services["inference"].Generate
        return Generation(caller_spans.generate(method, request, timeout), timeout)

    def tokenize(self, text: str, *, model: str = "") -> Tokenization:
        """Token ids of a text, with the model's special tokens, as generate would see them."""
        return self._call(_TOKENIZE, tokenize_request(text, model))

    def get_model(self, name: str = "") -> Model:
        """One served model; without a name the only one."""
        return self._call(_GET_MODEL, model_request(name))

    def list_models(self) -> tuple[Model, ...]:
        return self._call(_LIST_MODELS, pb.ListModelsRequest())

    def explain_plan(
        self, cached_tokens: int, new_tokens: int, **options: Unpack[ExplainOptions]
    ) -> tuple[WorkerPlan, ...]:
        """The plan each worker would follow for K cached and T new tokens. Runs nothing."""
        request = explain_request(cached_tokens, new_tokens, options)
        return self._call(_EXPLAIN_PLAN, request)

    def list_workers(self) -> tuple[Worker, ...]:
        return self._call(_LIST_WORKERS, pb.ListWorkersRequest())

    def get_queue(self) -> Queue:
        return self._call(_GET_QUEUE, pb.GetQueueRequest())

    def scheduler_status(self) -> SchedulerStatus:
        """Counters since the scheduler started: two readings give rates."""
        return self._call(_SCHEDULER_STATUS, pb.GetSchedulerStatusRequest())

    def health(self, service: str = INFERENCE_SERVICE) -> bool:
        """Whether the service says it is serving; "" asks for mere liveness."""
        return self._call(_HEALTH, health_pb2.HealthCheckRequest(service=service))

    def wait_ready(self, timeout: float = 60.0) -> None:
        """Return once the scheduler serves. Raises DeadlineExceeded after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (obstacle := self._obstacle()) is not None:
            if time.monotonic() > deadline:
                raise _not_ready(self.address, timeout, obstacle)
            time.sleep(_POLL_SECONDS)

    def _obstacle(self) -> str | None:
        """Why it is not ready; None when it is."""
        try:
            return None if self.health() else _NOT_SERVING
        except (Unavailable, DeadlineExceeded) as error:
            return error.message

    def _call(self, method: _Method[_Result], request: Any) -> _Result:
        check_size(request)
        try:
            send = getattr(self._services[method.service], method.name)
            return method.read(send(request, timeout=self._timeout))
        except grpc.RpcError as error:
            raise _error_of(error, _no_answer(self.address, self._timeout)) from error

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncGeneration:
    """`Generation` for asyncio: `async for`, `await complete()`, `async with`."""

    def __init__(self, call: Any, timeout: float | None = None) -> None:
        self._call = call
        self._events = _receive_async(call, timeout)

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._events

    async def __anext__(self) -> Event:
        return await anext(self._events)

    async def complete(self) -> Completion:
        """Wait for the whole answer (what was not yet iterated included)."""
        async for event in self._events:
            if isinstance(event, Completion):
                return event
        raise Internal("this generation was closed or read to its end before")

    async def close(self) -> None:
        _cancel(self._call)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncClient:
    """`Client` for asyncio. Create and use it inside one event loop."""

    def __init__(
        self,
        address: str | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
        token: str | None = None,
        ca: str | Path | None = None,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
        identity: Identity | None = None,
    ) -> None:
        self.address = check_address(address or default_address())
        self._timeout = timeout
        self.identity = (
            client_identity(token=token, ca=ca, certificate=certificate, key=key)
            if identity is None
            else identity
        )
        self._channel = channels.open_channel(self.address, self.identity)
        self._services = _stubs(self._channel)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncGeneration:
        """Start generating; returns at once. See GenerateOptions."""
        request = generate_request(prompt, options)
        timeout = request_values.seconds("timeout", options.get("timeout"))
        check_size(request)
        method = self._services["inference"].Generate
        return AsyncGeneration(caller_spans.generate(method, request, timeout), timeout)

    async def tokenize(self, text: str, *, model: str = "") -> Tokenization:
        """As Client.tokenize."""
        return await self._call(_TOKENIZE, tokenize_request(text, model))

    async def get_model(self, name: str = "") -> Model:
        """As Client.get_model."""
        return await self._call(_GET_MODEL, model_request(name))

    async def list_models(self) -> tuple[Model, ...]:
        return await self._call(_LIST_MODELS, pb.ListModelsRequest())

    async def explain_plan(
        self, cached_tokens: int, new_tokens: int, **options: Unpack[ExplainOptions]
    ) -> tuple[WorkerPlan, ...]:
        """As Client.explain_plan."""
        request = explain_request(cached_tokens, new_tokens, options)
        return await self._call(_EXPLAIN_PLAN, request)

    async def list_workers(self) -> tuple[Worker, ...]:
        return await self._call(_LIST_WORKERS, pb.ListWorkersRequest())

    async def get_queue(self) -> Queue:
        return await self._call(_GET_QUEUE, pb.GetQueueRequest())

    async def scheduler_status(self) -> SchedulerStatus:
        """As Client.scheduler_status."""
        return await self._call(_SCHEDULER_STATUS, pb.GetSchedulerStatusRequest())

    async def health(self, service: str = INFERENCE_SERVICE) -> bool:
        """As Client.health."""
        return await self._call(_HEALTH, health_pb2.HealthCheckRequest(service=service))

    async def wait_ready(self, timeout: float = 60.0) -> None:
        """As Client.wait_ready."""
        deadline = time.monotonic() + timeout
        while (obstacle := await self._obstacle()) is not None:
            if time.monotonic() > deadline:
                raise _not_ready(self.address, timeout, obstacle)
            await asyncio.sleep(_POLL_SECONDS)

    async def _obstacle(self) -> str | None:
        try:
            return None if await self.health() else _NOT_SERVING
        except (Unavailable, DeadlineExceeded) as error:
            return error.message

    async def _call(self, method: _Method[_Result], request: Any) -> _Result:
        check_size(request)
        try:
            send = getattr(self._services[method.service], method.name)
            return method.read(await send(request, timeout=self._timeout))
        except grpc.RpcError as error:
            raise _error_of(error, _no_answer(self.address, self._timeout)) from error

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
