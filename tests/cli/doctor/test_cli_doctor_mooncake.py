"""The doctor on Mooncake: what is missing, what is refused, and who can read what."""

from __future__ import annotations

import argparse
import socket
from typing import Any

import pytest
from mooncake_parts import needs_mooncake

from kvstore_service.mooncake import settings as mooncake_settings
from splitpoint.extras import need
from splitpoint_cli.checks.finding import Finding, Verdict
from splitpoint_cli.doctor import mooncake
from splitpoint_cli.doctor.checklist import examine
from splitpoint_cli.doctor.command import DoctorOptions

WITH_TRANSFER = {"transfer": "mooncake", "transfer_interface": "lo"}


def findings(**changes: Any) -> list[Finding]:
    options: dict[str, Any] = {
        "transfer": "grpc",
        "transfer_interface": None,
        "trusted_network": False,
        "tokens": None,
        "tier_mooncake": None,
        "tier_mooncake_memory": "0",
        "tier_mooncake_replicas": 1,
    }
    return list(mooncake.check_mooncake(argparse.Namespace(**{**options, **changes})))


def test_without_its_options_nothing_is_said() -> None:
    assert findings() == []
    assert not any("Mooncake" in found.name for found in examine(DoctorOptions(device="cpu")))


def test_a_missing_wheel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_settings, "has_wheel", lambda: False)
    [found] = findings(**WITH_TRANSFER)
    assert (found.verdict, found.found) == (Verdict.PROBLEM, "Mooncake is not installed")
    assert found.advice == "pip install 'splitpoint[mooncake]'"


@pytest.mark.parametrize("library", mooncake_settings.LIBRARIES)
def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    package = mooncake_settings.LIBRARIES[library]
    monkeypatch.setattr(mooncake_settings, "has_wheel", lambda: True)
    monkeypatch.setattr(mooncake_settings, "_loads", lambda name: name != library)
    found = findings(**WITH_TRANSFER)[0]
    assert found.verdict is Verdict.PROBLEM
    assert package in found.found
    assert found.advice == f"apt-get install {package}"


def test_options_that_the_store_would_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    [found] = findings(transfer="mooncake")
    assert found.verdict is Verdict.PROBLEM
    assert "needs --transfer-interface" in found.found
    [found] = findings(**WITH_TRANSFER, tokens="tokens.toml")
    assert "needs --trusted-network" in found.found


@pytest.mark.parametrize(
    ("address", "verdict", "words"),
    [
        ("127.0.0.1", Verdict.NOTE, "this host only"),
        ("10.1.2.3", Verdict.NOTE, "of all tenants, whatever tokens they have"),
        ("8.8.8.8", Verdict.WARNING, "public address"),
    ],
)
@needs_mooncake
def test_who_can_read_is_said(
    monkeypatch: pytest.MonkeyPatch, address: str, verdict: Verdict, words: str
) -> None:
    monkeypatch.setattr(mooncake, "address_of", lambda interface: address)
    wheel, ports = findings(**WITH_TRANSFER, tokens="tokens.toml", trusted_network=True)
    assert wheel.verdict is Verdict.OK
    assert (ports.verdict, words in ports.found) == (verdict, True)


@needs_mooncake
def test_a_master_that_does_not_answer_is_a_warning() -> None:
    pool = {"transfer_interface": "lo"}
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert findings(**pool, tier_mooncake=address)[-1].verdict is Verdict.OK
    found = findings(**pool, tier_mooncake=address)[-1]
    assert found.verdict is Verdict.WARNING
    assert "away until it answers" in found.found


def test_the_extra_brings_what_the_doctor_looks_for() -> None:
    if mooncake_settings.has_wheel():
        need("this test", "mooncake")
