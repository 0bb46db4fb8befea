"""No wrong byte comes from a damaged disk: flipped bytes, cut files, and files in wrong places."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from disk_tier_helpers import TierBench
from kvstore_helpers import LAYOUT

from kvstore_service.tiers.disk.format import (
    RECORD_HEADER_BYTES,
    SEGMENT_HEADER_BYTES,
    TRAILER_BYTES,
    BadHeaderChecksum,
    Division,
    RecordHeader,
    SegmentHeader,
    decode_trailer,
    encode_footer,
    keys_of_footer,
    record_bytes,
    record_offset,
    segment_size,
)
from splitpoint.arena.format import ArenaFormatError

SIZE = 1 << 20
RECORDS = Division.of(LAYOUT, SIZE).record_count
RECORD = RecordHeader(
    key=bytes(range(32)),
    parent_key=b"",
    layout_hash=LAYOUT.layout_hash,
    salt_tag=bytes(16),
    fingerprint=1 << 63,
    checksum=3,
    token_count=4,
    chunk_index=5,
    payload_bytes=LAYOUT.chunk_bytes,
    segment_number=7,
    record_index=8,
)


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[TierBench]:
    bench = TierBench(tmp_path, SIZE)
    yield bench
    await bench.close()
    bench.remove()


def flips(block: bytes) -> Iterator[bytes]:
    for place in range(len(block)):
        yield block[:place] + bytes([block[place] ^ 0x10]) + block[place + 1 :]


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


# -- the format ------------------------------------------------------------------------


def test_headers_come_back_as_they_were_encoded() -> None:
    assert RecordHeader.decode(RECORD.encode()) == RECORD
    segment = SegmentHeader(LAYOUT, 12)
    assert SegmentHeader.decode(segment.encode()) == segment
    assert len(RECORD.encode()) == RECORD_HEADER_BYTES
    assert len(segment.encode()) == SEGMENT_HEADER_BYTES


def test_every_flipped_byte_of_a_header_is_found() -> None:
    for block in flips(RECORD.encode()):
        with pytest.raises(ArenaFormatError):
            RecordHeader.decode(block)
    for block in flips(SegmentHeader(LAYOUT, 12).encode()):
        with pytest.raises(ArenaFormatError):
            SegmentHeader.decode(block)


def test_every_flipped_byte_of_a_footer_is_found() -> None:
    footer = encode_footer(7, [RECORD.encode(), RECORD.encode()])
    trailer = footer[-TRAILER_BYTES:]
    count, headers_crc = decode_trailer(trailer, 7)
    assert keys_of_footer(footer[:-TRAILER_BYTES], headers_crc) == [RECORD.key] * count
    for block in flips(trailer):
        with pytest.raises(ArenaFormatError):
            decode_trailer(block, 7)
    for block in flips(footer[:-TRAILER_BYTES]):
        with pytest.raises(BadHeaderChecksum):
            keys_of_footer(block, headers_crc)
    with pytest.raises(ArenaFormatError):
        decode_trailer(trailer, 8)


@pytest.mark.parametrize("size", [200_000, SIZE, 100 << 20, 10 << 30, 1 << 42])
def test_a_bound_holds_at_least_four_segments(size: int) -> None:
    division = Division.of(LAYOUT, size)
    assert 4 * division.segment_bytes <= size
    assert division.segment_bytes == segment_size(LAYOUT, division.record_count)
    assert division.segment_bytes <= 65 << 20


# -- files on the disk -----------------------------------------------------------------

# Offsets in a record: its header's fields, the payload's planes, the padding behind it.
IN_RECORD = [0, 9, 13, 16, 33, 41, 45, 48, 81, 113, 129, 137, 145, 200, 253, 256, 500, 1023]


@pytest.mark.parametrize("is_finished", [True, False])
async def test_a_flipped_byte_costs_one_chunk(bench: TierBench, is_finished: bool) -> None:
    count = RECORDS + 2
    await bench.start()
    await bench.write(*range(count))
    await bench.close()
    path = bench.segments()[0 if is_finished else 1]
    first, last = (0, RECORDS) if is_finished else (RECORDS, count)
    whole = path.read_bytes()
    for place, in_record in enumerate(IN_RECORD):
        damaged = first + place % (last - first)
        flip(path, record_offset(LAYOUT, damaged - first) + in_record)
        tier = await bench.start()
        found = await bench.check_read(*range(count))
        assert found == [number != damaged for number in range(count)], in_record
        assert tier.stats.damaged_chunk_count == 1 or not found[damaged]
        await bench.close()
        # It stays forgotten.
        tier = await bench.start()
        assert await bench.check_read(damaged) == [False]
        assert tier.stats.damaged_chunk_count <= 1
        await bench.close()
        path.write_bytes(whole)


async def test_damage_while_it_is_served_is_found(
    bench: TierBench, caplog: pytest.LogCaptureFixture
) -> None:
    tier = await bench.start()
    await bench.write(*range(RECORDS))
    path = bench.segments()[0]
    for number, in_record in enumerate((5, 50, 300, 900)):
        flip(path, record_offset(LAYOUT, number) + in_record)
    assert await bench.check_read(*range(6)) == [False] * 4 + [True] * 2
    assert tier.stats.damaged_chunk_count == 4
    assert tier.stats.chunk_count == RECORDS - 4
    told = [each.message for each in caplog.records if str(path) in each.message]
    assert any("damaged record" in each and "the first is number 0" in each for each in told), told


@pytest.mark.parametrize("offset", [0, 8, 12, 16, 32, 40, 48, 70, 4000, 4095])
async def test_a_segment_with_a_damaged_front_is_not_used(bench: TierBench, offset: int) -> None:
    await bench.start()
    await bench.write(*range(RECORDS + 1))
    await bench.close()
    flip(bench.segments()[0], offset)
    await bench.start()
    assert await bench.check_read(0, RECORDS) == [False, True]
    # It makes room first.
    await bench.write(*range(1000, 1000 + 14 * RECORDS))
    assert await bench.check_read(RECORDS) == [True]
    assert bench.disk_bytes() <= SIZE


@pytest.mark.parametrize("from_end", [1, 5, 13, 17, 25, 63, 64, 65, 300, 2000])
async def test_a_damaged_footer_costs_nothing(bench: TierBench, from_end: int) -> None:
    await bench.start()
    await bench.write(*range(RECORDS + 1))
    await bench.close()
    path = bench.segments()[0]
    flip(path, path.stat().st_size - from_end)
    await bench.start()
    assert all(await bench.check_read(*range(RECORDS + 1)))


CUTS = [
    (index, inside)
    for index in (0, 1, 4)
    for inside in (0, 1, 100, 255, 256, 257, 600, 256 + LAYOUT.chunk_bytes, 4095)
]


@pytest.mark.parametrize(("index", "inside"), CUTS)
async def test_a_torn_tail_is_cut(bench: TierBench, index: int, inside: int) -> None:
    await bench.start()
    await bench.write(*range(5))
    await bench.close()
    [path] = bench.segments()
    with path.open("r+b") as file:
        file.truncate(record_offset(LAYOUT, index) + inside)
    await bench.start()
    assert await bench.check_read(*range(5)) == [number < index for number in range(5)]
    assert await bench.write(*range(5)) == 5
    await bench.close()
    assert len(bench.segments()) == 1
    await bench.start()
    assert all(await bench.check_read(*range(5)))


@pytest.mark.parametrize("size", [0, 1, 100, 4095])
async def test_a_cut_front_is_not_used(bench: TierBench, size: int) -> None:
    await bench.start()
    await bench.write(1)
    await bench.close()
    [path] = bench.segments()
    with path.open("r+b") as file:
        file.truncate(size)
    await bench.start()
    assert await bench.check_read(1) == [False]
    assert await bench.write(1) == 1
    assert await bench.check_read(1) == [True]


@pytest.mark.parametrize("garbage", [b"\0" * 9000, b"\xa5" * 9000, b"SPLTCHNK" * 1200])
async def test_garbage_behind_the_last_record_is_cut(bench: TierBench, garbage: bytes) -> None:
    await bench.start()
    await bench.write(1, 2)
    await bench.close()
    [path] = bench.segments()
    with path.open("ab") as file:
        file.write(garbage)
    await bench.start()
    assert await bench.write(3) == 1
    await bench.close()
    await bench.start()
    assert await bench.check_read(1, 2, 3) == [True] * 3


async def test_a_record_in_a_wrong_place_is_not_used(bench: TierBench) -> None:
    await bench.start()
    await bench.write(1, 2, 3)
    await bench.close()
    [path] = bench.segments()
    block = path.read_bytes()
    first = block[record_offset(LAYOUT, 0) : record_offset(LAYOUT, 1)]
    with path.open("r+b") as file:
        file.seek(record_offset(LAYOUT, 1))
        file.write(first)
    await bench.start()
    assert await bench.check_read(1, 2, 3) == [True, False, True]


async def test_a_segment_under_a_wrong_name_is_not_used(bench: TierBench) -> None:
    await bench.start()
    await bench.write(1)
    await bench.close()
    [path] = bench.segments()
    shutil.copy(path, path.with_name("000000000009.segment"))
    tier = await bench.start()
    assert await bench.check_read(1) == [True]
    assert tier.stats.chunk_count == 1


async def test_the_padding_of_a_record_has_no_meaning(bench: TierBench) -> None:
    assert record_bytes(LAYOUT) > RECORD_HEADER_BYTES + LAYOUT.chunk_bytes
    await bench.start()
    await bench.write(1)
    flip(bench.segments()[0], record_offset(LAYOUT, 1) - 1)
    assert await bench.check_read(1) == [True]
