"""One request of a batch: its body read as the gateway reads it, sent, and rendered."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from gateway_service.batch.files import Line
from gateway_service.batch.order import prefix_key
from gateway_service.openai.answers import Answer, Job
from gateway_service.openai.chat_completions import read_chat
from gateway_service.openai.completions import read_completion
from gateway_service.openai.errors import error_answer
from gateway_service.openai.fields import wrong
from gateway_service.openai.responses import ResponseJob, read_response
from gateway_service.upstream import Models, Upstream, prepare
from splitpoint.client.caller_spans import Metadata
from splitpoint.client.scheduler_attempts import INFERENCE
from splitpoint.errors import SplitpointError
from splitpoint.tasks import run_all
from splitpoint.v1 import scheduler_pb2 as pb

# Ids of answers begin with these, and bodies are read by these.
_READS: dict[str, tuple[str, Callable[..., Job]]] = {
    "/v1/completions": ("cmpl", read_completion),
    "/v1/chat/completions": ("chatcmpl", read_chat),
    "/v1/responses": ("resp", read_response),
}
URLS = frozenset(_READS)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a request came to: the response, and its tokens over all its answers."""

    status: int
    request_id: str
    body: Mapping[str, Any]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class Requests:
    """Sends requests of a batch to the schedulers. Belongs to one event loop.

    Args:
        caller: returns the metadata of the next call; raises if its key may no longer be used.
        priority: of all requests, the scheduler's; None: as their bodies say.
        turns: entered by each generation while it is open.
    """

    def __init__(
        self,
        upstream: Upstream,
        *,
        caller: Callable[[], Metadata] = lambda: (),
        priority: int | None = None,
        turns: AbstractAsyncContextManager[Any, Any] | None = None,
    ) -> None:
        self._upstream = upstream
        self._models = Models(upstream)
        self._caller = caller
        self._priority = priority
        self._turns: AbstractAsyncContextManager[Any, Any] = turns or nullcontext()

    async def answer(self, line: Line) -> Outcome:
        """Return the answer to a request. Raises SplitpointError."""
        job = _job_of(line)
        await prepare(job, self._upstream, self._models, self._caller())
        answers = [Answer() for _ in job.requests]
        await run_all(
            self._generate(request, answer)
            for request, answer in zip(job.requests, answers, strict=True)
        )
        usages = [answer.finished.usage for answer in answers]
        return Outcome(
            200,
            job.id,
            job.result(answers),
            sum(usage.prompt_tokens for usage in usages),
            sum(usage.cached_tokens for usage in usages),
            sum(usage.completion_tokens for usage in usages),
        )

    async def _generate(self, request: pb.GenerateRequest, answer: Answer) -> None:
        if self._priority is not None:
            request.priority = self._priority
        async with self._turns:
            await self._upstream.generate(request, self._caller(), _taken_by(answer))

    async def key(self, line: Line) -> bytes:
        """Return what sorts a request by its prompt; of several prompts the first counts.

        Raises SplitpointError.
        """
        request = _job_of(line).requests[0]
        if request.HasField("token_ids"):
            token_ids = request.token_ids.ids
        else:
            asked = pb.TokenizeRequest(
                model=request.model, omits_special_tokens=request.omits_special_tokens
            )
            if request.HasField("chat"):
                asked.chat.CopyFrom(request.chat)
            else:
                asked.text = request.text
            told = await self._upstream.call(INFERENCE, "Tokenize", asked, self._caller())
            token_ids = told.token_ids
        return prefix_key(request.model, request.cache_salt, token_ids)


def refused(line: Line, error: SplitpointError) -> Outcome:
    """Return the response of a request that failed."""
    try:
        names = _job_of(line).parameter_names
    except SplitpointError:  # the body itself is wrong: the error has the client's own name
        names = {}
    told = error_answer(error, names)
    return Outcome(told.status, f"req-{uuid.uuid4().hex}", told.body)


def _job_of(line: Line) -> Job:
    prefix, read = _READS[line.url]
    job = read(line.body, request_id=f"{prefix}-{uuid.uuid4().hex}", created=int(time.time()))
    if job.form.is_stream:
        raise wrong("stream", "must not be true: a batch has whole answers")
    if isinstance(job, ResponseJob):
        if job.previous_id:
            raise wrong("previous_response_id", "is for the gateway: send the whole input")
        job.repeated["store"] = False
    return job


def _taken_by(answer: Answer) -> Callable[[pb.GenerateResponse], Awaitable[None]]:
    async def take(message: pb.GenerateResponse) -> None:
        answer.add(message)

    return take
