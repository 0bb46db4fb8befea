"""The arena format: round trips, and an attack for every named error."""

from __future__ import annotations

import dataclasses
import inspect
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvstore_helpers import LAYOUT

from splitpoint.arena import format as arena_format
from splitpoint.arena import mapping as arena
from splitpoint.arena import records as arena_records
from splitpoint.arena.format import (
    RECORD_BYTES,
    SUPERBLOCK_BYTES,
    ArenaFormatError,
    Condition,
    Geometry,
    Superblock,
    choose_superblock,
)
from splitpoint.arena.records import (
    CHUNK_OFFSET,
    GRANT_OFFSET,
    NO_PARENT,
    ChunkBlock,
    GrantBlock,
    SlotRecord,
    SlotState,
    commit_word,
    encode_token_row,
    first_generation,
    salt_tag,
    split_commit_word,
)
from splitpoint.errors import InvalidArgument
from splitpoint.keys import fingerprint, pack_tokens
from splitpoint.shapes import ArenaLayout, DataType, Encoding

SUPERBLOCK = Superblock(
    layout=LAYOUT,
    slot_count=7,
    instance_id=b"i" * 16,
    boot_id=b"b" * 16,
    epoch=3,
    sequence=8,
    condition=Condition.OPEN,
    process_id=4242,
)

PAGES = ArenaLayout.of_pages(1001)

layouts = st.builds(ArenaLayout.of_pages, st.integers(1, 1 << 30)) | st.builds(
    ArenaLayout,
    chunk_tokens=st.integers(1, 4096),
    layer_count=st.integers(1, 80),
    kv_head_count=st.integers(1, 64),
    head_dim=st.integers(1, 256),
    hidden_size=st.integers(1, 16384),
    data_type=st.sampled_from(DataType),
    has_activations=st.booleans(),
    model_fingerprint=st.binary(max_size=64),
    encoding=st.sampled_from(Encoding),
)


# -- geometry ----------------------------------------------------------------------


@settings(max_examples=100)
@given(layouts, st.integers(1, 100_000))
def test_regions_follow_each_other(layout: ArenaLayout, slot_count: int) -> None:
    geometry = Geometry(layout, slot_count)
    assert geometry.tokens_offset % 4096 == 0
    assert geometry.tokens_offset >= 8192 + slot_count * 256
    assert geometry.payload_offset % (2 << 20) == 0
    assert geometry.payload_offset >= geometry.tokens_offset + slot_count * layout.chunk_tokens * 4
    end = geometry.payload_offset
    for plane in geometry.planes:
        assert plane.offset % 4096 == 0
        assert 0 <= plane.offset - end < 4096
        end = plane.offset + plane.slot_bytes * slot_count
    assert 0 <= geometry.size_bytes - end < 2 << 20
    assert geometry.size_bytes % (2 << 20) == 0


@settings(max_examples=100)
@given(layouts, st.integers(0, 1 << 40))
def test_the_largest_arena_that_fits(layout: ArenaLayout, size_bytes: int) -> None:
    if Geometry(layout, 1).size_bytes > size_bytes:
        with pytest.raises(InvalidArgument, match=r"hold no (chunk|page)"):
            Geometry.fitting(layout, size_bytes)
        return
    geometry = Geometry.fitting(layout, size_bytes)
    assert geometry.size_bytes <= size_bytes
    assert Geometry(layout, geometry.slot_count + 1).size_bytes > size_bytes


def test_the_offsets_of_the_document() -> None:
    block = SUPERBLOCK.encode()
    assert len(block) == SUPERBLOCK_BYTES
    assert block[:8].hex(" ").upper() == "53 50 4C 41 52 45 4E 41"
    assert struct.unpack_from("<IIQ", block, 8) == (2, 0x01020304, SUPERBLOCK.geometry.size_bytes)
    assert block[24:40] == LAYOUT.layout_hash
    assert struct.unpack_from("<10I", block, 40) == (4, 2, 2, 4, 8, 0, 1, 7, 256, 10)
    assert block[80:144] == b"test model".ljust(64, b"\0")
    assert block[144:176] == b"i" * 16 + b"b" * 16
    assert struct.unpack_from("<QQII", block, 176) == (3, 8, 1, 4242)
    assert not any(block[200:4092])
    assert struct.unpack_from("<I", block, 4092) == (zlib.crc32(block[:4092]),)
    for number, encoding in enumerate((Encoding.NATIVE, Encoding.INT8, Encoding.INT4)):
        layout = dataclasses.replace(LAYOUT, encoding=encoding)
        block = dataclasses.replace(SUPERBLOCK, layout=layout).encode()
        assert struct.unpack_from("<I", block, 200) == (number,)
        assert not any(block[204:4092])
    block = dataclasses.replace(SUPERBLOCK, layout=PAGES).encode()
    assert struct.unpack_from("<10I", block, 40) == (8, 0, 0, 0, 0, 0, 0, 7, 256, 0)
    assert struct.unpack_from("<IIQ", block, 200) == (0, 0, 1001)
    assert not any(block[216:4092])


# -- superblocks --------------------------------------------------------------------


@settings(max_examples=50)
@given(
    layouts,
    st.integers(1, 2**20),
    st.binary(min_size=16, max_size=16),
    st.integers(1, 2**60),
    st.integers(0, 2**60),
    st.sampled_from(Condition),
)
def test_superblocks_come_back(
    layout: ArenaLayout,
    slot_count: int,
    instance_id: bytes,
    epoch: int,
    sequence: int,
    condition: Condition,
) -> None:
    written = Superblock(layout, slot_count, instance_id, b"b" * 16, epoch, sequence, condition, 1)
    assert Superblock.decode(written.encode()) == written
    assert written.offset == (sequence % 2) * 4096


@settings(max_examples=200)
@given(st.integers(0, SUPERBLOCK_BYTES * 8 - 1))
def test_no_flipped_bit_of_a_superblock_passes(bit: int) -> None:
    block = bytearray(SUPERBLOCK.encode())
    block[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ArenaFormatError):
        Superblock.decode(bytes(block))


def forged(offset: int, form: str, *values: object) -> bytes:
    """A superblock with some fields overwritten, and a CRC that agrees."""
    block = bytearray(SUPERBLOCK.encode())
    struct.pack_into(form, block, offset, *values)
    block[4092:] = struct.pack("<I", zlib.crc32(block[:4092]))
    return bytes(block)


def relaid(**changes: Any) -> bytes:
    """A superblock of another layout whose size field is that of the old one."""
    other = dataclasses.replace(SUPERBLOCK, layout=dataclasses.replace(LAYOUT, **changes))
    block = bytearray(other.encode())
    struct.pack_into("<Q", block, 16, SUPERBLOCK.geometry.size_bytes)
    block[4092:] = struct.pack("<I", zlib.crc32(block[:4092]))
    return bytes(block)


SUPERBLOCK_ATTACKS: list[tuple[str, Callable[[], bytes], type[ArenaFormatError]]] = [
    ("empty", lambda: b"", arena_format.Truncated),
    ("cut", lambda: SUPERBLOCK.encode()[:-1], arena_format.Truncated),
    ("zeros", lambda: bytes(SUPERBLOCK_BYTES), arena_format.BadMagic),
    ("another file", lambda: b"\x7fELF".ljust(4096, b"x"), arena_format.BadMagic),
    ("other version", lambda: forged(8, "<I", 1), arena_format.UnsupportedVersion),
    ("big endian", lambda: forged(12, ">I", 0x01020304), arena_format.ForeignByteOrder),
    ("bad crc", lambda: SUPERBLOCK.encode()[:-4] + bytes(4), arena_format.BadSuperblockChecksum),
    ("no chunk tokens", lambda: forged(40, "<I", 0), arena_format.BadLayout),
    ("huge chunks", lambda: forged(40, "<I", 4097), arena_format.BadLayout),
    ("no layers", lambda: forged(44, "<I", 0), arena_format.BadLayout),
    ("huge layers", lambda: forged(44, "<I", 2**31), arena_format.BadLayout),
    ("no heads", lambda: forged(48, "<I", 0), arena_format.BadLayout),
    ("no head dim", lambda: forged(52, "<I", 0), arena_format.BadLayout),
    ("no hidden size", lambda: forged(56, "<I", 0), arena_format.BadLayout),
    ("unknown data type", lambda: forged(60, "<I", 3), arena_format.BadLayout),
    ("activations 2", lambda: forged(64, "<I", 2), arena_format.BadLayout),
    ("long fingerprint", lambda: forged(76, "<I", 65), arena_format.BadLayout),
    ("unknown encoding", lambda: forged(200, "<I", 3), arena_format.BadLayout),
    ("tensors and pages", lambda: forged(208, "<Q", 1001), arena_format.BadLayout),
    ("no tensors", lambda: forged(44, "<4I", 0, 0, 0, 0), arena_format.BadLayout),
    ("huge pages", lambda: forged(208, "<Q", (1 << 30) + 1), arena_format.BadLayout),
    ("other encoding", lambda: forged(200, "<I", 1), arena_format.LayoutHashMismatch),
    ("other layout hash", lambda: forged(24, "<B", 0), arena_format.LayoutHashMismatch),
    ("other fingerprint", lambda: forged(80, "<B", 0), arena_format.LayoutHashMismatch),
    ("other head dim", lambda: forged(52, "<I", 8), arena_format.LayoutHashMismatch),
    ("record size", lambda: forged(72, "<I", 128), arena_format.BadRecordSize),
    ("no slots", lambda: forged(68, "<I", 0), arena_format.BadSlotCount),
    ("size off by one", lambda: forged(16, "<Q", 4097), arena_format.SizeMismatch),
    ("size of another layout", lambda: relaid(layer_count=4096), arena_format.SizeMismatch),
    ("many slots", lambda: forged(68, "<I", 2**32 - 1), arena_format.SizeMismatch),
    ("condition 0", lambda: forged(192, "<I", 0), arena_format.BadCondition),
    ("condition 3", lambda: forged(192, "<I", 3), arena_format.BadCondition),
    ("epoch 0", lambda: forged(176, "<Q", 0), arena_format.BadEpoch),
]


@pytest.mark.parametrize(
    ("make", "error"),
    [attack[1:] for attack in SUPERBLOCK_ATTACKS],
    ids=[attack[0] for attack in SUPERBLOCK_ATTACKS],
)
def test_superblock_attacks(make: Callable[[], bytes], error: type[ArenaFormatError]) -> None:
    with pytest.raises(error) as caught:
        Superblock.decode(make())
    assert type(caught.value) is error
    # The other copy still counts.
    assert choose_superblock(make(), SUPERBLOCK.encode()) == SUPERBLOCK
    assert choose_superblock(SUPERBLOCK.encode(), make()) == SUPERBLOCK


@pytest.mark.parametrize(
    ("offset", "form", "value", "error"),
    [
        (40, "<I", 16, arena_format.BadLayout),
        (44, "<I", 1, arena_format.BadLayout),
        (60, "<I", 1, arena_format.BadLayout),
        (64, "<I", 1, arena_format.BadLayout),
        (200, "<I", 1, arena_format.BadLayout),
        (208, "<Q", 0, arena_format.BadLayout),
        (208, "<Q", 1000, arena_format.LayoutHashMismatch),
    ],
)
def test_attacks_on_a_superblock_of_pages(
    offset: int, form: str, value: int, error: type[ArenaFormatError]
) -> None:
    block = bytearray(dataclasses.replace(SUPERBLOCK, layout=PAGES).encode())
    struct.pack_into(form, block, offset, value)
    block[4092:] = struct.pack("<I", zlib.crc32(block[:4092]))
    with pytest.raises(error) as caught:
        Superblock.decode(bytes(block))
    assert type(caught.value) is error


def test_the_higher_sequence_counts() -> None:
    newer = dataclasses.replace(SUPERBLOCK, sequence=9, epoch=4)
    assert choose_superblock(SUPERBLOCK.encode(), newer.encode()) == newer
    assert choose_superblock(newer.encode(), SUPERBLOCK.encode()) == newer


def test_two_bad_superblocks_name_what_is_wrong() -> None:
    with pytest.raises(arena_format.NoValidSuperblock, match=r"CRC.*epoch 0"):
        choose_superblock(SUPERBLOCK.encode()[:-4] + bytes(4), forged(176, "<Q", 0))
    with pytest.raises(arena_format.BadMagic):
        choose_superblock(bytes(4096), b"x" * 4096)


def test_a_fingerprint_that_does_not_fit_is_refused() -> None:
    layout = dataclasses.replace(LAYOUT, model_fingerprint=bytes(65))
    with pytest.raises(InvalidArgument, match="64 bytes"):
        dataclasses.replace(SUPERBLOCK, layout=layout).encode()


# -- records --------------------------------------------------------------------------

TOKENS = (5, 6, 7)
GENERATION = first_generation(3) + 11
GRANT = GrantBlock(GENERATION, 3, b"s" * 16, 4242, 987654)
CHUNK = ChunkBlock(
    generation=GENERATION,
    key=b"k" * 32,
    parent_key=b"p" * 32,
    layout_hash=LAYOUT.layout_hash,
    salt_tag=salt_tag(b"tenant"),
    fingerprint=fingerprint(TOKENS),
    checksum=2**64 - 1,
    seal_number=17,
    token_count=3,
    chunk_index=2,
)
ROW = encode_token_row(pack_tokens(TOKENS), LAYOUT.chunk_tokens)


def record(
    state: int = SlotState.SEALED,
    generation: int = GENERATION,
    grant: GrantBlock = GRANT,
    chunk: ChunkBlock = CHUNK,
) -> bytes:
    word = (generation << 8 | state).to_bytes(8, "little")
    return word + grant.encode() + chunk.encode()


def test_records_come_back() -> None:
    assert len(record()) == RECORD_BYTES
    assert record()[GRANT_OFFSET:CHUNK_OFFSET] == GRANT.encode()
    sealed = SlotRecord.decode(record(), ROW, LAYOUT)
    assert sealed == SlotRecord(GENERATION, SlotState.SEALED, GRANT, CHUNK)
    for state in (SlotState.WRITING, SlotState.QUARANTINED):
        torn = record(state)[:100] + bytes(156)  # the chunk block is not relied upon
        assert SlotRecord.decode(torn, ROW, LAYOUT) == SlotRecord(GENERATION, state, GRANT, None)
    free = record(SlotState.FREE)[:8] + b"\xff" * 248
    assert SlotRecord.decode(free, ROW, LAYOUT) == SlotRecord(
        GENERATION, SlotState.FREE, None, None
    )
    assert SlotRecord.decode(bytes(256), bytes(16), LAYOUT).generation == 0


def test_the_offsets_of_a_record() -> None:
    raw = record()
    assert struct.unpack_from("<Q", raw) == (GENERATION << 8 | 2,)
    assert struct.unpack_from("<QQ16sQIQ", raw, 8) == (
        GENERATION, 3, b"s" * 16, 987654, 4242, 0,
    )  # fmt: skip
    assert struct.unpack_from("<I", raw, 60) == (zlib.crc32(raw[8:60]),)
    assert struct.unpack_from("<Q32s32s16s16sQQQII", raw, 64) == (
        GENERATION, b"k" * 32, b"p" * 32, LAYOUT.layout_hash, salt_tag(b"tenant"),
        fingerprint(TOKENS), 2**64 - 1, 17, 3, 2,
    )  # fmt: skip
    assert not any(raw[200:252])
    assert struct.unpack_from("<I", raw, 252) == (zlib.crc32(raw[64:252]),)


@settings(max_examples=300)
@given(st.integers(0, (RECORD_BYTES + len(ROW)) * 8 - 1))
def test_no_flipped_bit_serves_another_chunk(bit: int) -> None:
    raw = bytearray(record() + ROW)
    raw[bit // 8] ^= 1 << bit % 8
    try:
        found = SlotRecord.decode(bytes(raw[:RECORD_BYTES]), bytes(raw[RECORD_BYTES:]), LAYOUT)
    except ArenaFormatError:
        return
    # Only a flipped state can pass, and it serves nothing.
    assert found.chunk is None


def changed(**fields: Any) -> bytes:
    return record(chunk=dataclasses.replace(CHUNK, **fields))


RECORD_ATTACKS: list[tuple[str, bytes, bytes, type[ArenaFormatError]]] = [
    ("cut", record()[:255], ROW, arena_format.Truncated),
    ("cut row", record(), ROW[:-1], arena_format.Truncated),
    ("state 4", record(state=4), ROW, arena_records.UnknownState),
    ("state 255", record(state=255), ROW, arena_records.UnknownState),
    ("generation 0", record(generation=0), ROW, arena_records.BadGeneration),
    (
        "torn grant",
        record()[:20] + b"\xff" * 8 + record()[28:],
        ROW,
        arena_records.BadGrantChecksum,
    ),
    (
        "torn chunk",
        record()[:120] + b"\xff" * 8 + record()[128:],
        ROW,
        arena_records.BadChunkChecksum,
    ),
    (
        "grant of before",
        record(grant=dataclasses.replace(GRANT, generation=GENERATION - 1)),
        ROW,
        arena_records.GenerationMismatch,
    ),
    ("chunk of before", changed(generation=1), ROW, arena_records.GenerationMismatch),
    ("other layout", changed(layout_hash=bytes(16)), ROW, arena_records.ForeignLayout),
    ("no tokens", changed(token_count=0), ROW, arena_records.BadTokenCount),
    ("five tokens of four", changed(token_count=5), ROW, arena_records.BadTokenCount),
    (
        "negative token",
        record(),
        struct.pack("<4i", 5, -6, 7, 0),
        arena_records.BadTokenRow,
    ),
    ("token behind", record(), struct.pack("<4i", 5, 6, 7, 8), arena_records.BadTokenRow),
    (
        "other tokens",
        record(),
        encode_token_row(pack_tokens((5, 6, 8)), 4),
        arena_records.FingerprintMismatch,
    ),
    ("no parent", changed(parent_key=NO_PARENT), ROW, arena_records.BadParent),
    ("parent of the first", changed(chunk_index=0), ROW, arena_records.BadParent),
]


@pytest.mark.parametrize(
    ("raw", "row", "error"),
    [attack[1:] for attack in RECORD_ATTACKS],
    ids=[attack[0] for attack in RECORD_ATTACKS],
)
def test_record_attacks(raw: bytes, row: bytes, error: type[ArenaFormatError]) -> None:
    with pytest.raises(error) as caught:
        SlotRecord.decode(raw, row, LAYOUT)
    assert type(caught.value) is error


@given(st.integers(1, 2**56 - 1), st.sampled_from(SlotState))
def test_commit_words_come_back(generation: int, state: SlotState) -> None:
    word = commit_word(generation, state)
    assert word < 2**64
    assert split_commit_word(word) == (generation, state)


def test_later_epochs_start_above_every_earlier_generation() -> None:
    assert first_generation(2) > first_generation(1) + 2**31


# -- the document -----------------------------------------------------------------------


def test_the_document_names_every_error_and_no_other() -> None:
    text = (Path(__file__).parents[3] / "docs" / "arena-format.md").read_text()
    table = text[text.index("| error |") : text.index("## The folder of a disk tier")]
    named = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    defined = {
        name
        for module in (arena_format, arena_records, arena)
        for name, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, ArenaFormatError) and kind is not ArenaFormatError
    }
    assert named == defined
