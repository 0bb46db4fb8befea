"""POST /tokenize and /detokenize."""

from __future__ import annotations

from gateway_service.endpoints.endpoint import Gateway
from gateway_service.http.exchange import Exchange
from gateway_service.openai.tokens import read_detokenize, read_tokenize
from splitpoint.client.caller_spans import Metadata
from splitpoint.client.tries import INFERENCE
from splitpoint.v1 import scheduler_pb2 as pb


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
        await exchange.respond({"prompt": answer.text})
