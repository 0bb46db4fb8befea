"""For operators: GET /health, /health/live, /version, /openapi.json and /metrics."""

from __future__ import annotations

import asyncio
import functools

from prometheus_client.exposition import choose_encoder

from gateway_service.endpoints.endpoint import Gateway
from gateway_service.http.exchange import Exchange
from gateway_service.openapi import Health, Version, document
from splitpoint.client.caller_spans import Metadata
from splitpoint.errors import Unavailable


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
