"""`splitpoint arena inspect` and `verify` on the folder of a disk tier."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from disk_tier_helpers import TierBench
from kvstore_helpers import LAYOUT
from typer.testing import CliRunner

from kvstore_service.tiers.disk.format import MOST_RECORDS, Division, SegmentHeader, record_offset
from splitpoint_cli.main import app

SIZE = 1 << 20
RECORDS = Division.of(LAYOUT, SIZE).record_count


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[TierBench]:
    bench = TierBench(tmp_path, SIZE)
    await bench.start()
    yield bench
    await bench.close()
    bench.remove()


def arena(command: str, folder: Path, *more: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["arena", command, str(folder), *more])
    return result.exit_code, result.stdout


def report(command: str, folder: Path) -> tuple[int, dict[str, Any]]:
    status, text = arena(command, folder, "--json")
    return status, json.loads(text)


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


async def test_a_folder_in_use_is_described(bench: TierBench) -> None:
    await bench.write(*range(RECORDS + 3))
    assert bench.tier is not None
    await bench.tier.drop(bench.keys(RECORDS))
    status, found = report("inspect", bench.folder)
    assert status == 0
    assert found["holder"].startswith("process ")
    [part] = found["layouts"]
    assert part["layout_hash"] == LAYOUT.layout_hash.hex()
    assert part["layout"]["chunk_tokens"] == LAYOUT.chunk_tokens
    assert (part["segment_count"], part["chunk_count"]) == (2, RECORDS + 2)
    assert (part["salt_count"], part["removed_count"]) == (1, 1)
    assert found["size_bytes"] == bench.tier.stats.used_bytes
    await bench.close()
    status, text = arena("verify", bench.folder)
    assert status == 0
    assert "no store uses it" in text
    assert "0 damages" in text


async def test_damage_is_named(bench: TierBench) -> None:
    await bench.write(*range(RECORDS + 3))
    await bench.close()
    first, last = bench.segments()
    flip(first, record_offset(LAYOUT, 1) + 300)
    flip(first, record_offset(LAYOUT, 2) + 50)
    flip(last, record_offset(LAYOUT, 0) + 45)
    status, found = report("inspect", bench.folder)
    assert status == 1
    assert [each["invariant"] for each in found["damages"]] == ["BadHeaderChecksum"] * 2
    status, found = report("verify", bench.folder)
    assert status == 1
    assert [(each["place"].partition("/")[2], each["invariant"]) for each in found["damages"]] == [
        (f"{first.name}, record 1", "PayloadMismatch"),
        (f"{first.name}, record 2", "BadHeaderChecksum"),
        (f"{last.name}, record 0", "BadHeaderChecksum"),
    ]
    flip(last, 20)
    status, found = report("inspect", bench.folder)
    assert found["damages"][-1]["place"].endswith(last.name)


async def test_a_torn_tail_is_no_damage(bench: TierBench) -> None:
    await bench.write(1, 2, 3)
    await bench.close()
    [path] = bench.segments()
    with path.open("r+b") as file:
        file.truncate(record_offset(LAYOUT, 2) + 300)
    status, found = report("verify", bench.folder)
    assert status == 0
    assert found["layouts"][0]["chunk_count"] == 2


@pytest.mark.parametrize("record_count", [1, MOST_RECORDS])
def test_a_footer_that_promises_more_than_the_file_holds(tmp_path: Path, record_count: int) -> None:
    """The layout has chunks of terabytes."""
    layout = replace(
        LAYOUT,
        chunk_tokens=4096,
        layer_count=1024,
        kv_head_count=1024,
        head_dim=1024,
        hidden_size=1 << 20,
    )
    folder = tmp_path / layout.layout_hash.hex()
    folder.mkdir()
    body = b"SPLTINDX" + struct.pack("<IIQI32x", 1, record_count, 1, 0)
    trailer = body + zlib.crc32(body).to_bytes(4, "little")
    path = folder / "000000000001.segment"
    path.write_bytes(SegmentHeader(layout, 1).encode() + bytes(256) + trailer)
    for command in ("inspect", "verify"):
        status, found = report(command, tmp_path)
        assert status == 0
        assert found["layouts"][0]["chunk_count"] == 0


def test_an_empty_folder(tmp_path: Path) -> None:
    assert report("inspect", tmp_path) == (
        0,
        {
            "path": str(tmp_path),
            "holder": None,
            "size_bytes": 0,
            "payload_compared": False,
            "layouts": [],
            "damages": [],
        },
    )
