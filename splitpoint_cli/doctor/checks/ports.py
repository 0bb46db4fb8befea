"""Whether the addresses to listen at are free, and allowed."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from splitpoint.config import check_address, check_listen_address
from splitpoint.errors import InvalidArgument
from splitpoint_cli.doctor.finding import Finding, Verdict
from splitpoint_cli.stack import metrics_ports

# Others are tried for the advice, the next ones first.
_NEIGHBOURS = 20
_ANSWER_SECONDS = 0.5


def check_listen(address: str, *, has_tls: bool, has_tokens: bool) -> Finding:
    """As of --listen."""
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
    """As of `up --metrics`: a port for each service."""
    found = metrics_ports.obstacle(addresses)
    if found is not None:
        return Finding("metrics", Verdict.PROBLEM, found, metrics_ports.advice(addresses))
    return Finding("metrics", Verdict.OK, f"{addresses[0]} to {addresses[-1]} are free")


def check_free(name: str, address: str, option: str) -> Finding:
    """Binds it for a moment. `option`: what the address was given by."""
    if address.startswith("unix:"):
        return _check_socket_file(name, Path(address.removeprefix("unix:")), option)
    try:
        check_address(address, field=option.removeprefix("--"))
    except InvalidArgument as error:
        return Finding(name, Verdict.PROBLEM, error.message)
    host, _, port_text = address.rpartition(":")
    host, port = host.strip("[]"), int(port_text)
    try:
        obstacle = metrics_ports.bind_error(host, port)
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
            f"See what: ss -ltnp 'sport = :{port}' (a stack: splitpoint down), or choose "
            f"another: {option} {_shown(host)}:{_free_port(host, port)}",
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


def _free_port(host: str, port: int) -> int:
    """A port near the taken one; 0 (any) when all of them are taken."""
    for other in range(port + 1, min(port + 1 + _NEIGHBOURS, 65536)):
        if metrics_ports.bind_error(host, other) is None:
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
