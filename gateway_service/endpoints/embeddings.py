"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import uuid

from gateway_service.endpoints.endpoint import Gateway
from gateway_service.endpoints.generating import whole_answers
from gateway_service.http.exchange import Exchange
from gateway_service.openai.embeddings import EMBEDDING_FIELDS, read_embedding
from splitpoint.client.caller_spans import Metadata


async def embeddings(gateway: Gateway, exchange: Exchange, metadata: Metadata) -> None:
    body = await exchange.json()
    exchange.request_id = f"embd-{uuid.uuid4().hex}"
    job = read_embedding(body, request_id=exchange.request_id)
    exchange.parameter_names = job.parameter_names
    exchange.ignored = EMBEDDING_FIELDS.ignored(body)
    async with exchange.while_connected():
        answers = await whole_answers(gateway, job, metadata)
        items = []
        for index, answer in enumerate(answers):
            items.append(job.item(index, answer))
            # Thousands of numbers each: streams go on in between.
            await asyncio.sleep(0)
        await exchange.respond_bytes(job.body(items, answers), b"application/json")
