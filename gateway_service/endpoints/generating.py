"""Endpoints that generate: a body becomes a job, whose answers are sent whole or as a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence

from gateway_service.endpoints.endpoint import Gateway
from gateway_service.http.exchange import Exchange
from gateway_service.openai.answers import Answer, Job
from gateway_service.openai.errors import HttpError
from gateway_service.openai.fields import Table
from gateway_service.openai.responses import ResponseJob
from gateway_service.upstream import Take, prepare
from splitpoint.client.caller_spans import Metadata
from splitpoint.tasks import run_all
from splitpoint.v1 import scheduler_pb2 as pb


class Generating:
    """Answers by generation (`endpoint.Handle`).

    Args:
        prefix: of the answers' ids, such as "cmpl".
        table: the fields of a body.
        read: returns the job of a body's JSON value, `request_id` and `created`. Raises
            InvalidArgument with the field as the client wrote it.
    """

    def __init__(
        self,
        prefix: str,
        table: Table,
        read: Callable[..., Job],
    ) -> None:
        self._prefix = prefix
        self._table = table
        self._read = read

    async def __call__(self, gateway: Gateway, exchange: Exchange, metadata: Metadata) -> None:
        body = await exchange.json()
        request_id = f"{self._prefix}-{uuid.uuid4().hex}"
        exchange.request_id = request_id
        job = self._read(body, request_id=request_id, created=int(time.time()))
        exchange.parameter_names = job.parameter_names
        exchange.ignored = self._table.ignored(body)
        async with exchange.while_connected():
            if isinstance(job, ResponseJob):
                _find_previous(gateway, exchange, job)
            await prepare(job, gateway.upstream, gateway.models, metadata)
            if job.form.is_stream:
                await _stream(gateway, exchange, job, metadata)
            else:
                answers = await whole_answers(gateway, job.requests, metadata)
                await exchange.respond(job.result(answers))


def _find_previous(gateway: Gateway, exchange: Exchange, job: ResponseJob) -> None:
    """Give a job the conversation that it goes on with, and keep what it comes to.

    Raises HttpError (404) if there is no such conversation of the client's.
    """
    responses, owner = gateway.responses, exchange.owner
    if job.previous_id:
        conversation = responses.get(owner, job.previous_id)
        if conversation is None:
            raise HttpError(
                404,
                f"Previous response with id '{job.previous_id}' not found.",
                reason="PREVIOUS_RESPONSE_NOT_FOUND",
                field="previous_response_id",
            )
        job.go_on(conversation)
    if job.is_stored and responses.keeps:
        job.keep = lambda conversation: responses.put(owner, job.id, conversation)
    else:
        job.repeated["store"] = False


async def whole_answers(
    gateway: Gateway, requests: Sequence[pb.GenerateRequest], metadata: Metadata
) -> list[Answer]:
    """Return the whole answers to requests, in their order."""
    answers = [Answer() for _ in requests]

    def take_of(index: int) -> Take:
        add = answers[index].add

        async def take(message: pb.GenerateResponse) -> None:
            add(message)

        return take

    await _generate(gateway, requests, metadata, take_of)
    return answers


async def _stream(gateway: Gateway, exchange: Exchange, job: Job, metadata: Metadata) -> None:
    """Send the answers as they come. Until the first message an error is the whole answer."""
    writer = job.writer()
    write = exchange.write

    async def begin(message: pb.GenerateResponse) -> None:
        await exchange.begin_stream(writer.failed)
        is_chunk = message.HasField("chunk")
        prompt_tokens = (message.chunk if is_chunk else message.complete.usage).prompt_tokens
        if first := writer.begin(prompt_tokens):
            await write(first)

    def take_of(index: int) -> Take:
        async def take(message: pb.GenerateResponse) -> None:
            if not exchange.status:
                await begin(message)
            if message.HasField("chunk"):
                frames = writer.chunk(index, message.chunk)
            else:
                frames = writer.complete(index, message.complete)
            if frames:
                await write(frames)

        return take

    await _generate(gateway, job.requests, metadata, take_of)
    await exchange.end(writer.end())


async def _generate(
    gateway: Gateway,
    requests: Sequence[pb.GenerateRequest],
    metadata: Metadata,
    take_of: Callable[[int], Take],
) -> None:
    """Run requests at the same time. The first error ends all of them."""
    generate = gateway.upstream.generate
    if len(requests) == 1:
        await generate(requests[0], metadata, take_of(0))
        return
    await run_all(
        generate(request, metadata, take_of(index)) for index, request in enumerate(requests)
    )
