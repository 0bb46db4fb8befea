"""The gateway's metrics: requests are counted as they end, the rest is read at a scrape."""

from __future__ import annotations

from collections.abc import Iterator

from gateway_service.endpoints.endpoint import Ended, Gateway
from gateway_service.server import HttpServer
from splitpoint.observe import metrics
from splitpoint.observe.meters import Meters, Reading


class Counts:
    """Counts requests; pass `ended` to `Gateway.on_ended`."""

    def __init__(self, meters: Meters) -> None:
        self._requests = meters.counter(metrics.GATEWAY_REQUESTS)
        self._seconds = meters.histogram(metrics.GATEWAY_REQUEST_SECONDS)
        self._first_token = meters.histogram(metrics.GATEWAY_FIRST_TOKEN_SECONDS)

    def ended(self, request: Ended) -> None:
        self._requests.labels(request.endpoint, str(request.status)).inc()
        self._seconds.labels(request.endpoint).observe(request.seconds)
        if request.first_event_seconds is not None:
            self._first_token.labels(request.endpoint).observe(request.first_event_seconds)


def readings(gateway: Gateway, server: HttpServer) -> Iterator[Reading]:
    """Yield everything that a scrape reads."""
    yield Reading(metrics.GATEWAY_OPEN_REQUESTS, gateway.open_count)
    yield Reading(metrics.GATEWAY_OPEN_GENERATIONS, gateway.upstream.open_count)
    yield Reading(metrics.GATEWAY_CONNECTIONS, server.connection_count)
    yield Reading(metrics.GATEWAY_BODY_BYTES, gateway.budget.used)
    yield Reading(metrics.GATEWAY_RETRIES, gateway.upstream.retry_count)
