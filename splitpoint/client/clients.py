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

Retries: with several addresses a call that failed with UNAVAILABLE goes to the next one. A
generation whose scheduler is lost goes on from its last token, at another address or, once it is
back, at the same one (`splitpoint.client.scheduler_attempts`); before its first token a single
address is asked again at most twice. Nothing else is ever repeated.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any, Generic, NamedTuple, Self, TypeVar, Unpack

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from splitpoint.client import answers, requests
from splitpoint.client.answers import (
    Completion,
    Model,
    Queue,
    SchedulerStatus,
    Tokenization,
    Tokens,
    Worker,
    WorkerPlan,
    scheduler_status,
)
from splitpoint.client.caller_spans import Metadata
from splitpoint.client.requests import (
    ChatOptions,
    ExplainOptions,
    GenerateOptions,
    Messages,
    Prompt,
    TokenizeOptions,
)
from splitpoint.client.scheduler_attempts import (
    ADMIN,
    DEFAULT_RETRY_SECONDS,
    HEALTH,
    INFERENCE,
    OnRetry,
    Round,
    Schedulers,
    Tries,
)
from splitpoint.config import check_addresses, default_address
from splitpoint.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    SplitpointError,
    Unavailable,
)
from splitpoint.transport.access import METADATA_KEY
from splitpoint.transport.channels import check_token_stays_safe, open_channel, open_sync_channel
from splitpoint.transport.tls import Identity, client_identity
from splitpoint.v1 import scheduler_pb2 as pb

DEFAULT_TIMEOUT_SECONDS = 10.0
INFERENCE_SERVICE = "splitpoint.v1.InferenceService"
_POLL_SECONDS = 0.1

Event = Tokens | Completion
_Result = TypeVar("_Result")


class _Method(NamedTuple, Generic[_Result]):
    """One unary call: its service and name on the wire, and how its answer is read."""

    service: Any
    name: str
    read: Callable[[Any], _Result]


_TOKENIZE = _Method(INFERENCE, "Tokenize", answers.tokenization)
_DETOKENIZE = _Method(INFERENCE, "Detokenize", answers.detokenization)
_GET_MODEL = _Method(INFERENCE, "GetModel", answers.model)
_GET_TOKENIZER = _Method(INFERENCE, "GetTokenizer", answers.tokenizer_files)
_LIST_MODELS = _Method(INFERENCE, "ListModels", answers.models)
_EXPLAIN_PLAN = _Method(INFERENCE, "ExplainPlan", answers.worker_plans)
_LIST_WORKERS = _Method(ADMIN, "ListWorkers", answers.workers)
_GET_QUEUE = _Method(ADMIN, "GetQueue", answers.queue)
_SCHEDULER_STATUS = _Method(ADMIN, "GetSchedulerStatus", scheduler_status)
_CHECK_HEALTH = _Method(HEALTH, "Check", answers.is_serving)


# -- generations -------------------------------------------------------------------------


# These are functions, not methods. A generator method would refer to its Generation and
# make a reference cycle; after `break` the request would then be cancelled only when the
# garbage collector runs. The Completion is yielded after the call has ended without error.
def _receive(tries: Tries) -> Iterator[Event]:
    with _closed_at_end(tries):
        while True:
            with tries.attempt():
                for message in tries.call:
                    if (tokens := tries.tokens_of(message)) is not None:
                        yield tokens
            if tries.is_over:
                break
            time.sleep(tries.pause_seconds)
            tries.restart()
    yield tries.completion()


async def _receive_async(tries: Tries) -> AsyncIterator[Event]:
    with _closed_at_end(tries):
        while True:
            with tries.attempt():
                async for message in tries.call:
                    if (tokens := tries.tokens_of(message)) is not None:
                        yield tokens
            if tries.is_over:
                break
            await asyncio.sleep(tries.pause_seconds)
            tries.restart()
    yield tries.completion()


@contextmanager
def _closed_at_end(tries: Tries) -> Iterator[None]:
    try:
        yield
    finally:
        _close(tries)


def _close(tries: Tries) -> None:
    """Cancel the open call; no effect if it has ended."""
    # At interpreter exit gRPC's threads may have died holding its locks. The
    # connection ends with the process anyway.
    if not sys.is_finalizing():
        tries.close()


_READ_BEFORE = "this generation was already closed or read to its end"


class Generation:
    """One running generation: iterate it for events, or `complete()` it.

    Leaving it early (`close`, the end of a `with` block, garbage collection)
    cancels the request; the worker stops within a step.
    """

    def __init__(self, tries: Tries) -> None:
        self._tries = tries
        self._events = _receive(tries)

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
        _close(self._tries)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncGeneration:
    """`Generation` for asyncio: `async for`, `await complete()`, `async with`."""

    def __init__(self, tries: Tries) -> None:
        self._tries = tries
        self._events = _receive_async(tries)

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
        _close(self._tries)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


# -- clients -----------------------------------------------------------------------------


class _Connection:
    """What both clients share: arguments, channel, stubs, and how a call starts."""

    _open: Callable[..., Any]

    def __init__(
        self,
        address: str | Iterable[str] | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
        retry_seconds: float = DEFAULT_RETRY_SECONDS,
        on_retry: OnRetry | None = None,
        token: str | None = None,
        ca: str | Path | None = None,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
        identity: Identity | None = None,
    ) -> None:
        given = address if isinstance(address, str) else ",".join(address or ())
        self._timeout = timeout
        # The token of a client for one caller, whose channels are another client's.
        self._metadata: Metadata = ()
        self._is_shared = False
        self.identity = identity or client_identity(
            token=token, ca=ca, certificate=certificate, key=key
        )
        self._schedulers = Schedulers(
            check_addresses(given or default_address()),
            self._open,
            self.identity,
            retry_seconds=retry_seconds,
            on_retry=on_retry,
        )

    @property
    def address(self) -> str:
        """The address that is called next: of several, the one that answered last."""
        return self._schedulers.addresses[self._schedulers.current]

    @property
    def away(self) -> dict[str, str]:
        """Addresses, of several, that did not answer when they were last asked, with why.

        Calls other than generations count; they went on at the next address.
        """
        return dict(self._schedulers.away)

    def with_token(self, token: str) -> Self:
        """Return a client that shows this token and shares the connections of this one.

        For a server that calls for others, each with a token of its own. Closing it does
        nothing. Raises InvalidArgument for a token that would leave this host unencrypted, and
        if this client has a token of its own.
        """
        if self.identity.token:
            raise InvalidArgument("this client has a token of its own", field="token")
        if not token or not token.isascii() or not token.isprintable():
            raise InvalidArgument("a token is printable ASCII text", field="token")
        for address in self._schedulers.addresses:
            check_token_stays_safe(address, self.identity)
        other = copy(self)
        other._metadata = ((METADATA_KEY, f"Bearer {token}"),)
        other._is_shared = True
        return other

    def _start(self, prompt: Prompt, options: GenerateOptions) -> Tries:
        """Start a generation from a prompt."""
        return self._tries(requests.generate_request(prompt, options), options)

    def _start_chat(self, messages: Messages, options: ChatOptions) -> Tries:
        """Start a generation from a chat."""
        return self._tries(requests.chat_request(messages, options), options)

    def _tries(self, request: pb.GenerateRequest, options: GenerateOptions) -> Tries:
        timeout = requests.checked_seconds("timeout", options.get("timeout"))
        requests.check_size(request)
        return Tries(self._schedulers, request, timeout, metadata=self._metadata)

    def _round(self, method: _Method[Any], request: Message) -> Round:
        """Begin a unary call."""
        requests.check_size(request)
        return Round(
            self._schedulers, method.service, method.name, request, self._timeout, self._metadata
        )

    def _stays_away(self, error: SplitpointError | None) -> str:
        """Return why the scheduler is not ready; another one is asked next."""
        self._schedulers.leave(self._schedulers.current)
        return error.message if error is not None else "it answers, but has no ready worker"

    def _not_ready(self, seconds: float, obstacle: str) -> DeadlineExceeded:
        where = " or ".join(self._schedulers.addresses)
        return DeadlineExceeded(f"{where} was not ready within {seconds:g} s: {obstacle}")


class Client(_Connection):
    """Blocking client of a scheduler. Threads may share one; close it, or use `with`.

    Args:
        address: host:port or unix:/path of a scheduler; several, in a list or with commas, of
            schedulers that serve the same workers. Default: $SPLITPOINT_ADDRESS, else
            127.0.0.1:50050.
        timeout: seconds for every call but generate, which takes its own.
        retry_seconds: how long a generation tries to go on, at all addresses in turn, after its
            scheduler was lost. 0: not at all, and other calls try one address only.
        on_retry: is called with the error and the next address when a generation goes on.
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
        return Generation(self._start(prompt, options))

    def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> Generation:
        """Start answering a chat and return at once. See ChatOptions.

        The scheduler turns the messages into a prompt by the model's chat template.
        """
        return Generation(self._start_chat(messages, options))

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Messages | None = None,
        **options: Unpack[TokenizeOptions],
    ) -> Tokenization:
        """Return the token ids of a text or a chat, with the model's special tokens."""
        return self._call(_TOKENIZE, requests.tokenize_request(text, messages, options))

    def detokenize(
        self, token_ids: Iterable[int], *, keeps_special_tokens: bool = False, model: str = ""
    ) -> str:
        """Return the text of token ids."""
        request = requests.detokenize_request(token_ids, keeps_special_tokens, model)
        return self._call(_DETOKENIZE, request)

    def get_tokenizer(self, model: str = "") -> dict[str, bytes]:
        """Return the files of the model's tokenizer, by name."""
        calls = self._round(_GET_TOKENIZER, requests.tokenizer_request(model))
        while True:
            with calls.attempt():
                return answers.tokenizer_files(calls.send())

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
        calls = self._round(method, request)
        while True:
            with calls.attempt():
                return method.read(calls.send())

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
            return None if self.health() else self._stays_away(None)
        except (Unavailable, DeadlineExceeded) as error:
            return self._stays_away(error)

    def close(self) -> None:
        for channel in () if self._is_shared else self._schedulers.closing():
            channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient(_Connection):
    """`Client` for asyncio. Create and use it inside one event loop."""

    _open = staticmethod(open_channel)

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncGeneration:
        """Start generating and return at once. See GenerateOptions."""
        return AsyncGeneration(self._start(prompt, options))

    def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> AsyncGeneration:
        """Do the same as Client.chat."""
        return AsyncGeneration(self._start_chat(messages, options))

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Messages | None = None,
        **options: Unpack[TokenizeOptions],
    ) -> Tokenization:
        """Do the same as Client.tokenize."""
        return await self._call(_TOKENIZE, requests.tokenize_request(text, messages, options))

    async def detokenize(
        self, token_ids: Iterable[int], *, keeps_special_tokens: bool = False, model: str = ""
    ) -> str:
        """Do the same as Client.detokenize."""
        request = requests.detokenize_request(token_ids, keeps_special_tokens, model)
        return await self._call(_DETOKENIZE, request)

    async def get_tokenizer(self, model: str = "") -> dict[str, bytes]:
        """Do the same as Client.get_tokenizer."""
        calls = self._round(_GET_TOKENIZER, requests.tokenizer_request(model))
        while True:
            with calls.attempt():
                return answers.tokenizer_files([message async for message in calls.send()])

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
        calls = self._round(method, request)
        while True:
            with calls.attempt():
                return method.read(await calls.send())

    async def wait_ready(self, timeout: float = 60.0) -> None:
        """Return once the scheduler serves. Raises DeadlineExceeded after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (obstacle := await self._obstacle()) is not None:
            if time.monotonic() > deadline:
                raise self._not_ready(timeout, obstacle)
            await asyncio.sleep(_POLL_SECONDS)

    async def _obstacle(self) -> str | None:
        try:
            return None if await self.health() else self._stays_away(None)
        except (Unavailable, DeadlineExceeded) as error:
            return self._stays_away(error)

    async def close(self) -> None:
        for channel in () if self._is_shared else self._schedulers.closing():
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
