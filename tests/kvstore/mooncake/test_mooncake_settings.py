"""Options of Mooncake: refused unless the interface is named and the network is trusted."""

from __future__ import annotations

import socket

import pytest
from transfer_engine import needs_engine

from kvstore_service.__main__ import parse_arguments
from kvstore_service.mooncake import settings as mooncake
from kvstore_service.mooncake.settings import (
    MooncakeSettings,
    PoolSettings,
    address_of,
    settings_of,
)
from splitpoint.errors import InvalidArgument
from splitpoint.extras import MissingExtra

TRANSFER = ("--transfer", "mooncake", "--transfer-interface", "lo")
POOL = ("--tier-mooncake", "10.0.0.1:50051", "--transfer-interface", "lo")


def settings(*arguments: str) -> MooncakeSettings | None:
    required = ["--listen", "127.0.0.1:0", "--host-memory", "1GiB", "--arena", "a"]
    return settings_of(parse_arguments([*required, *arguments]))


def test_without_the_options_nothing_is_used() -> None:
    assert settings() is None
    assert settings("--transfer", "grpc", "--tokens", "tokens.toml") is None


@needs_engine
def test_the_options_make_the_settings() -> None:
    assert settings(*TRANSFER) == MooncakeSettings("lo", True, None)
    assert settings(
        *POOL, "--tier-mooncake-memory", "1GiB", "--tier-mooncake-replicas", "2"
    ) == MooncakeSettings("lo", False, PoolSettings("10.0.0.1:50051", 1 << 30, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--transfer", "mooncake"), "needs --transfer-interface"),
        (("--tier-mooncake", "10.0.0.1:50051"), "needs --transfer-interface"),
        ((*TRANSFER, "--tokens", "tokens.toml"), "needs --trusted-network"),
        ((*POOL, "--tokens", "tokens.toml"), "needs --trusted-network"),
        (("--transfer-interface", "lo"), "needs --transfer mooncake or --tier-mooncake"),
        (("--trusted-network",), "needs --transfer mooncake or --tier-mooncake"),
        (("--tier-mooncake-memory", "1GiB"), "needs --tier-mooncake"),
        (("--tier-mooncake-replicas", "2"), "needs --tier-mooncake"),
        (("--transfer", "mooncake", "--transfer-interface", "none0"), "no such interface"),
        (("--transfer", "mooncake", "--transfer-interface", "x" * 16), "1 to 15 bytes"),
        (
            ("--tier-mooncake", "nowhere", "--transfer-interface", "lo"),
            "--tier-mooncake: 'nowhere' is not the HOST:PORT",
        ),
        (
            ("--tier-mooncake", "unix:/run/master.sock", "--transfer-interface", "lo"),
            "is not the HOST:PORT",
        ),
    ],
)
def test_what_is_unsafe_or_without_effect_is_refused(
    arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        settings(*arguments)


@needs_engine
def test_tokens_are_allowed_on_a_trusted_network() -> None:
    found = settings(*TRANSFER, "--tokens", "tokens.toml", "--trusted-network")
    assert found is not None
    assert found.has_transfer


def test_a_missing_wheel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "has_wheel", lambda: False)
    with pytest.raises(MissingExtra, match=r"pip install 'splitpoint\[mooncake\]'"):
        settings(*TRANSFER)


def test_the_address_of_an_interface() -> None:
    assert address_of("lo") == "127.0.0.1"
    with pytest.raises(InvalidArgument, match=socket.if_nameindex()[0][1]):
        address_of("none0")
