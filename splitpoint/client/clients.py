"""The Python clients: `Client` blocks, `AsyncClient` awaits, both with the same names.

    with Client() as client:
        for event in client.generate("def main():", max_tokens=32):
            ...                                     # Tokens, ..., then one Completion
        answer = client.generate("def main():").complete()

Both build requests, read answers and translate errors with the same functions; only the code that
waits exists twice. Errors are those of `splitpoint.errors`. The clients speak to a
scheduler only, never to workers or stores.

Token and certificates come from the arguments, else from the environment
(SPLITPOINT_TOKEN or SPLITPOINT_TOKEN_FILE, SPLITPOINT_CA, SPLITPOINT_CERT,
SPLITPOINT_KEY); see docs/security.md.

Retries: gRPC repeats a call that failed with UNAVAILABLE before its first answer, at most
twice, with back-off (`splitpoint.transport.channels`). Nothing else is ever repeated.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Generic, NamedTuple, Self, TypeVar, Unpack

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitpoint.client import answers, caller_spans, request_values, requests
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
from splitpoint.client.requests import ExplainOptions, GenerateOptions, Prompt
from splitpoint.client.telemetry import SchedulerStatus, scheduler_status
from splitpoint.config import check_address, default_address
from splitpoint.errors import DeadlineExceeded, Internal, Unavailable
from splitpoint.transport.channels import open_channel, open_sync_channel
from splitpoint.transport.statuses import error_of
from splitpoint.transport.tls import Identity, client_identity
from splitpoint.v1 import scheduler_pb2 as pb
from splitpoint.v1 import scheduler_pb2_grpc

DEFAULT_TIMEOUT_SECONDS = 10.0
INFERENCE_SERVICE = "splitpoint.v1.InferenceService"
_POLL_SECONDS = 0.1

Event = Tokens | Completion
_Result = TypeVar("_Result")


class _Method(NamedTuple, Generic[_Result]):
    """One unary call: its stub and name on the wire, and how its answer is read."""

    stub: Any
    name: str
    read: Callable[[Any], _Result]


_INFERENCE: Any = scheduler_pb2_grpc.InferenceServiceStub
_ADMIN: Any = scheduler_pb2_grpc.AdminServiceStub
_HEALTH: Any = health_pb2_grpc.HealthStub
_TOKENIZE = _Method(_INFERENCE, "Tokenize", answers.tokenization)
_GET_MODEL = _Method(_INFERENCE, "GetModel", answers.model)
_LIST_MODELS = _Method(_INFERENCE, "ListModels", answers.models)
_EXPLAIN_PLAN = _Method(_INFERENCE, "ExplainPlan", answers.worker_plans)
_LIST_WORKERS = _Method(_ADMIN, "ListWorkers", answers.workers)
_GET_QUEUE = _Method(_ADMIN, "GetQueue", answers.queue)
_SCHEDULER_STATUS = _Method(_ADMIN, "GetSchedulerStatus", scheduler_status)
_CHECK_HEALTH = _Method(_HEALTH, "Check", answers.is_serving)


# -- generations -------------------------------------------------------------------------


# These are functions, not methods. A generator method would refer to its Generation and
# make a reference cycle; after `break` the request would then be cancelled only when the
# garbage collector runs. The Completion is yielded after the call has ended without error.
def _receive(call: Any, timeout: float | None) -> Iterator[Event]:
    builder = CompletionBuilder()
    with _cancel_at_end(call, timeout):
        for message in call:
            yield from builder.events(message)
    yield builder.completion()


async def _receive_async(call: Any, timeout: float | None) -> AsyncIterator[Event]:
    builder = CompletionBuilder()
    with _cancel_at_end(call, timeout):
        async for message in call:
            for event in builder.events(message):
                yield event
    yield builder.completion()


@contextmanager
def _cancel_at_end(call: Any, timeout: float | None) -> Iterator[None]:
    """Cancel the call at the end of the block; translate its errors."""
    try:
        with _translate_errors(f"the generation did not end within {timeout or 0:g} s"):
            yield
    finally:
        _cancel(call)


@contextmanager
def _translate_errors(deadline_message: str) -> Iterator[None]:
    """Raise gRPC's errors as SplitpointErrors; `deadline_message` replaces gRPC's text."""
    try:
        yield
    except grpc.RpcError as error:
        result = error_of(error)
        # gRPC's own text contains these words; the scheduler's texts do not.
        if isinstance(result, DeadlineExceeded) and "deadline exceeded" in result.message.lower():
            result = DeadlineExceeded(deadline_message)
        raise result from error


def _cancel(call: Any) -> None:
    """Cancel a call; no effect if it has ended."""
    # At interpreter exit gRPC's threads may have died holding its locks. The
    # connection ends with the process anyway.
    if not sys.is_finalizing():
        call.cancel()


_READ_BEFORE = "this generation was already closed or read to its end"


class Generation:
    """One running generation: iterate it for events, or `complete()` it.

    Leaving it early (`close`, the end of a `with` block, garbage collection)
    cancels the request; the worker stops within a step.
    """

    def __init__(self, call: Any, timeout: float | None) -> None:
        self._call = call
        self._events = _receive(call, timeout)

    def __iter__(self) -> Iterator[Event]:
        return self._events

    def __next__(self) -> Event:
        return next(self._events)

    def complete(self) -> Completion:
        """Wait for the whole answer, including what was not yet iterated."""
        for event in self._events:
            if isinstance(event, Completion):
                return event
        raise Internal(_READ_BEFORE)

    def close(self) -> None:
        """Cancel the request if it still runs. Any thread or signal handler may call this."""
        _cancel(self._call)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncGeneration:
    """`Generation` for asyncio: `async for`, `await complete()`, `async with`."""

    def __init__(self, call: Any, timeout: float | None) -> None:
        self._call = call
        self._events = _receive_async(call, timeout)

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._events

    async def __anext__(self) -> Event:
        return await anext(self._events)

    async def complete(self) -> Completion:
        """Wait for the whole answer, including what was not yet iterated."""
        async for event in self._events:
            if isinstance(event, Completion):
                return event
        raise Internal(_READ_BEFORE)

    async def close(self) -> None:
        """Cancel the request if it still runs."""
        _cancel(self._call)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


# -- clients -----------------------------------------------------------------------------


class _Connection:
    """What both clients share: arguments, channel, stubs, and how a call starts."""

    _open: Callable[[str, Identity], Any]

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
        self.identity = identity or client_identity(
            token=token, ca=ca, certificate=certificate, key=key
        )
        self._channel = self._open(self.address, self.identity)
        self._stubs = {stub: stub(self._channel) for stub in (_INFERENCE, _ADMIN, _HEALTH)}

    def _start(self, prompt: Prompt, options: GenerateOptions) -> tuple[Any, float | None]:
        """Start a generation; return the call and its time limit."""
        request = requests.generate_request(prompt, options)
        timeout = request_values.seconds("timeout", options.get("timeout"))
        requests.check_size(request)
        method = self._stubs[_INFERENCE].Generate
        return caller_spans.generate(method, request, timeout), timeout

    def _send(self, method: _Method[Any], request: Message) -> Any:
        """Start a unary call."""
        requests.check_size(request)
        return getattr(self._stubs[method.stub], method.name)(request, timeout=self._timeout)

    def _translate_unary_errors(self) -> AbstractContextManager[None]:
        """Translate the errors of a unary call."""
        return _translate_errors(f"{self.address} did not answer within {self._timeout:g} s")

    def _not_ready(self, seconds: float, obstacle: str) -> DeadlineExceeded:
        return DeadlineExceeded(f"{self.address} was not ready within {seconds:g} s: {obstacle}")


_NOT_SERVING = "it answers, but has no ready worker"


class Client(_Connection):
    """Blocking client of a scheduler. Threads may share one; close it, or use `with`.

    Args:
        address: host:port or unix:/path. Default: $SPLITPOINT_ADDRESS, else 127.0.0.1:50050.
        timeout: seconds for every call but generate, which takes its own.
        token: bearer token. Never sent unencrypted beyond this host.
        ca: PEM file with the authority of the server's certificate; turns TLS on.
        certificate, key: PEM files for a server that demands them.
        identity: token and certificates that were read before. If set, the four arguments
            above and the environment are ignored.

    Raises InvalidArgument and PermissionDenied for files that cannot be used.
    """

    _open = staticmethod(open_sync_channel)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        """Start generating and return at once. See GenerateOptions."""
        return Generation(*self._start(prompt, options))

    def tokenize(self, text: str, *, model: str = "") -> Tokenization:
        """Return the token ids of a text, with the model's special tokens."""
        return self._call(_TOKENIZE, requests.tokenize_request(text, model))

    def get_model(self, name: str = "") -> Model:
        """Return one served model; without a name the only one."""
        return self._call(_GET_MODEL, requests.model_request(name))

    def list_models(self) -> tuple[Model, ...]:
        return self._call(_LIST_MODELS, pb.ListModelsRequest())

    def explain_plan(
        self, cached_tokens: int, new_tokens: int, **options: Unpack[ExplainOptions]
    ) -> tuple[WorkerPlan, ...]:
        """Return each worker's plan for this many cached and new tokens. Runs nothing."""
        request = requests.explain_request(cached_tokens, new_tokens, options)
        return self._call(_EXPLAIN_PLAN, request)

    def list_workers(self) -> tuple[Worker, ...]:
        return self._call(_LIST_WORKERS, pb.ListWorkersRequest())

    def get_queue(self) -> Queue:
        return self._call(_GET_QUEUE, pb.GetQueueRequest())

    def scheduler_status(self) -> SchedulerStatus:
        """Return counters since the scheduler started; two readings give rates."""
        return self._call(_SCHEDULER_STATUS, pb.GetSchedulerStatusRequest())

    def health(self, service: str = INFERENCE_SERVICE) -> bool:
        """Return True if the service says it is serving; "" asks for liveness only."""
        return self._call(_CHECK_HEALTH, health_pb2.HealthCheckRequest(service=service))

    def _call(self, method: _Method[_Result], request: Message) -> _Result:
        with self._translate_unary_errors():
            return method.read(self._send(method, request))

    def wait_ready(self, timeout: float = 60.0) -> None:
        """Return once the scheduler serves. Raises DeadlineExceeded after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (obstacle := self._obstacle()) is not None:
            if time.monotonic() > deadline:
                raise self._not_ready(timeout, obstacle)
            time.sleep(_POLL_SECONDS)

    def _obstacle(self) -> str | None:
        """Return why the scheduler is not ready; None if it is."""
        try:
            return None if self.health() else _NOT_SERVING
        except (Unavailable, DeadlineExceeded) as error:
            return error.message

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient(_Connection):
    """`Client` for asyncio. Create and use it inside one event loop."""

    _open = staticmethod(open_channel)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncGeneration:
        """Start generating and return at once. See GenerateOptions."""
        return AsyncGeneration(*self._start(prompt, options))

    async def tokenize(self, text: str, *, model: str = "") -> Tokenization:
        """Do the same as Client.tokenize."""
        return await self._call(_TOKENIZE, requests.tokenize_request(text, model))

    async def get_model(self, name: str = "") -> Model:
        """Do the same as Client.get_model."""
        return await self._call(_GET_MODEL, requests.model_request(name))

    async def list_models(self) -> tuple[Model, ...]:
        return await self._call(_LIST_MODELS, pb.ListModelsRequest())

    async def explain_plan(
        self, cached_tokens: int, new_tokens: int, **options: Unpack[ExplainOptions]
    ) -> tuple[WorkerPlan, ...]:
        """Do the same as Client.explain_plan."""
        request = requests.explain_request(cached_tokens, new_tokens, options)
        return await self._call(_EXPLAIN_PLAN, request)

    async def list_workers(self) -> tuple[Worker, ...]:
        return await self._call(_LIST_WORKERS, pb.ListWorkersRequest())

    async def get_queue(self) -> Queue:
        return await self._call(_GET_QUEUE, pb.GetQueueRequest())

    async def scheduler_status(self) -> SchedulerStatus:
        """Do the same as Client.scheduler_status."""
        return await self._call(_SCHEDULER_STATUS, pb.GetSchedulerStatusRequest())

    async def health(self, service: str = INFERENCE_SERVICE) -> bool:
        """Do the same as Client.health."""
        return await self._call(_CHECK_HEALTH, health_pb2.HealthCheckRequest(service=service))

    async def _call(self, method: _Method[_Result], request: Message) -> _Result:
        with self._translate_unary_errors():
            return method.read(await self._send(method, request))

    async def wait_ready(self, timeout: float = 60.0) -> None:
        """Return once the scheduler serves. Raises DeadlineExceeded after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (obstacle := await self._obstacle()) is not None:
            if time.monotonic() > deadline:
                raise self._not_ready(timeout, obstacle)
            await asyncio.sleep(_POLL_SECONDS)

    async def _obstacle(self) -> str | None:
        try:
            return None if await self.health() else _NOT_SERVING
        except (Unavailable, DeadlineExceeded) as error:
            return error.message

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
