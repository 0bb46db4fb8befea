"""`splitpoint probe`: does a service serve? For health checks of containers and supervisors.

It asks gRPC's health service, or a URL of a gateway. It runs every few seconds, so it loads
gRPC but neither torch nor the other commands.
`python -m splitpoint_cli.request.probe` does not load the command line either.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

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
        str,
        typer.Argument(
            help="Address of the service: host:port or unix:/path; of a gateway "
            "http://host:port/health, or https.",
            metavar="ADDRESS|URL",
        ),
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
    identity = identity_for(ca, server_cert)
    if address.startswith(("http://", "https://")):
        if service:
            raise InvalidArgument("--service is for gRPC, not for a URL", field="service")
        obstacle = http_obstacle_of(address, identity=identity, seconds=timeout)
    else:
        obstacle = obstacle_of(
            check_address(address), service=service, identity=identity, seconds=timeout
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
    _check_seconds(seconds)
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
            return " ".join(statuses.error_of(error, address).message.split())
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return f"{service or 'the process'} is not serving"


def http_obstacle_of(url: str, *, identity: Identity, seconds: float) -> str | None:
    """Return why a GET of the URL is not answered by 200; None if it is.

    `seconds` bound the connection, and then the wait for the answer. Raises InvalidArgument.
    """
    import socket  # these three take long to load, and are not needed for gRPC
    from http.client import HTTPConnection, HTTPException
    from urllib.parse import urlsplit

    _check_seconds(seconds)
    parts = urlsplit(url)
    host, _, port = check_address(parts.netloc).rpartition(":")
    host = host.strip("[]")
    connection = HTTPConnection(host, int(port))
    try:
        connection.sock = socket.create_connection((host, int(port)), seconds)
        if parts.scheme == "https":
            connection.sock = _tls_context(identity).wrap_socket(
                connection.sock, server_hostname=identity.server_name or host
            )
        connection.request("GET", parts.path or "/health")
        status = connection.getresponse().status
    except (OSError, HTTPException) as error:
        return " ".join(str(error).split()) or type(error).__name__
    finally:
        connection.close()
    return None if status == 200 else f"{parts.path or '/health'} answers {status}"


def _tls_context(identity: Identity) -> Any:
    """Return the settings of a client that trusts the identity's authorities, else the host's."""
    import ssl

    if not identity.authorities:
        return ssl.create_default_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=identity.authorities.decode("ascii", "ignore"))
    # A server's own certificate may be the authority, by any signer.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _check_seconds(seconds: float) -> None:
    if not 0 < seconds <= 3600:
        raise InvalidArgument("--timeout is more than 0 and at most 3600 seconds", field="timeout")


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
