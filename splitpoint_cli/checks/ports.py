"""Ports: which ones a stack's metrics get, and whether addresses to listen at are free."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from splitpoint.config import check_address, check_listen_address
from splitpoint.errors import InvalidArgument
from splitpoint_cli.checks.finding import Finding, Verdict

# Ports above a taken one that are tried for the advice: for one port, and for several in a row.
_NEIGHBOURS = 20
_ROW_NEIGHBOURS = 1000
_ANSWER_SECONDS = 0.5


def scheduler_addresses(listen: str, count: int) -> tuple[str, ...]:
    """Return the addresses of this many schedulers: `listen`, and the ports or paths after it.

    Port 0 stays 0: each scheduler takes a free one. Raises InvalidArgument for a port above 65535.
    """
    if listen.startswith("unix:"):
        return (listen, *(f"{listen}-{number}" for number in range(1, count)))
    host, _, port = listen.rpartition(":")
    first, last = int(port), int(port) + count - 1
    if not first:
        return (listen,) * count
    if last > 65535:
        raise InvalidArgument(
            f"--schedulers {count}: ports {first} to {last} are not all below 65536",
            field="schedulers",
        )
    return tuple(f"{host}:{each}" for each in range(first, last + 1))


def check_http_address(
    address: str, listens: Sequence[str], *, has_tls: bool, has_tokens: bool
) -> str:
    """Return the address of `up --http` unchanged.

    Raises InvalidArgument for a socket file, for a port of `listens`, and for an address beyond
    loopback without TLS and tokens.
    """
    if address.startswith("unix:"):
        raise InvalidArgument("--http: a gateway listens at HOST:PORT", field="http")
    check_listen_address(address, field="http", has_tls=has_tls, has_tokens=has_tokens)
    port = address.rpartition(":")[2]
    taken = [each.rpartition(":")[2] for each in listens if not each.startswith("unix:")]
    if int(port) and port in taken:
        raise InvalidArgument(
            f"--http: port {port} is the scheduler's (--listen); choose another one", field="http"
        )
    return address


def metrics_addresses(
    port: int | None, listens: Sequence[str], workers: int, *, http: str | None = None
) -> tuple[str, ...]:
    """Return the addresses of metrics: a scheduler's, the store's, each worker's, then those of
    the other schedulers, then the gateway's if it serves at `http`.

    They are `port` and the ports after it; empty if `port` is None. Raises InvalidArgument for
    a port above 65535, for those of `listens` and for that of `http`.
    """
    if port is None:
        return ()
    ports = range(port, port + 1 + workers + len(listens) + (http is not None))
    if not 1 <= ports[0] <= ports[-1] <= 65535:
        raise InvalidArgument(
            f"--metrics: {len(ports)} ports from {port} on are not all between 1 and 65535",
            field="metrics",
        )
    for address, option in [(each, "--listen") for each in listens] + [(http or "", "--http")]:
        listening = address.rpartition(":")[2]
        if address and not address.startswith("unix:") and int(listening) in ports:
            raise InvalidArgument(
                f"--metrics: ports {ports[0]} to {ports[-1]} would be for metrics, but clients "
                f"connect to {listening} ({option})",
                field="metrics",
            )
    return tuple(f"127.0.0.1:{each}" for each in ports)


def check_listen(address: str, *, has_tls: bool, has_tokens: bool) -> Finding:
    """Check the address of --listen."""
    name = "listen"
    try:
        check_listen_address(address, has_tls=has_tls, has_tokens=has_tokens)
    except InvalidArgument as error:
        return Finding(
            name,
            Verdict.PROBLEM,
            error.message,
            "See docs/security.md, or listen at this host only: --listen 127.0.0.1:50050",
        )
    return check_free(name, address, "--listen")


def check_metrics(addresses: Sequence[str]) -> Finding:
    """Check the ports of `up --metrics`, one for each service."""
    found = _first_obstacle(addresses)
    if found is not None:
        return Finding("metrics", Verdict.PROBLEM, found, _row_advice(addresses))
    return Finding("metrics", Verdict.OK, f"{addresses[0]} to {addresses[-1]} are free")


def check_free(name: str, address: str, option: str) -> Finding:
    """Check an address by binding it for a moment. `option`: the option with the address."""
    if address.startswith("unix:"):
        return _check_socket_file(name, Path(address.removeprefix("unix:")), option)
    try:
        check_address(address, field=option.removeprefix("--"))
    except InvalidArgument as error:
        return Finding(name, Verdict.PROBLEM, error.message)
    host, _, port_text = address.rpartition(":")
    host, port = host.strip("[]"), int(port_text)
    try:
        obstacle = bind_error(host, port)
    except socket.gaierror as error:
        return Finding(
            name,
            Verdict.PROBLEM,
            f"{host} has no address: {error.strerror}",
            f"Name an address of this host: {option} 127.0.0.1:{port}",
        )
    if obstacle is None:
        return Finding(name, Verdict.OK, f"{address} is free")
    if obstacle.errno == errno.EADDRINUSE:
        return Finding(
            name,
            Verdict.PROBLEM,
            f"something listens at {address} already",
            f"See what: ss -ltnp 'sport = :{port}' (a stack: splitpoint down --listen ...), "
            f"or choose another: {option} {_shown(host)}:{_free_port(host, port)}",
        )
    if obstacle.errno == errno.EACCES:
        return Finding(
            name,
            Verdict.PROBLEM,
            f"port {port} is for root only",
            f"Choose one from 1024 on: {option} {_shown(host)}:50050",
        )
    if obstacle.errno == errno.EADDRNOTAVAIL:
        return Finding(
            name,
            Verdict.PROBLEM,
            f"{host} is no address of this host",
            f"See which there are: ip addr; or listen at all of them: {option} 0.0.0.0:{port}",
        )
    return Finding(name, Verdict.PROBLEM, f"{address}: {obstacle.strerror}")


def _first_obstacle(addresses: Sequence[str]) -> str | None:
    """Return why the first address that is not free cannot be used; None if all are free."""
    for address in addresses:
        host, _, port = address.rpartition(":")
        error = bind_error(host, int(port))
        if error is not None:
            return f"{address} cannot be used: {error.strerror}"
    return None


def _row_advice(addresses: Sequence[str]) -> str:
    """Return how to get as many free ports in a row."""
    count, first = len(addresses), int(addresses[0].rpartition(":")[2])
    for port in range(first + 1, min(first + _ROW_NEIGHBOURS, 65536 - count)):
        if _first_obstacle([f"127.0.0.1:{port + more}" for more in range(count)]) is None:
            return f"{count} ports in a row are needed: --metrics {port}"
    return f"{count} ports in a row are needed"


def bind_error(host: str, port: int) -> OSError | None:
    """Return the error of binding, if any. Raises socket.gaierror for an unknown host."""
    family, kind, protocol, _, where = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as listener:
        # As servers do: ports of connections that ended a moment ago can be used.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(where)
            listener.listen(1)
        except OSError as error:
            return error
    return None


def _free_port(host: str, port: int) -> int:
    """Return a free port near the taken one; 0 (any) if all of them are taken."""
    for other in range(port + 1, min(port + 1 + _NEIGHBOURS, 65536)):
        if bind_error(host, other) is None:
            return other
    return 0


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _check_socket_file(name: str, path: Path, option: str) -> Finding:
    try:
        check_address(f"unix:{path}", field=option.removeprefix("--"))
    except InvalidArgument as error:
        return Finding(name, Verdict.PROBLEM, error.message)
    if not path.parent.is_dir():
        return Finding(
            name,
            Verdict.PROBLEM,
            f"{path.parent} does not exist",
            f"Make it: mkdir -m 700 {path.parent}",
        )
    if not os.access(path.parent, os.W_OK):
        return Finding(
            name,
            Verdict.PROBLEM,
            f"{path.parent} is not this user's to write in",
            f"Choose another folder: {option} unix:/tmp/...",
        )
    if path.exists() and _answers(path):
        return Finding(
            name,
            Verdict.PROBLEM,
            f"something listens at {path} already",
            f"Stop it (a stack: splitpoint down), or choose another path: {option} unix:...",
        )
    return Finding(name, Verdict.OK, f"{path} is free")


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(_ANSWER_SECONDS)
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True
