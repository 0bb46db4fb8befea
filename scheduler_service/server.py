"""The gRPC face of the scheduler: messages in, manager calls, messages out.

Holds no state of its own but the count of open Generate calls.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from scheduler_service.api.request import Request
from scheduler_service.api.text_jobs import TextJobs
from scheduler_service.api.validation import (
    DEFAULT_MAX_TOKENS,
    Encode,
    GenerateInput,
    ModelFacts,
    check_model,
    check_text,
    optional_residency,
    prompt_exceeds,
    validate_generate,
)
from scheduler_service.placement.fetch_plan import FetchSource
from scheduler_service.placement.footprint import NeverFits, WorkerFacts
from scheduler_service.placement.planning import Wishes, explain
from scheduler_service.requests.manager import RequestManager
from splitpoint.checkpoint.text import Tokenizer, TooManyTokens
from splitpoint.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from splitpoint.observe import tracing
from splitpoint.observe.logs import set_request
from splitpoint.observe.tracing import Span
from splitpoint.shapes import Encoding, ModelShape
from splitpoint.transport.access import current_caller
from splitpoint.transport.convert import (
    encoding_to_proto,
    objective_from_proto,
    plan_to_proto,
    shape_to_proto,
)
from splitpoint.transport.limits import MESSAGE_LIMIT_BYTES
from splitpoint.v1 import scheduler_pb2 as pb
from splitpoint.v1 import scheduler_pb2_grpc

_log = logging.getLogger(__name__)

INFERENCE_SERVICE = "splitpoint.v1.InferenceService"

# Each has an id, a spelling, and the two headers of the latter.
_MOST_TOKENS_OF_A_MESSAGE = MESSAGE_LIMIT_BYTES // 4
_PIECE_TOKENS = 4096

Context = grpc.aio.ServicerContext[Any, Any]
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The one model, as its folder describes it."""

    shape: ModelShape
    tokenizer: Tokenizer | None

    @property
    def facts(self) -> ModelFacts:
        shape = self.shape
        return ModelFacts(shape.name, shape.vocabulary_size, shape.context_length)

    @property
    def encode(self) -> Encode | None:
        return None if self.tokenizer is None else self.tokenizer.encode


class InferenceServicer(scheduler_pb2_grpc.InferenceServiceServicer):
    """What clients call."""

    def __init__(self, model: ServedModel, manager: RequestManager, text_jobs: TextJobs) -> None:
        self._model = model
        self._manager = manager
        self._open_calls = 0
        self._text_jobs = text_jobs

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        with ExitStack() as call:
            try:
                _check_deadline(context)
                call.enter_context(self._counted())
                span = call.enter_context(_traced(context))
                with span.part("validate"):
                    checked = await self._validated(request)
                live = self._manager.start(checked, span)
            except Exception as error:
                self._manager.accounts.rejected(error)
                raise
            set_request(live.request_id)
            if live.span is not span:
                span.set(attached_to=live.request_id)
            await self._deliver(live, context)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        check_model(request.model, self._model.facts)
        text = request.text
        return await self._beside(request, text, lambda: self._tokenized(text))

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        check_model(request.model, self._model.facts)
        return pb.GetModelResponse(model=self._model_message())

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[self._model_message()])

    async def ExplainPlan(
        self, request: pb.ExplainPlanRequest, context: Context
    ) -> pb.ExplainPlanResponse:
        check_model(request.model, self._model.facts)
        residency = optional_residency(request.residency)
        for field, least in (("cached_tokens", 0), ("new_tokens", 1), ("max_tokens", 0)):
            if getattr(request, field) < least:
                raise InvalidArgument(f"{field} must be at least {least}", field=field)
        max_tokens = request.max_tokens or DEFAULT_MAX_TOKENS
        context_length = self._model.shape.context_length
        # Without max_tokens only the counts that were given must fit.
        if request.cached_tokens + request.new_tokens + request.max_tokens > context_length:
            raise InvalidArgument(
                f"the tokens exceed the context of {context_length:,}",
                field="new_tokens",
                reason="CONTEXT_EXCEEDED",
            )
        wishes, sources = self._explained_wishes(request)
        response = pb.ExplainPlanResponse()
        for worker in self._manager.registry.ready():
            if worker.ready is None:
                continue
            answer = explain(
                worker.ready.facts,
                cached_tokens=request.cached_tokens,
                new_tokens=request.new_tokens,
                max_tokens=max_tokens,
                residency=residency,
                wishes=wishes,
                sources=sources,
            )
            entry = response.plans.add(worker_id=worker.worker_id)
            if isinstance(answer, NeverFits):
                entry.rejection = answer.reason
            else:
                entry.plan.CopyFrom(plan_to_proto(answer))
        if not response.plans:
            raise Unavailable(
                "no worker is ready",
                reason="NO_WORKER",
                retry_after_seconds=self._manager.limits.retry_seconds,
            )
        return response

    # -- below the calls ---------------------------------------------------------------

    def _explained_wishes(self, request: pb.ExplainPlanRequest) -> tuple[Wishes, list[FetchSource]]:
        """The objective, and the store to fetch from, of a plan that is only explained."""
        objective = self._manager.objective
        if request.objective:
            objective = objective_from_proto(request.objective)
        remote = request.remote_cached_tokens
        if not 0 <= remote <= request.cached_tokens + request.new_tokens:
            raise InvalidArgument(
                "remote_cached_tokens must be at least 0 and at most cached + new",
                field="remote_cached_tokens",
            )
        address = request.remote_store_address or "another store"
        return Wishes(objective=objective), [FetchSource(address, remote)] if remote else []

    @contextmanager
    def _counted(self) -> Iterator[None]:
        limits = self._manager.limits
        if self._open_calls >= limits.concurrent_calls:
            raise ResourceExhausted(
                f"{limits.concurrent_calls} Generate calls are open",
                reason="TOO_MANY_CALLS",
                retry_after_seconds=limits.retry_seconds,
            )
        self._open_calls += 1
        try:
            yield
        finally:
            self._open_calls -= 1

    async def _validated(self, request: pb.GenerateRequest) -> GenerateInput:
        tenant = current_caller().tenant

        def check() -> GenerateInput:
            return validate_generate(
                request,
                self._model.facts,
                self._model.encode,
                draw_seed=lambda: secrets.randbelow(1 << 63),
                draw_request_id=lambda: secrets.token_hex(16),
                tenant=tenant,
            )

        return await self._beside(request, request.text, check)

    async def _beside(
        self,
        request: pb.GenerateRequest | pb.TokenizeRequest,
        text: str,
        job: Callable[[], _Result],
    ) -> _Result:
        """The job's result; a text that is beyond the context by its bytes gets no turn."""
        tokenizer, context_length = self._model.tokenizer, self._model.shape.context_length
        if tokenizer is not None and tokenizer.fewest_tokens(text) >= context_length:
            error = TooManyTokens(tokenizer.fewest_tokens(text), is_exact=False)
            raise prompt_exceeds(error, "text", context_length)
        size = request.ByteSize()
        return await self._text_jobs.run(
            job,
            tenant=current_caller().tenant,
            request_bytes=size,
            text_bytes=size if text else 0,
        )

    async def _deliver(self, live: Request, context: Context) -> None:
        stall_seconds = self._manager.limits.stall_seconds
        with live.attach() as reader:
            async for response in reader:
                try:
                    async with asyncio.timeout(stall_seconds):
                        await context.write(response)
                except TimeoutError:
                    raise Cancelled(
                        f"nothing was read for {stall_seconds:g} s", reason="SLOW_READER"
                    ) from None

    def _tokenized(self, text: str) -> pb.TokenizeResponse:
        try:
            ids = check_text(text, self._model.encode, _MOST_TOKENS_OF_A_MESSAGE)
        except TooManyTokens as error:
            raise _too_large(error) from None
        tokenizer = self._model.tokenizer
        response = pb.TokenizeResponse()
        # In pieces: one of all would hold the interpreter.
        for start in range(0, len(ids), _PIECE_TOKENS):
            piece = ids[start : start + _PIECE_TOKENS]
            response.token_ids.extend(piece)
            response.tokens.extend([] if tokenizer is None else tokenizer.spelling(piece))
        if response.ByteSize() > MESSAGE_LIMIT_BYTES:
            raise _too_large(TooManyTokens(len(ids), is_exact=True))
        return response

    def _model_message(self) -> pb.Model:
        ready = [w.ready for w in self._manager.registry.ready() if w.ready is not None]
        shape = ready[0].facts.shape if ready else self._model.shape
        message = pb.Model(
            name=self._model.shape.name,
            shape=shape_to_proto(shape),
            ready_worker_count=len(ready),
            context_length=shape.context_length,
            has_tokenizer=self._model.tokenizer is not None,
            has_activations=any(worker.facts.has_activations for worker in ready),
            chunk_tokens=ready[0].facts.chunk_tokens if ready else 0,
            kv_encoding=encoding_to_proto(_smallest(worker.facts for worker in ready)),
        )
        message.shape.name = message.name
        return message


def _too_large(error: TooManyTokens) -> ResourceExhausted:
    return ResourceExhausted(f"{error} exceed a message", reason="MESSAGE_TOO_LARGE")


def _smallest(workers: Iterable[WorkerFacts]) -> Encoding:
    """The one that keeps least of a token; native when there is no worker."""
    order = list(Encoding)
    return max((worker.encoding for worker in workers), key=order.index, default=Encoding.NATIVE)


@contextmanager
def _traced(context: Context) -> Iterator[Span]:
    """The span of a call. Of a request that the call began, its end is not ours to tell:
    it was told, then, and a span ends but once."""
    span = tracing.begin("generate", tracing.parent_of(context))
    try:
        yield span
    except BaseException as error:
        span.end(error=tracing.name_of(error))
        raise
    span.end()


def _check_deadline(context: Context) -> None:
    remaining = context.time_remaining()
    if remaining is not None and remaining <= 0:
        raise DeadlineExceeded("the deadline had passed when the call arrived")
