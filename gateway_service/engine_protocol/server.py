"""The port at which the engine protocol is served: on this host only."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from gateway_service.engine_protocol.servicer import SERVICE_NAME, EngineServicer
from gateway_service.upstream.schedulers import Upstream
from splitpoint.config import check_address, is_local_address
from splitpoint.errors import InvalidArgument
from splitpoint.transport.servers import HealthReporter, create_server, listen

_log = logging.getLogger(__name__)


def check_engine_address(address: str) -> str:
    """Return the address of --engine-listen unchanged. Raises InvalidArgument.

    The protocol has neither tokens nor encryption, so it is for routers on this host.
    """
    check_address(address, field="engine-listen")
    if not is_local_address(address):
        raise InvalidArgument(
            f"{address!r} is not a loopback address: the engine protocol knows neither tokens nor "
            "TLS, so it is served on this host only",
            field="engine-listen",
            reason="OPEN_LISTEN_ADDRESS",
        )
    return address


@asynccontextmanager
async def engine_protocol_served(
    address: str, upstream: Upstream, *, token: str, grace_seconds: float
) -> AsyncIterator[str]:
    """Serve the engine protocol in this block; yield the address with its real port.

    At the end running requests may go on for `grace_seconds`. `token`: of calls that come
    without one. Raises InvalidArgument, and Unavailable for a port that is taken.
    """
    server = create_server()
    servicer = EngineServicer(upstream, token)
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(servicer, server)
    health = HealthReporter(server)
    bound = listen(server, check_engine_address(address))
    await server.start()
    await health.set("", True)
    await health.set(SERVICE_NAME, True)
    _log.info("engine protocol at %s", bound)
    try:
        yield bound
    finally:
        await health.shut_down()
        await server.stop(grace_seconds)
