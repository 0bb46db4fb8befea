"""`python -m gateway_service`: one gateway process, from its arguments to its stop."""

from __future__ import annotations

from splitpoint.extras import need_for_program

need_for_program("gateway")  # before the imports that need the extra

import os

# gRPC reads this when it is imported. Its newer event engine hands each message from thread to
# thread, which takes half as much again of a processor for a token (docs/gateway.md). The names are
# gRPC's own and may go with any release: then tests/gateway/test_gateway_process.py fails. After
# each update of grpcio, measure what a token costs (`make bench-gateway`).
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import uvloop

from gateway_service.app import App
from gateway_service.batch.folder import Folder
from gateway_service.endpoints.endpoint import Gateway
from gateway_service.metrics import Counts, readings
from gateway_service.server import HttpServer, tls_context
from gateway_service.settings import Limits
from gateway_service.upstream import Upstream
from splitpoint.config import (
    check_addresses,
    check_listen_address,
    is_local_address,
    parse_size,
)
from splitpoint.errors import InvalidArgument, PermissionDenied
from splitpoint.observe.meters import Meters
from splitpoint.observe.metrics import Service
from splitpoint.observe.metrics_server import metrics_served, on_loop
from splitpoint.options.gateway import SECTIONS
from splitpoint.options.values import parse_options
from splitpoint.service import (
    announce_ready,
    run_service,
    stop_on_signals,
    watch_parent,
)
from splitpoint.transport.access import access_of
from splitpoint.transport.tls import Identity, read_identity

_log = logging.getLogger(__name__)

_LEAST_BODY_BYTES = 1024
# The fewest that Python can be told; reading a number takes the square of its digits.
_MOST_DIGITS = sys.int_info.str_digits_check_threshold


def main(arguments: Sequence[str] | None = None) -> int:
    """Return exit code 0 after a requested stop, 2 for wrong arguments, else the error's."""
    sys.set_int_max_str_digits(_MOST_DIGITS)
    return run_service(
        "gateway",
        _serve,
        parse_arguments(arguments),
        SECTIONS,
        wrong_arguments=(PermissionDenied,),
        run=uvloop.run,
    )


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    return parse_options("gateway_service", __doc__, SECTIONS, arguments)


def _limits(arguments: argparse.Namespace) -> Limits:
    body_bytes = parse_size(arguments.max_body, field="max-body")
    if body_bytes < _LEAST_BODY_BYTES:
        raise InvalidArgument(
            f"--max-body: {arguments.max_body} is too small for any request, at least 1KiB",
            field="max-body",
        )
    return replace(
        Limits(),
        body_bytes=body_bytes,
        requests=arguments.max_requests,
        response_bytes=parse_size(arguments.response_memory, field="response-memory"),
        batch_requests=arguments.batch_requests,
        drain_seconds=arguments.drain_seconds,
        grace_seconds=arguments.grace_seconds,
    )


def _identity(arguments: argparse.Namespace) -> Identity:
    """Return what the gateway shows to the scheduler, and the certificates it trusts there."""
    if arguments.ca is not None and arguments.scheduler_cert is not None:
        raise InvalidArgument("give --ca or --scheduler-cert, not both", field="ca")
    identity = read_identity(
        certificate=arguments.tls_cert,
        key=arguments.tls_key,
        authorities=arguments.scheduler_cert or arguments.ca,
        server_name=arguments.tls_server_name,
    )
    if arguments.tls_cert is not None:
        from splitpoint.transport import certificates

        certificates.warn_of_expiry(arguments.tls_cert, identity.certificate)
    if arguments.scheduler_cert is not None and not identity.server_name:
        from splitpoint.transport import certificates

        name = certificates.host_of(Path(arguments.scheduler_cert).read_bytes())
        identity = replace(identity, server_name=name)
    return identity


def _schedulers(arguments: argparse.Namespace, identity: Identity) -> tuple[str, ...]:
    """Return their addresses. Raises InvalidArgument if keys would leave the host unencrypted."""
    addresses = check_addresses(arguments.scheduler, field="scheduler")
    for address in addresses:
        if not identity.expects_tls and not is_local_address(address):
            raise InvalidArgument(
                f"{address} is not on this host: clients' keys are never sent there unencrypted; "
                "give --ca or --scheduler-cert",
                field="scheduler",
                reason="TOKEN_WITHOUT_TLS",
            )
    return addresses


async def _serve(arguments: argparse.Namespace) -> None:
    stop = asyncio.Event()
    stop_on_signals(stop)
    if arguments.parent_fd is not None:
        watch_parent(arguments.parent_fd, stop)
    has_tls = arguments.tls_cert is not None
    check_listen_address(arguments.listen, has_tls=has_tls, has_tokens=arguments.tokens is not None)
    identity, limits = _identity(arguments), _limits(arguments)
    addresses, access = _schedulers(arguments, identity), access_of(arguments.tokens)
    tls = tls_context(arguments.tls_cert, arguments.tls_key) if has_tls else None
    upstream = Upstream(addresses, identity, call_seconds=limits.call_seconds)
    meters = Meters(Service.GATEWAY)
    meters.read_by(on_loop(asyncio.get_running_loop()))
    gateway = Gateway(upstream, limits, access, meters, checks_host=access is None)
    gateway.on_ended = Counts(meters).ended
    if arguments.batch_folder is not None:
        most = parse_size(arguments.batch_disk, field="batch-disk")
        gateway.keep_batches(Folder(Path(arguments.batch_folder), most))
    server = HttpServer(App(gateway), limits, tls)
    meters.read(lambda: readings(gateway, server))
    async with metrics_served(arguments, meters):
        await _run(arguments, gateway, server, stop)


async def _run(
    arguments: argparse.Namespace, gateway: Gateway, server: HttpServer, stop: asyncio.Event
) -> None:
    """Serve until the stop, and then until running requests have ended."""
    first_call = asyncio.create_task(gateway.upstream.warn_if_absent())
    try:
        address = await server.start(arguments.listen)
        announce_ready(address)
        kind = "http" if arguments.tls_cert is None else "https"
        _log.info("listening on %s://%s for %s", kind, address, arguments.scheduler)
        await stop.wait()
        _log.info("draining")
        await gateway.leave()
        server.stop_listening()
        await gateway.drain()
    finally:
        first_call.cancel()
        if gateway.batches is not None:
            await gateway.batches.close()
        await server.close()
        await gateway.upstream.close()


if __name__ == "__main__":
    sys.exit(main())
