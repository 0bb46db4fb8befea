"""InferenceService: the calls of clients. It validates requests and delivers their answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc

from scheduler_service.api.capabilities import GrammarChecks
from scheduler_service.api.delivery import StallBound
from scheduler_service.api.prompts import (
    Encode,
    Render,
    encoded_prompt,
    prompt_exceeds,
)
from scheduler_service.api.request import Request, Resume
from scheduler_service.api.text_jobs import TextJobs, is_long
from scheduler_service.api.validation import check_model, validate_generate
from scheduler_service.explain import explain_plans
from scheduler_service.requests.lifecycle import RequestManager
from scheduler_service.worker_facts import WorkerFacts
from splitpoint.checkpoint.text import TooManyTokens
from splitpoint.config import counted
from splitpoint.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
)
from splitpoint.observe import tracing
from splitpoint.observe.logs import set_request
from splitpoint.observe.tracing import Span
from splitpoint.sampling import check_token_ids
from splitpoint.shapes import Encoding, Numerics, WeightFormat
from splitpoint.transport.access import current_caller
from splitpoint.transport.convert import (
    draft_method_to_proto,
    encoding_to_proto,
    numerics_to_proto,
    selection_numbers,
    shape_to_proto,
    weight_format_to_proto,
)
from splitpoint.transport.limits import MESSAGE_LIMIT_BYTES
from splitpoint.v1 import scheduler_pb2 as pb
from splitpoint.v1 import scheduler_pb2_grpc

INFERENCE_SERVICE = "splitpoint.v1.InferenceService"

# Each token takes at least four bytes of a Tokenize answer: id, spelling, and two headers.
_MOST_TOKENS_OF_A_MESSAGE = MESSAGE_LIMIT_BYTES // 4
_PIECE_TOKENS = 4096
_PIECE_BYTES = 1 << 20

Context = grpc.aio.ServicerContext[Any, Any]
_Result = TypeVar("_Result")


class InferenceServicer(scheduler_pb2_grpc.InferenceServiceServicer):
    """Keeps no state but the number of open Generate calls."""

    def __init__(self, manager: RequestManager, text_jobs: TextJobs) -> None:
        self._manager = manager
        self._limits = manager.limits
        self._shape = manager.options.model.shape
        self._names = manager.options.model.names
        self._tokenizer = manager.options.model.tokenizer
        self._text_jobs = text_jobs
        self._grammars = GrammarChecks()
        self._open_calls = 0

    def close(self) -> None:
        """End the processes that compile grammars."""
        self._grammars.close()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        with ExitStack() as call:
            try:
                _check_deadline(context)
                call.enter_context(self._counted())
                span = call.enter_context(_traced(context))
                with span.part("validate"):
                    checked = await self._validated(request)
                accepted = self._manager.start(checked, span)
            except Exception as error:
                self._manager.counters.rejected(error)
                raise
            set_request(accepted.request_id)
            if accepted.span is not span:
                span.set(attached_to=accepted.request_id)
            await self._deliver(accepted, checked.resume, context)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> bytes:
        check_model(request.model, self._names)
        return await self._run_job(request, lambda: self._tokenized(request))

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        check_model(request.model, self._names)
        return await self._text_jobs.run(
            lambda: self._detokenized(request),
            tenant=current_caller().tenant,
            request_bytes=request.ByteSize(),
            text_bytes=request.ByteSize(),
        )

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Context) -> None:
        check_model(request.model, self._names)
        files = self._manager.options.model.tokenizer_files
        if self._tokenizer is None:
            raise FailedPrecondition("the model has no tokenizer", reason="NO_TOKENIZER")
        with StallBound(self._limits.stall_seconds) as bound:
            for name, path in files.items():
                async for data in _pieces(path):
                    bound.begin()
                    await context.write(pb.GetTokenizerResponse(file_name=name, data=data))
                    bound.end()

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        check_model(request.model, self._names)
        return pb.GetModelResponse(model=self._model_message(request.model))

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[self._model_message(name) for name in self._names])

    async def ExplainPlan(
        self, request: pb.ExplainPlanRequest, context: Context
    ) -> pb.ExplainPlanResponse:
        check_model(request.model, self._names)
        return explain_plans(request, self._manager.registry, self._manager.options)

    # -- below the calls ---------------------------------------------------------------

    @property
    def _encode(self) -> Encode | None:
        return None if self._tokenizer is None else self._tokenizer.encode

    @property
    def _render(self) -> Render | None:
        chats = self._manager.options.model.chats
        return None if chats is None else chats.render

    @contextmanager
    def _counted(self) -> Iterator[None]:
        if self._open_calls >= self._limits.concurrent_calls:
            raise ResourceExhausted(
                f"{self._limits.concurrent_calls} Generate calls are open",
                reason="TOO_MANY_CALLS",
                retry_after_seconds=self._limits.retry_seconds,
            )
        self._open_calls += 1
        try:
            yield
        finally:
            self._open_calls -= 1

    async def _validated(self, request: pb.GenerateRequest) -> Request:
        caller, key = current_caller(), self._manager.options.server_key

        def job() -> Request:
            shape, encode = self._shape, self._encode
            self._grammars.check(request.sampling)
            checked = validate_generate(
                request,
                shape,
                encode,
                render=self._render,
                tenant=caller.tenant,
                weight=caller.weight,
                other_names=self._names[1:],
                server_key=key,
            )
            self._manager.prepare(checked)
            return checked

        return await self._run_job(request, job, blocks=self._grammars.blocks(request.sampling))

    async def _run_job(
        self,
        request: pb.GenerateRequest | pb.TokenizeRequest,
        job: Callable[[], _Result],
        *,
        blocks: bool = False,
    ) -> _Result:
        """Run the job, in a thread if the text is long, or a chat, or if it `blocks`.

        Raises InvalidArgument at once for a text that by its bytes alone exceeds the context.
        """
        tokenizer, context_length, text = self._tokenizer, self._shape.context_length, request.text
        least = 0 if tokenizer is None else tokenizer.fewest_tokens(text)
        if least >= context_length:
            error = TooManyTokens(least, is_exact=False)
            raise prompt_exceeds(error, "text", context_length)
        # A message that is measured is serialized, which takes milliseconds for a long text.
        size = len(text) if is_long(len(text)) else request.ByteSize()
        has_resumed = isinstance(request, pb.GenerateRequest) and request.resume.token_ids
        return await self._text_jobs.run(
            job,
            tenant=current_caller().tenant,
            request_bytes=size,
            text_bytes=size if text or has_resumed or request.HasField("chat") else 0,
            blocks=blocks or request.HasField("chat"),
        )

    async def _deliver(self, request: Request, resume: Resume, context: Context) -> None:
        with StallBound(self._limits.stall_seconds) as bound, request.attach(resume) as reader:
            async for response in reader:
                bound.begin()
                await context.write(response)
                bound.end()

    def _tokenized(self, request: pb.TokenizeRequest) -> bytes:
        """Return a serialized TokenizeResponse: messages one after the other are one message.

        Made as a whole, a long one would hold the interpreter lock for too long.
        """
        try:
            ids = encoded_prompt(request, self._encode, self._render, _MOST_TOKENS_OF_A_MESSAGE)
        except TooManyTokens as error:
            raise _too_large(error) from None
        pieces = []
        for start in range(0, len(ids), _PIECE_TOKENS):
            piece = ids[start : start + _PIECE_TOKENS]
            tokens = [] if self._tokenizer is None else self._tokenizer.spelling(piece)
            pieces.append(pb.TokenizeResponse(token_ids=piece, tokens=tokens).SerializeToString())
        if sum(map(len, pieces)) > MESSAGE_LIMIT_BYTES:
            raise _too_large(TooManyTokens(len(ids), is_exact=True))
        return b"".join(pieces)

    def _detokenized(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        ids = request.token_ids
        if not 1 <= len(ids) <= self._shape.context_length:
            raise InvalidArgument(
                f"{counted(len(ids), 'token')}, from 1 to {self._shape.context_length:,} are "
                "detokenized",
                field="token_ids",
            )
        check_token_ids(ids, "token_ids", self._shape.vocabulary_size)
        if self._tokenizer is None:
            raise FailedPrecondition("the model has no tokenizer", reason="NO_TOKENIZER")
        text = self._tokenizer.decode(ids, keeps_special_tokens=request.keeps_special_tokens)
        response = pb.DetokenizeResponse(text=text)
        if response.ByteSize() > MESSAGE_LIMIT_BYTES:
            raise ResourceExhausted(
                f"the text of {counted(len(ids), 'token')} exceeds a message",
                reason="MESSAGE_TOO_LARGE",
            )
        return response

    def _model_message(self, name: str) -> pb.Model:
        """Return the model by one of its names; an empty one is the first."""
        ready = [w.ready.facts for w in self._manager.registry.ready() if w.ready is not None]
        shape = ready[0].shape if ready else self._shape
        digest = _common_digest(ready)
        message = pb.Model(
            name=name or self._names[0],
            shape=shape_to_proto(shape),
            ready_worker_count=len(ready),
            context_length=shape.context_length,
            has_tokenizer=self._tokenizer is not None,
            has_activations=any(facts.has_activations for facts in ready),
            chunk_tokens=ready[0].chunk_tokens if ready else 0,
            kv_encoding=encoding_to_proto(_smallest(ready)),
            numerics=numerics_to_proto(Numerics.INVARIANT if digest else Numerics.FAST),
            numerics_digest=digest,
            weight_format=weight_format_to_proto(_lossiest(ready)),
            has_chat_template=self._render is not None,
            tool_call_format=self._manager.options.model.tool_call_format,
            has_structured_output=any(facts.has_structured_output for facts in ready),
        )
        methods = {method for facts in ready for method in facts.draft_methods}
        message.draft_methods.extend(draft_method_to_proto(each) for each in sorted(methods))
        selects_by = {method for facts in ready for method in facts.selections}
        message.selection_methods.extend(selection_numbers(sorted(selects_by)))
        message.selection_method_names.extend(sorted(selects_by))
        message.shape.name = message.name
        return message


async def _pieces(path: Path) -> AsyncIterator[bytes]:
    """Yield the bytes of a file, as it is now."""
    with await asyncio.to_thread(path.open, "rb") as file:
        while data := await asyncio.to_thread(file.read, _PIECE_BYTES):
            yield data


def _too_large(error: TooManyTokens) -> ResourceExhausted:
    return ResourceExhausted(f"{error} exceed a message", reason="MESSAGE_TOO_LARGE")


def _smallest(workers: Iterable[WorkerFacts]) -> Encoding:
    """Return the encoding with the fewest bytes per token; native if there is no worker."""
    order = list(Encoding)
    return max((worker.encoding for worker in workers), key=order.index, default=Encoding.NATIVE)


def _common_digest(workers: Iterable[WorkerFacts]) -> str:
    """Return the digest of all workers' numerics.

    Empty if one has others, or is fast: then an answer depends on where it is computed.
    """
    digests = {worker.numerics_digest for worker in workers}
    return digests.pop() if len(digests) == 1 else ""


def _lossiest(workers: Iterable[WorkerFacts]) -> WeightFormat:
    """Return int8 if one of the workers has such weights."""
    has_int8 = any(each.weight_format is WeightFormat.INT8 for each in workers)
    return WeightFormat.INT8 if has_int8 else WeightFormat.NATIVE


@contextmanager
def _traced(context: Context) -> Iterator[Span]:
    """Give the span of a call. If the call began a request, the span has ended with it:
    a span ends only once, so ending it here does nothing then."""
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
