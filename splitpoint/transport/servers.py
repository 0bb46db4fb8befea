"""Servers as this project runs them: guarded handlers, limits, TLS, health, reflection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from splitpoint.errors import Unavailable
from splitpoint.host.descriptors import connection_limit
from splitpoint.transport.access import Access
from splitpoint.transport.guard import Guard, OnCallEnded, ignore_call_end
from splitpoint.transport.limits import SHARED_OPTIONS, WATCH_SECONDS, Options
from splitpoint.transport.tls import PLAIN, Identity

STREAMS_PER_CONNECTION = 256
# Calls that may wait until the event loop takes them.
PENDING_CALLS = 16_384
# A connection over this limit is closed as soon as it is accepted.
_CONNECTIONS = "grpc.max_allowed_incoming_connections"
_SERVER_OPTIONS: Options = [
    *SHARED_OPTIONS,
    ("grpc.max_concurrent_streams", STREAMS_PER_CONNECTION),
    # By default gRPC cancels some of more than 1,000, by chance and without a reason. The limit on
    # calls has a reason, and applies as the loop takes them.
    ("grpc.server.max_pending_requests", PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", PENDING_CALLS),
    ("grpc.keepalive_time_ms", 30_000),
    # Shorter than any client's keepalive time: a server closes connections that ping faster.
    ("grpc.http2.min_ping_interval_without_data_ms", round(WATCH_SECONDS * 500)),
    # Peers that connect and send nothing more must give their descriptor back.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),
    # A second server on the same port must fail, not share its connections.
    ("grpc.so_reuseport", 0),
]


def create_server(
    *,
    max_concurrent_rpcs: int | None = None,
    options: Sequence[tuple[str, Any]] = (),
    access: Access | None = None,
    on_answer: OnCallEnded | None = None,
) -> grpc.aio.Server:
    """Return a server with guarded handlers and the limits of the wire contract.

    Args:
        max_concurrent_rpcs: calls in flight; more are answered RESOURCE_EXHAUSTED.
        options: override the standard gRPC options.
        access: restricts every method but health to callers it knows; handlers read
            the caller from `access.current_caller()`. None: no restriction.
        on_answer: called as each call ends, with the method path as the caller sent it
            ("/package.Service/Method") and the status. A call that its caller gave up, or
            whose deadline passed, is CANCELLED. Calls beyond `max_concurrent_rpcs`, which
            gRPC refuses by itself, are not reported.
    """
    merged = {**dict(_SERVER_OPTIONS), _CONNECTIONS: connection_limit(), **dict(options)}
    return grpc.aio.server(
        interceptors=[Guard(access, on_answer or ignore_call_end)],
        options=list(merged.items()),
        maximum_concurrent_rpcs=max_concurrent_rpcs,
    )


def listen(server: grpc.aio.Server, address: str, identity: Identity = PLAIN) -> str:
    """Bind `host:port` or `unix:/path`; return the address with the real port.

    An identity with a certificate serves TLS on ports. If it also has authorities, it
    demands a certificate from every client. Raises Unavailable if the address cannot
    be bound.
    """
    try:
        if identity.serves_tls and not address.startswith("unix:"):
            port = server.add_secure_port(address, _server_credentials(identity))
        else:
            port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise Unavailable(f"cannot listen on {address}: it is in use or not ours") from error
    if address.startswith("unix:"):
        return address
    host, _, _ = address.rpartition(":")
    return f"{host}:{port}"


def _server_credentials(identity: Identity) -> grpc.ServerCredentials:
    return grpc.ssl_server_credentials(
        [(identity.key, identity.certificate)],
        root_certificates=identity.authorities or None,
        require_client_auth=bool(identity.authorities),
    )


class HealthReporter:
    """gRPC's health service: "" is liveness, a full service name is its readiness."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._servicer = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set(self, service_name: str, serving: bool) -> None:
        """Set a status and notify watchers. Ignored after `shut_down`."""
        status = health_pb2.HealthCheckResponse
        await self._servicer.set(service_name, status.SERVING if serving else status.NOT_SERVING)

    async def shut_down(self) -> None:
        """Set every service to NOT_SERVING for good: the server is draining."""
        await self._servicer.enter_graceful_shutdown()


def enable_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    """Serve gRPC reflection for `service_names`, health and reflection itself."""
    from grpc_reflection.v1alpha import reflection  # only servers have it installed

    names = [*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME]
    reflection.enable_server_reflection(names, server)
