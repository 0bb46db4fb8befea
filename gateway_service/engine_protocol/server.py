"""The port at which the engine protocol is served: on this host only."""

from __future__ import annotations

import logging

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


class EngineServer:
    """The engine protocol at one address. Create and use it inside one event loop.

    Args:
        token: of calls that come without one; empty: they go on without one.
    """

    def __init__(self, upstream: Upstream, token: str = "") -> None:
        self._server = create_server()
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(
            EngineServicer(upstream, token), self._server
        )
        self._health = HealthReporter(self._server)

    async def start(self, address: str) -> str:
        """Listen, and return the address with the real port.

        Raises InvalidArgument for one beyond this host, Unavailable if it cannot be bound.
        """
        bound = listen(self._server, check_engine_address(address))
        await self._server.start()
        for service in ("", SERVICE_NAME):
            await self._health.set(service, True)
        _log.info("engine protocol at %s", bound)
        return bound

    async def stop(self, grace_seconds: float) -> None:
        """Take no request any more; running ones may go on for so long."""
        await self._health.shut_down()
        await self._server.stop(grace_seconds)
