"""Mooncake: whether it can run here with these options, and what its open ports mean."""

from __future__ import annotations

import ipaddress
import socket
from argparse import Namespace
from collections.abc import Iterator

from kvstore_service.mooncake.settings import address_of, how_to_install, settings_of
from splitpoint.errors import InvalidArgument
from splitpoint.extras import MissingExtra
from splitpoint_cli.checks.finding import Finding, Verdict

_NAME = "Mooncake"
_CONNECT_SECONDS = 2.0


def check_mooncake(options: Namespace) -> Iterator[Finding]:
    """Check the options of a store that use Mooncake; yield nothing if none does."""
    try:
        settings = settings_of(options)
    except InvalidArgument as error:
        yield Finding(_NAME, Verdict.PROBLEM, error.message, "See docs/tiers.md, Safety")
        return
    except MissingExtra:
        yield _installed()
        return
    if settings is None:
        return
    yield _installed()
    yield _exposure(settings.interface, has_tokens=options.tokens is not None)
    if settings.pool is not None:
        yield _master(settings.pool.master)


def _installed() -> Finding:
    missing = how_to_install()
    if not missing:
        return Finding(_NAME, Verdict.OK, "the wheel and its libraries are installed")
    found, _, advice = missing.partition(": ")
    return Finding(_NAME, Verdict.PROBLEM, found, advice)


def _exposure(interface: str, *, has_tokens: bool) -> Finding:
    """Say which processes can read what."""
    address = address_of(interface)
    tenants = "of all tenants, whatever tokens they have" if has_tokens else "of this store"
    open_to = (
        f"Mooncake has neither encryption nor authentication: every host that reaches {interface} "
        f"({address}) can read the chunks {tenants}"
    )
    found = ipaddress.ip_address(address)
    if found.is_loopback:
        return Finding("Mooncake's ports", Verdict.NOTE, f"{interface} reaches this host only")
    if found.is_global:
        return Finding(
            "Mooncake's ports",
            Verdict.WARNING,
            f"{open_to}; this is a public address",
            "Name the interface of a private network: --transfer-interface NAME",
        )
    return Finding("Mooncake's ports", Verdict.NOTE, open_to)


def _master(address: str) -> Finding:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS):
            return Finding("Mooncake's master", Verdict.OK, f"{address} accepts connections")
    except OSError as error:
        return Finding(
            "Mooncake's master",
            Verdict.WARNING,
            f"{address}: {error.strerror or 'no answer'}; the pool is away until it answers",
            "Start it: mooncake_master --rpc_port=PORT --metrics_host=127.0.0.1",
        )
