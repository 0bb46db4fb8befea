"""Endpoints that answer in one piece: facts of models, and what operators ask for.

GET /v1/models and /v1/models/NAME, POST /tokenize and /detokenize, POST /v1/embeddings;
GET /health, /health/live, /version, /openapi.json and /metrics.
"""

from __future__ import annotations

import asyncio
import functools
import uuid

from prometheus_client.exposition import choose_encoder

from gateway_service.endpoints.endpoint import Gateway
from gateway_service.endpoints.generating import whole_answers
from gateway_service.http.exchange import Exchange
from gateway_service.openai.embeddings import EMBEDDING_FIELDS, read_embedding
from gateway_service.openai.tokens import (
    Text,
    model_list,
    model_object,
    read_detokenize,
    read_tokenize,
)
from gateway_service.openapi import Health, Version, document
from splitpoint.client.caller_spans import Metadata
from splitpoint.client.scheduler_attempts import INFERENCE
from splitpoint.errors import Unavailable
from splitpoint.v1 import scheduler_pb2 as pb


async def list_models(gateway: Gateway, exchange: Exchange, metadata: Metadata) -> None:
    request = pb.ListModelsRequest()
    answer = await gateway.upstream.call(INFERENCE, "ListModels", request, metadata)
    await exchange.respond(model_list(answer.models, gateway.created))


async def get_model(gateway: Gateway, exchange: Exchange, metadata: Metadata) -> None:
    request = pb.GetModelRequest(model=exchange.scope["path_params"]["model"])
    exchange.parameter_names = {}
    answer = await gateway.upstream.call(INFERENCE, "GetModel", request, metadata)
    await exchange.respond(model_object(answer.model, gateway.created))


async def tokenize(gateway: Gateway, exchange: Exchange, metadata: Metadata) -> None:
    job = read_tokenize(await exchange.json())
    exchange.parameter_names = {}
    call = gateway.upstream.call
    async with exchange.while_connected():
        answer = await call(INFERENCE, "Tokenize", job.request, metadata)
        asked = pb.GetModelRequest(model=job.request.model)
        model = (await call(INFERENCE, "GetModel", asked, metadata)).model
        await exchange.respond(job.result(answer, model.context_length))


async def detokenize(gateway: Gateway, exchange: Exchange, metadata: Metadata) -> None:
    request = read_detokenize(await exchange.json())
    exchange.parameter_names = {"token_ids": "tokens"}
    async with exchange.while_connected():
        answer = await gateway.upstream.call(INFERENCE, "Detokenize", request, metadata)
        await exchange.respond(Text(prompt=answer.text))


async def embeddings(gateway: Gateway, exchange: Exchange, metadata: Metadata) -> None:
    body = await exchange.json()
    exchange.request_id = f"embd-{uuid.uuid4().hex}"
    job = read_embedding(body, request_id=exchange.request_id)
    exchange.parameter_names = job.parameter_names
    exchange.ignored = EMBEDDING_FIELDS.ignored(body)
    async with exchange.while_connected():
        answers = await whole_answers(gateway, job.requests, metadata)
        items = []
        for index, answer in enumerate(answers):
            items.append(job.item(index, answer))
            # Thousands of numbers each: streams go on in between.
            await asyncio.sleep(0)
        await exchange.respond_bytes(job.body(items, answers), b"application/json")


async def health(gateway: Gateway, exchange: Exchange, metadata: Metadata) -> None:
    """Answer 200 if requests can be served: a scheduler is there, with a ready worker."""
    if gateway.is_leaving:
        raise Unavailable("the gateway is stopping", reason="DRAINING")
    if not await gateway.upstream.is_serving():
        raise Unavailable("no scheduler serves", reason="NOT_SERVING")
    await exchange.respond(Health(status="ok"))


async def live(gateway: Gateway, exchange: Exchange, metadata: Metadata) -> None:
    """Answer 200: the process works, whatever is behind it."""
    await exchange.respond(Health(status="ok"))


async def metrics(gateway: Gateway, exchange: Exchange, metadata: Metadata) -> None:
    """Answer with this gateway's metrics, for Prometheus."""
    encode, kind = choose_encoder(",".join(exchange.headers(b"accept")))
    # In a thread, since sources are read on this loop.
    body = await asyncio.to_thread(encode, gateway.meters.registry)
    await exchange.respond_bytes(body, kind.encode())


async def openapi(gateway: Gateway, exchange: Exchange, metadata: Metadata) -> None:
    await exchange.respond(document(_version(), needs_key=gateway.access is not None))


async def version(gateway: Gateway, exchange: Exchange, metadata: Metadata) -> None:
    await exchange.respond(Version(version=_version()))


@functools.cache
def _version() -> str:
    import importlib.metadata  # takes long to load

    try:
        return importlib.metadata.version("splitpoint")
    except importlib.metadata.PackageNotFoundError:  # run from a bare source tree
        return "unknown"
