"""`splitpoint probe`: does a service serve? For health checks of containers and supervisors.

It runs every few seconds, so it loads gRPC but neither torch nor the other commands.
`python -m splitpoint_cli.request.probe` does not load the command line either.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import grpc
import typer
from grpc_health.v1 import health_pb2

from splitpoint.config import check_address
from splitpoint.errors import InvalidArgument, SplitpointError
from splitpoint.transport import channels, statuses
from splitpoint.transport.tls import Identity, client_identity, read_identity

DEFAULT_SECONDS = 3.0
_CHECK = "/grpc.health.v1.Health/Check"


def probe(
    address: Annotated[
        str, typer.Argument(help="Address of the service: host:port or unix:/path.")
    ],
    service: Annotated[
        str,
        typer.Option(
            help="Service, such as splitpoint.v1.WorkerService; absent: the process as a whole.",
            metavar="NAME",
        ),
    ] = "",
    ca: Annotated[
        Path | None,
        typer.Option(help="Authority (PEM) of the server's certificate; turns TLS on."),
    ] = None,
    server_cert: Annotated[
        Path | None,
        typer.Option(help="Trust exactly this certificate (PEM), for any host; instead of --ca."),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(
            help="Give up after this time, connection and answer together.", metavar="SECONDS"
        ),
    ] = DEFAULT_SECONDS,
) -> None:
    """Ask a service for its health: exit 0 when it serves, 1 when it does not, with the reason.

    No token is needed. SPLITPOINT_CA, SPLITPOINT_CERT, SPLITPOINT_KEY and
    SPLITPOINT_SERVER_NAME count, as for other commands. Exit code 2: wrong input.
    """
    obstacle = obstacle_of(
        check_address(address),
        service=service,
        identity=identity_for(ca, server_cert),
        seconds=timeout,
    )
    if obstacle is not None:
        print(f"splitpoint: {address}: {obstacle}", file=sys.stderr)
        raise typer.Exit(1)


def identity_for(ca: Path | None, server_cert: Path | None) -> Identity:
    """Return the authorities that the probe trusts. Raises InvalidArgument."""
    if ca is not None and server_cert is not None:
        raise InvalidArgument("give --ca or --server-cert, not both", field="ca")
    if server_cert is None:
        # A server may demand a certificate: SPLITPOINT_CERT and SPLITPOINT_KEY. A token is
        # never wanted here, and not sent.
        return replace(client_identity(ca=ca), token="")
    authorities = read_identity(authorities=server_cert).authorities
    from splitpoint.transport import certificates  # slow to load, and only needed here

    return Identity(authorities=authorities, server_name=certificates.host_of(authorities))


def obstacle_of(
    address: str, *, service: str = "", identity: Identity, seconds: float
) -> str | None:
    """Return why the service does not serve; None if it does. Raises InvalidArgument."""
    if not 0 < seconds <= 3600:
        raise InvalidArgument("--timeout is more than 0 and at most 3600 seconds", field="timeout")
    with channels.open_sync_channel(address, identity) as channel:
        check = channel.unary_unary(
            _CHECK,
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer = check(health_pb2.HealthCheckRequest(service=service), timeout=seconds)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return f"there is no service {service or 'at all'} here"
            return " ".join(statuses.error_of(error).message.split())
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return f"{service or 'the process'} is not serving"


def main() -> None:
    """Run the probe without loading the other commands."""
    try:
        typer.run(probe)
    except SplitpointError as error:
        from splitpoint_cli.output import print_error

        print_error(error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
