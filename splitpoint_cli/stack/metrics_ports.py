"""Where a stack's metrics are served: ports of this host in a row, and whether they are free."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from splitpoint.errors import InvalidArgument, Unavailable

# Where others are looked for.
_NEIGHBOURS = 1000


def metrics_addresses(port: int | None, listen: str, workers: int) -> tuple[str, ...]:
    """Of the scheduler, the store and each worker: this port and those behind it.

    None: nowhere. Raises InvalidArgument when one of them is no port, or that of `listen`.
    """
    if port is None:
        return ()
    ports = range(port, port + 2 + workers)
    if not 1 <= ports[0] <= ports[-1] <= 65535:
        raise InvalidArgument(
            f"--metrics: {len(ports)} ports from {port} on are not all between 1 and 65535",
            field="metrics",
        )
    listening = listen.rpartition(":")[2]
    if not listen.startswith("unix:") and int(listening) in ports:
        raise InvalidArgument(
            f"--metrics: ports {ports[0]} to {ports[-1]} would be for metrics, but clients "
            f"connect to {listening} (--listen)",
            field="metrics",
        )
    return tuple(f"127.0.0.1:{each}" for each in ports)


def check_free(addresses: Sequence[str]) -> None:
    """Raises Unavailable for one that is taken: said now, not after a model was loaded.

    It may still be taken between this and its service's start, which then says so.
    """
    found = obstacle(addresses)
    if found is not None:
        raise Unavailable(f"--metrics: {found} ({advice(addresses)})", reason="METRICS_PORT")


def obstacle(addresses: Sequence[str]) -> str | None:
    """What keeps the first of them that is not free from being used; None: all are free."""
    for address in addresses:
        why = _obstacle(address)
        if why is not None:
            return f"{address} cannot be used: {why}"
    return None


def advice(addresses: Sequence[str]) -> str:
    """How to get as many ports in a row."""
    count, first = len(addresses), int(addresses[0].rpartition(":")[2])
    for port in range(first + 1, min(first + _NEIGHBOURS, 65536 - count)):
        if obstacle([f"127.0.0.1:{port + more}" for more in range(count)]) is None:
            return f"{count} ports in a row are needed: --metrics {port}"
    return f"{count} ports in a row are needed"


def _obstacle(address: str) -> str | None:
    """Why it cannot be listened at; None: nothing is in the way."""
    host, _, port = address.rpartition(":")
    error = bind_error(host, int(port))
    return None if error is None else error.strerror


def bind_error(host: str, port: int) -> OSError | None:
    """What binding says; None: nothing. Raises socket.gaierror for an unknown host."""
    family, kind, protocol, _, where = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as listener:
        # As servers do: connections that ended a moment ago are no obstacle.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(where)
            listener.listen(1)
        except OSError as error:
            return error
    return None
