"""For operators: GET /health, /health/live, /version and /metrics."""

from __future__ import annotations

import functools
import importlib.metadata

from gateway_service.endpoints.endpoint import Gateway
from gateway_service.http.exchange import Exchange
from splitpoint.client.caller_spans import Metadata
from splitpoint.errors import Unavailable


async def health(gateway: Gateway, exchange: Exchange, metadata: Metadata) -> None:
    """Answer 200 if requests can be served: a scheduler is there, with a ready worker."""
    if gateway.is_draining:
        raise Unavailable("the gateway is stopping", reason="DRAINING")
    if not await gateway.upstream.is_serving():
        raise Unavailable("no scheduler serves", reason="NOT_SERVING")
    await exchange.respond({"status": "ok"})


async def live(gateway: Gateway, exchange: Exchange, metadata: Metadata) -> None:
    """Answer 200: the process works, whatever is behind it."""
    await exchange.respond({"status": "ok"})


async def version(gateway: Gateway, exchange: Exchange, metadata: Metadata) -> None:
    await exchange.respond({"version": _version()})


@functools.cache
def _version() -> str:
    try:
        return importlib.metadata.version("splitpoint")
    except importlib.metadata.PackageNotFoundError:  # run from a bare source tree
        return "unknown"
