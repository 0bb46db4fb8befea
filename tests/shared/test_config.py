"""Sizes, rates, addresses and folders."""

from __future__ import annotations

import ast
import re
import stat
from pathlib import Path

import pytest

from splitpoint import config
from splitpoint.config import counted
from splitpoint.errors import FailedPrecondition, InvalidArgument


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("123", 123),
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        ("8g", 8 << 30),
        ("512MB", 512_000_000),
        ("1.5KiB", 1536),
        ("7B", 7),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_parse_size(text: str, size: int) -> None:
    assert config.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "1e9", "1 iB", "8GiBs", "GiB", "1.2.3", "inf"])
def test_parse_size_refuses(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        config.parse_size(text, field="host_memory")
    assert caught.value.field == "host_memory"
    assert caught.value.message.startswith("--host-memory: ")


@pytest.mark.parametrize(
    ("text", "rate"),
    [("184MB", 184_000_000), ("184MB/s", 184_000_000), ("1MB", 1_000_000), (" 16GiB/s", 16 << 30)],
)
def test_parse_rate(text: str, rate: int) -> None:
    assert config.parse_rate(text, field="link_rate") == rate


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((text, "examples: 184MB, 25GB") for text in ("", "/s", "-1MB", "1MB/min", "abc")),
        *((text, "under the least rate of 1 MB/s") for text in ("0", "0.1B", "999kB")),
        ("20", "20 is 20 bytes per second"),
        ("20/s", "did you mean 20MB?"),
    ],
)
def test_parse_rate_refuses(text: str, said: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        config.parse_rate(text, field="link_rate")
    assert caught.value.field == "link_rate"
    assert caught.value.message.startswith("--link-rate: ")
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (1, "1 B/s"),
        (1500, "1.5 kB/s"),
        (184e6, "184 MB/s"),
        (999.6e6, "1 GB/s"),
        (25.6e9, "25.6 GB/s"),
        (4e12, "4000 GB/s"),
    ],
)
def test_format_rate(rate: float, text: str) -> None:
    assert config.format_rate(rate) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (8 << 30, "8 GiB"),
        (100 << 20, "100 MiB"),
        ((1 << 30) - 1, "1 GiB"),
        (5 << 50, "5120 TiB"),
    ],
)
def test_format_size(size: int, text: str) -> None:
    assert config.format_size(size) == text


@pytest.mark.parametrize(
    "address", ["127.0.0.1:0", "localhost:1", "[::1]:65535", "unix:/tmp/store.sock"]
)
def test_listen_addresses(address: str) -> None:
    assert config.check_listen_address(address) == address


@pytest.mark.parametrize(
    "address",
    ["", "host", ":1", "::1", "127.0.0.1:x", "h:65536", "unix:relative", "unix:/" + "a" * 120],
)
def test_not_addresses(address: str) -> None:
    with pytest.raises(InvalidArgument):
        config.check_address(address)


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "example.org:1"])
def test_open_interfaces_are_refused(address: str) -> None:
    assert config.check_address(address) == address
    with pytest.raises(InvalidArgument, match=r"missing: --tls-cert and --tls-key .* --tokens"):
        config.check_listen_address(address)


def test_runtime_directory_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = config.runtime_path("one")
    config.make_runtime(folder)
    assert folder == tmp_path / "splitpoint" / "one"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    config.make_runtime(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with pytest.raises(InvalidArgument):
        config.runtime_path("../else")


def test_a_foreign_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(FailedPrecondition, match="not a folder of this user"):
            config.make_private(tmp_path / name)


# -- counts in sentences: one token, two tokens, and no message that says "1 tokens" -----

ROOT = Path(__file__).resolve().parents[2]
# What people read. Errors of formats and of services among themselves count layouts.
PACKAGES = ("splitpoint_cli", "scheduler_service")
# Workloads of benchmarks are never 1; what doctor and top count on a machine rarely is.
LEFT_OUT = {"bench", "checks", "top"}
NOUN = re.compile(
    r" (?:(?:prompt|cached|new|generated|streamed) )?"
    r"(tokens|chunks|slots|requests|workers|reservations|damages)\b(?!/s)"
)


def counts_with_a_fixed_plural(path: Path) -> list[str]:
    """Places of f-strings in which a value is followed by a noun in the plural."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.JoinedStr):
            continue
        for value, text in zip(node.values, node.values[1:], strict=False):
            if isinstance(value, ast.FormattedValue) and isinstance(text, ast.Constant):
                named = ast.unparse(value.value).isupper()  # a constant, which is never 1
                if NOUN.match(str(text.value)) and not named:
                    where = f"{path.relative_to(ROOT)}:{node.lineno}"
                    found.append(f"{where} {ast.unparse(value.value)}{str(text.value)[:24]!r}")
    return found


def test_one_and_many() -> None:
    assert [counted(n, "token") for n in (0, 1, 2, 3000)] == [
        "0 tokens",
        "1 token",
        "2 tokens",
        "3,000 tokens",
    ]
    assert counted(1, "entry", "entries") == "1 entry"
    assert counted(2, "token is", "tokens are") == "2 tokens are"


def test_every_count_in_a_message_has_its_singular() -> None:
    found = [
        place
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if not LEFT_OUT & set(path.parts)
        for place in counts_with_a_fixed_plural(path)
    ]
    assert found == []
