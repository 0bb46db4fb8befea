"""GET /v1/models and /v1/models/NAME."""

from __future__ import annotations

from gateway_service.endpoints.endpoint import Gateway
from gateway_service.http.exchange import Exchange
from gateway_service.openai.models import model_list, model_object
from splitpoint.client.caller_spans import Metadata
from splitpoint.client.tries import INFERENCE
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
